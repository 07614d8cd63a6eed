"""Where accelerate keeps the weights of modules that it loads for one forward at a time, and where those compute.

Owns all that is known of accelerate's hooks: finding a weight that is on "meta" in a hook's map, in host memory or as a
file, and telling hooks that only move tensors from other ones. Refuses to own reading a weight (weights).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

from tiered_cache.hf.parts import UnreadableError, has_attributes


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A tensor in a file: `read` returns it, `facts` change when the file does."""

    path: Path
    read: Callable[[], torch.Tensor]

    def load(self) -> torch.Tensor:
        """Return the tensor, read into memory. Raises UnreadableError: it cannot be."""
        try:
            return self.read()
        except OSError as error:
            raise UnreadableError(f"{self.path} cannot be read ({error.strerror})") from error

    def facts(self) -> tuple[int, ...]:
        """Return what the file system says of the file; ctime cannot be set back. Raises UnreadableError: it is gone."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise UnreadableError(f"{self.path} cannot be read ({error.strerror})") from error
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Offloaded:
    """The modules of a model that hooks of accelerate load and unload."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self._hooks = {
            name: hook
            for name, module in modules.items()
            if "_hf_hook" in module.__dict__
            for hook in _flat(module.__dict__["_hf_hook"])
            if isinstance(hook, AlignDevicesHook) and hook.offload
        }

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def find(self, module: str, name: str, tensor: torch.Tensor) -> torch.Tensor | OnDisk:
        """Return where a parameter or buffer `tensor` of a module comes from at its next forward: itself if it stays.

        Raises:
            UnreadableError: it comes from a map of an unknown kind, or comes without what a quantised one needs.
        """
        if not isinstance(tensor, torch.nn.Parameter) and not tensor.is_meta:
            return tensor
        owner, key = module, name
        while True:
            hook = self._hooks.get(owner)
            if hook is not None and (owner == module or hook.place_submodules):
                if has_attributes(tensor):
                    raise UnreadableError(f"{module}.{name} is quantised and offloaded; keep it on one device")
                return _find(f"{module}.{name}", hook.weights_map, key)
            if not owner:
                return tensor
            owner, _, last = owner.rpartition(".")
            key = f"{last}.{key}"


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device that `model` computes on: that of its first parameter, wherever that rests."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    return min(execution_devices(model), key=lambda each: (each.type == "cpu", str(each)), default=device)


def execution_devices(model: torch.nn.Module) -> set[torch.device]:
    """Return the devices that the modules of `model` compute on, wherever their weights rest."""
    found: set[torch.device] = set()
    for module in model.modules():
        hooks = [hook for hook in _flat(module.__dict__.get("_hf_hook")) if isinstance(hook, AlignDevicesHook)]
        places = [hook.execution_device for hook in hooks if hook.execution_device is not None]
        found.update(torch.empty(0, device=place).device for place in places)  # an int is an accelerator's number
        found.update(each.device for each in module._parameters.values() if each is not None and not places)
    return found - {torch.device("meta")}


def layer_devices(model: Any, num_layers: int) -> list[torch.device] | None:
    """Return the device of each of a decoder's layers, where its K/V are computed, and belong; None if that is not clear."""
    if not getattr(model, "hf_device_map", None) or len(execution_devices(model)) < 2:
        return [device_of(model)] * num_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = (module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers)
    found = [execution_devices(layer) for layer in next(lists, ())]
    return [devices.pop() for devices in found] if found and all(len(devices) == 1 for devices in found) else None


def replaces_forward(module: torch.nn.Module) -> list[Any]:
    """Return what computes in place of a module's forward; accelerate's own hooks only move tensors."""
    own = module.__dict__
    hook, forward = own.get("_hf_hook"), own.get("forward")
    if hook is None:
        return [] if forward is None else [forward]
    found = [each for each in _flat(hook) if type(each) not in (AlignDevicesHook, CpuOffload)]
    if getattr(getattr(forward, "func", None), "__module__", None) != AlignDevicesHook.__module__:
        found.append(forward)  # replaced after accelerate did
    before = own.get("_old_forward")
    if before is not None and getattr(before, "__func__", None) is not type(module).forward:
        found.append(before)
    return found


def _flat(hook: Any) -> Iterator[Any]:
    """Yield a hook of accelerate's, or those that it is made of."""
    if isinstance(hook, SequentialHook):
        for inner in hook.hooks:
            yield from _flat(inner)
    else:
        yield hook


def _find(name: str, weights: Any, key: str) -> torch.Tensor | OnDisk:
    """Return where a map of accelerate's has a weight."""
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, f"{weights.prefix}{key}"
    if isinstance(weights, OffloadedWeightsLoader) and key not in weights.state_dict:
        about = weights.index[key]
        path = Path(about.get("safetensors_file") or Path(weights.save_folder, f"{key}.dat"))
        return OnDisk(path, functools.partial(weights.__getitem__, key))
    if isinstance(weights, OffloadedWeightsLoader):
        weights = weights.state_dict
    weight = weights.get(key) if isinstance(weights, dict) else None
    if isinstance(weight, torch.Tensor):
        return weight
    raise UnreadableError(f"{name} is offloaded to where it cannot be read, {type(weights).__qualname__}")
