"""The CPU: host memory is device memory, so nothing is staged and all work is done when it was given."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from tiered_cache.devices.base import Device, Event, Lane, allocate_pageable
from tiered_cache.tiers.host import available_memory


class Done(Event):
    """A point that was reached."""

    def wait(self) -> None:
        return

    def order(self) -> None:
        return


DONE = Done()


class CPUDevice(Device):
    """The synchronous twin of an accelerator: same interface, all on the calling thread."""

    is_apart: ClassVar[bool] = False

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        return allocate_pageable(nbytes)

    def is_local(self, buffer: torch.Tensor) -> bool:
        return True

    def free_bytes(self) -> int:
        return available_memory()

    def mark(self) -> Event:
        return DONE

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        after: Sequence[Event] = (),
    ) -> Event:
        work()
        return DONE
