"""The CPU: host memory is device memory, so nothing is staged and every copy is complete when it returns."""

from collections.abc import Sequence

import torch

from tiered_cache.devices.base import Device, Transfer, allocate_pageable


class Done(Transfer):
    """A copy that is complete."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def wait(self) -> None:
        return

    def target(self) -> torch.Tensor:
        return self._target


class CPUDevice(Device):
    """The synchronous twin of an accelerator: same interface, copies on the calling thread."""

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        return allocate_pageable(nbytes)

    def stage(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        return buffers[0]

    def store(self, staged: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Transfer:
        for buffer in buffers:
            if buffer is not staged:
                buffer.copy_(staged)
        return Done(staged)

    def fetch(self, buffer: torch.Tensor) -> Transfer:
        return Done(buffer)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        target.copy_(source)
        return Done(target)
