"""Models that keep a state in place of tokens: a hit ends where a snapshot was taken. Each x every way a prompt meets one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hf.harness import (
    RECURRENT_TOLERANCE,
    ROUGH,
    assert_same,
    check,
    drop_pieces,
    forwarded,
    new_stack,
    run,
    settle,
)
from tests.hf.models import RECURRENT, fresh, prompt, tiny
from tiered_cache import DiskTier, HostTier, MissReason, TieredCache, TierStack, warm
from tiered_cache.hf import compat, selfcheck
from tiered_cache.hf.prefill import BRANCH_TOKENS
from tiered_cache.keys import MAIN, SIDE

LENGTH = 53  # three blocks of 16 and a tail
SYSTEM = BRANCH_TOKENS + 8

pytestmark = pytest.mark.skipif(not compat.KEEPS_STATES, reason="recurrent layers need transformers 5.17")


def serves(name: str) -> bool:
    """Say whether the installed transformers has the model, and hands it the cache in generate()."""
    if not hasattr(transformers, f"{name}Config"):
        return False
    try:
        return compat.uses_cache_by_default(tiny(name))
    except ValueError:  # a config that this release does not take
        return False


@pytest.fixture(params=RECURRENT)
def name(request: pytest.FixtureRequest) -> str:
    if not serves(request.param):
        pytest.skip(f"transformers {transformers.__version__} has no {request.param} that takes a cache")
    return request.param


@pytest.fixture
def stack(name: str) -> TierStack:
    """Hold the prompt and five generated tokens, of which the last was never fed; snapshots after 52 and 57 tokens."""
    stack = new_stack()
    out = check(tiny(name), prompt(LENGTH), stack, cached=0)
    stack.turn = out.sequences  # type: ignore[attr-defined]
    return stack


def question(system: torch.Tensor, seed: int, length: int = 12) -> torch.Tensor:
    """Return the system prompt with one of several questions, no two of which begin alike."""
    ids = torch.cat([system, prompt(length, seed)], dim=1)
    ids[0, system.shape[1]] = 3 + seed
    return ids


def test_warm(name: str, stack: TierStack) -> None:
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


def test_next_turn(name: str, stack: TierStack) -> None:
    ids = torch.cat([stack.turn, prompt(9, seed=1)], dim=1)  # type: ignore[attr-defined]
    check(tiny(name), ids, stack, cached=LENGTH + 4)


def test_stripped_turn(name: str, stack: TierStack) -> None:
    """The next turn keeps only part of the answer: it goes on from the prompt's own snapshot."""
    turn = stack.turn  # type: ignore[attr-defined]
    ids = torch.cat([turn[:, : LENGTH + 2], prompt(9, seed=3)], dim=1)
    ids[0, LENGTH + 2] = 3 if turn[0, LENGTH + 2] != 3 else 4
    check(tiny(name), ids, stack, cached=LENGTH - 1)


def test_where_prompts_part(name: str) -> None:
    """The second question shows where they part, and leaves a snapshot there for the third."""
    stack, system = new_stack(), prompt(SYSTEM)
    check(tiny(name), question(system, 1), stack, cached=0)
    check(tiny(name), question(system, 2), stack, cached=0)
    check(tiny(name), question(system, 3), stack, cached=SYSTEM)
    check(tiny(name), question(system, 1), stack, cached=SYSTEM + 11)


def test_warm_beforehand(name: str) -> None:
    stack, system = new_stack(), prompt(SYSTEM)
    settle(tiny(name))
    assert warm(tiny(name), system, stack=stack).created_tokens == SYSTEM
    check(tiny(name), question(system, 1), stack, cached=SYSTEM)
    check(tiny(name), system, stack, cached=SYSTEM - 1)


def test_shorter_prefix(name: str, stack: TierStack) -> None:
    """It has no snapshot of its own; the first call leaves one."""
    check(tiny(name), prompt(40), stack, cached=0)
    cache = TieredCache(stack)
    run(tiny(name), prompt(41), past_key_values=cache)
    check(tiny(name), prompt(40), stack, cached=39)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


