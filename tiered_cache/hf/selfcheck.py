"""Whether a model gives the same answer when it goes on from a prefix: some model code in transformers does not.

Owns the trial on a few tokens, once for each identity. Refuses to own what is done about its outcome (binding). Models that
keep nothing but K/V of tokens need none: their continuation is what generate() itself does at every step.
"""

import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tiered_cache.blocks import SequenceLayout
from tiered_cache.hf import compat
from tiered_cache.hf.layers import begin_forward
from tiered_cache.hf.offloaded import device_of, layer_devices
from tiered_cache.hf.shapes import allocate, layout_of, lengths, put_states, side_layers, states, strips_of
from tiered_cache.keys import MAIN

_TOKENS = 19
_SPLITS = (6, 18)  # a few tokens at once, and one
_PADS = 3  # of the second row
_TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-2,
}  # of logits, as a part of the largest; wrong ones are off by 0.1 and more
_TOLERANCE_LOW = 0.15  # half precision rounds differently when a prefill is split
_MAX_VERDICTS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial showed.

    Attributes:
        why: why nothing may be reused, or None.
        serves_pads: whether that also holds of left-padded rows.
        layout: how its K/V and states are laid out.
    """

    why: str | None
    serves_pads: bool = False
    layout: SequenceLayout | None = None


_verdicts: OrderedDict[tuple[bytes, bool], Verdict] = OrderedDict()
_lock = threading.Lock()


def verdict(model: PreTrainedModel, identity: bytes, by_hand: bool) -> Verdict:
    """Return what a trial of `model` showed, now or at an earlier call.

    Args:
        identity: its fingerprint.
        by_hand: it is fed by a loop that may not number positions, as generate() does.
    """
    key = identity, by_hand
    with _lock:
        known = _verdicts.get(key)
    if known is None:
        known = _try(model, by_hand)
        with _lock:
            _verdicts[key] = known
            while len(_verdicts) > _MAX_VERDICTS:
                _verdicts.popitem(last=False)
    return known


def _try(model: PreTrainedModel, by_hand: bool) -> Verdict:
    kind = model.config.model_type
    try:
        with torch.no_grad():
            plain, layout = _error(model, 0, by_hand)
            tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_LOW)
            if not plain <= tolerance:  # nor NaN
                return Verdict(f"{kind} in transformers {compat.VERSION} answers differently when it goes on from a prefix")
            padded = 0.0 if by_hand else _error(model, _PADS, by_hand)[0]
    except Exception as error:  # noqa: BLE001  whatever model code does, generate() goes on without reuse
        return Verdict(f"{kind} in transformers {compat.VERSION} fails when it goes on from a prefix ({error!r})")
    return Verdict(None, padded <= tolerance, layout)


def transplanted(model: PreTrainedModel, layers: Sequence[Any]) -> list[Any]:
    """Return fresh layers of `model` that hold what a store would bring back of `layers`, and nothing else."""
    fresh, layout = compat.cache_layers(model.config, sys.maxsize), layout_of(layers)
    strips = strips_of(layers)
    (columns,) = lengths(layers)
    batch = next(iter(strips[MAIN].tensors or [tensor for _, _, tensor in states(layers)])).shape[0]
    origin = max([slid.captured_from for slid in side_layers(layers)], default=0)
    allocate(fresh, layout, batch, columns, origin, layer_devices(model, len(fresh)))
    for kind, strip in strips_of(fresh).items():
        for new, there in zip(strip.tensors, strips[kind].tensors, strict=True):
            new.copy_(there)
    for slid in side_layers(fresh):
        slid.settle()
    put_states(fresh, [(place, name) for place, name, _ in states(layers)], [tensor for *_, tensor in states(layers)], columns)
    return fresh


def _error(model: PreTrainedModel, pads: int, by_hand: bool) -> tuple[float, SequenceLayout]:
    """Return how far logits are off that come of a split prompt, as a part of the largest, and the layout of what it left."""
    high = min(compat.text_config(model.config).vocab_size, 1 << 15)
    ids = torch.randint(high, (2, _TOKENS), generator=torch.Generator().manual_seed(0)).to(device_of(model))
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    whole, cache = _logits(model, ids, mask, [], by_hand)
    worst = 0.0
    for split in _SPLITS:
        parts, _ = _logits(model, ids, mask, [split], by_hand)
        wrong = (whole - parts)[:, split:].abs().amax(dim=(1, 2))
        worst = max(worst, float(wrong.max() / whole.abs().max()))
    return worst, layout_of(cache.layers)


class _TrialCache(DynamicCache):
    """A plain cache that counts what recurrent layers are fed, as TieredCache does."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        begin_forward(self.layers[layer_idx], state_idx)
        return super().get_conv_state(layer_idx, state_idx)


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, splits: list[int], by_hand: bool
) -> tuple[torch.Tensor, DynamicCache]:
    """Return the logits `[B, T, V]` of `ids` `[B, T]` fed in parts, as if stored in between, and the cache after that."""
    cache = _TrialCache()
    cache.layers = compat.cache_layers(model.config, sys.maxsize)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters and not by_hand
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = []
    for start, stop in zip([0, *splits], [*splits, ids.shape[1]], strict=True):
        if start:
            cache.layers = transplanted(model, cache.layers)
        options: dict[str, Any] = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
        if not by_hand:
            options["attention_mask"] = mask[:, :stop]
        if takes_positions:
            options["position_ids"] = positions[:, start:stop]
        logits.append(model(ids[:, start:stop], **options).logits.float())
    return torch.cat(logits, dim=1), cache
