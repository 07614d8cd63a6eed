"""What a live model is, as far as its K/V depend on it: not what it is called.

Owns the fingerprint of weights, config and surroundings, and the cheap check at every call that it still holds.
Refuses to own keys (they take the fingerprint as opaque bytes) and which calls may reuse (cache, session).
"""

import hashlib
import itertools
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import xxhash
from transformers import PreTrainedModel

# Of the config: names, bookkeeping and what only selects outputs.
_IGNORED_CONFIG = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "architectures", "use_cache", "output_attentions",
     "output_hidden_states", "return_dict", "pretraining_tp", "torchscript", "dtype"}
)  # fmt: skip
_SAMPLES = 16  # elements of each tensor looked at in every call
_ADAPTER_STATE = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")  # of PEFT's tuner layers


_lock = threading.Lock()
_weights: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[object, ...], bytes]]" = weakref.WeakKeyDictionary()
_serials: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


def identify(model: PreTrainedModel) -> bytes | None:
    """Return the fingerprint of `model` as it is now, or None if it has none (weights elsewhere, or of unknown kind).

    The first call reads all weights; later calls look at version counters and a sample of each tensor (a few
    milliseconds), and read all again if any of them changed. Safe to call from several threads.
    """
    modules = dict(model.named_modules())
    tensors = _weight_tensors(modules)
    if not all(_is_plain(tensor) for tensor in tensors.values()):
        return None
    seen = _glance(tensors)
    with _lock:
        known = _weights.get(model)
        if known is None or known[0] != seen:
            known = (seen, _checksum(tensors))
            _weights[model] = known
    digest = hashlib.sha256(known[1])
    digest.update(_surroundings(model, modules).encode())
    return digest.digest()


def forget(model: PreTrainedModel) -> None:
    """Drop what is remembered of `model`: the next identify() reads all its weights."""
    with _lock:
        _weights.pop(model, None)


def is_training(model: PreTrainedModel) -> bool:
    """Say whether any part of `model` is in training mode (dropout makes K/V random)."""
    return any(module.training for module in model.modules())


def _weight_tensors(modules: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return all parameters and persistent buffers by name."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                tensors[f"{prefix}.{name}"] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}"] = buffer
    return tensors


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is what its elements are: a subclass keeps more (quantisation state), "meta" has none at all."""
    return type(tensor) in (torch.nn.Parameter, torch.Tensor) and not tensor.is_meta and not tensor.is_sparse


def _glance(tensors: dict[str, torch.Tensor]) -> tuple[object, ...]:
    """Return what is looked at in every call: where each tensor is, how often it was written, and some of its values."""
    facts: list[object] = []
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            version = None if tensor.is_inference() else tensor._version
            facts.append((name, tensor.data_ptr(), version, tensor.shape, tensor.dtype))
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
            step = -(-flat.numel() // _SAMPLES) or 1
            samples.setdefault((tensor.dtype, tensor.device), []).append(flat[::step])
        for group in samples.values():
            facts.append(_bytes_of(torch.cat(group).cpu()).tobytes())
    return tuple(facts)


def _checksum(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a digest of every byte of every tensor, with its name, dtype and shape."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{tensor.device.type}|".encode())
        data = tensor.detach().contiguous()
        digest.update(xxhash.xxh3_128_digest(_bytes_of(data)) if data.device.type == "cpu" else _device_sum(data))
    return digest.digest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor as a numpy array that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _device_sum(tensor: torch.Tensor) -> bytes:
    """Return a checksum of all bytes made where they are: two sums modulo 2^64, each with weights of the position."""
    raw = tensor.reshape(-1).view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    chunk = 1 << 24  # bounds the extra memory
    for start in range(0, raw.numel(), chunk):
        part = raw[start : start + chunk]
        place = torch.arange(start, start + part.numel(), device=raw.device)
        sums[0] += (part * (2 * place + 1)).sum()
        # Odd multipliers keep every bit; mixing the high half down makes it count in the sum as well.
        mixed = (part ^ (part >> 29)) * -4658895280553007687 + place
        sums[1] += ((mixed ^ (mixed >> 32)) * -7723592293110705685).sum()
    return sums.cpu().numpy().tobytes()


def _surroundings(model: PreTrainedModel, modules: dict[str, torch.nn.Module]) -> str:
    """Return all but the weights that K/V depend on: code, config, attention kernel, adapters, hooks, autocast."""
    config = model.config.to_dict()
    device = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
    version = ".".join(transformers.__version__.split(".")[:2])
    facts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in config.items() if key not in _IGNORED_CONFIG},
        "attention": getattr(model.config, "_attn_implementation", None),
        "experts": getattr(model.config, "_experts_implementation", None),
        "dtype": str(model.dtype),
        "autocast": autocast,
        "transformers": version,
        "modules": list(_module_state(modules)),
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _module_state(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[object, ...]]:
    """Yield what code outside of the weights changes a module's output: hooks, replaced forwards, adapter switches.

    Hooks and functions are known by a number of this process: what was computed under them is used only under them.
    """
    for name, module in modules.items():
        prepares = module.__dict__.get("prepare_inputs_for_generation")
        if prepares is not None and not hasattr(getattr(prepares, "__self__", None), "peft_config"):  # PEFT only hands on
            yield (name, "inputs", _serial(prepares))
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):  # accelerate only moves tensors
            hooks.append(module.__dict__["forward"])
        if hooks:
            yield (name, "hooks", *map(_serial, hooks))
        if hasattr(type(module), "merged_adapters"):
            yield (name, "adapters", *(_plain(getattr(module, attribute, None)) for attribute in _ADAPTER_STATE))


def _serial(function: Any) -> int:
    """Return a number that this function object alone has, for as long as it lives."""
    try:
        return _serials.setdefault(function, next(_next_serial))
    except TypeError:  # no weak reference to it: never the same twice
        return next(_next_serial)


def _plain(value: Any) -> object:
    return sorted((str(key), str(item)) for key, item in value.items()) if isinstance(value, dict) else str(value)
