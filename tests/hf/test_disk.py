"""The disk tier under generate(): after a restart a prompt reuses from disk what it would from memory, and answers as cold."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.hf.harness import assert_consistent, assert_same, block_nbytes, forwarded, run, stored_bytes
from tests.hf.models import FULL_ATTENTION, SLIDING, fresh, prompt, tiny
from tests.hf.test_identity import length_dependent
from tiered_cache import DiskTier, HostTier, MissReason, TieredCache, TierStack, archive
from tiered_cache.hf import compat
from tiered_cache.hf.shapes import expected_layouts, layout_of
from tiered_cache.keys import MAIN, SIDE

LENGTH = 53  # three blocks of 16 and a tail; with what is generated, 57 tokens
WINDOW = 24


class Disk:
    """One directory, and the stack that uses it now."""

    def __init__(self, path: Path) -> None:
        self.path = path / "kv"
        self.block_tokens = 16
        self.stacks: list[TierStack] = []

    def open(self, host: int | str = "256MB", size: int | str = "1GB", **options: Any) -> TierStack:
        """Return one more stack on the directory."""
        tiers = HostTier(host), DiskTier(self.path, size, min_free=0)
        self.stacks.append(TierStack(*tiers, **{"block_tokens": self.block_tokens, **options}))
        return self.stacks[-1]

    def restart(self, host: int | str = "256MB", size: int | str = "1GB", **options: Any) -> TierStack:
        """Return a stack that knows nothing but what is on disk, after all that was queued was written."""
        self.close()
        return self.open(host, size, **options)

    def close(self) -> None:
        while self.stacks:
            stack = self.stacks.pop()
            if not stack.closed:
                stack.flush(60)
                assert_consistent(stack)
                stack.close()

    def files(self, kind: str = MAIN) -> dict[bytes, Path]:
        """Return the files of all pieces of a kind by the short key of their block."""
        files = [file for file in self.path.rglob("*.kv") if file.name.endswith(".side.kv") == (kind == SIDE)]
        return {bytes.fromhex(file.name.partition("-")[0]): file for file in files}

    def file(self, place: int, kind: str = MAIN) -> Path:
        """Return the file of the block at `place` of the longest sequence there is; -1 is its tail."""
        names = {key: file.name.split("-") for key, file in self.files().items()}

        def longest(parent: bytes) -> list[bytes]:
            children = [key for key, name in names.items() if bytes.fromhex(name[1]) == parent]
            chains = [[key, *longest(key)] for key in children]
            return max(chains, key=lambda chain: sum(int(names[key][2]) for key in chain), default=[])

        roots = {bytes.fromhex(name[1]) for name in names.values()} - set(names)
        return self.files(kind)[max(map(longest, sorted(roots)), key=len)[place]]

    def damage(self, place: int, kind: str = MAIN, at: int = -1) -> None:
        """Flip a bit of a block's file; by default of its last byte, which is payload."""
        file = self.file(place, kind)
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(archive, "LOOKUP_S", 60.0)  # a busy machine is not a slow disk
    disk = Disk(tmp_path)
    yield disk
    disk.close()


def check(
    model: PreTrainedModel,
    ids: torch.Tensor,
    stack: TierStack,
    cached: int,
    tiers: dict[str, int] | None = None,
    *,
    reason: MissReason | None = MissReason.NOT_STORED,
    created: int | None = None,
    cache: TieredCache | None = None,
    **options: Any,
) -> Any:
    """Assert that `ids` answer as cold, with `cached` columns reused in each row, all from disk unless `tiers` says where from.

    `reason` is what is expected where more than one token is computed.
    """
    mask = options.get("attention_mask")
    cold = run(model, ids, **options)
    stack.flush(60)
    before = stored_bytes(stack)
    cache = TieredCache(stack) if cache is None else cache
    with forwarded(model) as columns:
        out = run(model, ids, past_key_values=cache, **options)
    assert_same(out, cold)
    usage = cache.usage
    assert columns[0] == ids.shape[1] - cached, cache.explain()
    assert all(count == 1 for count in columns[1:])
    pads = torch.zeros(len(ids), dtype=torch.long) if mask is None else (mask == 0).sum(dim=1)
    tokens = int((cached - pads).clamp(min=0).sum())
    assert usage.prompt_tokens == ids.numel() - int(pads.sum())
    assert usage.cached_by_tier == (({"disk": tokens} if tokens else {}) if tiers is None else tiers)
    assert usage.cached_tokens == tokens == sum(usage.cached_by_tier.values())
    assert usage.miss_reason == (None if columns[0] == 1 else reason)
    assert created in (None, usage.created_tokens)
    stack.flush(60)
    after = stored_bytes(stack)
    assert all(after[key] == digest for key, digest in before.items() if key in after)
    assert_consistent(stack)
    return out


