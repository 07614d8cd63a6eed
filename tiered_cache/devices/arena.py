"""Host memory that is pinned once and handed out in spans, since pinning takes longer than copying.

Owns slabs and which of their bytes are free. Refuses to own how a slab is pinned (accelerator) and who may have what
(tiers).
"""

import bisect
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

ALIGNMENT = 4096  # of spans: a page
STEP = 128 << 20  # by which the arena grows; a power of two, as torch rounds pinned memory up to one
MOST = 2 << 30  # bytes of a slab, unless one span needs more
SPANS = 4  # that a slab has room for, at least: few large ones would leave much of a power of two unused
LOOSE = 3 / 4  # of the arena must be in use for it to grow: what does not fit into what is free is not worth more pinned memory


class Arena:
    """Slabs of host memory, growing in steps, that give out aligned spans and take them back when nobody sees them any more.

    Where free spans are too short for what is asked, slabs that are free as a whole are let go; then it grows if `LOOSE` of it
    is in use. So it is never larger than its largest use / LOOSE, and one slab.

    Args:
        allocate: returns a slab, a flat uint8 tensor `[nbytes]`. May raise RuntimeError or MemoryError.
        step: smallest slab, bytes.
        let_go: called after slabs were.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], step: int = STEP, let_go: Callable[[], None] = lambda: None
    ) -> None:
        self.reserved_bytes = 0
        self._used_bytes = 0
        self._allocate = allocate
        self._step = step
        self._let_go = let_go
        self._slabs: dict[int, np.ndarray] = {}
        self._next = 0
        self._free: list[tuple[int, int, int]] = []  # (slab, start, stop), sorted
        self._returned: deque[tuple[int, int, int]] = deque()  # the garbage collector may give a span back anywhere
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        """Bytes of spans that somebody may see."""
        with self._lock:
            self._take_back()
            return self._used_bytes

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a flat uint8 tensor `[nbytes]`, or None where there is no room and the arena should not grow.

        Raises:
            RuntimeError, MemoryError: as `allocate` does.
        """
        size = aligned(nbytes)
        with self._lock:
            self._take_back()
            if not self._fits(size):
                self._trim()
                if self._used_bytes < LOOSE * self.reserved_bytes:
                    return None
                self._grow(size)
            _, place = min((stop - start, place) for place, (_, start, stop) in enumerate(self._free) if stop - start >= size)
            slab, start, stop = self._free.pop(place)
            if start + size < stop:
                bisect.insort(self._free, (slab, start + size, stop))
            self._used_bytes += size
            span = self._slabs[slab][start : start + nbytes]
        # The tensor's storage keeps the span alive, and all its views keep the storage: so this is when all of them are gone.
        weakref.finalize(span, self._returned.append, (slab, start, start + size)).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(span, dtype=torch.uint8)

    def _fits(self, size: int) -> bool:
        return any(stop - start >= size for _, start, stop in self._free)

    def _grow(self, size: int) -> None:
        least = max(self._step, 1 << (size - 1).bit_length())
        nbytes = min(max(least, SPANS * (1 << (size - 1).bit_length())), max(least, MOST))
        try:
            slab = self._allocate(nbytes)
        except (RuntimeError, MemoryError):
            if nbytes == least:
                raise
            nbytes = least
            slab = self._allocate(nbytes)
        self._slabs[self._next] = slab.numpy()  # keeps the tensor
        bisect.insort(self._free, (self._next, 0, nbytes))
        self.reserved_bytes += nbytes
        self._next += 1

    def _trim(self) -> None:
        """Let slabs go that are free as a whole."""
        gone = False
        for span in [span for span in self._free if span[2] - span[1] == self._slabs[span[0]].nbytes]:
            self._free.remove(span)
            self.reserved_bytes -= self._slabs.pop(span[0]).nbytes
            gone = True
        if gone:
            self._let_go()

    def _take_back(self) -> None:
        while self._returned:
            slab, start, stop = self._returned.popleft()
            self._used_bytes -= stop - start
            place = bisect.bisect(self._free, (slab, start, stop))
            if place < len(self._free) and self._free[place][:2] == (slab, stop):
                stop = self._free.pop(place)[2]
            if place > 0 and self._free[place - 1][0] == slab and self._free[place - 1][2] == start:
                start = self._free.pop(place - 1)[1]
            bisect.insort(self._free, (slab, start, stop))


def aligned(nbytes: int) -> int:
    """Return the size of a span for `nbytes`."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
