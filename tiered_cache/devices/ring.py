"""A few buffers on a device, used in turn: what one of them holds is consumed while the next one is filled."""

from dataclasses import dataclass, field

import torch

from tiered_cache.devices.base import Device, Event


@dataclass(slots=True, eq=False)
class Slot:
    """One buffer.

    Attributes:
        buffer: flat, uint8.
        busy: points after which it may be written.
    """

    buffer: torch.Tensor
    busy: list[Event] = field(default_factory=list)


class Ring:
    """Slots of a device's memory, made when they are first needed.

    Args:
        device: whose memory.
        num_slots: how many.
    """

    def __init__(self, device: Device, num_slots: int = 2) -> None:
        self._device = device
        self._slots: list[Slot | None] = [None] * num_slots
        self._next = 0

    def take(self, nbytes: int) -> Slot:
        """Return the slot used longest ago, with room for `nbytes`. Write it after `busy`, and say there how long it is in use.

        Raises:
            MemoryError: there is no room on the device.
        """
        place = self._next
        slot = self._slots[place]
        if slot is None or slot.buffer.nbytes < nbytes:
            self._slots[place] = None  # frees the short one first; a lane that still needs it keeps it
            buffer = self._device.allocate("device", nbytes)
            # Its memory may be in use by what the current stream was given before.
            slot = self._slots[place] = Slot(buffer, [self._device.mark()])
        self._next = (place + 1) % len(self._slots)
        return slot