def parted(shared: int, length: int = LENGTH, seed: int = 2) -> torch.Tensor:
    """Return a prompt that shares exactly `shared` tokens with `prompt(length)`, and has 12 more."""
    ids = torch.cat([prompt(shared), prompt(12, seed=seed)], dim=1)
    if shared < length:
        ids[0, shared] = 3 if prompt(length)[0, shared] != 3 else 4
    return ids


# --- every architecture -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FULL_ATTENTION + SLIDING)
def test_every_architecture(name: str, disk: Disk) -> None:
    """The same prompt, its next turn and one that parts in the third block, each after a restart."""
    model, stack = tiny(name), disk.open()
    cache = TieredCache(stack)
    turn = check(model, prompt(LENGTH), stack, 0, cache=cache, created=57).sequences
    assert layout_of(cache.layers) in expected_layouts(model, cache.fresh_layers())
    check(model, prompt(LENGTH), disk.restart(), 48, created=9)  # of the tail of 9 tokens, only 5 are asked for
    check(model, torch.cat([turn, prompt(9, seed=1)], dim=1), disk.restart(), 57, created=14)
    check(model, parted(40), disk.restart(), 32, created=16 + 8)
    assert disk.open().stats().tiers["disk"].corrupt_pieces == 0


@pytest.mark.parametrize("name", FULL_ATTENTION + SLIDING)
def test_inside_a_block(name: str, disk: Disk) -> None:
    """Of a block of which not all is shared: exact to the token from 16 on."""
    disk.block_tokens = 64
    model = tiny(name)
    check(model, prompt(LENGTH), disk.open(), 0)
    check(model, prompt(LENGTH), disk.restart(), LENGTH - 1)
    for shared in (15, 16, 41):
        check(model, parted(shared, seed=shared), disk.restart(), shared if shared >= 16 else 0)