@pytest.mark.parametrize("name", ["Zaya"], indirect=True)
@pytest.mark.parametrize("length", [2, 22, 23, 24, 25, 26, 48, 49])
def test_around_a_window(name: str, length: int) -> None:
    """Of 24 tokens: a snapshot before it is full, when it just is, and when it moved on."""
    stack = new_stack()
    out = check(tiny(name), prompt(length), stack, cached=0)
    check(tiny(name), prompt(length), stack, cached=length - 1)
    check(tiny(name), torch.cat([out.sequences, prompt(30, seed=1)], dim=1), stack, cached=length + 4)


@pytest.mark.parametrize("name", ["Lfm2", "Qwen3Next"], indirect=True)
def test_outputs_of_the_whole_prompt(name: str) -> None:
    """Whoever asks for its hidden states gets all of them: the prefill is not split then."""
    options = {"output_hidden_states": True}
    cold = run(tiny(name), prompt(LENGTH), **options)
    out = run(tiny(name), prompt(LENGTH), past_key_values=TieredCache(new_stack()), **options)
    assert_same(out, cold)
    assert [tuple(state.shape) for state in out.hidden_states[0]] == [tuple(state.shape) for state in cold.hidden_states[0]]


def test_why_not_more(name: str, stack: TierStack) -> None:
    cache = TieredCache(stack)
    run(tiny(name), prompt(50), past_key_values=cache)
    assert cache.usage.miss_reason is MissReason.NOT_STORED
    assert "recurrent layers go on from snapshots only" in cache.explain()


def test_beams(name: str, stack: TierStack) -> None:
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, num_beams=3, num_return_sequences=2)
    check(tiny(name), prompt(LENGTH, seed=9), stack, cached=0, num_beams=3)
    check(tiny(name), prompt(LENGTH, seed=9), stack, cached=LENGTH - 1, num_beams=3)


def test_samples(name: str, stack: TierStack) -> None:
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, num_return_sequences=3, do_sample=True)


def test_batch(name: str) -> None:
    """A batch of different questions shows by itself where they part; another batch goes on from there."""
    stack, system = new_stack(), prompt(SYSTEM)
    check(tiny(name), torch.cat([question(system, 1), question(system, 2)]), stack, cached=0)
    check(tiny(name), torch.cat([question(system, 3), question(system, 4)]), stack, cached=SYSTEM)
    check(tiny(name), torch.cat([question(system, 3), question(system, 1)]), stack, cached=SYSTEM + 11)
    check(tiny(name), question(system, 2), stack, cached=SYSTEM + 11)


def test_left_padded_batch(name: str) -> None:
    stack = new_stack()
    ids = prompt(LENGTH, rows=2)
    ids[0, :5] = 0
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    check(tiny(name), ids, stack, cached=0, attention_mask=mask)
    check(tiny(name), ids, stack, cached=LENGTH - 1, attention_mask=mask)
    check(tiny(name), ids[:1, 5:], stack, cached=LENGTH - 6)  # each row is what it is alone
    check(tiny(name), ids[1:], stack, cached=LENGTH - 1)


def test_rows_that_end_early(name: str) -> None:
    """A row that ended goes on being fed padding: its state is not that of its tokens."""
    stack = new_stack()
    for seed in range(20):
        ids = prompt(LENGTH, seed, rows=2)
        free = run(tiny(name), ids, new_tokens=6).sequences
        eos = int(free[0, LENGTH + 1])
        if eos not in free[1, LENGTH:] and eos != free[0, LENGTH]:  # one ends early, the other does not
            break
    run(tiny(name), ids, new_tokens=6, eos_token_id=eos, past_key_values=TieredCache(stack))
    turn = torch.cat([free[:1, : LENGTH + 2], prompt(9, seed=1)], dim=1)
    check(tiny(name), turn, stack, cached=LENGTH - 1)


