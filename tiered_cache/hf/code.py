"""What code computes: a text that is the same in every process, and another when somebody replaced it.

Owns reading functions, classes and the plain values they use, and numbers for objects that only this process knows.
Refuses to own which code a model consists of (identity) and tensors (weights).
"""

import contextlib
import functools
import inspect
import itertools
import weakref
from types import CodeType
from typing import Any

import torch
import xxhash
from torch.utils.weak import WeakIdKeyDictionary

SETTINGS = frozenset({int, float, bool, str, torch.dtype})  # plain values that may change what is computed
LOCAL = "of this process "  # in the text of what is known by a number of this process

_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate"})  # a version says what their code is

_serials: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_tensor_serials: Any = WeakIdKeyDictionary()  # tensors cannot be compared as keys
_next_serial = itertools.count()


def text_of_class(cls: Any) -> str:
    """Return what a module class computes, as far as its code says: its forward, and the functions that calls by name.

    Of code that is not a library's, also what those call, and the plain values they all use: nobody numbers its versions.
    """
    texts: dict[Any, str] = {}
    _read(cls.forward, cls, texts)
    return f"{cls.__module__}.{cls.__qualname__}: {' '.join(texts.values())}"


def text_of_function(function: Any) -> str:
    """Return a function's name and a digest of its code: the same in every process, another if somebody replaced it.

    What cannot be told so (an object that is called, a value in a closure) is known by a number of this process.
    """
    if isinstance(function, functools.partial):
        bound = [_value(value) for value in (*function.args, *itertools.chain(*sorted(function.keywords.items())))]
        return f"partial({text_of_function(function.func)}, {', '.join(bound)})"
    code = getattr(function, "__code__", None)
    if code is None:
        return _value(function)
    name = f"{function.__module__}.{function.__qualname__}-{xxhash.xxh3_64_hexdigest(_bytes_of(code))}"
    if is_of_library(function):
        return name
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *itertools.chain(*sorted((function.__kwdefaults__ or {}).items()))]
    return f"{name} {' '.join(_value(value) for value in (*cells, *defaults))}"


def is_of_library(code: Any) -> bool:
    """Say whether a function or class is of a library whose version says what its code is."""
    return str(code.__module__).partition(".")[0] in _LIBRARIES


def serial(thing: Any) -> int:
    """Return a number that this object alone has, for as long as it lives."""
    if isinstance(thing, torch.Tensor):
        return int(_tensor_serials.setdefault(thing, next(_next_serial)))
    try:
        return _serials.setdefault(thing, next(_next_serial))
    except TypeError:  # no weak reference to it: never the same twice
        return next(_next_serial)


def held_by(function: Any) -> list[tuple[Any, object]]:
    """Return what a function, or the object that it is of, may read anew in every call: plain values, and tensors by number.

    A strength that is turned up, a direction that is scaled in place.
    """
    held: dict[Any, Any] = dict(getattr(getattr(function, "__self__", function), "__dict__", {}))
    if isinstance(function, functools.partial):
        held.update(function.keywords)
        held.update(enumerate(function.args))
    names, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    for name, cell in zip(names.co_freevars, cells, strict=True) if names is not None and cells else ():
        with contextlib.suppress(ValueError):  # nothing in it yet
            held[name] = cell.cell_contents
    tensors = [(name, value) for name, value in held.items() if isinstance(value, torch.Tensor)]
    return [
        *((name, value) for name, value in held.items() if type(value) in SETTINGS),
        *((name, (serial(value), None if value.is_inference() else value._version)) for name, value in tensors),
    ]


def _read(function: Any, cls: Any, texts: dict[Any, str], *, follows: bool = True) -> None:
    """Add a function, and what it uses, to `texts`."""
    unwrapped = inspect.unwrap(function)
    for each in {function: None, unwrapped: None}:
        if each not in texts:
            texts[each] = text_of_function(each)
    if not follows or not hasattr(unwrapped, "__code__"):
        return
    is_library = is_of_library(unwrapped)
    for name in sorted(_names(unwrapped.__code__)):
        for value in (unwrapped.__globals__.get(name), getattr(cls, name, None)):
            if inspect.isfunction(value):
                if inspect.unwrap(value) not in texts:
                    _read(value, cls, texts, follows=not is_library)
            elif type(value) in SETTINGS and not is_library:
                texts[unwrapped, name] = f"{name}={value!r}"


def _names(code: CodeType) -> set[str]:
    """Return the names that code, and functions inside it, look up."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _bytes_of(code: CodeType) -> bytes:
    constants = [value for value in code.co_consts if type(value) in SETTINGS]
    inner = [_bytes_of(value) for value in code.co_consts if isinstance(value, CodeType)]
    return code.co_code + repr((code.co_names, constants, inner)).encode()


def _value(value: Any) -> str:
    if value is None or type(value) in SETTINGS:
        return repr(value)
    if inspect.isfunction(value) and (is_of_library(value) or not value.__closure__):
        return text_of_function(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value) in (tuple, list, dict):
        items = itertools.chain(*value.items()) if type(value) is dict else value
        return f"{type(value).__qualname__}({', '.join(map(_value, items))})"
    return f"{type(value).__qualname__} {LOCAL}{serial(value)}"
