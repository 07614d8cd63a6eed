"""A device whose copies complete only when the test says so.

It runs on the CPU, with "device" memory apart from "host" memory by name only. It raises where a real accelerator would
silently give wrong bytes: a buffer used before the copy into it is complete, or written while a copy still reads it.
"""

import threading
from collections.abc import Sequence

import torch

from tiered_cache.devices.base import Device, Transfer, allocate_pageable

POISON = 0xFF  # in every byte of memory that was allocated and not yet written: NaN in any floating-point dtype
PATIENCE_S = 30.0


class ManualTransfer(Transfer):
    """A copy that has not happened yet, unless `done`."""

    def __init__(self, device: "ManualDevice", source: torch.Tensor, targets: list[torch.Tensor]) -> None:
        self.source = source
        self.targets = targets
        self._device = device
        self._done = threading.Event()

    def wait(self) -> None:
        if self._device.automatic:
            self._device.complete_through(self)
        if not self._done.wait(PATIENCE_S):
            raise AssertionError("waited for a copy that the test does not complete")

    def target(self) -> torch.Tensor:
        # On an accelerator the stream would wait, and go on when the copy is done; here that is now.
        self._device.complete_through(self)
        return self.targets[0]

    def perform(self) -> None:
        for target in self.targets:
            if target is not self.source:
                target.copy_(self.source)
        self._done.set()


class ManualDevice(Device):
    """See the module.

    Args:
        automatic: complete a copy when somebody waits for it, so that only misuse shows.
    """

    def __init__(self, *, automatic: bool = False) -> None:
        self.automatic = automatic
        self.allocated: dict[str, int] = {"host": 0, "device": 0}
        self._lock = threading.RLock()
        self._pending: list[ManualTransfer] = []
        self._device_memory: set[int] = set()

    def complete(self) -> int:
        """Let all copies under way complete, in order; return how many."""
        with self._lock:
            done, self._pending = self._pending, []
            for transfer in done:
                transfer.perform()
            return len(done)

    def complete_through(self, last: ManualTransfer) -> None:
        """Let the copies up to `last` complete, as a stream would, in order."""
        with self._lock:
            while last in self._pending:
                self._pending.pop(0).perform()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        self.allocated[memory] += nbytes
        buffer = allocate_pageable(nbytes)
        buffer.fill_(POISON)
        if memory == "device":
            self._device_memory.add(buffer.data_ptr())
        else:
            self._device_memory.discard(buffer.data_ptr())
        return buffer

    def stage(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        self._check_writable(buffers)
        on_device = [buffer for buffer in buffers if self._is_on_device(buffer)]
        return on_device[0] if on_device else self.allocate("device", buffers[0].nbytes)

    def store(self, staged: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Transfer:
        return self._start(staged, [buffer for buffer in buffers if buffer is not staged] or [staged])

    def fetch(self, buffer: torch.Tensor) -> Transfer:
        if self._is_on_device(buffer):
            return self._start(buffer, [buffer])
        return self._start(buffer, [self.allocate("device", buffer.nbytes)])

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._start(source, [target])

    def _is_on_device(self, buffer: torch.Tensor) -> bool:
        return buffer.data_ptr() in self._device_memory

    def _start(self, source: torch.Tensor, targets: list[torch.Tensor]) -> Transfer:
        with self._lock:
            for transfer in self._pending:
                if any(target is source and transfer.source is not target for target in transfer.targets):
                    raise AssertionError("use before wait: the copy that fills this buffer is not complete")
            self._check_writable([target for target in targets if target is not source])
            transfer = ManualTransfer(self, source, targets)
            self._pending.append(transfer)
            return transfer

    def _check_writable(self, buffers: Sequence[torch.Tensor]) -> None:
        for transfer in self._pending:
            if any(buffer is transfer.source for buffer in buffers):
                raise AssertionError("reuse before done: a copy out of this buffer is not complete")
