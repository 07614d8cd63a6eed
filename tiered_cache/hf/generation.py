"""The hooks on transformers' GenerationMixin, and switching them: enable, disable, uninstall.

Owns how a generate() call comes to have a session. Refuses to own what the session does (session).
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from tiered_cache.defaults import default_stack
from tiered_cache.errors import ConfigError, TieredCacheError
from tiered_cache.hf import compat
from tiered_cache.hf.cache import TieredCache
from tiered_cache.hf.columns import count_tokens
from tiered_cache.hf.explain import Refusal
from tiered_cache.hf.session import Session
from tiered_cache.stack import TierStack, check_stack
from tiered_cache.usage import MissReason, Usage

logger = logging.getLogger(__name__)

_MARK = "_tiered_cache_hook"
_automatic: dict[str, TierStack | None] = {}  # {"stack": ...} while enabled


def enable(stack: TierStack | None = None) -> None:
    """Let every generate() without a cache of its own use a TieredCache, on `stack` or the default stack.

    Never raises in generate() and never changes a result. Steps aside for encoder-decoder models, use_cache=False, any
    cache_implementation, nested calls and models in training mode.

    Raises:
        ConfigError, ClosedError: `stack` is not an open TierStack.
    """
    if stack is not None:
        check_stack(stack, "enable(stack=...)")
    install()
    _automatic["stack"] = stack


def disable() -> None:
    """Undo `enable`. Calls that pass a TieredCache go on as before."""
    _automatic.clear()


def install() -> None:
    """Put the hooks on GenerationMixin, unless they are there. TieredCache() does this by itself."""
    for name, wrap in _hooks():
        for function in _chain(getattr(GenerationMixin, name)):
            if _is_hook(function) and function.__globals__ is globals():
                function.active = True
                break
        else:
            present = getattr(GenerationMixin, name)
            if _is_hook(present):  # of an earlier import of this package
                present = present.__wrapped__
            setattr(GenerationMixin, name, wrap(present))
    TieredCache.hooks_installed = True


def uninstall() -> None:
    """Take the hooks off again; where somebody wrapped them they stay, and do nothing. Also disables.

    A TieredCache made before is refused by generate() from then on; making a new one installs the hooks again.
    """
    disable()
    for name, _ in _hooks():
        for function in _chain(getattr(GenerationMixin, name)):
            if _is_hook(function):
                function.active = False
        if _is_hook(getattr(GenerationMixin, name)):
            setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
    TieredCache.hooks_installed = False


TieredCache.install_hooks = staticmethod(install)


def _hook_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not generate.active:  # type: ignore[attr-defined]
            return original(self, *args, **kwargs)
        return _generate(original, self, args, kwargs)

    return _marked(generate)


def _hook_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prefill(
        self: PreTrainedModel, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        cache = model_kwargs.get(compat.CACHE_ARGUMENT)
        if not _prefill.active or not _is_tiered(cache):  # type: ignore[attr-defined]
            return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if cache.session is not None and cache.session.encloses_this():
            return cache.session.prefill(original, input_ids, generation_config, model_kwargs, *args, **kwargs)
        # generate() was fetched before the hooks were installed: the prefill is all there is to see.
        session = Session(self, cache)
        session.open(0, only_new_tokens=False)
        try:
            outputs = session.prefill(original, input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            session.fail()  # whatever comes next is not seen: keep the prompt, and nothing else
            session.close()
        return outputs

    return _marked(_prefill)


def _hook_encoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def encode(
        self: PreTrainedModel, inputs_tensor: Any, model_kwargs: Any, model_input_name: Any, generation_config: Any
    ) -> Any:
        cache = model_kwargs.get(compat.CACHE_ARGUMENT)
        is_ours = encode.active and _is_tiered(cache) and cache.session is not None  # type: ignore[attr-defined]
        if not is_ours or not cache.session.encloses_this():
            return original(self, inputs_tensor, model_kwargs, model_input_name, generation_config)
        return cache.session.encode(original, inputs_tensor, model_kwargs, model_input_name, generation_config)

    return _marked(encode)


def _hooks() -> list[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
    hooks = [("generate", _hook_generate), ("_prefill", _hook_prefill), (compat.ENCODING, _hook_encoding)]
    return [(name, wrap) for name, wrap in hooks if hasattr(GenerationMixin, name)]


def _generate(original: Callable[..., Any], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one generate() call, with a session if it has a TieredCache."""
    given = [kwargs[name] for name in compat.CACHE_ARGUMENTS if kwargs.get(name) is not None]
    cache = next(filter(_is_tiered, given), None)
    automatic = cache is None
    if automatic and not given and _may_insert(model, args, kwargs):
        cache = _inserted()  # None where that cannot be made
    if model.config.is_encoder_decoder and any(map(_holds_tiered, given)):
        return _generate_apart(original, model, args, kwargs)
    if cache is None:
        return original(model, *args, **kwargs)
    if any(other is not cache for other in given):
        raise ConfigError("generate() was given two caches, as `cache` and as `past_key_values`. Pass one of them.")
    kwargs = {name: value for name, value in kwargs.items() if name not in compat.CACHE_ARGUMENTS}
    kwargs[compat.CACHE_ARGUMENT] = cache
    if cache.session is not None and cache.session.encloses_this():  # a decoding method calls generate() itself
        return original(model, *args, **kwargs)
    custom = compat.generate_argument(args, kwargs, "custom_generate")
    refusal = Refusal(MissReason.DISABLED_CALL, "custom_generate does its own decoding") if custom is not None else None
    assistant = compat.generate_argument(args, kwargs, "assistant_model")
    own_positions = kwargs.get("position_ids") is None
    session = Session(model, cache, automatic=automatic, refusal=refusal, assistant=assistant, own_positions=own_positions)
    try:
        session.open(*_count_prompt(args, kwargs))
    except Exception:
        if not automatic:
            raise
        kwargs.pop(compat.CACHE_ARGUMENT)
        return original(model, *args, **kwargs)
    try:
        try:
            result = original(model, *args, **kwargs)
        except BaseException as error:
            session.fail()
            if isinstance(error, torch.OutOfMemoryError):  # so that the next try may succeed
                cache.stack.relieve(sys.maxsize)
            raise
        session.finish(result)
        return result
    finally:
        session.close()


