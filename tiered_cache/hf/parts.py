"""What one value that a model computes with is made of: plain tensors, and a text of the rest.

Owns taking apart tensors that are more than their elements (quantised ones), and saying why one cannot be. Refuses to own
where a model keeps its weights (weights, offloaded), and reading elements.
"""

import dataclasses
import enum
import functools
import importlib.metadata
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from tiered_cache.hf.code import LOCAL, SETTINGS, is_of_library, text_of_function

_PLAIN = (torch.nn.Parameter, torch.Tensor)
_VALUES = SETTINGS | {type(None), bytes, complex, torch.device, torch.layout, torch.memory_format}
# Their parameters are subclasses that keep the rest in plain attributes; so do the modules, from the first forward on.
_WITH_ATTRIBUTES = "bitsandbytes"
_OF_ONE_FORWARD = frozenset({"module", "is_training", "idx"})  # of those attributes
_MANY = 1000  # plain values in one container, beyond which it is not looked through in every call
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class UnreadableError(Exception):
    """Say which weight cannot be read in full, and what to do."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is what its elements are, and has them: "meta" has none, a subclass keeps more."""
    return type(tensor) in _PLAIN and not tensor.is_meta and tensor.layout is torch.strided and not tensor.is_quantized


def has_attributes(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a parameter whose scales are plain attributes of it or of its module."""
    return type(tensor).__module__.partition(".")[0] == _WITH_ATTRIBUTES


def take_apart(name: str, value: Any, parts: dict[str, torch.Tensor], *, strict: bool = True) -> str:
    """Put the plain tensors that `value` is made of into `parts`, by name; return a text of all the rest.

    Args:
        strict: what is unknown is an error; else it counts by its type, and objects other than dataclasses are not entered.

    Raises:
        UnreadableError: it is more than can be read.
    """

    def inner(items: Iterable[tuple[Any, Any]]) -> str:
        return ", ".join(f"{key}={take_apart(f'{name}.{key}', each, parts, strict=strict)}" for key, each in items)

    if isinstance(value, torch.Tensor):
        return _take_tensor_apart(name, value, parts)
    if type(value) in _VALUES:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, dict | tuple | list):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        if not strict and len(items) > _MANY and type(items[0][1]) in _VALUES:  # a vocabulary, say
            return _name(type(value))
        return f"{_name(type(value))}({inner(items)})"
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, torch.ScriptObject):
        raise UnreadableError(f"{name} is packed where it cannot be read; quantise with torchao instead")
    if inspect.isfunction(value) and LOCAL not in (text := text_of_function(value)):
        return text
    attributes = _attributes(value, strict)
    if attributes is not None:
        return f"{_name(type(value))}({inner(attributes)})"
    if strict:
        raise UnreadableError(f"{name} is of a kind that cannot be read, {_name(type(value))}")
    return _name(type(value))


@functools.lru_cache(maxsize=1024)  # asked of every module in every call
def keeps_more(cls: Any) -> bool:
    """Say whether modules of a class may compute with tensors in plain attributes, not as parameters or buffers only."""
    place = str(cls.__module__)
    package = place.partition(".")[0]
    if package in ("torch", "transformers"):
        return place.startswith(("torch.ao.", "transformers.integrations."))
    return package not in ("peft", "accelerate", _WITH_ATTRIBUTES)  # of bitsandbytes they come with the parameter


def gather(name: str, parameter: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor | str]:
    """Return what a parameter or buffer that is not plain is made of, by name."""
    parts: dict[str, torch.Tensor] = {}
    if has_attributes(parameter) and not parameter.is_meta:
        text = _take_attributes_apart(name, parameter, module, parts)
    else:
        text = _take_tensor_apart(name, parameter, parts)
    return {**parts, f"{name} is": text}


def gather_attributes(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor | str]:
    """Return the tensors that a module keeps in plain attributes, by name, with what is kept beside them."""
    found: dict[str, torch.Tensor | str] = {}
    for attribute, value in module.__dict__.items():
        # What is only cached was made of other things and grows with the requests.
        if type(value) in _VALUES or attribute in _OF_EVERY_MODULE or "cache" in attribute:
            continue
        parts: dict[str, torch.Tensor] = {}
        text = take_apart(f"{name}.{attribute}", value, parts, strict=False)
        if parts:
            found |= {**parts, f"{name}.{attribute} is": text}
    return found


def _take_tensor_apart(name: str, tensor: Any, parts: dict[str, torch.Tensor]) -> str:
    if is_plain(tensor):
        parts[name] = tensor
        return "tensor"
    kind = _name(type(tensor))
    if tensor.is_meta:
        raise UnreadableError(f"{name} is on the meta device, and no hook of accelerate's knows its values; load them first")
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = [f"{each}={take_apart(f'{name}.{each}', getattr(tensor, each), parts)}" for each in names]
        rest = take_apart(f"{name}.context", context, parts)
        return f"{kind} {_version(kind)} {tuple(tensor.shape)} {tensor.dtype} ({', '.join(inner)}) {rest}"
    raise UnreadableError(
        f"{name} is of a kind that cannot be read, {kind} ({tensor.layout}); quantise with torchao or bitsandbytes instead"
    )


def _take_attributes_apart(name: str, parameter: Any, module: Any, parts: dict[str, torch.Tensor]) -> str:
    """Take a parameter of bitsandbytes apart: its packed bytes, and scales that it or its module keeps."""
    parts[name] = parameter.as_subclass(torch.Tensor)  # an alias: same storage, same version counter
    places = [vars(parameter), getattr(getattr(module, "state", None), "__dict__", {})]
    if vars(parameter).get("quant_state") is None:  # lost where the parameter was converted
        places.append({"quant_state": getattr(module, "quant_state", None)})
    # They move from one to the other at the first forward, unchanged.
    kept = {key: value for place in places for key, value in place.items() if value is not None and key not in _OF_ONE_FORWARD}
    texts = [f"{key}={take_apart(f'{name}.{key}', kept[key], parts)}" for key in sorted(kept)]
    kind = _name(type(parameter))
    return f"{kind} {_version(kind)} {', '.join(texts)}"


def _attributes(value: Any, strict: bool) -> list[tuple[str, Any]] | None:
    """Return the attributes of an object that is no more than those, or None."""
    if isinstance(value, type | torch.nn.Module) or callable(value):
        return None
    if not strict and is_of_library(type(value)):  # a config, say
        return None
    if dataclasses.is_dataclass(value):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    # Objects of extension modules may hold more than they show.
    if strict and type(type(value)) is type and hasattr(value, "__dict__"):
        return sorted(vars(value).items())
    return None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@functools.cache
def _version(kind: str) -> str:
    """Return the version of the package that a class is of: what it computes with its parts."""
    try:
        return importlib.metadata.version(kind.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return ""
