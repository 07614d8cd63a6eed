"""What a live model is, as far as its K/V depend on it: not what it is called.

Owns the fingerprint of weights, config and surroundings, and the cheap check at every call that it still holds.
Refuses to own keys (they take the fingerprint as opaque bytes) and which calls may reuse (cache, session).
"""

import functools
import hashlib
import inspect
import io
import itertools
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import transformers
import xxhash
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Of the config: names, bookkeeping and what only selects outputs.
_IGNORED_CONFIG = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "architectures", "use_cache", "output_attentions",
     "output_hidden_states", "return_dict", "pretraining_tp", "torchscript", "dtype"}
)  # fmt: skip
_SAMPLES = 16  # elements of each tensor looked at in every call
_SETTINGS = frozenset({int, float, bool, str})  # plain attributes of modules that may change what they compute
_VOLATILE = frozenset(
    {"training", "name_or_path", "max_seq_len_cached", "_is_hf_initialized", "_active_adapter", "_disable_adapters"}
) | {"_output_capturing_hooks_installed"}
_COLLECTORS = "transformers.utils.output_capturing"  # puts hooks on at the first call that needs them; they only collect

_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate"})  # a version says what their code is
_LOCAL = "of this process "

Facts = tuple[object, ...]  # about one tensor

_PATIENCE = 3  # calls in a row whose weights changed (a training loop), before nothing is looked for until they hold still
_lock = threading.Lock()
_memories: "weakref.WeakKeyDictionary[PreTrainedModel, _Memory]" = weakref.WeakKeyDictionary()
_serials: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of a live model: `digest` of all that K/V depend on, and what was looked at to know that weights did not change."""

    digest: bytes
    glance: tuple[Facts, ...]
    state: tuple[tuple[object, ...], ...]
    is_local: bool = False  # code is known by numbers of this process

    @property
    def is_portable(self) -> bool:
        """Say whether it means the same in every process: hooks and replaced functions are known by numbers of this one."""
        return not self.is_local and not any(replaced for _, _, _, replaced, _ in self.state)


@dataclass(slots=True)
class _Memory:
    """Of one model: what was seen last, a digest of the weights then, and each tensor's own by name."""

    glance: tuple[Facts, ...] = ()
    weights: bytes = b""
    read: dict[object, tuple[Facts, bytes]] = field(default_factory=dict)
    changes: int = 0  # calls in a row that found weights rewritten
    state: tuple[tuple[object, ...], ...] = ()
    state_text: str = ""

    def read_again(self, seen: tuple[Facts, ...], tensors: dict[str, torch.Tensor], still: bool) -> bool:
        """Read those tensors that are not as they were; say whether that was done. Not while they change at every call."""
        stale = [facts for facts in seen if self.read.get(facts[0], ((), b""))[0] != facts]
        rewritten = any(facts[0] in self.read for facts in stale)
        self.glance, self.weights = seen, b""
        self.changes = self.changes + 1 if rewritten and not still else 0
        if self.changes > _PATIENCE:
            return False
        for facts in stale:
            self.read[facts[0]] = facts, _checksum(str(facts[0]), tensors[str(facts[0])])
        self.weights = b"".join(sorted(self.read[facts[0]][1] for facts in seen))
        return True


def identify(model: PreTrainedModel) -> Fingerprint | None:
    """Return the fingerprint of `model` as it is now, or None if it has none (weights elsewhere, or of unknown kind).

    The first call reads all weights; later calls look at version counters and a sample of each tensor (a few
    milliseconds), and read those again that changed. A model that changes at every call has none until it holds still.
    Safe to call from several threads.
    """
    modules, idle = _live_modules(model)
    tensors = _weight_tensors(modules, idle)
    if not all(_is_plain(tensor) for tensor in tensors.values()):
        return None
    seen = _glance(tensors)
    with _lock:
        memory = _memories.setdefault(model, _Memory())
        still = seen == memory.glance
        if not (still and memory.weights) and not memory.read_again(seen, tensors, still):
            return None
        digest = hashlib.sha256(memory.weights)
    state = tuple(_module_state(modules))
    if state != memory.state:
        memory.state, memory.state_text = state, repr(state)
    around = _surroundings(model, modules)
    digest.update((around + memory.state_text).encode())
    return Fingerprint(digest.digest(), seen, state, _LOCAL in around)


def is_unchanged(model: PreTrainedModel, since: Fingerprint) -> bool:
    """Say whether nothing was written or switched since a fingerprint was taken, not even there and back.

    Looks at less than `identify`, since it is for the length of one call: version counters and the modules' state.
    """
    modules, idle = _live_modules(model)
    tensors = _weight_tensors(modules, idle)
    if any(tensor.is_inference() for tensor in tensors.values()):  # no version counters: look at samples
        return _glance(tensors) == since.glance
    written = [(name, tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()]
    return written == [facts[:3] for facts in since.glance] and tuple(_module_state(modules)) == since.state


def describe(model: PreTrainedModel) -> dict[str, object]:
    """Return what a model is, in words, for people who look at what is stored."""
    return {
        "class": type(model).__name__,
        "name": getattr(model.config, "_name_or_path", "") or None,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype),
        "device": next(model.parameters()).device.type,
        "attention": getattr(model.config, "_attn_implementation", None),
        "transformers": transformers.__version__,
    }


def forget(model: PreTrainedModel) -> None:
    """Drop what is remembered of `model`: the next identify() reads all its weights."""
    with _lock:
        _memories.pop(model, None)


def is_training(model: PreTrainedModel) -> bool:
    """Say whether any part of `model` is in training mode (dropout makes K/V random)."""
    return any(module.training for module in model.modules())


def _live_modules(model: PreTrainedModel) -> tuple[dict[str, torch.nn.Module], set[str]]:
    """Return all modules by name, but for adapters of PEFT that are switched off, and the paths of those.

    What is off does not count: going back to an adapter finds its old entries.
    """
    modules = dict(model.named_modules())
    idle = {f"{name}.{part}" for name, module in modules.items() for part in _idle_adapters(module)}
    if not idle:
        return modules, idle
    return {name: module for name, module in modules.items() if name not in idle}, idle


def _idle_adapters(module: torch.nn.Module) -> list[str]:
    """Return the parts of one of PEFT's layers that compute nothing now, as paths below it."""
    if not hasattr(type(module), "merged_adapters"):
        return []
    layer: Any = module
    live = {*(() if layer.disable_adapters else layer.active_adapters), *layer.merged_adapters}
    # What a layer keeps by adapter name: LoRA's two factors, dropouts, ...
    places: dict[str, Any] = {place: parts for place, parts in layer._modules.items() if hasattr(parts, "keys")}
    return [
        f"{place}.{name}{below}"
        for place, parts in places.items()
        for name in parts
        if name not in live
        for below in _paths_below(parts[name])
    ]


def _paths_below(part: Any) -> list[str]:
    """Return "" for the part itself, and the paths of the modules in it."""
    names = part.named_modules() if isinstance(part, torch.nn.Module) else [("", part)]
    return [f".{name}" if name else "" for name, _ in names]


def _weight_tensors(modules: dict[str, torch.nn.Module], idle: set[str]) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, but for rotary frequencies that follow the length of the request."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{prefix}.{name}" not in idle:
                tensors[f"{prefix}.{name}"] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and not (name.endswith("inv_freq") and _follows_length(module)):
                tensors[f"{prefix}.{name}"] = buffer
    return tensors


def _follows_length(module: torch.nn.Module) -> bool:
    return any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope"))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is what its elements are: a subclass keeps more (quantisation state), "meta" has none at all."""
    return type(tensor) in (torch.nn.Parameter, torch.Tensor) and not tensor.is_meta and not tensor.is_sparse


def _glance(tensors: dict[str, torch.Tensor]) -> tuple[Facts, ...]:
    """Return what is looked at in every call: where each tensor is, how often it was written, and some of its values."""
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors.values():
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
            step = -(-flat.numel() // _SAMPLES) or 1
            samples.setdefault((tensor.dtype, tensor.device), []).append(flat[::step])
        # All of a device's in one copy.
        streams = {group: io.BytesIO(_bytes_of(torch.cat(parts).cpu()).tobytes()) for group, parts in samples.items()}
    facts = []
    for name, tensor in tensors.items():
        count = -(-tensor.numel() // (-(-tensor.numel() // _SAMPLES) or 1))
        sample = streams[tensor.dtype, tensor.device].read(count * tensor.itemsize)
        version = None if tensor.is_inference() else tensor._version
        facts.append((name, tensor.data_ptr(), version, tensor.shape, tensor.dtype, sample))
    return tuple(facts)


def _checksum(name: str, tensor: torch.Tensor) -> bytes:
    """Return a digest of every byte of a tensor, with its name, dtype and shape."""
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{tensor.device.type}|".encode())
    data = tensor.detach().contiguous()
    digest.update(xxhash.xxh3_128_digest(_bytes_of(data)) if data.device.type == "cpu" else _device_sum(data))
    return digest.digest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor as a numpy array that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _device_sum(tensor: torch.Tensor) -> bytes:
    """Return a checksum of all bytes made where they are: two sums modulo 2^64, each with weights of the position."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    raw = raw.view(torch.int64)
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
    device = next(model.parameters()).device
    autocast = torch.is_autocast_enabled(device.type) and str(torch.get_autocast_dtype(device.type))
    attention = getattr(model.config, "_attn_implementation", None)
    version = ".".join(transformers.__version__.split(".")[:2])
    facts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in config.items() if key not in _IGNORED_CONFIG},
        "attention": attention,
        "experts": getattr(model.config, "_experts_implementation", None),
        "dtype": str(model.dtype),
        "device": str(device),
        "autocast": autocast,
        "transformers": version,
        "attention function": _function(ALL_ATTENTION_FUNCTIONS.get(attention)),
        "code": sorted(_code(cls) for cls in {type(module) for module in modules.values()}),
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _module_state(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[object, ...]]:
    """Yield what besides weights changes a module's output: class, settings, hooks, replaced functions, adapter switches.

    Hooks and functions are known by a number of this process: what was computed under them is used only under them.
    """
    for name, module in modules.items():
        own = module.__dict__
        settings = [item for item in own.items() if type(item[1]) in _SETTINGS and item[0] not in _VOLATILE]
        after = [hook for hook in own["_forward_hooks"].values() if getattr(hook, "__module__", None) != _COLLECTORS]
        replaced = [*own["_forward_pre_hooks"].values(), *after]
        if "forward" in own and "_hf_hook" not in own:  # accelerate only moves tensors
            replaced.append(own["forward"])
        prepares = own.get("prepare_inputs_for_generation")
        if prepares is not None and not hasattr(getattr(prepares, "__self__", None), "peft_config"):  # PEFT only hands on
            replaced.append(prepares)
        adapters: tuple[object, ...] = ()
        if hasattr(type(module), "merged_adapters"):
            adapters = _adapter_state(module)
        yield (name, type(module).__qualname__, settings, [_state_of(function) for function in replaced], adapters)


def _code(cls: Any) -> str:
    """Return what a module class computes, as far as its code says: its forward, and the functions that calls by name.

    Of code that is not a library's, also what those call, and the plain values they all use: nobody numbers its versions.
    """
    texts: dict[Any, str] = {}
    _read_code(cls.forward, cls, texts)
    return f"{cls.__module__}.{cls.__qualname__}: {' '.join(texts.values())}"


def _read_code(function: Any, cls: Any, texts: dict[Any, str], *, follows: bool = True) -> None:
    """Add a function, and what it uses, to `texts`."""
    unwrapped = inspect.unwrap(function)
    for each in {function: None, unwrapped: None}:
        if each not in texts:
            texts[each] = _function(each)
    if not follows or not hasattr(unwrapped, "__code__"):
        return
    is_library = _is_library(unwrapped)
    for name in sorted(_names(unwrapped.__code__)):
        for value in (unwrapped.__globals__.get(name), getattr(cls, name, None)):
            if inspect.isfunction(value):
                if inspect.unwrap(value) not in texts:
                    _read_code(value, cls, texts, follows=not is_library)
            elif type(value) in _SETTINGS and not is_library:
                texts[unwrapped, name] = f"{name}={value!r}"


def _is_library(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] in _LIBRARIES


def _names(code: CodeType) -> set[str]:
    """Return the names that code, and functions inside it, look up."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _function(function: Any) -> str:
    """Return a function's name and a digest of its code: the same in every process, another if somebody replaced it.

    What cannot be told so (an object that is called, a value in a closure) is known by a number of this process.
    """
    if isinstance(function, functools.partial):
        bound = [_value(value) for value in (*function.args, *itertools.chain(*sorted(function.keywords.items())))]
        return f"partial({_function(function.func)}, {', '.join(bound)})"
    code = getattr(function, "__code__", None)
    if code is None:
        return _value(function)
    if _is_library(function):
        return f"{function.__module__}.{function.__qualname__}-{xxhash.xxh3_64_hexdigest(_bytes_of_code(code))}"
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *itertools.chain(*sorted((function.__kwdefaults__ or {}).items()))]
    used = [_value(value) for value in (*cells, *defaults)]
    return f"{function.__module__}.{function.__qualname__}-{xxhash.xxh3_64_hexdigest(_bytes_of_code(code))} {' '.join(used)}"


def _bytes_of_code(code: CodeType) -> bytes:
    constants = [value for value in code.co_consts if type(value) in _SETTINGS]
    inner = [_bytes_of_code(value) for value in code.co_consts if isinstance(value, CodeType)]
    return code.co_code + repr((code.co_names, constants, inner)).encode()


def _value(value: Any) -> str:
    if value is None or type(value) in _SETTINGS:
        return repr(value)
    if inspect.isfunction(value) and (_is_library(value) or not value.__closure__):
        return _function(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value) in (tuple, list, dict):
        items = itertools.chain(*value.items()) if type(value) is dict else value
        return f"{type(value).__qualname__}({', '.join(map(_value, items))})"
    return f"{type(value).__qualname__} {_LOCAL}{_serial(value)}"


def _state_of(function: Any) -> tuple[object, ...]:
    """Return a hook's number, and its plain attributes where it is an object's (a strength that is turned up, say)."""
    own = getattr(getattr(function, "__self__", function), "__dict__", {})
    return _serial(function), [item for item in own.items() if type(item[1]) in _SETTINGS]


def _serial(function: Any) -> int:
    """Return a number that this function object alone has, for as long as it lives."""
    try:
        return _serials.setdefault(function, next(_next_serial))
    except TypeError:  # no weak reference to it: never the same twice
        return next(_next_serial)


def _adapter_state(layer: Any) -> tuple[object, ...]:
    """Return which adapters of one of PEFT's layers are on, in their order, and how strongly."""
    live = () if layer.disable_adapters else tuple(layer.active_adapters)
    scaling = getattr(layer, "scaling", {})
    return live, tuple(layer.merged_adapters), [str(scaling.get(name)) for name in live]
