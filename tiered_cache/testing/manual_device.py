"""A device on the CPU that does what its lanes are given as late, or in as odd an order, as streams and events allow.

"Device" memory is apart from "host" memory by name only. It raises where a real accelerator would silently give wrong bytes:
memory that is used before the work that fills it is done, or written while work still reads it, by a lane, by the caller's own
stream as far as that says so (`claim`), or by a thread. What a stream does here is done at once; so lanes must have been told
to come after it. What nobody says is touched (a model's own computation) shows in the result: memory that nobody wrote is NaN.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tiered_cache.devices import substitute
from tiered_cache.devices.arena import Arena, aligned
from tiered_cache.devices.base import Device, Event, Lane, allocate_pageable

_Extent = tuple[int, int]

POISON = 0xFF  # in every byte of memory that was allocated and not yet written: NaN in any floating-point dtype
PATIENCE_S = 30.0


class ManualEvent(Event):
    """A point on a lane; or one that was reached, as every point of the calling thread's own stream is."""

    def __init__(self, device: "ManualDevice", clock: int, job: "_Job | None" = None) -> None:
        self._device = device
        self.clock = clock  # how much of what the caller's stream claimed comes before it
        self.job = job

    def wait(self) -> None:
        if self.job is None:
            return
        if self._device.automatic:
            self._device.finish(self.job)
        if not self.job.done.wait(PATIENCE_S):
            raise AssertionError("waited for work that the test does not let complete")

    def order(self) -> None:
        if self.job is not None:  # a stream would wait, and go on when it is done; here that is now
            self._device.finish(self.job)


class _Job:
    """Work that a lane was given."""

    def __init__(
        self, lane: Lane, work: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor],
        after: Sequence[Event], before: "_Job | None",
    ) -> None:  # fmt: skip
        self.clock: int
        self.done = threading.Event()
        self.lane = lane
        self.work = work
        self.reads = [_extent(tensor) for tensor in reads]
        self.writes = [_extent(tensor) for tensor in writes]
        self.keeps = (*reads, *writes)
        points = [event for event in after if isinstance(event, ManualEvent)]
        jobs = [job for job in (*(point.job for point in points), before) if job is not None]
        self.clock = max([0, *(point.clock for point in points), *(job.clock for job in jobs)])
        self.after = [job for job in jobs if not job.done.is_set()]

    def comes_after(self, other: "_Job") -> bool:
        seen, left = set[int](), list(self.after)
        while left:
            job = left.pop()
            if job is other:
                return True
            if id(job) not in seen:
                seen.add(id(job))
                left += job.after
        return False


class ManualDevice(Device):
    """See the module.

    Args:
        automatic: work is done when somebody waits for it, so that only misuse shows; else the test calls `complete`.
        order: where given, at every call some of the work that may be done, is: which, it says.
        step: of the arena that stands for pinned memory, bytes.
        device_bytes: how much device memory there is.
    """

    def __init__(
        self, *, automatic: bool = False, order: random.Random | None = None, step: int = 1 << 16, device_bytes: int = 1 << 40
    ) -> None:
        super().__init__()
        self.automatic = automatic
        self.allocated: dict[str, int] = {"host": 0, "device": 0}
        self.device_bytes = device_bytes
        self.pinned = Arena(allocate_pageable, step)
        self._order = order
        self._lock = threading.RLock()
        self._pending: list[_Job] = []
        self._last: dict[Lane, _Job] = {}
        self._clock = 0
        self._claims: deque[tuple[int, list[_Extent], list[_Extent]]] = deque(maxlen=256)  # what the caller's stream touched
        self._device_memory: dict[int, int] = {}  # address, size

    # --- for the test -----------------------------------------------------------------------------------------------

    def complete(self) -> int:
        """Let all work that was given complete; return how much that is."""
        with self._lock:
            number = len(self._pending)
            while self._pending:
                self.finish(self._pending[0])
            return number

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # --- as a device ------------------------------------------------------------------------------------------------

    def footprint(self, nbytes: int) -> int:
        return aligned(nbytes)

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        self._shuffle()
        with self._lock:
            self.allocated[memory] += nbytes
            span = self.pinned.take(nbytes) if memory == "host" else None
            buffer = allocate_pageable(nbytes) if span is None else span
            buffer.fill_(POISON)
            address = buffer.data_ptr()
            for start in [
                start for start, size in self._device_memory.items() if start < address + nbytes and address < start + size
            ]:
                del self._device_memory[start]
            if memory == "device":
                self._device_memory[address] = nbytes
            return buffer

    def is_local(self, buffer: torch.Tensor) -> bool:
        start = buffer.untyped_storage().data_ptr()
        return start in self._device_memory

    def free_bytes(self) -> int:
        return self.device_bytes

    def mark(self) -> Event:
        return ManualEvent(self, self._clock)

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        after: Sequence[Event] = (),
    ) -> Event:
        with self._lock:
            job = _Job(lane, work, reads, writes, after, self._last.get(lane))
            self._check(job.reads, job.writes, job)
            self._check_claims(job)
            self._pending.append(job)
            self._last[lane] = job
        self._shuffle()
        return ManualEvent(self, job.clock, job)

    def claim(
        self, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (), by_thread: bool = False
    ) -> None:
        with self._lock:
            touched = [_extent(tensor) for tensor in reads], [_extent(tensor) for tensor in writes]
            self._check(*touched, None)
            if not by_thread:
                self._clock += 1
                self._claims.append((self._clock, *touched))

    def finish(self, job: _Job) -> None:
        """Do one job, and before it what it comes after."""
        with self._lock:
            if job.done.is_set():
                return
            for earlier in job.after:
                self.finish(earlier)
            self._pending.remove(job)
            try:
                job.work()
            finally:
                job.done.set()
                job.after, job.keeps, job.work = [], (), _nothing

    # --- inside -----------------------------------------------------------------------------------------------------

    def _shuffle(self) -> None:
        order = self._order
        with self._lock:
            while order is not None and self._pending and order.random() < 0.5:
                ready = [job for job in self._pending if not any(not each.done.is_set() for each in job.after)]
                self.finish(order.choice(ready))

    def _check_claims(self, job: _Job) -> None:
        for clock, reads, writes in self._claims:
            if clock <= job.clock:
                continue
            if _overlap(writes, job.reads) or _overlap(writes, job.writes):
                raise AssertionError("use before wait: the stream that fills this memory was not waited for")
            if _overlap(reads, job.writes):
                raise AssertionError("reuse before done: the stream that reads this memory was not waited for")

    def _check(self, reads: "list[_Extent]", writes: "list[_Extent]", job: _Job | None) -> None:
        for other in self._pending:
            if job is not None and job.comes_after(other):
                continue
            if _overlap(other.writes, reads) or _overlap(other.writes, writes):
                raise AssertionError("use before wait: the work that fills this memory is not done")
            if _overlap(other.reads, writes):
                raise AssertionError("reuse before done: work that reads this memory is not done")


def _nothing() -> None:
    return


def _extent(tensor: torch.Tensor) -> _Extent:
    """Return the first address of a tensor and the one behind its last."""
    last = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlap(ones: Sequence[_Extent], others: Sequence[_Extent]) -> bool:
    return any(one[0] < other[1] and other[0] < one[1] for one in ones for other in others)


@contextmanager
def pretend_accelerator(device: ManualDevice | None = None) -> Iterator[ManualDevice]:
    """Let the package believe that the CPU is an accelerator with memory of its own, for as long as the context is open."""
    device = ManualDevice(automatic=True) if device is None else device
    with substitute(torch.device("cpu"), device):
        yield device
