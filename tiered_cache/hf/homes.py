"""K/V of one layer in host memory, and the slots on the device that such layers take turns in.

The host copy is the authority: each step sends down the new tokens' K/V, and brings up one layer after the other ahead of its
use, over the end of a step to the first layers of the next. Refuses to own which layers these are (offload) and
streams (devices).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered_cache.devices.base import Device, Event, Lane
from tiered_cache.errors import CapacityError
from tiered_cache.hf.layers import Home, capacity_for
from tiered_cache.usage import format_bytes

SLOTS = 2  # one layer computes while the next one arrives


@dataclass(slots=True, eq=False)
class _Slot:
    """Room for one layer on the device.

    Attributes:
        buffer: flat, uint8.
        home: whose first `filled` tokens are in it.
        came: the point at which they are.
        busy: points after which it may be written, besides all that the current stream was given.
    """

    buffer: torch.Tensor
    home: "HostHome | None" = None
    filled: int = 0
    came: Event | None = None
    busy: Event | None = None


class LayerRing:
    """The slots that the hosted layers of one device take turns in.

    Args:
        device: whose memory and lanes.
        relieve: asked to free that many bytes of the device's memory, before giving up.
    """

    def __init__(self, device: Device, relieve: Callable[[int], None]) -> None:
        self.device = device
        self.num_tokens = 0
        self.homes: list[HostHome] = []
        self._relieve = relieve
        self._slots: list[_Slot] = []

    def slot_of(self, home: "HostHome", nbytes: int) -> _Slot:
        """Return a slot of `nbytes` that holds all tokens of `home`, for the current stream to use next."""
        slot = next((slot for slot in self._slots if slot.home is home and slot.filled == home.length), None)
        if slot is None:
            slot = self._fetch(home, self._free_slot([]), nbytes)
        if slot.came is not None:
            slot.came.order()
            slot.came = None
        elif not home.length and slot.busy is not None:
            slot.busy.order()  # what was sent down from it
        if slot.buffer.nbytes < nbytes:
            buffer = self._allocate(nbytes)
            used = home.length * home.row_nbytes
            self.device.claim(reads=[slot.buffer[:used]], writes=[buffer])
            buffer[:used] = slot.buffer[:used]
            slot.buffer = buffer
        return slot

    def fetch_ahead(self, home: "HostHome") -> None:
        """Start to fetch what is needed next; the slot of `home` is in use until the next layer's turn."""
        if home not in self.homes:  # it moves out
            return
        place = self.homes.index(home)
        following = [*self.homes[place + 1 :], *self.homes[:place]][: SLOTS - 1]
        for wanted in following:
            if wanted.length and not any(each.home is wanted and each.filled == wanted.length for each in self._slots):
                self._fetch(wanted, self._free_slot([home, *following]), wanted.row_nbytes * (wanted.length + 1))

    def take_turns(self, homes: "list[HostHome]", num_tokens: int) -> None:
        """Let `homes` be those that take turns from now on, in their order, up to `num_tokens` tokens."""
        self.homes, self.num_tokens = homes, num_tokens
        for slot in self._slots:
            if slot.home not in homes:
                slot.home = None

    def forget(self, home: "HostHome") -> None:
        """Note that what slots hold of `home` is not what it holds any more."""
        for slot in self._slots:
            if slot.home is home:
                slot.home = None

    def _free_slot(self, needed: "Sequence[HostHome]") -> _Slot:
        if len(self._slots) < SLOTS:
            self._slots.append(_Slot(torch.empty(0, dtype=torch.uint8)))
            return self._slots[-1]
        slot = next((slot for slot in self._slots if slot.home not in needed), self._slots[0])
        self._slots.remove(slot)
        self._slots.append(slot)  # the first one is the one used longest ago
        return slot

    def _fetch(self, home: "HostHome", slot: _Slot, nbytes: int) -> _Slot:
        slot.home, slot.filled = None, 0  # should this raise
        if slot.buffer.nbytes < nbytes:
            slot.buffer = torch.empty(0, dtype=torch.uint8)  # freed first
            slot.buffer = self._allocate(nbytes)
        slot.came = None
        if home.length:
            after = [self.device.mark(), *([slot.busy] if slot.busy else []), *home.coming_down]
            used = home.length * home.row_nbytes
            slot.came = slot.busy = self.device.copy(Lane.UP, home.flat[:used], slot.buffer[:used], after)
            home.going_up = [slot.came]
        slot.home, slot.filled = home, home.length
        return slot

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return a slot's buffer, as large as it will have to be if there is room for that."""
        expected = max((home.row_nbytes for home in self.homes), default=0) * self.num_tokens
        for size in dict.fromkeys((min(max(nbytes, expected), 2 * nbytes), nbytes)):
            for is_last in (False, True):
                try:
                    return self.device.allocate("device", size)
                except MemoryError:
                    if not is_last:
                        self._relieve(size)
        raise CapacityError(
            f"The device has no {format_bytes(nbytes)} left for one layer's K/V, of which {SLOTS} must be there at once, "
            "whatever else is in host memory. Shorten the prompt or the batch, or free memory on the device."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerRing":
        twin = LayerRing(self.device, self._relieve)
        memo[id(self)] = twin
        twin.take_turns([copy.deepcopy(home, memo) for home in self.homes], self.num_tokens)
        return twin


class HostHome(Home):
    """K/V of one layer in host memory, token after token: K `[B, H_k, D_k]` of one token, then its V; so new ones are one copy.

    Where beams change places the tokens stay: which row of a token is whose is kept, and applied on the device.

    Attributes:
        length: tokens.
        coming_down: points after which all of them are in host memory.
        going_up: points after which what is fetched of them was read.
    """

    def __init__(self, ring: LayerRing) -> None:
        self.ring = ring
        self.length = 0
        self.coming_down: list[Event] = []
        self.going_up: list[Event] = []
        self.flat = torch.empty(0, dtype=torch.uint8)
        self._rows: torch.Tensor | None = None  # [T, B], on the device: the row of a token's K/V that is row b's
        self._batch, self._keys, self._values = 0, (0, 0), (0, 0)
        self._dtype = torch.uint8

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token's K and V, in all rows of the batch."""
        return self._batch * (math.prod(self._keys) + math.prod(self._values)) * self._dtype.itemsize

    def allocate(
        self, batch: int, num_tokens: int, keys: tuple[int, int], values: tuple[int, int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.clear()
        self._batch, self._keys, self._values, self._dtype = batch, keys, values, dtype
        self.flat = self.ring.device.allocate("host", self._room(num_tokens) * self.row_nbytes)
        self.length = num_tokens
        return self.show(num_tokens)

    def append(self, length: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.ring.device
        if length < self.length:
            self._cut(length)
        if not self._batch:
            shapes = [(tensor.shape[1], tensor.shape[3]) for tensor in (keys, values)]
            self.allocate(keys.shape[0], 0, shapes[0], shapes[1], keys.dtype)
        for tensor, shape in ((keys, self._keys), (values, self._values)):
            if (tensor.shape[0], tensor.shape[1], tensor.shape[3], tensor.dtype) != (self._batch, *shape, self._dtype):
                held = f"{self._batch} rows of {shape[0]} heads of {shape[1]} {self._dtype}"
                raise RuntimeError(f"K or V of shape {tuple(tensor.shape)} and {tensor.dtype} cannot follow {held}.")
        start, stop = self.length, self.length + keys.shape[2]
        self._grow(stop)
        slot = self.ring.slot_of(self, stop * self.row_nbytes)
        new = slot.buffer[start * self.row_nbytes : stop * self.row_nbytes]
        device.claim(writes=[new])
        for target, source in zip(self._views(new), (keys, values), strict=True):
            target.copy_(source)
        if new.nbytes:
            target = self.flat[start * self.row_nbytes : stop * self.row_nbytes]
            slot.busy = device.copy(Lane.DOWN, new, target, [device.mark(), *self.going_up])
            self.coming_down = [slot.busy]
        self.length = slot.filled = stop
        device.claim(reads=[slot.buffer[: stop * self.row_nbytes]])
        whole = self._views(slot.buffer[: stop * self.row_nbytes])
        if self._rows is not None:
            own = torch.arange(self._batch, device=keys.device).expand(stop - start, -1)
            rows = self._rows = torch.cat([self._rows, own])
            tokens = torch.arange(stop, device=rows.device)[:, None]
            whole = [view.permute(2, 0, 1, 3)[tokens, rows].permute(1, 2, 0, 3) for view in whole]
        self.ring.fetch_ahead(self)
        return whole[0], whole[1]

    def show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length < self.length:
            self._cut(length)
        keys, values = self._views(self.flat[: length * self.row_nbytes])
        return keys, values

    def reorder(self, rows: torch.Tensor) -> None:
        if self._rows is None:
            self._rows = torch.arange(self._batch, device=rows.device).expand(self.length, -1)
        self._rows = self._rows.to(rows.device)[:, rows]

    def settle(self) -> None:
        self._wait()
        if self._rows is not None:
            self.ring.device.claim(writes=[self.flat], by_thread=True)
            rows, self._rows = self._rows.cpu(), None
            tokens = torch.arange(self.length)[:, None]
            for view in self._views(self.flat[: self.length * self.row_nbytes]):
                by_token = view.permute(2, 0, 1, 3)
                by_token.copy_(by_token[tokens, rows])
            self.ring.forget(self)

    def clear(self) -> None:
        self._wait()
        self.ring.forget(self)
        self._batch = self.length = 0
        self._rows = None

    def _cut(self, length: int) -> None:
        self.length = length
        self.ring.forget(self)
        self._rows = None if self._rows is None else self._rows[:length]

    def _wait(self) -> None:
        """Let this thread touch the host's memory."""
        for event in (*self.coming_down, *self.going_up):
            event.wait()
        self.coming_down, self.going_up = [], []

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return K and V `[B, H, T, D]` of the tokens in `flat`."""
        tokens = flat.view(self._dtype).view(-1, self.row_nbytes // self._dtype.itemsize)
        width = self._batch * math.prod(self._keys)
        parts = zip((tokens[:, :width], tokens[:, width:]), (self._keys, self._values), strict=True)
        return [part.view(len(part), self._batch, *shape).permute(1, 2, 0, 3) for part, shape in parts]

    def _grow(self, length: int) -> None:
        nbytes = length * self.row_nbytes
        if self.flat.nbytes >= nbytes:
            return
        self._wait()
        before = self.flat
        self.flat = self.ring.device.allocate("host", self._room(length) * self.row_nbytes)
        used = self.length * self.row_nbytes
        self.ring.device.claim(reads=[before], writes=[self.flat], by_thread=True)
        self.flat[:used] = before[:used]

    def _room(self, length: int) -> int:
        return min(max(self.ring.num_tokens, length), 2 * capacity_for(length))  # what is expected may be far off

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostHome":
        self.settle()
        twin = HostHome.__new__(HostHome)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin
