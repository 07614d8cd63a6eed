"""How bytes move: the only package with streams, events and pinned memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiered_cache.devices.accelerator import AcceleratorDevice
from tiered_cache.devices.base import Device
from tiered_cache.devices.cpu import CPUDevice
from tiered_cache.tiers import device as device_tier

__all__ = ["device_for", "substitute"]

_devices: dict[torch.device, Device] = {}
_lock = threading.Lock()

_STREAMING = ("cuda", "xpu")  # ROCm calls itself cuda; elsewhere (mps) tensors are copied on the calling thread


def accelerator_present() -> bool:
    """Say whether this machine has an accelerator with memory and streams of its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    with _lock:
        return (accelerator is not None and accelerator.type in _STREAMING) or any(each.is_apart for each in _devices.values())


device_tier.accelerator_present = accelerator_present  # tiers/ may not import torch, so it is told here how to ask


def device_for(device: torch.device) -> Device:
    """Return the one Device object that moves bytes to and from `device`."""
    with _lock:
        if device not in _devices:
            _devices[device] = AcceleratorDevice(device) if device.type in _STREAMING else CPUDevice()
        return _devices[device]


@contextmanager
def substitute(device: torch.device, stand_in: Device) -> Iterator[None]:
    """Let another Device object move the bytes of `device`, for tests."""
    with _lock:
        before = _devices.get(device)
        _devices[device] = stand_in
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _devices[device]
            else:
                _devices[device] = before
