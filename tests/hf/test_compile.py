"""Compiled models: the same tokens, and no shape that has to stay as it is."""

import pytest
import torch
from transformers import StaticCache

from tests.hf.harness import assert_same, new_stack, run
from tests.hf.models import fresh, prompt
from tiered_cache import TieredCache
from tiered_cache.hf import compat

LENGTH = 40


@pytest.fixture(autouse=True)
def _no_compiled_code_left() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Lfm2"])
@pytest.mark.parametrize("way", ["module", "forward", "wrapped"])
def test_the_same_tokens(name: str, way: str) -> None:
    if name == "Lfm2" and not compat.KEEPS_STATES:
        pytest.skip("recurrent layers need transformers 5.17")
    model, stack = fresh(name), new_stack()
    cold = run(model, prompt(LENGTH))
    used = model
    if way == "module":
        model.compile(backend="eager")
    elif way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        used = torch.compile(model, backend="eager")
    for cached in (0, LENGTH - 1):
        cache = TieredCache(stack)
        assert_same(run(used, prompt(LENGTH), past_key_values=cache), cold, 2e-3)
        assert cache.usage.cached_tokens == cached, cache.explain()


def test_never_compileable() -> None:
    assert TieredCache(new_stack()).is_compileable is False
    cache = TieredCache(new_stack())
    run(fresh(), prompt(LENGTH), past_key_values=cache)
    assert cache.is_compileable is False


def test_a_static_cache_beside_it() -> None:
    """Whoever wants static shapes passes transformers' own cache, or names it, not both."""
    model, stack = fresh(), new_stack()
    cold = run(model, prompt(LENGTH))
    run(model, prompt(LENGTH), past_key_values=TieredCache(stack))
    static = StaticCache(config=model.config, max_cache_len=64)
    assert_same(run(model, prompt(LENGTH), past_key_values=static), cold)
    with pytest.raises(ValueError, match="cache_implementation"):
        run(model, prompt(LENGTH), past_key_values=TieredCache(stack), cache_implementation="static")
