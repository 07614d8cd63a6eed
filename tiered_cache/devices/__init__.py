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

# tiers/ may not import torch, so it is told here how to ask.
device_tier.accelerator_present = torch.accelerator.is_available


def device_for(device: torch.device) -> Device:
    """Return the one Device object that moves bytes to and from `device`."""
    with _lock:
        if device not in _devices:
            _devices[device] = CPUDevice() if device.type == "cpu" else AcceleratorDevice(device)
        return _devices[device]
