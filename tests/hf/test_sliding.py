"""Sliding-window layers: a hit needs the window before its end, whatever was evicted, dropped or cropped."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.hf.harness import assert_consistent, assert_same, block_nbytes, check, drop_pieces, new_stack, run
from tests.hf.models import SLIDING, fresh, prompt, tiny
from tiered_cache import MissReason, TieredCache
from tiered_cache.hf import cache as cache_module
from tiered_cache.keys import SIDE

WINDOW = 24
LENGTH = 70


@pytest.fixture(params=["Mistral", "Gemma2", "Llama4Text"])  # all layers slide; every other does; chunks
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("block_tokens", [1, 5, 16, 64, 256])
def test_window_edges(name: str, block_tokens: int) -> None:
    """Prompts that part from what is stored, or end, around the window and at its multiples."""
    stack = new_stack(block_tokens=block_tokens)
    check(tiny(name), prompt(LENGTH), stack, cached=0)
    for shared in (1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1, LENGTH - 1):
        ids = torch.cat([prompt(shared), prompt(9, seed=shared)], dim=1)
        ids[0, shared] = 3 if prompt(LENGTH)[0, shared] != 3 else 4
        check(tiny(name), ids, stack, cached=shared)
        check(tiny(name), prompt(shared + 1), stack, cached=shared)


@pytest.mark.parametrize("block_tokens", [5, 16, 64])
def test_a_chat(name: str, block_tokens: int) -> None:
    """Turn after turn, each on a new cache: blocks that begin before what was restored get their side pieces all the same."""
    stack, ids = new_stack(block_tokens=block_tokens), prompt(20)
    out = check(tiny(name), ids, stack, cached=0)
    for turn in range(8):
        held = out.sequences.shape[1] - 1
        ids = torch.cat([out.sequences, prompt(3 + 5 * turn, seed=turn)], dim=1)
        out = check(tiny(name), ids, stack, cached=held)
    check(tiny(name), ids[:, :50], stack, cached=49)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (lambda start: False, 0),
        (lambda start: start < 16, 16),  # from the start on, no whole window is needed
        (lambda start: start < 32, 32),
        (lambda start: start >= 32, LENGTH - 1),
        (lambda start: start >= 48, 0),  # 48 .. 69 is less than a window
        (lambda start: start != 48, 48),
        (lambda start: start not in (0, 64), 64),
        (lambda start: start not in (16, 64), 64),
        (lambda start: start in (32, 64), 0),
    ],
)
def test_a_hit_ends_where_the_window_before_it_is_complete(name: str, kept: Any, expected: int) -> None:
    stack, cache = new_stack(), TieredCache()
    check(tiny(name), prompt(LENGTH), stack, cached=0)
    drop_pieces(stack, SIDE, kept)
    assert_consistent(stack)
    cache = TieredCache(stack)
    check(tiny(name), prompt(LENGTH), stack, cached=expected, cache=cache)
    if expected < LENGTH - 1:
        assert cache.usage.miss_reason is MissReason.NOT_STORED
        assert "sliding-window" in cache.explain()
    # What was computed again is stored again.
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


def test_side_pieces_of_the_last_window_stay_longest(name: str) -> None:
    """Under pressure the inner side pieces go first; the next turn of every chat still hits."""
    roomy = new_stack()
    chats = [torch.cat([torch.full((1, 1), 3 + n), prompt(LENGTH, seed=n)], dim=1) for n in range(4)]
    for ids in chats:
        check(tiny(name), ids, roomy, cached=0)
    stack = new_stack(int(roomy.tiers[0].used_bytes * 0.9))
    outs = [check(tiny(name), ids, stack, cached=0) for ids in chats]
    assert stack.stats().tiers["host"].evicted_pieces > 0
    for out in reversed(outs):
        check(tiny(name), out.sequences, stack, cached=out.sequences.shape[1] - 1)


def test_under_a_small_budget(name: str) -> None:
    roomy = new_stack()
    check(tiny(name), prompt(LENGTH), roomy, cached=0)
    for blocks in range(1, 9):
        stack = new_stack(int((blocks + 0.5) * block_nbytes(roomy)))
        for length in (LENGTH, LENGTH, 40, LENGTH, 55):
            cold = run(tiny(name), prompt(length))
            assert_same(run(tiny(name), prompt(length), past_key_values=TieredCache(stack)), cold)
            assert_consistent(stack)


def test_a_kept_cache(name: str) -> None:
    """Extended in place; cropped in place as far as K/V before the window are still there; else from the stack."""
    stack = new_stack()
    cache = TieredCache(stack)
    out = check(tiny(name), prompt(LENGTH), stack, cached=0, cache=cache)
    held = out.sequences.shape[1] - 1
    ids = torch.cat([out.sequences, prompt(8, seed=1)], dim=1)
    check(tiny(name), ids, stack, cached=held, cache=cache)
    assert cache.usage.cached_by_tier == {"resident": held}
    for length in (30, 80, 5, 60, 83):
        check(tiny(name), ids[:, :length], stack, cached=length - 1, cache=cache)
    near = torch.cat([ids[:, :81], prompt(4, seed=2)], dim=1)
    check(tiny(name), ids, stack, cached=ids.shape[1] - 1, cache=cache)
    check(tiny(name), near, stack, cached=81 + int(near[0, 81] == ids[0, 81]), cache=cache)


def test_only_new_tokens_on_a_kept_cache(name: str) -> None:
    stack = new_stack()
    cache = TieredCache(stack)
    out = run(tiny(name), prompt(LENGTH), past_key_values=cache)
    new = torch.cat([out.sequences[:, -1:], prompt(5, seed=1)], dim=1)
    ids = torch.cat([out.sequences[:, :-1], new], dim=1)
    check(tiny(name), ids, stack, cached=LENGTH + 4, cache=cache, passed=new, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("limit", [0, 3000, 20_000])
def test_captured_kv_leave_within_a_budget(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt, whole or in chunks, decoding on: what left the windows is stored in mid-generation, then freed."""
    monkeypatch.setattr(cache_module, "CAPTURE_NBYTES", limit)
    for chunk in (None, 30):
        stack = new_stack()
        cache, model = TieredCache(stack), tiny(name)
        options = {"prefill_chunk_size": chunk} if chunk else {}
        cold = run(model, prompt(150), new_tokens=40)
        assert_same(run(model, prompt(150), new_tokens=40, past_key_values=cache, **options), cold)
        assert cache.usage.created_tokens == 189
        for layer in cache.layers:
            if layer.is_sliding:
                assert layer.captured[0].shape[2] <= WINDOW + 16 + 40
        check(model, cold.sequences, stack, cached=189)
        check(model, prompt(140), stack, cached=139)


