"""What a device does for the stack and the layers: allocate, and run work beside the computation, in order.

Owns streams, events and pinned memory. Refuses to own what the bytes mean (blocks) and where they stay (tiers).

Everything that leaves the caller's own stream goes through one door, `Device.run`, on one of two lanes. A lane keeps the order
in which it was given work; nothing else is ordered unless an `Event` says so.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch


class Lane(enum.Enum):
    """A stream beside the caller's: one for each direction, since a link carries both at once."""

    UP = "up"  # from host memory to the device
    DOWN = "down"  # from the device to host memory


class Event(ABC):
    """A point in the work given to a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until all work before that point is done."""

    @abstractmethod
    def order(self) -> None:
        """Let whatever the current stream of this thread does next come after that point. Blocks nobody."""


class Device(ABC):
    """Memory of one torch device and of the host, and the lanes between them. Safe to use from several threads.

    Attributes:
        is_apart: whether its memory is another one than the host's; else nothing need ever be copied between them.
        moved: bytes that `copy` was given, by lane.
    """

    is_apart: ClassVar[bool] = True

    def __init__(self) -> None:
        self.moved = dict.fromkeys(Lane, 0)

    def footprint(self, nbytes: int) -> int:
        """Return how many bytes of memory a buffer of `nbytes` takes at most."""
        return nbytes

    @abstractmethod
    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        """Return a flat, uninitialised uint8 tensor `[nbytes]` in "host" or "device" memory, that shares its storage with none.

        Its memory is used again when the storage is gone and no work on a lane names it any more.

        Raises:
            MemoryError: there is no room.
        """

    @abstractmethod
    def is_local(self, buffer: torch.Tensor) -> bool:
        """Say whether `buffer` is in this device's memory."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how many bytes of device memory could be allocated now."""

    @abstractmethod
    def mark(self) -> Event:
        """Return the point that the current stream of this thread has reached."""

    @abstractmethod
    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        after: Sequence[Event] = (),
    ) -> Event:
        """Let a lane do `work`, which is torch operations that wait for nothing, after the points `after`.

        Args:
            reads, writes: all that the work touches. They stay alive until it is done, and must not be touched before.
        """

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Let a lane copy `source` to `target`, of the same shape and dtype. See `run`."""
        return self.copy_all(lane, [(source, target)], after)

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event] = ()) -> Event:
        """Let a lane copy the first of each pair to the second. See `run`."""

        def work() -> None:
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

        self.moved[lane] += sum(source.numel() * source.itemsize for source, _ in pairs)
        reads, writes = [source for source, _ in pairs], [target for _, target in pairs]
        return self.run(lane, work, reads=reads, writes=writes, after=after)

    def claim(  # noqa: B027
        self, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (), by_thread: bool = False
    ) -> None:
        """Say that the current stream, or this thread itself, is about to touch these: a device for tests checks that."""


def allocate_pageable(nbytes: int) -> torch.Tensor:
    """Return a flat uint8 tensor in ordinary host memory, usable inside and outside inference mode. Raises MemoryError."""
    with torch.inference_mode(False):
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch's CPU allocator has no error class of its own
            raise MemoryError(str(error)) from error
