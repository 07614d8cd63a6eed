"""An accelerator (CUDA, ROCm, XPU): pinned host memory, and a stream for each direction beside the one that computes."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from tiered_cache.devices.arena import STEP, Arena, aligned
from tiered_cache.devices.base import Device, Event, Lane, allocate_pageable

logger = logging.getLogger(__name__)


class StreamEvent(Event):
    """A point in a stream."""

    def __init__(self, owner: "AcceleratorDevice", event: torch.Event) -> None:
        self._owner = owner
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()
        self._owner.forget_done()

    def order(self) -> None:
        torch.accelerator.current_stream(self._owner.device).wait_event(self.event)


class AcceleratorDevice(Device):
    """One accelerator, through `torch.accelerator`, `torch.Stream` and `torch.Event`.

    Lanes are streams of the lowest priority there is, which on CUDA is that of the default stream too.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._streams = {lane: torch.Stream(device, priority=0) for lane in Lane}
        self._locks = {lane: threading.RLock() for lane in Lane}  # entering a stream is not for two threads at once
        # What a lane touches stays alive until it is done.
        self._under_way: dict[Lane, deque[tuple[torch.Event, object]]] = {lane: deque() for lane in Lane}
        self._arena = Arena(_pinned, let_go=_unpin_unused)
        self._pins, self._warned = True, False

    def footprint(self, nbytes: int) -> int:
        return aligned(nbytes)

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        self.forget_done()
        if memory == "device":
            with torch.inference_mode(False):
                try:
                    return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                except torch.OutOfMemoryError as error:
                    raise MemoryError(str(error)) from error
        if self._pins:
            try:
                span = self._arena.take(nbytes)
                if span is not None:
                    return span
            except (RuntimeError, MemoryError) as error:
                self._pins = nbytes > STEP  # else not even a little
                if not self._warned:
                    logger.warning("Host memory cannot be pinned (%s); copies to %s will be slower.", error, self.device)
                self._warned = True
        return allocate_pageable(nbytes)

    def is_local(self, buffer: torch.Tensor) -> bool:
        return buffer.device == self.device

    def free_bytes(self) -> int:
        self.forget_done()
        if hasattr(torch.accelerator, "get_memory_info"):
            free, _ = torch.accelerator.get_memory_info(self.device)
        else:  # before torch 2.10
            free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.accelerator.memory_reserved(self.device) - torch.accelerator.memory_allocated(self.device)
        return int(free + cached)

    def mark(self) -> Event:
        return StreamEvent(self, torch.accelerator.current_stream(self.device).record_event())

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        after: Sequence[Event] = (),
    ) -> Event:
        stream = self._streams[lane]
        with self._locks[lane]:
            for event in after:
                assert isinstance(event, StreamEvent)
                stream.wait_event(event.event)
            try:
                with stream:
                    work()
            finally:  # part of it may be under way
                done = stream.record_event()
                self._under_way[lane].append((done, (*reads, *writes)))
        self.forget_done()
        return StreamEvent(self, done)

    def claim(
        self, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (), by_thread: bool = False
    ) -> None:
        # Memory that another stream allocated is not used again before what this one does with it.
        stream = torch.accelerator.current_stream(self.device)
        for tensor in (*reads, *writes):
            if tensor.device == self.device:
                tensor.record_stream(stream)

    def forget_done(self) -> None:
        """Let go of what lanes are done with."""
        for lane, under_way in self._under_way.items():
            with self._locks[lane]:
                while under_way and under_way[0][0].query():
                    under_way.popleft()


def _unpin_unused() -> None:
    if hasattr(torch.accelerator, "empty_host_cache"):  # else torch keeps what it pinned, for whoever asks for as much
        torch.accelerator.empty_host_cache()


def _pinned(nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