def test_kept_cache(name: str, stack: TierStack) -> None:
    cache = TieredCache(stack)
    out = check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, cache=cache)
    ids = torch.cat([out.sequences, prompt(7, seed=6)], dim=1)
    check(tiny(name), ids, stack, cached=LENGTH + 4, cache=cache)
    assert cache.usage.cached_by_tier == {"resident": LENGTH + 4}
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, cache=cache)
    assert cache.usage.cached_by_tier == {"host": LENGTH - 1}


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunked_prefill(name: str, stack: TierStack, chunk: int) -> None:
    ids = torch.cat([prompt(LENGTH), prompt(20, seed=8)], dim=1)
    cold = run(tiny(name), ids)
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(tiny(name), ids, past_key_values=cache, prefill_chunk_size=chunk), cold, 2e-2)
    assert (cache.usage.cached_tokens == ids.shape[1] - 1) is compat.CHUNKED_PREFILL_CONTINUES


def test_after_eviction(name: str, stack: TierStack) -> None:
    """Of all snapshots, then of all K/V from a token on: what is computed again is there again."""
    drop_pieces(stack, SIDE, lambda start: False)
    check(tiny(name), prompt(LENGTH), stack, cached=0)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)
    drop_pieces(stack, "main", lambda start: start < 16)
    check(tiny(name), prompt(LENGTH), stack, cached=0)


def test_other_weights_miss(name: str, stack: TierStack) -> None:
    check(tiny(name, seed=1), prompt(LENGTH), stack, cached=0)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


def test_a_small_tier(name: str, stack: TierStack) -> None:
    """With room for a prompt and a half, every answer is right and the budget holds."""
    small = new_stack(int(stack.tiers[0].used_bytes * 0.8))
    for seed in (0, 1, 0, 2, 0):
        cold = run(tiny(name), prompt(LENGTH, seed))
        assert_same(run(tiny(name), prompt(LENGTH, seed), past_key_values=TieredCache(small)), cold, 2e-2)
        assert small.tiers[0].used_bytes <= small.tiers[0].capacity_bytes


def test_own_loop(name: str) -> None:
    stack, ids = new_stack(), prompt(LENGTH)
    model = tiny(name)
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        for expected in (0, 20):
            cache = TieredCache(stack)
            start = cache.restore(model, ids)
            if cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS:
                pytest.skip(cache.explain())
            assert start == expected
            options = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
            if not start:
                model(ids[:, :20], **options)
                cache.commit(ids[:, :20])
            logits = model(ids[:, max(start, 20) :], **options).logits[:, -1]
            cache.commit(ids)
            torch.testing.assert_close(logits, whole, rtol=0, atol=2e-3)
    longer = torch.cat([ids, prompt(5, seed=2)], dim=1)
    assert TieredCache(stack).restore(model, longer) == LENGTH


def test_an_exception_on_the_way(name: str) -> None:
    """What was complete of the prompt stays of use."""
    stack = new_stack()

    class Stop(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == LENGTH + 2:
                raise KeyboardInterrupt
            return scores

    cache = TieredCache(stack)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(name), prompt(LENGTH), past_key_values=cache, logits_processor=[Stop()])
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, cache=cache)


@pytest.mark.parametrize("name", ["Mamba2", "Lfm2", "Qwen3Next", "FalconH1", "Zaya"], indirect=True)
def test_a_wrong_state_shows(name: str, stack: TierStack) -> None:
    """The negative control: with the states of another prompt, logits are not the same."""
    model = tiny(name)
    run(model, prompt(LENGTH, seed=5), past_key_values=TieredCache(stack))
    tier = stack.tiers[0]
    sides = [piece for piece in stack._inventory.pieces.values() if piece.kind == SIDE and piece.block.num_tokens == 4]
    assert len(sides) == 2  # after 52 tokens of each
    sides[0].copies[tier.name], sides[1].copies[tier.name] = sides[1].copies[tier.name], sides[0].copies[tier.name]
    with pytest.raises(AssertionError):
        check(model, prompt(LENGTH), stack, cached=LENGTH - 1)


