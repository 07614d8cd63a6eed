"""What a device does for the stack: allocate flat buffers, and move them between memories.

Owns streams, events and pinned memory. Refuses to own what the bytes mean (blocks) and where they stay (tiers).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Transfer(ABC):
    """A copy under way. Keeps both of its ends alive until it is complete."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until the copy is complete."""

    @abstractmethod
    def target(self) -> torch.Tensor:
        """Return the copy's target, ordered: whatever the current stream does next with it comes after the copy."""


class Device(ABC):
    """Moves bytes between one torch device and host memory. Safe to use from several threads."""

    def footprint(self, nbytes: int) -> int:
        """Return how many bytes of memory a buffer of `nbytes` takes at most."""
        return nbytes

    @abstractmethod
    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        """Return a flat, uninitialised uint8 tensor `[nbytes]`, an allocation of its own, in "host" or "device" memory.

        Raises:
            MemoryError: there is no room.
        """

    @abstractmethod
    def stage(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a flat tensor on this device to fill on the current stream, before `store` brings it to `buffers`.

        Where one of `buffers` is on the device, that is it, and nothing is copied twice.
        """

    @abstractmethod
    def store(self, staged: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Transfer:
        """Start to copy `staged`, after the work queued on the current stream, to those `buffers` that it is not itself."""

    @abstractmethod
    def fetch(self, buffer: torch.Tensor) -> Transfer:
        """Start to copy `buffer` to this device; the target is a flat tensor there, or `buffer` itself."""

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Start to copy one flat buffer to another of the same size."""


def allocate_pageable(nbytes: int) -> torch.Tensor:
    """Return a flat uint8 tensor in ordinary host memory, usable inside and outside inference mode. Raises MemoryError."""
    with torch.inference_mode(False):
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch's CPU allocator has no error class of its own
            raise MemoryError(str(error)) from error
