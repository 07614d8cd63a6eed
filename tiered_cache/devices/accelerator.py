"""An accelerator (CUDA, ROCm, XPU): pinned host memory and one copy stream beside the compute stream.

Simple and right: each block is one copy, and a copy is waited for before its buffer is used by anyone else.
"""

import logging
import threading
from collections.abc import Sequence

import torch

from tiered_cache.devices.base import Device, Transfer, allocate_pageable

logger = logging.getLogger(__name__)


class StreamTransfer(Transfer):
    """A copy on the copy stream, complete when `event` is. Holds its buffers, so that their memory is not reused before."""

    def __init__(self, device: torch.device, event: torch.Event, target: torch.Tensor, source: torch.Tensor) -> None:
        self._device = device
        self._event = event
        self._target = target
        self._source: torch.Tensor | None = source

    def wait(self) -> None:
        self._event.synchronize()
        self._source = None

    def target(self) -> torch.Tensor:
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(self._event)
        if self._target.device == self._device:
            self._target.record_stream(stream)  # its memory is not used again before what this stream does with it
        return self._target


class AcceleratorDevice(Device):
    """One accelerator, through `torch.accelerator`, `torch.Stream` and `torch.Event`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device)
        self._stream_lock = threading.Lock()  # entering a stream is not for two threads at once
        self._pins = True

    def footprint(self, nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length()  # torch rounds pinned memory up to a power of two

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            if memory == "device":
                try:
                    return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                except torch.OutOfMemoryError as error:
                    raise MemoryError(str(error)) from error
            if self._pins:
                try:
                    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                except RuntimeError as error:
                    self._pins = False
                    logger.warning("Host memory cannot be pinned (%s); copies to %s will be slower.", error, self.device)
        return allocate_pageable(nbytes)

    def stage(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        on_device = [buffer for buffer in buffers if buffer.device == self.device]
        return on_device[0] if on_device else self.allocate("device", buffers[0].nbytes)

    def store(self, staged: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Transfer:
        return self._copy(staged, [buffer for buffer in buffers if buffer is not staged] or [staged])

    def fetch(self, buffer: torch.Tensor) -> Transfer:
        if buffer.device == self.device:
            return self._copy(buffer, [buffer])
        return self._copy(buffer, [self.allocate("device", buffer.nbytes)])

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._copy(source, [target])

    def _copy(self, source: torch.Tensor, targets: list[torch.Tensor]) -> Transfer:
        # After all that is queued: the source's producer, and whoever used the targets' memory before.
        current = torch.accelerator.current_stream(self.device)
        with self._stream_lock:
            self._stream.wait_stream(current)
            with self._stream:
                for target in targets:
                    if target is not source:
                        target.copy_(source, non_blocking=True)
                event = self._stream.record_event()
        for tensor in (source, *targets):
            if tensor.device == self.device:
                tensor.record_stream(self._stream)
        return StreamTransfer(self.device, event, targets[0], source)