# --- the disk -----------------------------------------------------------------------------------------------------------


def on_disk(path: Path) -> TierStack:
    return TierStack(HostTier("64MB"), DiskTier(path, "1GB", min_free=0), block_tokens=16)


def reuse(name: str, ids: torch.Tensor, path: Path, cached: int, **options: Any) -> None:
    """Assert that a stack that knows nothing but what is on disk serves `cached` columns, and the answer is as cold."""
    with on_disk(path) as stack:
        for tier in ("disk", "host"):
            cache = TieredCache(stack)
            out = run(tiny(name), ids, past_key_values=cache, **options)
            assert_same(out, run(tiny(name), ids, **options), ROUGH.get(tiny(name).config.model_type, RECURRENT_TOLERANCE))
            assert cache.usage.cached_by_tier == ({tier: cached * len(ids)} if cached else {}), cache.explain()
            if tier == "disk" and cached != ids.shape[1] - 1:
                break  # a snapshot further on was taken
        assert stack.flush(30)


def test_after_a_restart(name: str, tmp_path: Path) -> None:
    with on_disk(tmp_path) as stack:
        turn = run(tiny(name), prompt(LENGTH), past_key_values=TieredCache(stack)).sequences
        assert stack.flush(30)
    reuse(name, prompt(LENGTH), tmp_path, LENGTH - 1)
    reuse(name, prompt(LENGTH), tmp_path, LENGTH - 1, num_beams=2)
    reuse(name, torch.cat([turn, prompt(9, seed=1)], dim=1), tmp_path, LENGTH + 4)
    reuse(name, prompt(LENGTH).repeat(2, 1), tmp_path, LENGTH - 1)
    reuse(name, prompt(30), tmp_path, 0)


@pytest.mark.parametrize("kind", [MAIN, SIDE])
@pytest.mark.parametrize("name", ["Mamba2", "Qwen3Next", "Zaya"], indirect=True)
def test_a_damaged_file(name: str, kind: str, tmp_path: Path) -> None:
    """The hit ends at the snapshot before, and what is computed again is there again."""
    system = prompt(SYSTEM)
    with on_disk(tmp_path) as stack:
        settle(tiny(name))
        warm(tiny(name), system, stack=stack)
        run(tiny(name), question(system, 1), past_key_values=TieredCache(stack))
    (tail,) = [
        file
        for file in tmp_path.rglob("*.kv")
        if f"-{(SYSTEM + 11) % 16}-" in file.name and (SIDE in file.name) == (kind == SIDE)
    ]
    content = bytearray(tail.read_bytes())
    content[-1 if len(content) % 4096 else 100] ^= 1
    tail.write_bytes(content)
    reuse(name, question(system, 1), tmp_path, SYSTEM)
    reuse(name, question(system, 1), tmp_path, SYSTEM + 11)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, str]]:
    """Return what fills with the (key, kind) of each piece that is read from disk."""
    read: list[tuple[bytes, str]] = []
    real = DiskTier.read

    def counted(self: DiskTier, branch: Any, block: Any, kind: str, target: Any) -> None:
        read.append((block.key, kind))
        real(self, branch, block, kind, target)

    monkeypatch.setattr(DiskTier, "read", counted)
    return read


