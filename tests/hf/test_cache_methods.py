"""What DynamicCache can do, TieredCache does in the same way, and forgets tokens it no longer knows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.hf.harness import check, new_stack, run
from tests.hf.models import fresh, prompt, tiny
from tiered_cache import ConfigError, MissReason, TieredCache, TierStack
from tiered_cache.hf import compat
from tiered_cache.hf.layers import GROWTH_TOKENS, GrowableLayer


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def filled(cache: Any, rows: int = 2) -> Any:
    """Run three forwards of 20, 1 and 1 tokens."""
    with torch.no_grad():
        for length in (20, 1, 1):
            tiny()(prompt(length, rows=rows), past_key_values=cache)
    return cache


def same(cache: Any, stock: Any) -> None:
    assert len(cache) == len(stock)
    assert cache.get_seq_length() == stock.get_seq_length()
    for layer, stock_layer in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(layer.keys, stock_layer.keys)
        assert torch.equal(layer.values, stock_layer.values)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda cache: None,
    "crop 1": lambda cache: cache.crop(-1),
    "crop 0": lambda cache: cache.crop(0),
    "crop 21": lambda cache: cache.crop(-21),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "reorder to one": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "crop, reorder, crop": lambda cache: (cache.crop(-3), cache.reorder_cache(torch.tensor([1, 0])), cache.crop(-2)),
}


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_as_dynamic_cache(stack: TierStack, operation: str) -> None:
    cache, stock = filled(TieredCache(stack)), filled(DynamicCache())
    same(cache, stock)
    OPERATIONS[operation](cache)
    OPERATIONS[operation](stock)
    same(cache, stock)
    rows = stock.layers[0].keys.shape[0]
    with torch.no_grad():
        for _ in range(2):
            new = prompt(3, seed=1, rows=rows)
            torch.testing.assert_close(tiny()(new, past_key_values=cache).logits, tiny()(new, past_key_values=stock).logits)
    same(cache, stock)


def test_crop_refuses_what_dynamic_cache_refuses(stack: TierStack) -> None:
    cache, stock = filled(TieredCache(stack)), filled(DynamicCache())
    try:
        stock.crop(5)
    except ValueError:  # from some release on, counts to keep are refused
        with pytest.raises(ValueError):
            cache.crop(5)
    else:
        cache.crop(5)
        same(cache, stock)


def test_reset(stack: TierStack) -> None:
    cache = filled(TieredCache(stack))
    cache.reset()
    assert cache.get_seq_length() == 0
    same(filled(cache), filled(DynamicCache()))


def test_iteration_and_batch_size(stack: TierStack) -> None:
    cache, stock = filled(TieredCache(stack)), filled(DynamicCache())
    for ours, theirs in zip(cache, stock, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert cache.is_compileable is False
    assert not hasattr(cache, "to")  # accelerate would call it


@pytest.mark.parametrize("operation", ["crop 1", "reorder", "repeat", "select"])
def test_known_tokens_follow(stack: TierStack, operation: str) -> None:
    """After generate() and an operation, the kept cache still serves exactly the rows and columns it holds."""
    ids = prompt(30, rows=2)
    cache = TieredCache(stack)
    out = run(tiny(), ids, past_key_values=cache).sequences
    OPERATIONS[operation](cache)
    expected = {
        "crop 1": out[:, :33],
        "reorder": out[[1, 0], :34],
        "repeat": out[:, :34].repeat_interleave(3, dim=0),
        "select": out[1:, :34],
    }
    held = expected[operation]
    cache.stack = new_stack()  # nothing but the cache itself can serve
    ids = torch.cat([held, prompt(4, seed=1, rows=len(held))], dim=1)
    check(tiny(), ids, cache.stack, cached=held.shape[1], cache=cache)
    assert cache.usage.cached_by_tier == {"resident": held.numel()}


def test_reset_forgets_tokens(stack: TierStack) -> None:
    cache = TieredCache(stack)
    run(tiny(), prompt(30), past_key_values=cache)
    cache.reset()
    stack.clear()
    check(tiny(), prompt(30), stack, cached=0, cache=cache)


# --- growing buffers ----------------------------------------------------------------------------------------------------


def test_a_decode_step_copies_one_token() -> None:
    layer = GrowableLayer()
    with torch.no_grad():
        keys, _ = layer.update(torch.randn(2, 3, 10, 4), torch.randn(2, 3, 10, 6))
        storage = keys.untyped_storage().data_ptr()
        for step in range(1, GROWTH_TOKENS - 12):
            keys, values = layer.update(torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 6))
            assert keys.untyped_storage().data_ptr() == storage
            assert (keys.shape[2], values.shape[3]) == (10 + step, 6)


def test_growth_is_a_small_share() -> None:
    layer = GrowableLayer()
    moves, last = 0, None
    with torch.no_grad():
        layer.update(torch.zeros(1, 1, 4000, 2), torch.zeros(1, 1, 4000, 2))
        for _ in range(4000):
            keys, _ = layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
            moves += keys.untyped_storage().data_ptr() != last
            last = keys.untyped_storage().data_ptr()
    assert moves < 10
    assert keys.untyped_storage().nbytes() <= 1.2 * keys.nbytes


def test_gradients_flow_as_with_dynamic_cache(stack: TierStack) -> None:
    model = fresh()
    losses = []
    for cache in (DynamicCache(), TieredCache(stack)):
        model.zero_grad()
        model(prompt(10), past_key_values=cache)
        loss = model(prompt(5, seed=1), past_key_values=cache).logits.square().mean()
        loss.backward()
        losses.append((loss.item(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    assert losses[0][0] == pytest.approx(losses[1][0])
    torch.testing.assert_close(losses[0][1], losses[1][1])


def test_deepcopy_of_layers_is_independent() -> None:
    layer = GrowableLayer()
    with torch.no_grad():
        layer.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))
        twin = copy.deepcopy(layer)
        layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
        keys, _ = twin.update(torch.full((1, 1, 1, 2), 2.0), torch.full((1, 1, 1, 2), 2.0))
    assert keys[0, 0, :, 0].tolist() == [0, 0, 0, 0, 0, 2]
    assert layer.keys[0, 0, :, 0].tolist() == [0, 0, 0, 0, 0, 1]


# --- loops by hand ------------------------------------------------------------------------------------------------------


def greedy_by_hand(
    model: Any, ids: torch.Tensor, cache: TieredCache, steps: int, mask: torch.Tensor | None = None
) -> tuple[Any, int]:
    """Decode as a user would, and return the sequences and how many columns were reused."""
    with torch.no_grad():
        start = cache.restore(model, ids, mask)
        fed = ids[:, start:]
        for _ in range(steps):
            options = {}
            if mask is not None:
                options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -fed.shape[1] :]}
            logits = model(fed, past_key_values=cache, **options).logits[:, -1]
            fed = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, fed], dim=1)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(fed)], dim=1)
        cache.commit(ids, mask)
    return ids, start


def test_restore_and_commit(stack: TierStack) -> None:
    cold = run(tiny(), prompt(30)).sequences
    for expected in (0, 29):
        cache = TieredCache(stack)
        ids, start = greedy_by_hand(tiny(), prompt(30), cache, steps=5)
        assert ids.tolist() == cold.tolist()
        assert start == expected == cache.usage.cached_tokens
    check(tiny(), torch.cat([cold, prompt(3, seed=1)], dim=1), stack, cached=34)


def test_restore_and_commit_with_left_pads(stack: TierStack) -> None:
    ids = prompt(30, rows=2)
    ids[0, :8] = 0
    mask = (ids != 0).long()
    cold = run(tiny(), ids, attention_mask=mask).sequences
    for expected in (0, 29):
        out, start = greedy_by_hand(tiny(), ids, TieredCache(stack), steps=5, mask=mask)
        assert out.tolist() == cold.tolist()
        assert start == expected


def test_a_loop_that_counts_pads_as_positions_spoils_nothing(stack: TierStack) -> None:
    """Without position_ids pads count in most models. What such a loop stores is found by its like only."""
    ids = torch.cat([torch.zeros(1, 8, dtype=torch.long), prompt(22)], dim=1)
    mask = (ids != 0).long()
    with torch.no_grad():
        whole = tiny()(ids, attention_mask=mask).logits[:, -1]
        for expected in (0, 29):
            cache = TieredCache(stack)
            start = cache.restore(tiny(), ids, mask)
            assert start == expected
            logits = tiny()(ids[:, start:], attention_mask=mask, past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)
            cache.commit(ids, mask)
    check(tiny(), prompt(22), stack, cached=0)
    check(tiny(), ids, stack, cached=29, attention_mask=mask)


def test_commit_of_other_tokens_than_were_restored_for(stack: TierStack) -> None:
    cache = TieredCache(stack)
    with torch.no_grad():
        assert cache.restore(tiny(), prompt(30)) == 0
        tiny()(prompt(30), past_key_values=cache)
    with pytest.raises(ConfigError, match="differ"):
        cache.commit(prompt(30, seed=1))


def test_a_kept_cache_gives_memory_back() -> None:
    stack = new_stack()
    cache = TieredCache(stack)
    run(tiny(), prompt(3000), past_key_values=cache)
    run(tiny(), prompt(20), past_key_values=cache)
    assert cache.layers[0].keys.untyped_storage().nbytes() < 4 * cache.layers[0].keys[:, :, :1].numel() * 4 * GROWTH_TOKENS


def test_rows_that_do_not_fit_are_refused_as_by_stock(stack: TierStack) -> None:
    for cache in (DynamicCache(), TieredCache(stack)):
        filled(cache, rows=3)
        with pytest.raises(RuntimeError):
            filled(cache, rows=1)


def test_restore_on_a_used_cache(stack: TierStack) -> None:
    cache = TieredCache(stack)
    greedy_by_hand(tiny(), prompt(30), cache, steps=5)
    other = prompt(30)
    other[0, 20] = 3 if other[0, 20] != 3 else 4
    ids, start = greedy_by_hand(tiny(), other, cache, steps=5)
    assert start == 20
    assert ids.tolist() == run(tiny(), other).sequences.tolist()


def test_restore_where_nothing_can_be_reused(stack: TierStack) -> None:
    model = tiny("Jamba" if compat.KEEPS_STATES else "Lfm2")
    for _ in range(2):
        cache = TieredCache(stack)
        ids, start = greedy_by_hand(model, prompt(30), cache, steps=3)
        assert start == 0
        assert cache.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS
        assert ids.tolist() == run(model, prompt(30), new_tokens=3).sequences.tolist()


def test_commit_refuses_what_does_not_fit(stack: TierStack) -> None:
    cache = TieredCache(stack)
    with pytest.raises(ConfigError, match="restore"):
        cache.commit(prompt(30))
    with torch.no_grad():
        cache.restore(tiny(), prompt(30))
        tiny()(prompt(30), past_key_values=cache)
    with pytest.raises(ConfigError, match="30"):
        cache.commit(prompt(29))
    cache.commit(prompt(30))
    other = prompt(30)
    other[0, 3] = 3 if other[0, 3] != 3 else 4
    with pytest.raises(ConfigError, match="differ"):
        cache.commit(other)
    with pytest.raises(ConfigError, match="input_ids"):
        cache.restore(tiny(), prompt(30)[0])
    with pytest.raises(ConfigError, match="attention_mask"):
        cache.restore(tiny(), prompt(30), torch.ones(1, 29))
    run(tiny(), prompt(30), past_key_values=cache)
    with pytest.raises(ConfigError, match="restore"):
        cache.commit(prompt(30))
