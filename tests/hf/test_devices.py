"""Models spread over devices: each layer's K/V are put where that layer computes."""

from typing import Any

import pytest
import torch

from tests.hf.harness import assert_same, new_stack, run
from tests.hf.models import fresh, prompt
from tiered_cache import TieredCache
from tiered_cache.hf import binding, layers, offloaded, windows

LENGTH = 40
PLACES = [torch.device("cpu"), torch.device("cpu", 0)]  # to torch the same, but not equal


def spread(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model whose layers compute on two devices, as far as accelerate says."""
    model = fresh(name)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}
    real = offloaded.execution_devices
    of_layers = {id(layer): {PLACES[number]} for number, layer in enumerate(model.model.layers)} | {id(model): set(PLACES)}
    monkeypatch.setattr(offloaded, "execution_devices", lambda module: set(of_layers.get(id(module), ())) or real(module))
    return model


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_each_layer_gets_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stack = spread(name, monkeypatch), new_stack()
    cold = run(model, prompt(LENGTH))
    seen = []
    for kind in (layers.GrowableLayer, windows.CapturingSlidingLayer):
        real = kind.allocate

        def allocate(self: Any, *args: Any, real: Any = real) -> None:
            seen.append(args[-1])
            real(self, *args)

        monkeypatch.setattr(kind, "allocate", allocate)
    for cached in (0, LENGTH - 1):
        cache = TieredCache(stack)
        assert_same(run(model, prompt(LENGTH), past_key_values=cache), cold)
        assert cache.usage.cached_tokens == cached, cache.explain()
    assert [str(device) for device in seen] == ["cpu", "cpu:0"]


def test_a_model_on_one_device_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    monkeypatch.setattr(offloaded, "execution_devices", lambda module: 1 / 0)
    assert binding.layer_devices(model, 2) == [torch.device("cpu")] * 2


def test_where_it_is_not_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer on two devices: without reuse, and the reason is said."""
    model = spread("Llama", monkeypatch)
    monkeypatch.setattr(offloaded, "execution_devices", lambda module: set(PLACES))
    cache = TieredCache(new_stack())
    assert_same(run(model, prompt(LENGTH), past_key_values=cache), run(model, prompt(LENGTH)))
    assert "on which device" in cache.explain()
