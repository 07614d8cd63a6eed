"""What a user sees: names, usage, explanations, reprs, warm() and forget()."""

import pytest
import torch
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

import tiered_cache
from tests.hf.harness import check, new_stack, run
from tests.hf.models import prompt, tiny
from tiered_cache import MissReason, TieredCache, TierStack, Usage, forget, warm
from tiered_cache.hf import compat, prefixes


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def test_public_names() -> None:
    assert tiered_cache.__all__ == sorted(tiered_cache.__all__)
    for name in tiered_cache.__all__:
        assert getattr(tiered_cache, name) is not None
        assert name in dir(tiered_cache)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tiered_cache.nothing


def test_usage_counts_rows_as_passed(stack: TierStack) -> None:
    """No pads, no copies for beams or samples; what rows share is stored once."""
    ids = prompt(30, rows=2)
    ids[:, :20] = prompt(20)
    ids[1, :5] = 0
    mask = (ids != 0).long()
    cache = TieredCache(stack)
    run(tiny(), ids, past_key_values=cache, attention_mask=mask, num_beams=3)
    assert cache.usage == Usage(55, 0, 55, {}, cache.usage.fetch_seconds, MissReason.NOT_STORED)
    cache = TieredCache(stack)
    run(tiny(), ids, past_key_values=cache, attention_mask=mask, num_return_sequences=2, do_sample=True)
    assert (cache.usage.prompt_tokens, cache.usage.cached_tokens, cache.usage.computed_tokens) == (55, 53, 2)
    assert cache.usage.cached_by_tier == {"host": 53}
    assert cache.usage.miss_reason is None
    assert cache.usage.fetch_seconds > 0


def test_row_limit(stack: TierStack) -> None:
    check(tiny(), prompt(30), stack, cached=0)
    ids = torch.cat([prompt(30), prompt(30)])
    ids[1, 10] = 3 if ids[1, 10] != 3 else 4
    cache = TieredCache(stack)
    check(tiny(), ids, stack, cached=10, cache=cache)
    assert cache.usage.miss_reason is MissReason.ROW_LIMIT
    assert "row" in cache.explain()


def test_explain(stack: TierStack) -> None:
    cache = TieredCache(stack)
    assert cache.explain() == "This cache has not served a prompt yet."
    run(tiny(), prompt(30), past_key_values=cache)
    assert cache.explain() == (
        "Computed all 30 prompt tokens. NOT_STORED: no more of this prompt is stored. Stored 34 new tokens for later calls."
    )
    cache = TieredCache(stack)
    run(tiny(), prompt(30), past_key_values=cache)
    text = cache.explain()
    assert text.startswith("Reused 29 of 30 prompt tokens (29 from host memory, ")
    assert text.endswith(" ms) and computed 1.")


def test_reprs(stack: TierStack) -> None:
    cache = TieredCache(stack)
    assert repr(cache) == "TieredCache(empty)"
    run(tiny(), prompt(30), past_key_values=cache)
    assert repr(cache) == "TieredCache(34 tokens in 2 layers; last call reused 0 of 30 prompt tokens)"
    assert repr(stack) == ("TierStack(HostTier(8.5 KiB of 244.1 MiB used); 3 blocks of up to 16 tokens, namespace 'default')")
    run(tiny(), prompt(30), past_key_values=cache)
    assert repr(stack.stats()).split("\n") == [
        "Stats: 2 requests, 29 of 60 prompt tokens reused (48%), 34 tokens stored, 0 blocks dropped",
        "  host: 8.5 KiB of 244.1 MiB in 3 pieces, 0 evicted",
        "  misses: not_stored 1",
    ]
    assert repr(cache.usage).startswith("Usage(prompt_tokens=30, cached_tokens=29 (29 resident), computed_tokens=1, ")


def test_warm(stack: TierStack) -> None:
    usage = warm(tiny(), prompt(40), stack=stack)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.created_tokens) == (40, 0, 40)
    usage = warm(tiny(), prompt(45), stack=stack)
    assert (usage.prompt_tokens, usage.cached_tokens) == (45, 40)
    check(tiny(), prompt(45), stack, cached=44)
    usage = warm(tiny(), prompt(20, seed=1, rows=3), stack=stack)
    assert usage.created_tokens >= 57


@pytest.mark.parametrize("bars", [True, False])
def test_warming_shows_progress(
    stack: TierStack, bars: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only when it takes a while, and where transformers shows bars."""
    monkeypatch.setattr(prefixes, "CHUNK_TOKENS", 10)
    warm(tiny(), prompt(45), stack=stack)
    assert "Warming" not in capsys.readouterr().err
    monkeypatch.setattr(compat, "BAR_DELAY_S", 0.0)
    (enable_progress_bar if bars else disable_progress_bar)()
    try:
        warm(tiny(), prompt(45, seed=1), stack=stack)
    finally:
        enable_progress_bar()
    assert ("Warming" in capsys.readouterr().err) is bars
    check(tiny(), prompt(45), stack, cached=44)


def test_warm_on_the_default_stack() -> None:
    own = new_stack()
    before = tiered_cache.default_stack()
    tiered_cache.set_default_stack(own)
    try:
        warm(tiny(), prompt(40))
        cache = TieredCache()
        assert cache.stack is own
        run(tiny(), prompt(40), past_key_values=cache)
        assert cache.usage.cached_tokens == 39
        forget(tiny())
        assert not own._index.blocks
    finally:
        tiered_cache.set_default_stack(before)


def test_forget(stack: TierStack) -> None:
    """All of this model's, under any salt; nothing of any other."""
    check(tiny(), prompt(30), stack, cached=0)
    check(tiny(), prompt(30), stack, cached=0, cache=TieredCache(stack, salt="a"))
    check(tiny(seed=1), prompt(30), stack, cached=0)
    forget(tiny(), stack=stack)
    check(tiny(seed=1), prompt(30), stack, cached=29)
    check(tiny(), prompt(30), stack, cached=0, cache=TieredCache(stack, salt="a"))
    check(tiny(), prompt(30), stack, cached=0)
