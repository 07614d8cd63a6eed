"""What K/V, and states, of a model look like: those that are there, and before there are any.

Owns layouts and which tensors pieces are read from. An expectation is read from the config, by which blocks on disk are looked
up before the first forward. It need not be right: what is stored comes from live K/V and is found under their layout only, so
that a wrong expectation finds nothing. Refuses to own which tokens they are (cache).
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tiered_cache.blocks import BlockLayout, SequenceLayout, SnapshotLayout, Strip
from tiered_cache.hf import compat
from tiered_cache.hf.layers import GrowableLayer, StatefulLayer
from tiered_cache.hf.offloaded import device_of
from tiered_cache.hf.windows import CapturingSlidingLayer
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT

Widths = tuple[tuple[int, int], tuple[int, int]]  # (heads, width) of K and of V


def full_layers(layers: Sequence[Any]) -> list[GrowableLayer]:
    """Return those of the layers that attend to everything."""
    return [layer for layer in layers if isinstance(layer, GrowableLayer)]


def side_layers(layers: Sequence[Any]) -> list[CapturingSlidingLayer]:
    """Return those of the layers that attend to a window."""
    return [layer for layer in layers if isinstance(layer, CapturingSlidingLayer)]


def is_stateful(layers: Sequence[Any]) -> bool:
    """Say whether a hit takes a snapshot."""
    return any(isinstance(layer, StatefulLayer) for layer in layers)


def is_hosted(layer: Any) -> bool:
    """Say whether a layer's K/V live in host memory, and not on the device that computes."""
    return isinstance(layer, GrowableLayer) and layer.home is not None


def lengths(layers: Sequence[Any]) -> set[int]:
    """Return how many columns layers hold, of those that count them: recurrent ones only where there are no others."""
    attention = {int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")}
    return attention or {layer.num_tokens for layer in layers if isinstance(layer, StatefulLayer)}


def states(layers: Sequence[Any]) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield what the layers keep in place of tokens: (layer, name, tensor `[B, ...]`)."""
    for place, layer in enumerate(layers):
        if isinstance(layer, StatefulLayer):
            yield from ((place, name, tensor) for name, tensor in layer.state().items())


def put_states(layers: Sequence[Any], names: Sequence[tuple[int, str]], tensors: Sequence[torch.Tensor], columns: int) -> None:
    """Let fresh layers go on from states after `columns` columns: tensors `[B, ...]` of each (layer, name)."""
    by_layer: dict[int, dict[str, torch.Tensor]] = {}
    for (place, name), tensor in zip(names, tensors, strict=True):
        by_layer.setdefault(place, {})[name] = tensor
    for place, state in by_layer.items():
        layers[place].put_state(state, columns)


def strips_of(layers: Sequence[Any]) -> dict[str, Strip]:
    """Return the K/V of all layers as the strips that pieces are read from and written to."""
    full, side = full_layers(layers), side_layers(layers)
    for layer in full:
        layer.settle()
    hosted = frozenset(2 * place + part for place, layer in enumerate(full) for part in (0, 1) if layer.home is not None)
    main = Strip(_tensors(full), hosted=hosted)
    if not side or any(slid.captured is None for slid in side):
        return {MAIN: main, SIDE: Strip((), origin=sys.maxsize)}
    origin = max(slid.captured_from for slid in side)
    captured = tuple(tensor[:, :, origin - slid.captured_from :] for slid in side for tensor in slid.captured or ())
    return {MAIN: main, SIDE: Strip(captured, origin)}


def layout_of(layers: Sequence[Any]) -> SequenceLayout:
    """Return the layout of live layers."""
    main, side = _tensors(full_layers(layers)), _tensors(side_layers(layers))
    kept = list(states(layers))
    # Not that of K/V, which may be in host memory.
    places = [layer.device for layer in (*full_layers(layers), *side_layers(layers))]
    device = [*places, *(tensor.device for _, _, tensor in kept)][0]
    main_layout = BlockLayout.of(main, device)
    if kept:
        pieces = tuple((place, name, tuple(tensor.shape[1:]), tensor.dtype) for place, name, tensor in kept)
        return SequenceLayout(main_layout, SnapshotLayout(pieces, device), SNAPSHOT)
    window = max([slid.window for slid in side_layers(layers)], default=0)
    return SequenceLayout(main_layout, BlockLayout.of(side, device), window)


def allocate(
    layers: Sequence[Any], layout: SequenceLayout, batch: int, columns: int, origin: int, devices: Sequence[torch.device]
) -> tuple[torch.Tensor, ...]:
    """Let fresh layers hold `columns` uninitialised columns, each on its own of `devices`; return zeros for the states.

    Args:
        origin: the first column that layers with a window hold.
    """
    main = iter(layout.main.pieces)
    side = iter(() if isinstance(layout.side, SnapshotLayout) else layout.side.pieces)
    states = layout.side.pieces if isinstance(layout.side, SnapshotLayout) else ()
    for layer, device in zip(layers, devices, strict=True):
        if isinstance(layer, GrowableLayer):
            layer.allocate(batch, columns, next(main), next(main), device)
        elif isinstance(layer, CapturingSlidingLayer):
            layer.allocate(batch, columns, origin, next(side), next(side), device)
    return tuple(torch.zeros((batch, *shape), dtype=dtype, device=devices[place]) for place, _, shape, dtype in states)


def truncate(layers: Sequence[Any], columns: int) -> None:
    """Keep the first columns of all layers that can be cut; the others must end there."""
    for layer in layers:
        if hasattr(layer, "truncate"):
            layer.truncate(columns)


def _tensors(layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


def expected_layouts(model: PreTrainedModel, layers: Sequence[Any]) -> list[SequenceLayout]:
    """Return the layouts that K/V of `model` may have in its cache `layers`, the likeliest first."""
    device = device_of(model)
    dtype = model.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    window = max([layer.window for layer in side_layers(layers)], default=0)
    layouts = []
    for of_layers in zip(*map(_widths, compat.layer_configs(model.config, len(layers))), strict=False):
        pieces: dict[type, list[tuple[int, int, torch.dtype]]] = {GrowableLayer: [], CapturingSlidingLayer: []}
        for layer, both in zip(layers, of_layers, strict=True):
            if type(layer) in pieces:
                pieces[type(layer)] += [(heads, width, dtype) for heads, width in both]
        main, side = (BlockLayout(tuple(each), device) for each in pieces.values())
        layouts.append(SequenceLayout(main, side, window))
    return layouts


def _widths(config: PreTrainedConfig) -> list[Widths]:
    """Return what heads and widths of K and V may be, in all layers."""

    def number(name: str) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else 0

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    if not heads or not hidden:
        return []
    latent, rope = number("kv_lora_rank"), number("qk_rope_head_dim")
    if latent:  # latent attention: kept as it is, or multiplied out
        return [((1, latent), (1, rope)), ((heads, number("qk_nope_head_dim") + rope), (heads, number("v_head_dim")))]
    width = number("head_dim") or hidden // heads
    groups = dict.fromkeys([number("num_key_value_heads") or heads, heads, number("num_kv_heads") or 1, 1])
    return [((group, width), (group, width)) for group in groups]