def _generate_apart(original: Callable[..., Any], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a generate() call of an encoder-decoder model with a cache of its own: what the decoder sees of the encoder is
    never that of an earlier call."""
    for name in compat.CACHE_ARGUMENTS:
        cache = kwargs.pop(name, None)
        if _is_tiered(cache):
            cache.check_free()
            cache.take_out()
            why = Refusal(MissReason.UNSUPPORTED_LAYERS, "an encoder-decoder model: nothing is kept from one call to the next")
            cache.note(Usage(_count_prompt(args, kwargs)[0], miss_reason=why.reason), why)
            cache.stack.record(cache.noted)
    return original(model, *args, **kwargs)


def _may_insert(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether enable() gives this call a cache."""
    if "stack" not in _automatic or _is_nested():
        return False
    configs = [compat.generate_argument(args, kwargs, "generation_config"), model.generation_config]
    for name, plain in (("use_cache", (None, True)), ("cache_implementation", (None,))):
        chosen = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        if any(value not in plain for value in chosen):
            return False
    return not (
        model.config.is_encoder_decoder
        or model.training
        or compat.generate_argument(args, kwargs, "custom_generate") is not None
        or kwargs.get("inputs_embeds") is not None
        or not compat.uses_cache_by_default(model)
    )


def _inserted() -> TieredCache | None:
    """Return a new cache on the stack that enable() was given, or on the default one if that was closed.

    None, with a warning, where the environment names a directory for it that is not fit.
    """
    stack = _automatic.get("stack")
    try:
        return TieredCache(stack if stack is not None and not stack.closed else default_stack())
    except TieredCacheError as error:
        logger.warning("generate() goes on without a TieredCache: %s", error)
        return None


def _count_prompt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
    """Return the tokens a call passes, and whether its mask has more columns, as far as that can be seen before it runs."""
    embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    if isinstance(embeds, torch.Tensor):
        return int(embeds.shape[:2].numel()), False
    ids = compat.generate_argument(args, kwargs, "inputs")
    ids = kwargs.get("input_ids") if ids is None else ids
    if ids is None:
        return 1, False  # the BOS token
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return 0, False
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return count_tokens(ids, None), False
    return count_tokens(ids, mask), mask.shape[1] != ids.shape[1]


def _is_nested() -> bool:
    """Say whether the present generate() call runs inside another one on this thread."""
    # The stack itself says so: a counter could be left standing by Ctrl-C.
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code is _generate.__code__
        frame = frame.f_back
    return calls > 1


def _marked(hook: Callable[..., Any]) -> Callable[..., Any]:
    # functools.wraps copies attributes onto other people's wrappers; only the hook itself carries itself as its mark.
    hook.__dict__[_MARK] = hook
    hook.active = True  # type: ignore[attr-defined]
    return hook


def _is_hook(function: Any) -> bool:
    return getattr(function, _MARK, None) is function


def _chain(function: Any) -> Iterator[Any]:
    """Yield a function and those it wraps, as far as functools.wraps shows them."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _holds_tiered(cache: Any) -> bool:
    """Say whether a cache is a TieredCache, or the decoder's part of a pair is one."""
    return _is_tiered(cache) or _is_tiered(getattr(cache, "self_attention_cache", None))


def _is_tiered(cache: Any) -> bool:
    return getattr(type(cache), "is_tiered", False) is True
