"""Layers that keep a state in place of tokens, or besides them: it can be taken, and put into fresh layers.

Owns how transformers' recurrent, convolutional and hybrid layers hold their state. Refuses to own when one is taken (prefill,
binding). Needs transformers 5.17.
"""

# transformers' base classes do not fit each other:
# mypy: disable-error-code="misc, override, no-untyped-call"

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from tiered_cache.hf.layers import GrowableLayer, StatefulLayer


class StateLayer(LinearAttentionLayer, StatefulLayer):
    """Linear attention, state space or short convolution, as LinearAttentionLayer.

    `num_tokens` is right where the model's forward asks the cache for the state, once, before it updates it.
    """

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        super().__init__(number_of_states=number_of_states, **kwargs)
        self.num_tokens = 0

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        # A single step writes in place, and is not seen here but when it asks for the state.
        self.num_tokens += conv_states.shape[-1] - 1 if state_idx == 0 else 0
        return super().update_conv_state(conv_states, state_idx, **kwargs)

    def state(self) -> dict[str, torch.Tensor]:
        return _recurrent_state(self)

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        _put_recurrent_state(self, state)
        self.num_tokens = num_tokens


class HybridLayer(LinearAttentionAndFullAttentionLayer, GrowableLayer, StatefulLayer):
    """A state besides full attention, whose K/V grow in steps."""

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        GrowableLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        GrowableLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        GrowableLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        GrowableLayer.crop(self, tokens_to_remove)

    def state(self) -> dict[str, torch.Tensor]:
        return _recurrent_state(self)

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        _put_recurrent_state(self, state)


class WindowLayer(DynamicSlidingWindowLayer, StatefulLayer):
    """Sliding-window attention in a model with recurrent layers: its last window belongs to the state."""

    def state(self) -> dict[str, torch.Tensor]:
        return _window_state(self)

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        _put_window_state(self, state, num_tokens)


class WindowHybridLayer(LinearAttentionAndSlidingWindowAttentionLayer, StatefulLayer):
    """A state besides sliding-window attention, whose last window belongs to it."""

    def state(self) -> dict[str, torch.Tensor]:
        return {**_recurrent_state(self), **_window_state(self)}

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        _put_recurrent_state(self, state)
        _put_window_state(self, state, num_tokens)


def _recurrent_state(layer: LinearAttentionLayer) -> dict[str, torch.Tensor]:
    kinds = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {f"{name}{place}": state for name, states in kinds for place, state in states.items() if state is not None}


def _put_recurrent_state(layer: LinearAttentionLayer, state: Mapping[str, torch.Tensor]) -> None:
    # A tensor made in inference mode cannot be written outside of it; one made outside can be written anywhere.
    with torch.inference_mode(False):
        for place in range(layer.number_of_states):
            conv, recurrent = state.get(f"conv{place}"), state.get(f"recurrent{place}")
            if conv is not None:
                layer.lazy_initialization(conv_states=conv, state_idx=place)
                layer.conv_states[place].copy_(conv)  # type: ignore[union-attr]
            if recurrent is not None:
                layer.lazy_initialization(recurrent_states=recurrent, state_idx=place)
                layer.recurrent_states[place].copy_(recurrent)  # type: ignore[union-attr]
            layer.has_previous_state[place] = conv is not None or recurrent is not None


def _window_state(layer: DynamicSlidingWindowLayer) -> dict[str, torch.Tensor]:
    """Return K and V of a whole window, zeros before the first token."""
    window = int(layer.sliding_window) - 1
    assert layer.keys is not None and layer.values is not None
    both = {"keys": layer.keys, "values": layer.values}
    return {name: functional.pad(tensor, (0, 0, window - tensor.shape[2], 0)) for name, tensor in both.items()}


def _put_window_state(layer: DynamicSlidingWindowLayer, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
    keys, values = state["keys"], state["values"]
    layer.lazy_initialization(keys, values)
    kept = min(num_tokens, keys.shape[2])
    layer.keys, layer.values = (tensor[:, :, tensor.shape[2] - kept :].clone() for tensor in (keys, values))
    layer.cumulative_length = num_tokens


def own_layer(layer: Any, is_stateful: bool) -> Any:
    """Return our layer in place of a fresh one of transformers'; that one, where it holds no state.

    Args:
        is_stateful: some layer of the model does.
    """
    if type(layer) is LinearAttentionLayer:
        return StateLayer(layer.number_of_states)
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return HybridLayer(layer.number_of_states)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return WindowHybridLayer(layer.sliding_window, layer.number_of_states)
    if type(layer) is DynamicSlidingWindowLayer and is_stateful and layer.sliding_window > 1:
        return WindowLayer(layer.sliding_window)
    return layer


def is_recurrent(layers: Sequence[Any]) -> bool:
    """Say whether any of transformers' layers keeps a state."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in layers)
