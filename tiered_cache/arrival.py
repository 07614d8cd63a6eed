"""K/V of a restore that come while the first forward runs: each layer's part ahead of its turn.

Owns the order of layers and their staging. Refuses to own which layers wait for it (hf) and all that does not overlap (port).
"""

from collections.abc import Sequence

import torch

from tiered_cache.blocks import BlockLayout
from tiered_cache.devices.base import Device, Event, Lane
from tiered_cache.devices.ring import Ring, Slot
from tiered_cache.tiers.base import Part, Transfer

# Layer by layer, a restore brings smaller pieces; so only where these are large, and enough of it hides behind a forward.
LAYER_PIECE_NBYTES = 1 << 20
HIDDEN_SHARE = 0.1
FLOPS, LINK_BYTES_PER_S = 400e12, 50e9  # of an accelerator of 2024, about


def hides(layout: BlockLayout, block_tokens: int, num_tokens: int, flops: float) -> bool:
    """Say whether it pays to let `num_tokens` tokens come layer by layer, while a forward of `flops` operations runs."""
    token_nbytes = layout.nbytes(block_tokens) / block_tokens
    is_large = 2 * token_nbytes * block_tokens >= LAYER_PIECE_NBYTES * len(layout.pieces) > 0
    return is_large and flops / FLOPS >= HIDDEN_SHARE * token_nbytes * num_tokens / LINK_BYTES_PER_S


class Arrival:
    """What one restore has to bring, layer by layer.

    All bytes are in host memory, verified and held, and all that is needed of the device's memory is taken, before the forward
    begins. Used on the thread that runs it.

    Args:
        device: moves the bytes.
        rows, first_column: of the batch, as for `SequencePort`.
        tensors: K and V of each layer in turn, as in the strip of "main" pieces.
    """

    def __init__(self, device: Device, rows: slice, first_column: int, tensors: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._rows = rows
        self._first_column = first_column
        self._tensors = tensors
        self._runs: list[tuple[int, list[Part]]] = []
        self._layout = BlockLayout((), torch.device("cpu"))
        self._waiting: list[int] = []  # layers not begun, in order
        self._coming: dict[int, tuple[Slot, Event]] = {}  # in the order in which they were begun
        self._ring = Ring(device)
        self._last: Event | None = None

    def add(self, start: int, parts: Sequence[Part], layout: BlockLayout, resident: Sequence[int]) -> Transfer:
        """Take over a run of pieces, the first one's first token at `start`, for the `resident` tensors."""
        self._layout = layout
        self._waiting = sorted({place // 2 for place in resident})
        before = self._runs[-1][1][-1] if self._runs else None
        if before is not None and before.num_tokens == before.take == parts[0].num_tokens == parts[0].take:
            self._runs[-1][1].extend(parts)
        else:
            self._runs.append((start, list(parts)))
        return self

    def begin(self) -> None:
        """Start with the first layers. Raises MemoryError: the device has no room for their staging."""
        room = max((self._nbytes(layer) for layer in self._waiting), default=0)
        for slot in [self._ring.take(room) for _ in range(min(2, len(self._waiting)))]:
            self._start(slot)

    def cancel(self) -> None:
        """Bring nothing any more."""
        self._waiting.clear()
        self._coming.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def bring(self, layer: int) -> None:
        """Put what `layer` waits for in place, for whatever the current stream does next, and start with a later one."""
        while layer in self._waiting or layer in self._coming:
            self._put_next()

    def wait(self) -> None:
        """Put all that is left in place, and wait until it was read from the host."""
        while self._waiting or self._coming:
            self._put_next()
        if self._last is not None:
            self._last.wait()

    def _start(self, slot: Slot) -> None:
        layer = self._waiting[0]
        pairs, offset = [], 0
        for _, parts in self._runs:
            extents = self._layout.extents(parts[0].num_tokens)
            first, last = extents[2 * layer][0], extents[2 * layer + 1][1]
            for part in parts:
                pairs.append((part.buffer[first:last], slot.buffer[offset : offset + last - first]))
                offset += last - first
        self._last = self._device.copy_all(Lane.UP, pairs, slot.busy)
        self._coming[layer] = slot, self._last
        del self._waiting[0]  # now, and not before: it is begun

    def _put_next(self) -> None:
        if not self._coming:  # a start failed
            self._start(self._ring.take(max(map(self._nbytes, self._waiting))))
        layer = next(iter(self._coming))
        slot, came = self._coming.pop(layer)
        came.order()
        self._device.claim(reads=[slot.buffer[: self._nbytes(layer)]])
        layout, offset = self._of(layer), 0
        for start, parts in self._runs:
            size, first = parts[0].num_tokens, self._first_column + start
            stop = offset + len(parts) * layout.nbytes(size)
            staged, offset = slot.buffer[offset:stop].view(len(parts), -1), stop
            last = first + sum(part.take for part in parts)
            for view, tensor in zip(layout.views(staged, size), self._tensors[2 * layer : 2 * layer + 2], strict=True):
                put(view if len(parts) > 1 else view[0], tensor[self._rows, :, first:last])
        slot.busy = [self._device.mark()]
        if self._waiting:
            self._start(self._ring.take(0))

    def _of(self, layer: int) -> BlockLayout:
        return BlockLayout(self._layout.pieces[2 * layer : 2 * layer + 2], self._layout.device)

    def _nbytes(self, layer: int) -> int:
        return sum(len(parts) * self._of(layer).nbytes(parts[0].num_tokens) for _, parts in self._runs)


def put(view: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy one piece's K or V `[H, T, D]`, or those of N whole ones `[N, H, T, D]`, to rows `[B, H, t, D]` of a layer."""
    if view.ndim == 3:
        rows[:] = view[:, : rows.shape[2]]
    else:
        rows.view(*rows.shape[:2], len(view), view.shape[2], rows.shape[3])[:] = view.movedim(0, 1)