@pytest.mark.parametrize("name", ["Mamba2", "Qwen3Next", "Zaya"], indirect=True)
def test_fan_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stored prefix each piece is read once, for beams, samples and a batch of different questions."""
    system = prompt(SYSTEM)
    with on_disk(tmp_path) as stack:
        settle(tiny(name))
        warm(tiny(name), system, stack=stack)
        assert stack.flush(30)
    batch = torch.cat([question(system, seed) for seed in range(4)])
    for ids, options in (
        (batch, {}),
        (question(system, 5), {"num_beams": 3}),
        (question(system, 6), {"num_return_sequences": 4, "do_sample": True}),
    ):
        with on_disk(tmp_path) as stack:
            with monkeypatch.context() as patched:
                read = count_reads(patched)
                cache = TieredCache(stack)
                run(tiny(name), ids, past_key_values=cache, **options)
            assert cache.usage.cached_by_tier == {"disk": SYSTEM * len(ids)}
            assert len(read) == len(set(read)) == -(-SYSTEM // 16) + 1  # the blocks, and one snapshot
            stack.flush(30)
            stack.clear()
            warm(tiny(name), system, stack=stack)
            stack.flush(30)


# --- the trial ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Jamba", "Mamba", "FalconMamba"])
def test_models_that_do_not_continue(name: str) -> None:
    """They are wrong in transformers itself: found by trying, refused by name, and right as with a cache of its own."""
    if not serves(name):
        pytest.skip("it takes no cache of ours there")
    stack = new_stack()
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(tiny(name), prompt(20), past_key_values=cache), run(tiny(name), prompt(20)))
        assert cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS
        assert "when it goes on from a prefix" in cache.explain()
    assert not stack._index.blocks


def test_without_the_trial_they_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    stack, model = new_stack(), tiny("Jamba")
    monkeypatch.setattr(selfcheck, "verdict", lambda *args, **options: selfcheck.Verdict(None))
    run(model, prompt(20), past_key_values=TieredCache(stack))
    ids = torch.cat([prompt(20), prompt(9, seed=1)], dim=1)
    with pytest.raises(AssertionError):
        check(model, ids, stack, cached=19)


def tried(model: Any, ids: torch.Tensor) -> int:
    """Return how many forwards of one call were a trial's."""
    with forwarded(model) as columns:
        run(model, ids, new_tokens=1, past_key_values=TieredCache(new_stack()))
    return len(columns) - 2  # the prompt, but for its last token; that token


def test_a_trial_takes_place_once() -> None:
    model = fresh("Lfm2", seed=77)
    assert tried(model, prompt(20)) == 4  # a prompt at once; in three parts
    assert tried(model, prompt(20)) == 0


def test_no_trial_where_nothing_can_be_reused() -> None:
    model = fresh("Lfm2", seed=76)
    with forwarded(model) as columns:
        model.generate(prompt(20), max_new_tokens=1, prompt_lookup_num_tokens=2, past_key_values=TieredCache(new_stack()))
    assert columns[0] == 20


def test_no_trial_of_attention() -> None:
    model = fresh("Llama", seed=78)
    with forwarded(model) as columns:
        run(model, prompt(20), new_tokens=1, past_key_values=TieredCache(new_stack()))
    assert columns == [20]


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, is_final in ((MemoryError(), False), (ZeroDivisionError(), True)):
        model = fresh("Lfm2", seed=79 + 10 * is_final)
        with monkeypatch.context() as patched:

            def fail(*args: Any, error: Exception = error) -> None:
                raise error

            patched.setattr(selfcheck, "_logits", fail)
            cache = TieredCache(TierStack(HostTier("1MB")))
            assert_same(run(model, prompt(20), past_key_values=cache), run(model, prompt(20)))
            assert type(error).__name__ in cache.explain()
        cache = TieredCache(TierStack(HostTier("1MB")))
        run(model, prompt(20), past_key_values=cache)
        assert (cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS) is is_final