def test_a_stack_too_small_for_what_is_captured(name: str) -> None:
    """Then the oldest captured K/V go unstored, and nothing else is lost."""
    roomy = new_stack()
    check(tiny(name), prompt(200), roomy, cached=0)
    stack = new_stack(roomy.tiers[0].used_bytes // 3)
    for _ in range(2):
        cold = run(tiny(name), prompt(200))
        assert_same(run(tiny(name), prompt(200), past_key_values=TieredCache(stack)), cold)
    assert_consistent(stack)


def test_an_exception_past_prefill_keeps_the_prompt(name: str) -> None:
    stack = new_stack()
    cache = TieredCache(stack)
    steps = iter(range(3))

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        next(steps)
        return list(range(3, 128))

    with pytest.raises(StopIteration):
        run(tiny(name), prompt(LENGTH), past_key_values=cache, prefix_allowed_tokens_fn=allowed, new_tokens=9)
    assert_consistent(stack)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, cache=cache)


@pytest.mark.parametrize("name", SLIDING)
def test_many_prompts_and_pads(name: str) -> None:
    """Left-padded batches of branches of one text, in any order, on a budget that evicts."""
    random = np.random.default_rng(0)
    model, stack = tiny(name), new_stack(60_000)
    caches = [TieredCache(stack) for _ in range(2)]
    hits = 0
    for step in range(25):
        rows, length = int(random.integers(1, 4)), int(random.integers(10, 90))
        ids = prompt(length).repeat(rows, 1)
        for row in range(rows):
            place = int(random.integers(1, length))
            ids[row, place:] = prompt(length, seed=int(random.integers(0, 3)) + 1)[0, place:]
            pads = int(random.integers(0, 2)) * int(random.integers(0, length - 5))
            ids[row] = torch.cat([torch.zeros(pads, dtype=torch.long), ids[row, : length - pads]])
        ids[0] = ids[0] if ids[0, 0] else prompt(length)[0]
        mask = (ids != 0).long()
        options = {"num_beams": 2} if step % 5 == 4 else {}
        cold = run(model, ids, attention_mask=mask, **options)
        cache = TieredCache(stack) if step % 3 else caches[step % 2]
        assert_same(run(model, ids, attention_mask=mask, past_key_values=cache, **options), cold)
        hits += cache.usage.cached_tokens > 0
        assert_consistent(stack)
    assert hits > 10


def test_window_sizes_that_differ_by_layer() -> None:
    model = fresh("Gemma2", num_hidden_layers=4)
    for layer in model.config.layer_types:
        assert layer in ("sliding_attention", "full_attention")
    stack = new_stack()
    check(model, prompt(LENGTH), stack, cached=0)
    check(model, prompt(50), stack, cached=49)
