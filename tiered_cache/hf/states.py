"""Layers that keep a state in place of tokens, or besides them: it can be taken, and put into fresh layers.

Owns how transformers' recurrent, convolutional and hybrid layers hold their state. Refuses to own when one is taken (prefill,
binding). Needs transformers 5.17.
"""

# transformers' base classes do not fit each other:
# mypy: disable-error-code="misc, override, no-untyped-call, union-attr"

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from tiered_cache.hf.layers import GrowableLayer, StatefulLayer


class _Recurrent(LinearAttentionLayer, StatefulLayer):
    """What recurrent layers have in common, with attention and without.

    `num_tokens` is right where the model's forward asks the cache for the state, once, before it updates it with all it is fed.
    """

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        # A single step writes in place, and is not seen here but when it asks for the state.
        self.num_tokens += conv_states.shape[-1] - 1 if state_idx == 0 else 0
        return super().update_conv_state(conv_states, state_idx, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # A tensor made in inference mode cannot be written outside of it; one made outside can be written anywhere.
        with torch.inference_mode(False):
            super().lazy_initialization(*args, **kwargs)

    def state(self) -> dict[str, torch.Tensor]:
        kinds = (("conv", self.conv_states), ("recurrent", self.recurrent_states))
        return {f"{name}{place}": state for name, states in kinds for place, state in states.items() if state is not None}

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        for place in range(self.number_of_states):
            conv, recurrent = state.get(f"conv{place}"), state.get(f"recurrent{place}")
            if conv is not None:
                # Beside attention, whose K/V set the device, nothing else sets it.
                self.dtype = self.dtype or conv.dtype  # type: ignore[assignment]
                self.lazy_initialization(conv_states=conv, state_idx=place)
                self.conv_states[place].copy_(conv)
            if recurrent is not None:
                self.lazy_initialization(recurrent_states=recurrent, state_idx=place)
                self.recurrent_states[place].copy_(recurrent)
            self.has_previous_state[place] = conv is not None or recurrent is not None
        self.num_tokens = num_tokens

    def reset(self) -> None:
        super().reset()
        self.num_tokens = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        if isinstance(self, DynamicLayer):
            super().batch_repeat_interleave(repeats)
        self._change(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if isinstance(self, DynamicLayer):
            super().batch_select_indices(indices)
        self._change(lambda state: state[indices, ...])

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            states.update({place: change(state) for place, state in states.items() if state is not None})


class StateLayer(_Recurrent):
    """Linear attention, state space or short convolution, as LinearAttentionLayer."""


class HybridLayer(_Recurrent, LinearAttentionAndFullAttentionLayer, GrowableLayer):
    """A state besides full attention, whose K/V grow in steps."""

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        GrowableLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        GrowableLayer.reset(self)
        self.num_tokens = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        GrowableLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        GrowableLayer.crop(self, tokens_to_remove)


class WindowLayer(DynamicSlidingWindowLayer, StatefulLayer):
    """Sliding-window attention in a model with recurrent layers: its last window belongs to the state."""

    def state(self) -> dict[str, torch.Tensor]:
        return _window_state(self)

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        _put_window_state(self, state, num_tokens)


class WindowHybridLayer(_Recurrent, LinearAttentionAndSlidingWindowAttentionLayer):
    """A state besides sliding-window attention, whose last window belongs to it."""

    def state(self) -> dict[str, torch.Tensor]:
        return {**super().state(), **_window_state(self)}

    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        super().put_state(state, num_tokens)
        _put_window_state(self, state, num_tokens)


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
