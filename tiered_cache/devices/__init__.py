"""How bytes move: the only package with streams, events and pinned memory."""

import threading

import torch

from tiered_cache.devices.accelerator import AcceleratorDevice
from tiered_cache.devices.base import Device
from tiered_cache.devices.cpu import CPUDevice
from tiered_cache.tiers import device as device_tier

__all__ = ["device_for"]

_devices: dict[torch.device, Device] = {}
_lock = threading.Lock()

_STREAMING = ("cuda", "xpu")  # ROCm calls itself cuda; elsewhere (mps) tensors are copied on the calling thread


def accelerator_present() -> bool:
    """Say whether this machine has an accelerator with memory and streams of its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type in _STREAMING


device_tier.accelerator_present = accelerator_present  # tiers/ may not import torch, so it is told here how to ask


def device_for(device: torch.device) -> Device:
    """Return the one Device object that moves bytes to and from `device`."""
    with _lock:
        if device not in _devices:
            _devices[device] = AcceleratorDevice(device) if device.type in _STREAMING else CPUDevice()
        return _devices[device]
