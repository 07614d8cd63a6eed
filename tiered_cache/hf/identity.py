"""What a live model is, as far as its K/V depend on it: not what it is called.

Owns the fingerprint as a whole: weights, config, adapters, hooks, code and all around them, and whether it still holds.
Refuses to own how weights (weights) and code (code) are read, keys (they take the fingerprint as opaque bytes) and which
calls may reuse (cache, session).
"""

import hashlib
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiered_cache.hf import weights
from tiered_cache.hf.code import LOCAL, SETTINGS, held_by, serial, text_of_class, text_of_function
from tiered_cache.hf.offloaded import device_of, execution_devices, replaces_forward
from tiered_cache.hf.parts import UnreadableError

# Of the config: names, bookkeeping and what only selects outputs.
_IGNORED_CONFIG = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "architectures", "use_cache", "output_attentions",
     "output_hidden_states", "return_dict", "pretraining_tp", "torchscript", "dtype"}
)  # fmt: skip
_VOLATILE = frozenset(
    {"training", "name_or_path", "max_seq_len_cached", "_is_hf_initialized", "_active_adapter", "_disable_adapters"}
) | {"_output_capturing_hooks_installed"}
_COLLECTORS = "transformers.utils.output_capturing"  # puts hooks on at the first call that needs them; they only collect

_lock = threading.Lock()
_memories: "weakref.WeakKeyDictionary[PreTrainedModel, _Memory]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of a live model: `digest` of all that K/V depend on, and what was looked at to know that weights did not change."""

    digest: bytes
    glance: tuple[weights.Facts, ...]
    state: tuple[tuple[object, ...], ...]
    is_local: bool = False  # code is known by numbers of this process

    @property
    def is_portable(self) -> bool:
        """Say whether it means the same in every process: hooks and replaced functions are known by numbers of this one."""
        return not self.is_local and not any(replaced for _, _, _, replaced, _ in self.state)


@dataclass(slots=True)
class _Memory:
    """Of one model: what was read of its weights, and the state of its modules with the text of that."""

    reader: weights.Reader = field(default_factory=weights.Reader)
    state: tuple[tuple[object, ...], ...] = ()
    state_text: str = ""


def identify(model: PreTrainedModel) -> Fingerprint | None:
    """Return the fingerprint of `model` as it is now, or None if it has none (`why_not` says why).

    The first call reads all weights; later calls look at version counters and a sample of each tensor (a few
    milliseconds), and read those again that changed. A model that changes at every call has none until it holds still.
    Safe to call from several threads.
    """
    modules, idle = _live_modules(model)
    try:
        found = weights.find(modules, idle)
        seen = weights.glance(found)
        with _lock:
            memory = _memories.setdefault(model, _Memory())
            known = memory.reader.digest_of(found, seen)
    except UnreadableError:
        return None
    if known is None:
        return None
    digest = hashlib.sha256(known)
    state = tuple(_module_state(modules))
    if state != memory.state:
        memory.state, memory.state_text = state, repr(state)
    around = _surroundings(model, modules)
    digest.update((around + memory.state_text).encode())
    return Fingerprint(digest.digest(), seen, state, LOCAL in around)


def why_not(model: PreTrainedModel) -> str:
    """Return why `identify` gives nothing for `model` now."""
    try:
        weights.glance(weights.find(*_live_modules(model)))
    except UnreadableError as error:
        return f"the weights cannot be read in full: {error}"
    return "the weights change at every call"


def is_unchanged(model: PreTrainedModel, since: Fingerprint) -> bool:
    """Say whether nothing was written or switched since a fingerprint was taken, not even there and back.

    Looks at less than `identify`, since it is for the length of one call: version counters and the modules' state.
    """
    modules, idle = _live_modules(model)
    try:
        is_unwritten = weights.is_unwritten(weights.find(modules, idle), since.glance)
    except UnreadableError:
        return False
    return is_unwritten and tuple(_module_state(modules)) == since.state


def describe(model: PreTrainedModel) -> dict[str, object]:
    """Return what a model is, in words, for people who look at what is stored."""
    return {
        "class": type(model).__name__,
        "name": getattr(model.config, "_name_or_path", "") or None,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype),
        "device": device_of(model).type,
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


def _surroundings(model: PreTrainedModel, modules: dict[str, torch.nn.Module]) -> str:
    """Return all but the weights that K/V depend on: code, config, attention kernel, adapters, hooks, autocast."""
    config = model.config.to_dict()
    device = device_of(model)
    autocast = torch.is_autocast_enabled(device.type) and str(torch.get_autocast_dtype(device.type))
    attention = getattr(model.config, "_attn_implementation", None)
    version = ".".join(transformers.__version__.split(".")[:2])
    facts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in config.items() if key not in _IGNORED_CONFIG},
        "attention": attention,
        "experts": getattr(model.config, "_experts_implementation", None),
        "dtype": str(model.dtype),
        "devices": sorted(map(str, execution_devices(model))) if getattr(model, "hf_device_map", None) else [str(device)],
        "autocast": autocast,
        "transformers": version,
        "attention function": text_of_function(ALL_ATTENTION_FUNCTIONS.get(attention)),
        "code": sorted(text_of_class(cls) for cls in {type(module) for module in modules.values()}),
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _module_state(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[object, ...]]:
    """Yield what besides weights changes a module's output: class, settings, hooks, replaced functions, adapter switches.

    Hooks and functions are known by a number of this process: what was computed under them is used only under them.
    """
    for name, module in modules.items():
        own = module.__dict__
        settings = [item for item in own.items() if type(item[1]) in SETTINGS and item[0] not in _VOLATILE]
        after = [hook for hook in own["_forward_hooks"].values() if getattr(hook, "__module__", None) != _COLLECTORS]
        replaced = [*own["_forward_pre_hooks"].values(), *after]
        if "forward" in own:
            replaced += replaces_forward(module)
        prepares = own.get("prepare_inputs_for_generation")
        if prepares is not None and not hasattr(getattr(prepares, "__self__", None), "peft_config"):  # PEFT only hands on
            replaced.append(prepares)
        adapters: tuple[object, ...] = ()
        if hasattr(type(module), "merged_adapters"):
            adapters = _adapter_state(module)
        yield (name, type(module).__qualname__, settings, [_state_of(function) for function in replaced], adapters)


def _state_of(function: Any) -> tuple[object, ...]:
    """Return a hook's number, and what it holds."""
    return serial(function), held_by(function)


def _adapter_state(layer: Any) -> tuple[object, ...]:
    """Return which adapters of one of PEFT's layers are on, in their order, and how strongly."""
    live = () if layer.disable_adapters else tuple(layer.active_adapters)
    scaling = getattr(layer, "scaling", {})
    return live, tuple(layer.merged_adapters), [str(scaling.get(name)) for name in live]
