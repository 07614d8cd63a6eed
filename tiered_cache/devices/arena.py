"""Host memory that is pinned once and handed out in spans, since pinning takes longer than copying.

Owns slabs and which of their bytes are free. Refuses to own how a slab is pinned (accelerator) and who may have what
(tiers).
"""

import bisect
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

ALIGNMENT = 4096  # of spans: a page
STEP = 128 << 20  # by which the arena grows; a power of two, as torch rounds pinned memory up to one
LOOSE = 3 / 4  # of the arena must be in use for it to grow: what does not fit into what is free is not worth more pinned memory


class Arena:
    """Slabs of host memory, growing in steps, that give out aligned spans and take them back when nobody sees them any more.

    Never larger than its largest use / LOOSE, and a step: where free spans are too short for what is asked, it does not grow.

    Args:
        allocate: returns a slab, a flat uint8 tensor `[nbytes]`. May raise RuntimeError or MemoryError.
        step: smallest slab, bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], step: int = STEP) -> None:
        self.reserved_bytes = 0
        self.used_bytes = 0
        self._allocate = allocate
        self._step = step
        self._slabs: list[np.ndarray] = []
        self._free: list[tuple[int, int, int]] = []  # (slab, start, stop), sorted
        self._lock = threading.RLock()  # the garbage collector may give a span back anywhere

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a flat uint8 tensor `[nbytes]`, or None where there is no room and the arena should not grow.

        Raises:
            RuntimeError, MemoryError: as `allocate` does.
        """
        size = aligned(nbytes)
        with self._lock:
            place = self._find(size)
            if place is None:
                if self.used_bytes < LOOSE * self.reserved_bytes:
                    return None
                self._grow(size)
                place = self._find(size)
                assert place is not None
            slab, start, stop = self._free.pop(place)
            if start + size < stop:
                bisect.insort(self._free, (slab, start + size, stop))
            self.used_bytes += size
            span = self._slabs[slab][start : start + nbytes]
        # The tensor's storage keeps the span alive, and all its views keep the storage: so this is when all of them are gone.
        weakref.finalize(span, self._give_back, slab, start, start + size).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(span, dtype=torch.uint8)

    def _find(self, size: int) -> int | None:
        """Return the place of the shortest free span that is long enough."""
        fitting = ((stop - start, place) for place, (_, start, stop) in enumerate(self._free) if stop - start >= size)
        return min(fitting, default=(0, None))[1]

    def _grow(self, size: int) -> None:
        nbytes = max(self._step, 1 << (size - 1).bit_length())
        slab = self._allocate(nbytes)
        self._slabs.append(slab.numpy())  # keeps the tensor
        self.reserved_bytes += nbytes
        bisect.insort(self._free, (len(self._slabs) - 1, 0, nbytes))

    def _give_back(self, slab: int, start: int, stop: int) -> None:
        with self._lock:
            self.used_bytes -= stop - start
            place = bisect.bisect(self._free, (slab, start, stop))
            if place < len(self._free) and self._free[place][:2] == (slab, stop):
                stop = self._free.pop(place)[2]
            if place > 0 and self._free[place - 1][0] == slab and self._free[place - 1][2] == start:
                start = self._free.pop(place - 1)[1]
            bisect.insort(self._free, (slab, start, stop))


def aligned(nbytes: int) -> int:
    """Return the size of a span for `nbytes`."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
