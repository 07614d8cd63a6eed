"""K/V of all layers of one sequence <-> flat buffers, as the stack's `BlockPort`.

Owns what is gathered from and scattered to the layers, and through which lane of the device. Refuses to own the layout
(blocks), streams (devices) and which blocks exist (stack).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tiered_cache.arrival import Arrival, put
from tiered_cache.blocks import FlatLayout, SequenceLayout, Strip
from tiered_cache.devices import device_for
from tiered_cache.devices.base import Device, Event, Lane
from tiered_cache.devices.ring import Ring, Slot
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT
from tiered_cache.tiers.base import Part, Transfer


class SequencePort:
    """One sequence's columns in the layers' K/V.

    On a device with memory of its own, pieces from the host are copied one behind the other into a staging buffer there, and
    put into the layers from that, a whole run at once; the way back gathers on the lane that brings it down. Layers whose K/V
    are in host memory are written and read there, by the calling thread.

    Args:
        layout: of the layers.
        strips: their K/V by kind of piece, read by `save` and written by `load`. What was computed of them, the current stream
            of the thread that makes the port was given before.
        rows: the batch rows that hold the sequence. `save` reads the first, `load` writes all (beams start as copies).
        first_column: the column of the sequence's token 0 (its number of left pads).
        device: of the first layer: moves blocks, and the K/V of layers there. Others have lanes of their own.
        side_from: the first column whose "side" K/V are there.
        snapshots: tensors `[B, ...]` of each snapshot, by the tokens it stands for: read by `save`, written by `load`.
        restored_end: the tokens of the snapshot that the sequence went on from; 0 if none.
        late: takes over the "main" pieces that come from the host, to bring them when a layer needs them.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        strips: dict[str, Strip],
        rows: slice,
        first_column: int,
        device: Device,
        side_from: int = 0,
        snapshots: Mapping[int, Sequence[torch.Tensor]] = {},
        restored_end: int = 0,
        late: Arrival | None = None,
    ) -> None:
        self.layout = layout
        # The one that was restored is there already; it stays as long as what is stored behind it.
        self.ends = tuple(dict.fromkeys([*snapshots, *([restored_end] if restored_end > 0 else [])]))
        self._snapshots = snapshots
        self._layouts: dict[str, FlatLayout] = {MAIN: layout.main, SIDE: layout.side}
        self._strips = strips
        self._rows = rows
        self._first_column = first_column
        self._device = device
        self._side_from = side_from
        self._on_devices = {kind: self._link_up(strip) for kind, strip in strips.items()}
        self._made = device.mark()
        self._ring = Ring(device)
        self._late = late

    def _link_up(self, strip: Strip) -> "list[_Link]":
        """Return the devices of the tensors that are in no host memory, this port's own first."""
        found: dict[Device, list[int]] = {self._device: []}
        for place, tensor in enumerate(strip.tensors):
            if place not in strip.hosted:
                found.setdefault(self._device_of(place, tensor), []).append(place)
        for device, places in found.items():
            device.claim(writes=[strip.tensors[place] for place in places])
        return [_Link(device, Ring(device), device.mark(), places) for device, places in found.items() if places]

    @property
    def window(self) -> int:
        return self.layout.window

    @property
    def staging(self) -> str:
        return type(self._device).__name__

    def has_side(self, start: int, stop: int) -> bool:
        if self.window == SNAPSHOT:
            return stop in self._snapshots
        return self._first_column + start >= self._side_from

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return self._device.footprint(self._layouts[kind].nbytes(num_tokens))

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        return self._device.allocate(memory, nbytes)

    def view(self, buffer: torch.Tensor) -> memoryview:
        return buffer.numpy().data

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        lane = Lane.UP if self._device.is_local(target) else Lane.DOWN
        return self._device.copy(lane, source, target, [self._device.mark()])

    # --- from the layers --------------------------------------------------------------------------------------------

    def save(self, kind: str, start: int, num_tokens: int, buffers: Sequence[torch.Tensor]) -> Event:
        layout = self._layouts[kind]
        rows = [rows[0] for rows in self._targets(kind, start, num_tokens)]
        links, hosted = self._links(kind, len(rows))
        local = [buffer for buffer in buffers if self._device.is_local(buffer)]
        on_host = [buffer for buffer in buffers if not self._device.is_local(buffer)]
        own = links[0].places if links and links[0].device is self._device else ()
        elsewhere = [place for place in range(len(rows)) if place not in own]
        if elsewhere and not on_host:  # the host tier has no room for it
            on_host = [self._device.allocate("host", layout.nbytes(num_tokens))]
        done: list[Event] = []
        for link in links:
            is_here = link.device is self._device and bool(local)
            slot = Slot(local[0], [self._device.mark()]) if is_here else link.ring.take(layout.nbytes(num_tokens))
            gathered = link.gather(layout, num_tokens, rows, slot)
            ranges = layout.ranges(num_tokens, link.places)
            pairs = [(slot.buffer[first:last], buffer[first:last]) for buffer in on_host for first, last in ranges]
            slot.busy = [link.device.copy_all(Lane.DOWN, pairs, [gathered]) if pairs else gathered]
            done += slot.busy
        for buffer in on_host if hosted else ():
            self._gather_hosted(layout, num_tokens, buffer, rows, hosted)
        if elsewhere and local:
            ranges = layout.ranges(num_tokens, elsewhere)
            pairs = [(on_host[0][first:last], local[0][first:last]) for first, last in ranges]
            done.append(self._device.copy_all(Lane.UP, pairs, done))
        return _All(done)

    def _gather_hosted(
        self, layout: FlatLayout, num_tokens: int, buffer: torch.Tensor, rows: Sequence[torch.Tensor], hosted: Sequence[int]
    ) -> None:
        self._device.claim(reads=[rows[place] for place in hosted], by_thread=True)
        for first, last in layout.ranges(num_tokens, hosted):
            buffer[first:last].zero_()
        views = layout.views(buffer, num_tokens)
        for place in hosted:
            views[place].copy_(rows[place])

    # --- to the layers ----------------------------------------------------------------------------------------------

    def load(self, kind: str, start: int, parts: Sequence[Part]) -> Transfer:
        layout, size = self._layouts[kind], parts[0].num_tokens
        links, hosted = self._links(kind, len(layout.shapes(size)))
        done: list[Event] = []
        if self._device.is_local(parts[0].buffer):
            own = [link for link in links if link.device is self._device]
            for place, part in enumerate(parts if own else ()):
                self._device.claim(reads=[part.buffer])
                views = layout.views(part.buffer, size)
                self._scatter(kind, start + place * size, part.take, views, own[0].places)
            done.append(self._device.mark())
            links = [link for link in links if link.device is not self._device]
            parts = [self._brought_down(part) for part in parts] if links or hosted else parts
        self._scatter_hosted(kind, start, parts, hosted)
        if self._late is not None and kind == MAIN and not done:
            return self._late.add(start, parts, self.layout.main, [place for link in links for place in link.places])
        nbytes = layout.nbytes(size)
        for link in links:
            slot = link.ring.take(len(parts) * nbytes)
            staged = slot.buffer[: len(parts) * nbytes].view(len(parts), nbytes)
            ranges = layout.ranges(size, link.places)
            rows = zip(staged, parts, strict=True)
            pairs = [(part.buffer[first:last], row[first:last]) for row, part in rows for first, last in ranges]
            came = link.device.copy_all(Lane.UP, pairs, slot.busy)
            came.order()
            link.device.claim(reads=[staged])
            views = layout.views(staged if len(parts) > 1 else staged[0], size)
            self._scatter(kind, start, sum(part.take for part in parts), views, link.places)
            slot.busy = [link.device.mark()]
            done.append(came)
        return _All(done)

    def _scatter(self, kind: str, start: int, take: int, views: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        """Put a piece's tensors, or those of a run of whole ones (`[N, H, T, D]` each), into the layers."""
        targets = list(self._targets(kind, start, take))
        for place in places:
            if kind == SIDE and self.window == SNAPSHOT:
                targets[place][:] = views[place]
            else:
                put(views[place], targets[place])

    def _scatter_hosted(self, kind: str, start: int, parts: Sequence[Part], places: Sequence[int]) -> None:
        targets = list(self._targets(kind, start, sum(part.take for part in parts))) if places else []
        self._device.claim(writes=[targets[place] for place in places], by_thread=True)
        for part in parts if places else ():
            self._scatter(kind, start, part.take, self._layouts[kind].views(part.buffer, part.num_tokens), places)
            start += part.take

    def _brought_down(self, part: Part) -> Part:
        buffer = self._device.allocate("host", part.buffer.nbytes)
        self._device.copy(Lane.DOWN, part.buffer, buffer, [self._device.mark()]).wait()
        return Part(buffer, part.num_tokens, part.take)

    def _links(self, kind: str, number: int) -> "tuple[list[_Link], list[int]]":
        """Return where the tensors of a piece are: on which devices, and which of them in host memory."""
        if kind == SIDE and self.window == SNAPSHOT:
            return [_Link(self._device, self._ring, self._made, range(number))], []
        return self._on_devices[kind], sorted(self._strips[kind].hosted)

    def _device_of(self, place: int, tensor: torch.Tensor) -> Device:
        here = tensor.device == self.layout.main.device
        return self._device if here else device_for(tensor.device)

    def _targets(self, kind: str, start: int, num_tokens: int) -> Iterator[torch.Tensor]:
        """Yield the rows of the layers' tensors that a piece belongs to, tensor by tensor."""
        if kind == SIDE and self.window == SNAPSHOT:
            for tensor in self._snapshots[start + num_tokens]:
                yield tensor[self._rows]
            return
        first = self._first_column + start - self._strips[kind].origin
        assert first >= 0
        for tensor in self._strips[kind].tensors:
            yield tensor[self._rows, :, first : first + num_tokens]


@dataclass(frozen=True, slots=True)
class _Link:
    """A device, its staging, the point up to which its stream computed K/V, and the places of the tensors there."""

    device: Device
    ring: Ring
    made: Event
    places: Sequence[int]

    def gather(self, layout: FlatLayout, num_tokens: int, rows: Sequence[torch.Tensor], slot: Slot) -> Event:
        """Let the lane down bring those of `rows` that are here into a slot."""
        views = layout.views(slot.buffer, num_tokens)

        def work() -> None:
            if layout.has_gaps(num_tokens):
                slot.buffer.zero_()  # what was in memory before must not get into a file
            for place in self.places:
                views[place].copy_(rows[place])

        reads = [rows[place] for place in self.places]
        return self.device.run(Lane.DOWN, work, reads=reads, writes=[slot.buffer], after=[self.made, *slot.busy])


class _All(Event):
    """Several points, on one or several devices."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def order(self) -> None:
        for event in self._events:
            event.order()
