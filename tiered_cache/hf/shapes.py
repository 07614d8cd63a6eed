"""What K/V of a model will look like, before it has computed any.

Owns an expectation, read from the config, by which blocks on disk are looked up before the first forward. It need not be
right: what is stored
comes from live K/V and is found under their layout only, so that a wrong expectation finds nothing. Refuses to own
layouts of live K/V (binding).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tiered_cache.blocks import BlockLayout, SequenceLayout
from tiered_cache.hf import compat
from tiered_cache.hf.layers import CapturingSlidingLayer

Widths = tuple[tuple[int, int], tuple[int, int]]  # (heads, width) of K and of V


def expected_layouts(model: PreTrainedModel, layers: Sequence[Any]) -> list[SequenceLayout]:
    """Return the layouts that K/V of `model` may have in its cache `layers`, the likeliest first."""
    device = next(model.parameters()).device
    dtype = model.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    is_side = [isinstance(layer, CapturingSlidingLayer) for layer in layers]
    window = max([layer.window for layer in layers if isinstance(layer, CapturingSlidingLayer)], default=0)
    layouts = []
    for widths in _widths(compat.text_config(model.config)):
        both = tuple((heads, width, dtype) for heads, width in widths)
        main, side = (BlockLayout(both * is_side.count(kind), device) for kind in (False, True))
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
