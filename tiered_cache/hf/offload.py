"""Which layers of a running sequence live in host memory: as few as needed, spread between the resident ones.

So fetches hide behind the computation of the layers in between. Sliding and recurrent layers stay resident: they are small.
Refuses to own when a layer is fetched (homes).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tiered_cache.blocks import SequenceLayout
from tiered_cache.devices import accelerator_present, device_for
from tiered_cache.errors import ConfigError
from tiered_cache.hf import compat
from tiered_cache.hf.homes import SLOTS, HostHome, LayerRing
from tiered_cache.hf.layers import GrowableLayer
from tiered_cache.hf.offloaded import execution_devices, layer_devices
from tiered_cache.hf.shapes import expected_layouts, full_layers, is_hosted
from tiered_cache.tiers.base import parse_capacity

RESERVE_NBYTES = 1 << 30  # of a device that K/V leave to whatever else is needed


def spread(number: int, count: int) -> frozenset[int]:
    """Return `count` of `number` places, evenly spread, neither end first."""
    return frozenset((2 * each + 1) * number // (2 * count) for each in range(count))


def hosted_by_share(number: int, share: float) -> frozenset[int]:
    """Return which of `number` layers live on the host, where `share` of them is to be resident."""
    return spread(number, number - round(share * number))


def hosted_by_budget(nbytes: Sequence[int], budget: int) -> frozenset[int]:
    """Return which layers live on the host so that the others and the ring's slots take no more than `budget` bytes.

    Args:
        nbytes: K/V of each layer, when the sequence is as long as it will be.
    """
    for count in range(len(nbytes) + 1):
        hosted = spread(len(nbytes), count)
        resident = sum(size for place, size in enumerate(nbytes) if place not in hosted)
        if resident + (SLOTS * max(nbytes) if hosted else 0) <= budget:
            return hosted
    return frozenset(range(len(nbytes)))


Setting = str | float | int  # "auto", a resident share, or a budget in bytes


def check_offload(offload: object) -> Setting:
    """Return what `TieredCache(offload=...)` says. Raises ConfigError."""
    if offload == "auto":
        return "auto"
    way_out = (
        'Pass "auto", the share of layers whose K/V stay on the accelerator (0.0 to 1.0), or how many bytes of K/V may be '
        'there (such as "2GiB").'
    )
    if isinstance(offload, bool) or not isinstance(offload, str | int | float):
        raise ConfigError(
            f"TieredCache(offload={offload!r}) must be a str, float or int, not {type(offload).__name__}. {way_out}"
        )
    if isinstance(offload, str) or (isinstance(offload, int) and offload > 1):
        setting: Setting = parse_capacity(offload, "TieredCache(offload=...)")
    elif 0 <= offload <= 1:
        setting = float(offload)
    else:
        raise ConfigError(f"TieredCache(offload={offload!r}) is no share. {way_out}")
    if not accelerator_present():
        raise ConfigError(
            f"TieredCache(offload={offload!r}) needs an accelerator, and this machine has none: K/V are in host memory anyway. "
            'Leave it out (it is "auto").'
        )
    return setting


class Offload:
    """Where the layers of one cache live.

    Args:
        setting: see `check_offload`.
        relieve: asked to free that many bytes of a device's memory, before giving up.
    """

    def __init__(self, setting: Setting, relieve: Callable[[int], None]) -> None:
        self.hosted: frozenset[int] = frozenset()  # places among the layers with full attention
        self._setting = setting
        self._relieve = relieve
        self._rings: dict[torch.device, LayerRing] = {}
        self._num_tokens = 0

    def plan(
        self, model: PreTrainedModel, rows: int, columns: int, computed: int, held: int, known: SequenceLayout | None
    ) -> None:
        """Decide which layers live in host memory: as few as needed.

        Args:
            rows, columns: of the batch, when the call is over.
            computed: columns that one forward may have to compute.
            held: bytes of the device that are this sequence's already, or will be freed for it.
            known: how its K/V are laid out, if that is known.
        """
        self.hosted, self._num_tokens = frozenset(), columns
        if not any(device_for(device).is_apart for device in layer_devices(model, 1) or execution_devices(model)):
            return
        layers = compat.cache_layers(model.config, 1)
        devices = _devices_of(model, layers)
        nbytes = [rows * columns * each for each in _token_nbytes(model, layers, known)]
        reserve = compat.activation_nbytes(model.config, model.dtype) * rows * computed + RESERVE_NBYTES
        for device in dict.fromkeys(devices):
            places = [place for place, each in enumerate(devices) if each == device]
            mover = device_for(device)
            sizes = [nbytes[place] for place in places] if len(nbytes) == len(devices) else []
            if isinstance(self._setting, float):
                chosen = hosted_by_share(len(places), self._setting)
            elif not sizes or not mover.is_apart:
                continue
            elif isinstance(self._setting, int):
                chosen = hosted_by_budget(sizes, self._setting * len(places) // len(devices))
            else:
                chosen = hosted_by_budget(sizes, mover.free_bytes() + held - reserve)
                if chosen:  # copies of blocks give way first
                    self._relieve(sum(sizes) + reserve - held - mover.free_bytes())
                    chosen = hosted_by_budget(sizes, mover.free_bytes() + held - reserve)
            self.hosted |= {places[each] for each in chosen if mover.is_apart}
        if any(isinstance(layer, compat.EMPTY_LAYERS) for layer in layers):
            self.hosted -= {len(devices) - 1}  # layers that keep nothing use what the last one returned

    def place(self, model: PreTrainedModel, layers: Sequence[Any]) -> None:
        """Let layers live where the plan says, and be the ones whose turns count from now on."""
        if not self.hosted and not any(map(is_hosted, layers)):
            return
        turns: dict[torch.device, list[HostHome]] = {device: [] for device in self._rings}
        for place, (layer, device) in enumerate(zip(full_layers(layers), _devices_of(model, layers), strict=True)):
            if place not in self.hosted:
                if layer.home is not None:
                    layer.move(None)
                continue
            ring = self._rings.setdefault(device, LayerRing(device_for(device), self._relieve))
            home = layer.home if layer.home is not None else HostHome(ring)
            assert isinstance(home, HostHome)
            turns.setdefault(device, []).append(home)
            if layer.home is None:
                layer.move(home)
        for device, homes in turns.items():
            self._rings[device].take_turns(homes, self._num_tokens)


def _devices_of(model: PreTrainedModel, layers: Sequence[Any]) -> list[torch.device]:
    """Return the device of each layer with full attention; none where that is not clear."""
    devices = layer_devices(model, len(layers))
    if devices is None:
        return []
    return [device for layer, device in zip(layers, devices, strict=True) if isinstance(layer, GrowableLayer)]


def _token_nbytes(model: PreTrainedModel, layers: Sequence[Any], known: SequenceLayout | None) -> list[int]:
    """Return the bytes of one token's K/V in each layer with full attention, as `known` or expected of the config."""
    layouts = [known] if known is not None else expected_layouts(model, layers)
    if not layouts or not layouts[0].main.pieces:
        return []
    # The likeliest comes first; of latent K/V it is not known whether they are kept multiplied out.
    is_latent = layouts[0].main.pieces[0][0] == 1
    layout = max(layouts, key=lambda each: each.main.nbytes(1)) if is_latent else layouts[0]
    pieces = [heads * width * dtype.itemsize for heads, width, dtype in layout.main.pieces]
    return [keys + values for keys, values in zip(pieces[::2], pieces[1::2], strict=True)]