OTHERS = {  # whose configs say in other words what their K/V look like
    "Falcon": {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None, "num_key_value_heads": None},
    "GPTBigCode": {"multi_query": True, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 48},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "Persimmon": {"num_key_value_heads": 4},
    "Gemma": {"head_dim": 16},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    "Nemotron": {},
    "Glm": {"head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_more_architectures(name: str, disk: Disk) -> None:
    model, stack = fresh(name, **OTHERS[name]), disk.open()
    cache = TieredCache(stack)
    check(model, prompt(LENGTH), stack, 0, cache=cache)
    assert layout_of(cache.layers) in expected_layouts(model, cache.fresh_layers())
    check(model, prompt(LENGTH), disk.restart(), 48)


# --- ways of generating ---------------------------------------------------------------------------------------------------

SOME = ("Llama", "Gemma2", "Mistral", "Llama4Text")  # all, some or none of whose layers attend to everything


@pytest.fixture(params=SOME)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_large_blocks(name: str, disk: Disk) -> None:
    disk.block_tokens = 256
    model, stack = tiny(name), disk.open()
    turn = check(model, prompt(300), stack, 0).sequences
    check(model, prompt(300), disk.restart(), 299)
    check(model, torch.cat([turn, prompt(9, seed=1)], dim=1), disk.restart(), 304)
    check(model, parted(270, 300), disk.restart(), 256)  # 14 tokens inside the second block
    check(model, parted(280, 300), disk.restart(), 280)
    check(model, parted(200, 300), disk.restart(), 200)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype, disk: Disk) -> None:
    """Logits are exactly those of the same call continuing from memory."""
    model, stack = fresh(name).to(dtype), disk.open()
    turn = run(model, prompt(60), past_key_values=TieredCache(stack)).sequences
    ids, cache = torch.cat([turn, prompt(9, seed=1)], dim=1), TieredCache(stack)
    expected = run(model, ids, past_key_values=cache)
    assert cache.usage.cached_by_tier == {"host": 64}
    cache = TieredCache(disk.restart())
    out = run(model, ids, past_key_values=cache)
    assert cache.usage.cached_by_tier == {"disk": 64}
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert all(torch.equal(got, wanted) for got, wanted in zip(out.logits, expected.logits, strict=True))


def test_half_and_full_precision_of_the_same_weights(disk: Disk) -> None:
    """One directory; each finds its own."""
    models = [fresh().to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    for cached in (0, 48):
        for model in models:
            cache = TieredCache(disk.restart())
            run(model, prompt(LENGTH), past_key_values=cache)
            assert cache.usage.cached_tokens == cached


def test_beams_and_samples(name: str, disk: Disk) -> None:
    """Several rows of K/V for each row of the prompt; also from a block of which only a part is used."""
    disk.block_tokens = 32
    model = tiny(name)
    check(model, prompt(LENGTH), disk.open(), 0, num_beams=3, num_return_sequences=2, created=LENGTH)
    check(model, prompt(LENGTH), disk.restart(), LENGTH - 1, num_beams=3, num_return_sequences=2, created=1)
    check(model, prompt(LENGTH), disk.restart(), LENGTH - 1, num_return_sequences=3, do_sample=True)
    check(model, parted(51), disk.restart(), 51, num_beams=2)
    check(model, parted(49), disk.restart(), 49, num_return_sequences=2, do_sample=True)
    rows = torch.cat([prompt(LENGTH), parted(40)[:, :LENGTH].repeat(1, 2)[:, :LENGTH]])
    check(model, rows, disk.restart(), 32, num_beams=2, num_return_sequences=2, reason=MissReason.ROW_LIMIT)


def left_padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of rows `[1, length]` of several lengths."""
    length = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat([torch.zeros(1, length - row.shape[1], dtype=torch.long), row], dim=1) for row in rows])
    mask = torch.ones_like(ids)
    for row, tokens in enumerate(rows):
        mask[row, : length - tokens.shape[1]] = 0
    return ids, mask


def test_rows_that_share_blocks(name: str, disk: Disk) -> None:
    model = tiny(name)
    check(model, prompt(LENGTH), disk.open(), 0)
    ids = torch.cat([parted(48, seed=seed) for seed in (3, 4, 5)])
    check(model, ids, disk.restart(), 48)
    stack = disk.restart()
    ids, mask = left_padded(parted(48, seed=3), parted(32, seed=6), prompt(LENGTH))  # pads 0, 16, 7
    check(model, ids, stack, 48, {"disk": 48 + 32 + 41}, attention_mask=mask, reason=MissReason.ROW_LIMIT)
    check(model, ids, stack, 59, {"host": 59 + 43 + 52}, attention_mask=mask)


def test_rows_that_share_nothing(name: str, disk: Disk) -> None:
    model = tiny(name)
    rows = [prompt(length, seed=seed) for length, seed in ((60, 11), (50, 12), (34, 13))]
    rows[1][0, 0], rows[2][0, 0] = rows[0][0, 0] % 100 + 10, rows[0][0, 0] % 100 + 11
    ids, mask = left_padded(*rows)  # pads 0, 10, 26
    check(model, ids, disk.open(), 0, attention_mask=mask, created=60 + 50 + 34 + 3 * 4)
    check(model, ids, disk.restart(), 48, attention_mask=mask, reason=MissReason.ROW_LIMIT)  # 48, 10 + 48, 26 + 32
    other = prompt(50, seed=14)
    other[0, 0] = 3 if other[0, 0] != 3 else 4
    ids, mask = left_padded(rows[0], other, rows[2])
    check(model, ids, disk.restart(), 0 if rows[0].shape[1] == 50 else 10, attention_mask=mask, reason=MissReason.ROW_LIMIT)


def test_a_chat_over_restarts(name: str, disk: Disk) -> None:
    """A new cache and a new stack each turn: all that was fed is reused."""
    model, ids, held = tiny(name), prompt(20), 0
    for turn in range(5):
        out = check(model, ids, disk.restart(), held, created=ids.shape[1] + 4 - held)
        held = ids.shape[1] + 4
        ids = torch.cat([out.sequences, prompt(4 + 5 * turn, seed=turn)], dim=1)


def test_a_kept_cache(name: str, disk: Disk) -> None:
    """Through a chat, then another prompt, then back to what only the disk and memory know."""
    model = tiny(name)
    check(model, prompt(LENGTH), disk.open(), 0)
    stack = disk.restart()
    cache = TieredCache(stack)
    out = check(model, parted(50), stack, 48, cache=cache)
    ids = torch.cat([out.sequences, prompt(7, seed=6)], dim=1)
    check(model, ids, stack, 66, {"resident": 66}, cache=cache)
    other = prompt(30, seed=7)
    other[0, 0] = 3 if prompt(1)[0, 0] != 3 else 4
    check(model, other, stack, 0, cache=cache)
    check(model, ids, stack, len(ids[0]) - 1, {"host": len(ids[0]) - 1}, cache=cache)


def test_a_kept_cache_that_the_disk_outdoes(name: str, disk: Disk) -> None:
    """It holds some of a prompt, the disk more; where the disk lets it down, what it holds is used after all."""
    model = tiny(name)
    check(model, prompt(90), disk.open(), 0)
    for is_damaged in (False, True):
        stack = disk.restart()
        cache = TieredCache(stack)
        run(model, prompt(30), new_tokens=1, past_key_values=cache)
        stack._inventory.discard_roots(lambda root: True)  # memory forgets, the cache holds 30 tokens
        if is_damaged:
            disk.damage(1)
        tiers, reason = {"disk": 80}, MissReason.NOT_STORED
        if is_damaged:
            tiers, reason = {"resident": 30}, MissReason.CORRUPT
        check(model, prompt(90), stack, sum(tiers.values()), tiers, cache=cache, reason=reason)


def test_by_hand(name: str, disk: Disk) -> None:
    """restore() and commit(), with and without pads."""
    model = tiny(name)
    ids, mask = left_padded(prompt(LENGTH), prompt(48))
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.inference_mode():
        whole = model(prompt(LENGTH)).logits
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
        for cached in (0, LENGTH - 1):
            cache = TieredCache(disk.restart())
            start = cache.restore(model, prompt(LENGTH))
            assert start == cached == cache.usage.cached_by_tier.get("disk", 0)
            logits = model(prompt(LENGTH)[:, start:], past_key_values=cache).logits
            torch.testing.assert_close(logits, whole[:, start:], rtol=0, atol=1e-4)
            cache.commit(prompt(LENGTH))
            assert cache.usage.created_tokens == LENGTH - start
        for cached in (5, LENGTH - 1):  # row 1 behind its pads is for loops of this kind only: at first row 0 has 5 alone
            cache = TieredCache(disk.restart())
            start = cache.restore(model, ids, mask)
            assert start == cached
            feed = {"attention_mask": mask, "position_ids": positions[:, start:], "past_key_values": cache}
            logits = model(ids[:, start:], **feed).logits
            torch.testing.assert_close(logits[:, -1], padded[:, -1], rtol=0, atol=1e-4)
            cache.commit(ids, mask)
    check(model, prompt(48), disk.restart(), 47)


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunked_prefill(name: str, chunk: int, disk: Disk) -> None:
    """Before transformers 5.24 nothing is reused there, but the prompt is stored."""
    model = tiny(name)
    for cached in (0, 48):
        cache, cold = TieredCache(disk.restart()), run(model, prompt(LENGTH))
        assert_same(run(model, prompt(LENGTH), past_key_values=cache, prefill_chunk_size=chunk), cold)
        assert cache.usage.cached_tokens == (cached if compat.CHUNKED_PREFILL_CONTINUES else 0)
    check(model, prompt(LENGTH), disk.restart(), 48)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes(name: str, context: Callable[[], Any], disk: Disk) -> None:
    """What one mode stored another reads; generate() itself turns gradients off."""
    model = tiny(name)
    with context():
        check(model, prompt(LENGTH), disk.open(), 0)
    with torch.inference_mode():
        check(model, prompt(LENGTH), disk.restart(), 48)
    with context():
        out = check(model, parted(48), disk.restart(), 48)
        check(model, torch.cat([out.sequences, prompt(5)], dim=1), disk.restart(), 64)


def test_autocast(name: str, disk: Disk) -> None:
    """Its K/V are its own; where their layout cannot be foreseen nothing is found, and nothing is wrong."""
    model = tiny(name)
    with torch.autocast("cpu", torch.bfloat16):
        run(model, prompt(60), past_key_values=TieredCache(disk.open()))
        stack = disk.restart()
        cold, cache = run(model, prompt(60)), TieredCache(stack)
        out = run(model, prompt(60), past_key_values=cache)
        assert cache.usage.cached_tokens in (0, 48)
        assert all((got - want).abs().max() < 2 for got, want in zip(out.logits[:1], cold.logits, strict=False))
    check(model, prompt(60), disk.restart(), 0)


def test_explain_names_the_disk(disk: Disk) -> None:
    check(tiny(), prompt(LENGTH), disk.open(), 0)
    cache = TieredCache(disk.restart())
    run(tiny(), prompt(LENGTH), past_key_values=cache)
    assert "48 from disk" in cache.explain()
    assert "no more of this prompt is stored" in cache.explain()
    stack = disk.restart(int(2.5 * 4096))
    for _ in range(2):
        cache = TieredCache(stack)
        run(tiny(), prompt(LENGTH), past_key_values=cache)
        stack.flush()
    assert "from host memory and" in cache.explain()
    assert "from disk" in cache.explain()
    assert "disk:" in repr(stack.stats())


# --- which model ----------------------------------------------------------------------------------------------------------


def test_two_models_salts_and_namespaces_in_one_directory(disk: Disk) -> None:
    sayings: list[tuple[PreTrainedModel, dict[str, Any], dict[str, Any]]] = [
        (tiny(), {}, {}),
        (tiny(seed=1), {}, {}),
        (tiny("Qwen2"), {}, {}),
        (tiny(), {"salt": "a"}, {}),
        (tiny(), {"salt": "b"}, {}),
        (tiny(), {}, {"namespace": "other"}),
        (tiny(), {"salt": "a"}, {"namespace": "other"}),
        (tiny(), {}, {"block_tokens": 24}),
    ]
    for cached in (0, 48):
        for model, options, settings in sayings:
            stack = disk.restart(**settings)
            check(model, prompt(LENGTH), stack, cached, cache=TieredCache(stack, **options))


def test_adapters(disk: Disk) -> None:
    """Each state of a model with adapters finds its own on disk, and going back finds the old."""
    from tests.hf import test_adapters as adapters

    model = adapters.wrapped()
    model.add_adapter("two", adapters.adapter(2))
    for cached in (0, 48):
        for name in ("one", "two"):
            model.set_adapter(name)
            check(model.eval(), prompt(LENGTH), disk.restart(), cached)
        with model.disable_adapter():
            check(model, prompt(LENGTH), disk.restart(), cached)
    again = adapters.wrapped()  # the same adapter, loaded anew
    check(again, prompt(LENGTH), disk.restart(), 48)
    again.merge_adapter()
    check(again, prompt(LENGTH), disk.restart(), 0)


def test_hooks_and_replaced_functions_mean_nothing_on_disk(disk: Disk) -> None:
    """What is computed under them stays in memory; what is on disk is not for them."""
    check(fresh(), prompt(LENGTH), disk.open(), 0)
    number = len(disk.files())

    def stronger(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5

    hooked, replaced = fresh(), fresh()
    hooked.model.layers[0].mlp.register_forward_hook(stronger)
    plain = replaced.model.layers[0].mlp.forward
    replaced.model.layers[0].mlp.forward = lambda x: plain(x) * 1.5
    for model in (hooked, replaced):
        stack = disk.restart()
        check(model, prompt(LENGTH), stack, 0, created=57)
        check(model, prompt(LENGTH), stack, LENGTH - 1, {"host": LENGTH - 1})
        stack.flush()
        assert len(disk.files()) == number
        check(model, prompt(LENGTH), disk.restart(), 0)
    check(fresh(), prompt(LENGTH), disk.restart(), 48)


def test_edited_weights(disk: Disk) -> None:
    """One element more or less: another model, also when it changes while a call is under way."""
    model = fresh()
    check(model, prompt(LENGTH), disk.open(), 0)
    weight = model.model.layers[1].self_attn.k_proj.weight

    def edit(batch: int, ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            weight[3, 5] += 0.5
        return list(range(3, 128))

    run(model, parted(40), past_key_values=TieredCache(disk.restart()), prefix_allowed_tokens_fn=edit)
    assert len(disk.files()) == 4
    check(model, prompt(LENGTH), disk.restart(), 0)
    check(fresh(), prompt(LENGTH), disk.restart(), 48)
    assert len(disk.files()) > 4


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_length(rope_type: str, disk: Disk) -> None:
    """Which change at 48 tokens: nothing crosses from one regime to the other by way of the disk."""
    model = length_dependent(rope_type)
    check(model, prompt(30), disk.open(), 0, created=34)
    check(model, prompt(45), disk.restart(), 16, created=32, new_tokens=8)  # grows beyond the switch: not stored from there
    for cached in (0, 48):
        if rope_type == "dynamic":
            check(model, prompt(60), disk.restart(), 0, created=0, reason=MissReason.UNSUPPORTED_LAYERS)
        else:
            check(model, prompt(60), disk.restart(), cached)
    check(model, prompt(45), disk.restart(), 32)


# --- little memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [0.5, 1.5, 2.5, 5.5])
def test_less_memory_than_a_sequence(name: str, blocks: float, disk: Disk) -> None:
    """Right whatever fits; and what does not fit comes from disk, call after call."""
    model = tiny(name)
    check(model, prompt(150), disk.open(), 0)
    nbytes = block_nbytes(disk.stacks[0])
    stack = disk.restart(int(blocks * nbytes))
    for ids, cached in ((prompt(150), 144), (prompt(150), 144), (parted(100, 150), 96), (prompt(150), 144)):
        cold, cache = run(model, ids), TieredCache(stack)
        assert_same(run(model, ids, past_key_values=cache), cold)
        assert cache.usage.cached_tokens >= cached
        stack.flush(60)
        assert_consistent(stack)
        assert stack.stats().tiers["host"].used_bytes <= int(blocks * nbytes)


@pytest.mark.parametrize("blocks", [0.5, 2.5])
def test_a_sequence_goes_to_disk_that_memory_never_held(blocks: float, disk: Disk) -> None:
    """With sliding windows only what was captured within the budget of the host tier does."""
    model = tiny()
    run(model, prompt(150), past_key_values=TieredCache(disk.open()))
    nbytes = block_nbytes(disk.stacks[0])
    disk.restart().clear()
    stack = disk.restart(int(blocks * nbytes))
    for _ in range(3):  # what did not fit into the queue does later
        run(model, prompt(150), past_key_values=TieredCache(stack))
        stack.flush(60)
    assert_consistent(stack)
    check(model, prompt(150), disk.restart(), 144)


def test_less_memory_than_the_working_set(name: str, disk: Disk) -> None:
    """Ten prompts, memory for two: all of them are found, round after round."""
    model, stack = tiny(name), disk.open()
    run(model, prompt(48), past_key_values=TieredCache(stack))
    used = stack.stats().tiers["host"].used_bytes
    stack = disk.restart(2 * used)
    prompts = [torch.cat([torch.full((1, 1), 3 + seed), prompt(47, seed=seed)], dim=1) for seed in range(10)]
    for cached in (0, 47, 47):
        for ids in prompts:
            cold, cache = run(model, ids), TieredCache(stack)
            assert_same(run(model, ids, past_key_values=cache), cold)
            assert cache.usage.cached_tokens >= min(cached, 32)
            stack.flush(60)
            assert_consistent(stack)
    stats = stack.stats()
    assert stats.tiers["host"].evicted_pieces > 0
    assert stats.tiers["disk"].pieces == len(disk.files()) + len(disk.files(SIDE))
    assert stats.hit_rate > 0.4


def test_memory_first_disk_for_the_rest(name: str, disk: Disk) -> None:
    model = tiny(name)
    check(model, prompt(150), disk.open(), 0)
    stack = disk.restart()
    check(model, prompt(65), stack, 64, {"disk": 64})
    check(model, prompt(150), stack, 144, {"host": 64, "disk": 80})
    check(model, prompt(150), stack, 149, {"host": 149})


def test_parting_from_what_was_read_from_disk(name: str, disk: Disk) -> None:
    """A long prompt was read from disk, its side pieces only in the last window; then one that parts early."""
    model = tiny(name)
    check(model, prompt(120), disk.open(), 0)
    stack = disk.restart()
    check(model, prompt(120), stack, 112)
    check(model, parted(60, 120), stack, 60, {"host": 60})


@pytest.mark.parametrize("name", SOME)
def test_many_prompts_pads_restarts_and_accidents(name: str, disk: Disk) -> None:
    """Left-padded batches of branches of one text, in any order, on budgets that evict, while files are damaged and go."""
    random = np.random.default_rng(1)
    model, stack, hits = tiny(name), disk.open(150_000, 2_000_000), 0
    kept = TieredCache(stack)
    for step in range(40):
        if step % 6 == 5:
            stack = disk.restart([150_000, 20_000, "1MB"][step // 6 % 3], 2_000_000)
            kept = TieredCache(stack)
        files = sorted(disk.path.rglob("*.kv"))
        if files and step % 3 == 0:
            file = files[int(random.integers(len(files)))]
            content = bytearray(file.read_bytes())
            content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
            file.write_bytes(content)
        if files and step % 5 == 4:
            files[int(random.integers(len(files)))].unlink(missing_ok=True)
        rows, length = int(random.integers(1, 4)), int(random.integers(10, 120))
        ids = prompt(length).repeat(rows, 1)
        for row in range(rows):
            place = int(random.integers(1, length))
            ids[row, place:] = prompt(length, seed=int(random.integers(0, 3)) + 1)[0, place:]
            pads = int(random.integers(0, 2)) * int(random.integers(0, length - 5))
            ids[row] = torch.cat([torch.zeros(pads, dtype=torch.long), ids[row, : length - pads]])
        mask = (ids != 0).long()
        options = [{}, {}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}][step % 4]
        cold = run(model, ids, attention_mask=mask, **options)
        cache = kept if step % 3 == 2 else TieredCache(stack)
        assert_same(run(model, ids, attention_mask=mask, past_key_values=cache, **options), cold)
        hits += cache.usage.cached_by_tier.get("disk", 0) > 0
        stack.flush(60)
        assert_consistent(stack)
    assert hits > 5