@pytest.mark.parametrize("part", ["conv", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_notices_a_state_that_is_lost(part: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("Qwen3Next", seed=80).to(dtype)
    assert selfcheck._try(model, padded=False, by_hand=False).why is None
    assert selfcheck._try(model, padded=True, by_hand=False).why is None
    real = selfcheck.put_states

    def lose(layers: Any, names: Any, tensors: Any, columns: int) -> None:
        real(layers, names, [each * (part not in name) for (_, name), each in zip(names, tensors, strict=True)], columns)

    monkeypatch.setattr(selfcheck, "put_states", lose)
    assert "is not what was stored of it" in (selfcheck._try(model, padded=False, by_hand=False).why or "")


@pytest.mark.parametrize(("name", "bias"), [("FalconH1", "mamba_proj_bias"), ("Mamba2", "use_bias"), ("Lfm2", "conv_bias")])
def test_pads_that_leave_something_behind(name: str, bias: str) -> None:
    """With a bias, a padded row's state is not that of its tokens alone: then padded rows are without reuse."""
    if not serves(name):
        pytest.skip("it takes no cache of ours there")
    model, stack = fresh(name, seed=81, **{bias: True}), new_stack()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim == 1 else None
    ids = prompt(LENGTH, rows=2)
    ids[0, :5] = 0
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = TieredCache(stack)
    cold = run(model, ids, attention_mask=mask)
    assert_same(run(model, ids, past_key_values=cache, attention_mask=mask), cold, 2e-3)
    check(model, ids[:1, 5:], stack, cached=0 if cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS else LENGTH - 6)


def test_the_callers_random_numbers_stay() -> None:
    model = fresh("Lfm2", seed=82)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model.generate(prompt(20), max_new_tokens=1, do_sample=False, past_key_values=TieredCache(new_stack()))
    assert torch.equal(torch.rand(3), expected)


# --- forwards that are interrupted ----------------------------------------------------------------------------------------


@contextmanager
def breaking(model: Any, after: int) -> Iterator[None]:
    """Let the forward of the model's last layer raise at its call number `after` + 1: those before it have run."""
    layer = (getattr(model, "model", None) or model.backbone).layers[-1]
    calls = []

    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module is layer:
            calls.append(None)
            if len(calls) > after:
                raise KeyboardInterrupt

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        handle.remove()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_interrupted(name: str, after: int) -> None:
    """In the middle of a forward: of the prompt, of its last token, while decoding. Later calls are right."""
    stack, model = new_stack(), tiny(name)
    settle(model)
    kept = TieredCache(stack)
    with breaking(model, after):
        run(model, prompt(LENGTH), past_key_values=kept)
    longer = torch.cat([prompt(LENGTH), prompt(9, seed=1)], dim=1)
    for ids in (longer, prompt(LENGTH)):
        for cache in (TieredCache(stack), kept):
            rough = ROUGH.get(model.config.model_type, RECURRENT_TOLERANCE)
            assert_same(run(model, ids, past_key_values=cache), run(model, ids), rough)


def test_interrupted_behind_a_hit(name: str, stack: TierStack) -> None:
    model, kept = tiny(name), TieredCache(stack)
    longer = torch.cat([prompt(LENGTH), prompt(9, seed=1)], dim=1)
    with breaking(model, 0):
        run(model, longer, past_key_values=kept)
    check(model, prompt(LENGTH), stack, cached=LENGTH - 1, cache=kept)
    run(model, longer, past_key_values=kept)
    check(model, longer, stack, cached=longer.shape[1] - 1)


def test_a_loop_of_ones_own_interrupted(name: str) -> None:
    if not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip("before, nothing tells")
    stack, model, ids = new_stack(), tiny(name), prompt(LENGTH)
    cache = TieredCache(stack)
    options = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        cache.restore(model, ids)
        if cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS:
            pytest.skip(cache.explain())
        model(ids[:, :40], **options)
        cache.commit(ids[:, :40])
        with breaking(model, 0):
            model(ids[:, 40:45], **options)
        for _ in range(2):
            start = cache.restore(model, ids)
            assert start in (0, 40)
            logits = model(ids[:, start:], **options).logits[:, -1]
            torch.testing.assert_close(logits, whole, rtol=0, atol=ROUGH.get(model.config.model_type, 2e-3))


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_exception_between_forwards(name: str, step: int) -> None:
    """Then a longer prompt, on the same cache and on another."""

    class Stop(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == LENGTH + step:
                raise ValueError
            return scores

    stack, model = new_stack(), tiny(name)
    kept = TieredCache(stack)
    with pytest.raises(ValueError):
        run(model, prompt(LENGTH), past_key_values=kept, logits_processor=[Stop()])
    longer = torch.cat([prompt(LENGTH), prompt(6, seed=3)], dim=1)
    for cache in (kept, TieredCache(stack)):
        out = run(model, longer, past_key_values=cache)
        assert_same(out, run(model, longer), ROUGH.get(model.config.model_type, RECURRENT_TOLERANCE))


def test_a_commit_after_an_interrupted_forward(name: str) -> None:
    """What it stores serves no wrong answer: the states are of no length that is known."""
    if not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip("before, nothing tells")
    stack, model, ids = new_stack(), tiny(name), prompt(LENGTH)
    cache = TieredCache(stack)
    options = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        cache.restore(model, ids)
        if cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS:
            pytest.skip(cache.explain())
        model(ids[:, :40], **options)
        with breaking(model, 0):
            model(ids[:, 40:45], **options)
        length = cache.get_seq_length()
        cache.commit(ids[:, :length])
        again = TieredCache(stack)
        start = again.restore(model, ids)
        logits = model(ids[:, start:], **{**options, compat.CACHE_ARGUMENT: again}).logits[:, -1]
        torch.testing.assert_close(logits, whole, rtol=0, atol=ROUGH.get(model.config.model_type, 2e-3))
    assert start == (45 if name == "NemotronH" else 0)  # its last layer keeps nothing: all states were there


# --- what else is done to a cache ---------------------------------------------------------------------------------------


def test_pads_fed_token_by_token(name: str) -> None:
    """The single step of some models takes a pad for a token: nothing of that is kept, and stock errors stay errors."""
    stack, model, ids = new_stack(), tiny(name), prompt(30, rows=2)
    ids[0, :12] = 0
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    cache = TieredCache(stack)
    try:
        run(model, ids, attention_mask=mask, prefill_chunk_size=1, past_key_values=cache)
    except ValueError:
        assert name == "Mamba2"
    assert cache.usage.cached_tokens == 0
    assert not stack._index.blocks
    check(model, ids[:1, 12:], stack, cached=0)


@pytest.mark.parametrize("rows", [[1, 0], [1], [0, 0, 1]])
def test_rows_selected_by_hand(name: str, rows: list[int]) -> None:
    model, stack = tiny(name), new_stack()
    kept = TieredCache(stack)
    out = run(model, prompt(30, rows=2), past_key_values=kept)
    kept.batch_select_indices(torch.tensor(rows))
    longer = torch.cat([out.sequences[rows], prompt(5, seed=3, rows=2)[[row % 2 for row in rows]]], dim=1)
    for cache in (kept, TieredCache(stack)):
        found = run(model, longer, past_key_values=cache)
        assert_same(found, run(model, longer), ROUGH.get(model.config.model_type, RECURRENT_TOLERANCE))


def test_rows_repeated_by_hand(name: str) -> None:
    model, stack = tiny(name), new_stack()
    kept = TieredCache(stack)
    out = run(model, prompt(30, rows=2), past_key_values=kept)
    kept.batch_repeat_interleave(2)
    longer = torch.cat([out.sequences.repeat_interleave(2, 0), prompt(5, seed=3, rows=4)], dim=1)
    mask = torch.ones_like(longer)
    found = run(model, longer, past_key_values=kept, attention_mask=mask)
    assert kept.usage.cached_by_tier == {"resident": 34 * 4}, kept.explain()
    cold = run(model, longer, attention_mask=mask)
    assert_same(found, cold, ROUGH.get(model.config.model_type, RECURRENT_TOLERANCE))


def test_a_crop_that_fails() -> None:
    """Layers before the first recurrent one are cut already."""
    if not compat.KEEPS_STATES:
        pytest.skip("recurrent layers need transformers 5.17")
    model = fresh("Qwen3Next", 3, layer_types=["full_attention", "linear_attention"])
    kept = TieredCache(new_stack(2000))
    out = run(model, prompt(30), past_key_values=kept)
    with pytest.raises(RuntimeError):
        kept.crop(-6)
    longer = torch.cat([out.sequences[:, :28], prompt(5, seed=3)], dim=1)
    assert_same(run(model, longer, past_key_values=kept), run(model, longer), RECURRENT_TOLERANCE)


def test_inference_mode_and_then_none(name: str) -> None:
    model, kept = tiny(name), TieredCache(new_stack())
    with torch.inference_mode():
        out = run(model, prompt(20), past_key_values=kept)
    longer = torch.cat([out.sequences.clone(), prompt(4, seed=1)], dim=1)
    check(model, longer, kept.stack, cached=24, cache=kept)


def test_reset(name: str) -> None:
    model, cache = tiny(name), TieredCache(new_stack())
    run(model, prompt(20), past_key_values=cache)
    cache.reset()
    assert "empty" in repr(cache)
    check(model, prompt(20), cache.stack, cached=19, cache=cache)


@pytest.mark.parametrize("name", ["Lfm2", "Mamba2"], indirect=True)
def test_a_batch_of_which_one_row_is_damaged(name: str, tmp_path: Path) -> None:
    """The other row has another snapshot where the damage begins."""
    model, a, b = tiny(name), prompt(48, seed=1), prompt(48, seed=2)
    ids = torch.cat([torch.cat([a, b]), prompt(20, seed=3, rows=2)], dim=1)
    with on_disk(tmp_path / "whole") as stack:
        for system in (a, b):
            warm(model, system, stack=stack)
        for row in range(2):
            run(model, ids[row : row + 1], past_key_values=TieredCache(stack), new_tokens=1)
        assert stack.flush(30)
    for number, file in enumerate(sorted((tmp_path / "whole").rglob("*.kv"))):
        shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        hurt = tmp_path / str(number) / file.relative_to(tmp_path / "whole")
        content = bytearray(hurt.read_bytes())
        content[-1 if len(content) % 4096 else 100] ^= 1
        hurt.write_bytes(content)
        with on_disk(tmp_path / str(number)) as stack:
            cache = TieredCache(stack)
            out = run(model, ids, past_key_values=cache)
            assert_same(out, run(model, ids), RECURRENT_TOLERANCE)
            assert cache.usage.miss_reason is not MissReason.TIER_ERROR


# --- how long it stays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3Next"], indirect=True)
def test_a_hit_pins_and_renews_its_snapshot(name: str, tmp_path: Path) -> None:
    with on_disk(tmp_path) as stack:
        settle(tiny(name))
        run(tiny(name), prompt(LENGTH), past_key_values=TieredCache(stack, ttl=1000))
        assert stack.flush(30)
        files = list(tmp_path.rglob(f"*-{(LENGTH - 1) % 16}-*.kv"))
        assert len(files) == 2
        for file in files:
            os.utime(file, (0, 0))
        for block in stack._index.blocks.values():
            for piece in block.pieces.values():
                piece.saved_at = 0.0
        longer = torch.cat([prompt(LENGTH - 1), prompt(9, seed=1)], dim=1)
        longer[0, LENGTH - 1] = 3 if prompt(LENGTH)[0, LENGTH - 1] != 3 else 4
        cache = TieredCache(stack, pin=True)
        run(tiny(name), longer, past_key_values=cache)
        assert cache.usage.cached_tokens == LENGTH - 1
        assert stack.flush(30)
        (ending,) = [block for block in stack._index.blocks.values() if block.num_tokens == (LENGTH - 1) % 16]
        assert ending.pinned_bytes
        assert ending.expires_at == float("inf")
        assert all(file.stat().st_mtime > 0 for file in files)


def test_nothing_is_kept_for_nobody(name: str) -> None:
    cache = TieredCache(new_stack())
    run(tiny(name), prompt(LENGTH), past_key_values=cache)
    assert not cache._bound.snapshots
