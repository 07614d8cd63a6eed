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
_SPLITS = (6, 18)  # a few tokens at once, some more, and one
_PADS = 3
# Of logits, as a part of the largest. Right ones were off by up to 1e-4 in fp32 and 0.01 in bf16, wrong ones by 0.005 and more.
_TOLERANCE = {torch.float64: 3e-3, torch.float32: 3e-3}
_TOLERANCE_LOW = 0.03
_MAX_VERDICTS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial showed: why nothing may be reused, or None, and how what the layers hold is laid out."""

    why: str | None
    layout: SequenceLayout | None = None


_verdicts: OrderedDict[tuple[bytes, bool, bool], Verdict] = OrderedDict()
_lock = threading.Lock()


def verdict(model: PreTrainedModel, identity: bytes, *, padded: bool, by_hand: bool) -> Verdict:
    """Return what a trial of `model` showed, now or at an earlier call.

    Args:
        identity: its fingerprint.
        padded: of a row with left pads, which must be what it is without.
        by_hand: it is fed by a loop that may not number positions, as generate() does.
    """
    key = identity, padded, by_hand
    with _lock:
        known = _verdicts.get(key)
    if known is None:
        try:
            known = _try(model, padded, by_hand)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return Verdict(f"there was no memory for a trial of how it goes on from a prefix ({error!r})")
        with _lock:
            _verdicts[key] = known
            while len(_verdicts) > _MAX_VERDICTS:
                _verdicts.popitem(last=False)
    return known


def _try(model: PreTrainedModel, padded: bool, by_hand: bool) -> Verdict:
    who = f"{model.config.model_type} in transformers {compat.VERSION}"
    behind = "a prefix with left pads" if padded else "a prefix"
    try:
        with torch.no_grad():
            ids = torch.randint(_vocabulary(model), (1, _TOKENS), generator=torch.Generator().manual_seed(0))
            ids = ids.to(device_of(model))
            row = torch.nn.functional.pad(ids, (_PADS, 0)) if padded else ids
            mask = torch.nn.functional.pad(torch.ones_like(ids), (_PADS, 0)) if padded else torch.ones_like(ids)
            numbers = padded or not by_hand
            whole, cache = _logits(model, ids, torch.ones_like(ids), [], numbers)
            parts, _ = _logits(model, row, mask, [split + row.shape[1] - _TOKENS for split in _SPLITS], numbers)
            wrong = (whole - parts[:, -_TOKENS:]).abs().max() / whole.abs().max()
            if not float(wrong) <= _TOLERANCE.get(model.dtype, _TOLERANCE_LOW):  # nor NaN
                return Verdict(f"{who} answers differently when it goes on from {behind}")
            return Verdict(None, layout_of(cache.layers))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001  whatever model code does, generate() goes on without reuse
        return Verdict(f"{who} fails when it goes on from {behind} ({error!r})")


def _vocabulary(model: PreTrainedModel) -> int:
    return min(int(compat.text_config(model.config).vocab_size), 1 << 15)


def transplanted(model: PreTrainedModel, layers: Sequence[Any]) -> list[Any]:
    """Return fresh layers of `model` that hold what a store would bring back of `layers`.

    Raises:
        RuntimeError: that is not all they hold.
    """
    fresh, layout = compat.cache_layers(model.config, sys.maxsize), layout_of(layers)
    strips = strips_of(layers)
    (columns,) = lengths(layers)
    batch = next(iter(strips[MAIN].tensors or [tensor for _, _, tensor in states(layers)])).shape[0]
    origin = max([slid.captured_from for slid in side_layers(layers)], default=0)
    devices = layer_devices(model, len(fresh))
    assert devices is not None
    allocate(fresh, layout, batch, columns, origin, devices)
    for kind, strip in strips_of(fresh).items():
        for new, there in zip(strip.tensors, strips[kind].tensors, strict=True):
            new.copy_(there)
    for slid in side_layers(fresh):
        slid.settle()
    put_states(fresh, [(place, name) for place, name, _ in states(layers)], [tensor for *_, tensor in states(layers)], columns)
    for new, old in zip(fresh, layers, strict=True):
        for name in vars(old):
            is_count = name == "num_tokens"  # right where there is no attention
            if not (name.startswith("_") or is_count) and not _is_same(vars(new).get(name), vars(old)[name]):
                raise RuntimeError(f"{type(old).__name__}.{name} is not what was stored of it")
    return fresh


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


class _TrialCache(DynamicCache):
    """A plain cache that counts what recurrent layers are fed, as TieredCache does."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        begin_forward(self.layers[layer_idx], state_idx)
        return super().get_conv_state(layer_idx, state_idx)


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, splits: list[int], numbers: bool
) -> tuple[torch.Tensor, DynamicCache]:
    """Return the logits `[B, T, V]` of `ids` `[B, T]` fed in parts, as if stored in between, and the cache after that.

    `numbers`: as generate() does it, with a mask and positions.
    """
    cache = _TrialCache()
    cache.layers = compat.cache_layers(model.config, sys.maxsize)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters and numbers
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = []
    for start, stop in zip([0, *splits], [*splits, ids.shape[1]], strict=True):
        if start:
            cache.layers = transplanted(model, cache.layers)
        options: dict[str, Any] = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
        if numbers:
            options["attention_mask"] = mask[:, :stop]
        if takes_positions:
            options["position_ids"] = positions[:, start:stop]
        logits.append(model(ids[:, start:stop], **options).logits.float())
    return torch.cat(logits, dim=1), cache
