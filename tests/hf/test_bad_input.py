"""Wrong arguments get an error that names the argument and the way out, and cost nothing that was stored."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiered_cache
from tests.hf.harness import assert_same, check, new_stack, run, stored_bytes
from tests.hf.models import prompt, tiny
from tiered_cache import ClosedError, ConfigError, HostTier, TieredCache, TierStack, enable, forget, warm


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def test_a_closed_stack(stack: TierStack) -> None:
    stack.close()
    for call in (
        lambda: TieredCache(stack),
        lambda: enable(stack),
        lambda: warm(tiny(), prompt(5), stack=stack),
        lambda: forget(tiny(), stack=stack),
    ):
        with pytest.raises(ClosedError, match=r"closed.*(new TierStack|default)"):
            call()


@pytest.mark.parametrize("wrong", ["8GiB", (1, 2), DynamicCache(), TierStack], ids=lambda wrong: str(wrong)[:20])
def test_something_else_as_a_stack(wrong: Any) -> None:
    for call in (lambda: TieredCache(wrong), lambda: enable(wrong), lambda: forget(tiny(), stack=wrong)):
        with pytest.raises(ConfigError, match="must be a TierStack"):
            call()


def test_a_tier_as_a_stack() -> None:
    with pytest.raises(ConfigError, match="TierStack"):
        TieredCache(HostTier("1MB"))  # type: ignore[arg-type]


def test_a_wrong_salt(stack: TierStack) -> None:
    with pytest.raises(ConfigError, match="salt"):
        TieredCache(stack, salt=7)  # type: ignore[arg-type]


def test_two_caches_in_one_call(stack: TierStack) -> None:
    check(tiny(), prompt(30), stack, cached=0)
    for other in (DynamicCache(), TieredCache(stack)):
        with pytest.raises(ConfigError, match="two caches"):
            run(tiny(), prompt(30), past_key_values=TieredCache(stack), cache=other)
    check(tiny(), prompt(30), stack, cached=29)


def test_a_tuple_as_a_cache(stack: TierStack) -> None:
    """Stock refuses it, and so it stays, also when a cache would be put in by enable()."""
    pairs = tuple((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)) for _ in range(2))
    enable(stack)
    try:
        with pytest.raises(ValueError, match="tuple"):
            run(tiny(), prompt(30), past_key_values=pairs)
    finally:
        tiered_cache.disable()


def test_a_prompt_longer_than_the_positions(stack: TierStack) -> None:
    """Where positions are looked up in a table it cannot work; stock says "index out of range"."""
    cache = TieredCache(stack)
    check(tiny("GPT2"), prompt(30), stack, cached=0, cache=cache)
    before = stored_bytes(stack)
    with pytest.raises(ConfigError, match=r"input_ids has 600 tokens.*512 positions"):
        run(tiny("GPT2"), prompt(600), past_key_values=cache)
    assert stored_bytes(stack) == before
    check(tiny("GPT2"), prompt(30), stack, cached=29, cache=cache)


def test_a_prompt_longer_than_what_a_rotary_model_was_trained_for(stack: TierStack) -> None:
    """Stock computes it, and so do we: same tokens."""
    ids = prompt(600)
    assert_same(run(tiny(), ids, past_key_values=TieredCache(stack)), run(tiny(), ids))
    check(tiny(), ids, stack, cached=599)


def test_nothing_stored_appears_in_words(stack: TierStack) -> None:
    """Private by default: no token ids in reprs, explanations or errors."""
    ids = torch.full((1, 30), 117)
    cache = TieredCache(stack)
    run(tiny(), ids, past_key_values=cache)
    words = [repr(cache), cache.explain(), repr(cache.usage), repr(stack), repr(stack.stats())]
    with pytest.raises(ConfigError) as caught:
        run(tiny(), ids, past_key_values=cache, attention_mask=torch.ones(1, 31))
    for text in (*words, str(caught.value)):
        assert "117" not in text
