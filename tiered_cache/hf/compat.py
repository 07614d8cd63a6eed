"""Every difference between the supported transformers versions, and what is read from their configs and arguments.

Owns names and facts of transformers that changed or may change. Refuses to own decisions that need our own state.
"""

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version  # a dependency of transformers
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from tiered_cache import progress
from tiered_cache.errors import UnsupportedModelError
from tiered_cache.hf.layers import GrowableLayer
from tiered_cache.hf.windows import CapturingSlidingLayer

VERSION = Version(transformers.__version__)

# Before that release recurrent layers are without reuse.
KEEPS_STATES = Version("5.17") <= VERSION
if KEEPS_STATES:
    from tiered_cache.hf import states

# Of a layer that keeps nothing, or shares what another one keeps.
EMPTY_LAYERS: tuple[Any, ...] = tuple(vars(cache_utils)[name] for name in ("DummyLayer",) if hasattr(cache_utils, name))

# generate() and forward() call their cache argument `past_key_values` up to some release, `cache` from then on.
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
)
CACHE_ARGUMENTS = ("cache", "past_key_values")  # what our hooks accept everywhere

# A chunked prefill on a cache that holds something: before this release the whole prompt is fed again.
CHUNKED_PREFILL_CONTINUES = Version("5.24") <= VERSION

# Model code that is itself wrong, or fails, when it continues from a prefix (seen at some of the supported releases).
NOT_CONTINUING = frozenset(
    {"big_bird", "deepseek_v32", "glm_moe_dsa", "megatron-bert", "prophetnet", "rembert", "roformer", "xlm", "xlm-prophetnet"}
)
# Models that count positions from the attention mask by themselves, or have none. Others get them from generate(), if at all.
POSITIONS_FROM_MASK = frozenset({"bloom", "falcon_mamba", "mamba", "mamba2", "opt"})

# Models whose mask over content is wrong on a cache that holds something, at some of the supported releases.
CONTENT_FROM_EMPTY = frozenset() if Version("5.24") <= VERSION else frozenset({"gemma3"})
# generate() encodes images by this, before the prefill, from some release on.
ENCODING = "_maybe_prepare_encoder_kwargs_for_generation"

REUSING_MODES = frozenset(
    {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}
)
BEAM_MODES = frozenset({GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE})

# What generate() may hand to forward() without changing K/V beyond what tokens, mask and identity say.
PLAIN_MODEL_ARGUMENTS = frozenset(
    {CACHE_ARGUMENT, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"}
)
OUTPUT_ARGUMENTS = ("output_attentions", "output_hidden_states")

BAR_DELAY_S = 1.0  # before that no progress bar is shown

_GENERATE_ARGUMENTS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]


def generate_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return what a generate() call passes as `name`, by position or by keyword."""
    if name in kwargs:
        return kwargs[name]
    place = _GENERATE_ARGUMENTS.index(name) if name in _GENERATE_ARGUMENTS else len(args)
    return args[place] if place < len(args) else None


def check_decoder(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for an encoder-decoder model, whose cache is a pair of caches."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model, for which TieredCache has no reuse. Leave the cache out."
        )


def cache_layers(config: PreTrainedConfig, max_captured_nbytes: int) -> list[Any]:
    """Return fresh layers for a model of `config`: ours where a prefix can be reused, transformers' own elsewhere.

    Args:
        max_captured_nbytes: what all sliding-window layers together may hold until it is stored.
    """
    layers: list[Any] = DynamicCache(config=text_config(config)).layers
    if KEEPS_STATES:
        is_recurrent = states.is_recurrent(layers)
        layers = [states.own_layer(layer, is_recurrent) for layer in layers]
    sliding = [type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1 for layer in layers]
    share = max_captured_nbytes // max(sum(sliding), 1)
    return [
        GrowableLayer() if type(layer) is DynamicLayer
        else CapturingSlidingLayer(layer.sliding_window, share) if slides
        else layer
        for layer, slides in zip(layers, sliding, strict=True)
    ]  # fmt: skip


def progress_bar(total: int, what: str, unit: str) -> Any:
    """Return transformers' own bar, shown after a second, not at all where transformers' progress bars are off."""
    return logging.tqdm(
        total=total, desc=what, unit=unit, unit_scale=unit == "B", unit_divisor=1024, delay=BAR_DELAY_S, leave=False
    )


progress.show = progress_bar


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the decoder that the cache serves."""
    return config.get_text_config(decoder=True)


def slices_prompts(cache: DynamicCache) -> bool:
    """Say whether generate() feeds only what a cache does not hold: not where that holds states alone."""
    return not cache.layers or not all(getattr(cache, "is_linear", [False]))


def layer_configs(config: PreTrainedConfig, num_layers: int) -> list[PreTrainedConfig]:
    """Return the config of each layer of the decoder that the cache serves; they may differ in heads and widths."""
    config = text_config(config)
    configs = list(getattr(config, "per_layer_config", None) or ())
    return [configs[place] if place < len(configs) else config for place in range(num_layers)]


def mask_columns(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int | None:
    """Return the columns of the attention mask that generate() was given or made, inside `_prefill`; None without one.

    A mask of ones is dropped there; its length is then noted in the generation config (from 5.24 on). `_prefill` feeds only
    what the cache does not hold where that is the prompt's length, and the whole prompt where forward() names no mask.
    """
    mask = model_kwargs.get("attention_mask")
    noted = mask.shape[-1] if mask is not None else getattr(generation_config, "_mask_length", None)
    return None if noted is None else int(noted)


def uses_cache_by_default(model: PreTrainedModel) -> bool:
    """Say whether generate() would give this model a DynamicCache when the user passes none."""
    cls: Any = type(model)
    return bool(
        CACHE_ARGUMENT in inspect.signature(model.forward).parameters
        and cls._supports_default_dynamic_cache()
        and cls._prepare_cache_for_generation is GenerationMixin._prepare_cache_for_generation
    )


def inner_model(model: Any) -> Any:
    """Return the model that generate() runs on: the one inside where PEFT wraps it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def keeps_state(model: PreTrainedModel) -> bool:
    """Say whether a model keeps something of an earlier request on itself (the Qwen-VL family's position offsets)."""
    return any("rope_deltas" in vars(module) for module in model.modules())


def activation_nbytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Estimate what a forward needs on the device for each token that it computes, besides K/V: bytes."""
    config = text_config(config)
    hidden, inner = getattr(config, "hidden_size", None) or 0, getattr(config, "intermediate_size", None) or 0
    return int(6 * hidden + 3 * (inner if isinstance(inner, int) else 4 * hidden)) * dtype.itemsize


def token_flops(config: PreTrainedConfig) -> float:
    """Estimate the floating-point operations of one token's forward, attention itself left out."""
    config = text_config(config)
    hidden, layers = getattr(config, "hidden_size", None) or 0, getattr(config, "num_hidden_layers", None) or 0
    inner = getattr(config, "intermediate_size", None)
    return float(2 * layers * (4 * hidden**2 + 3 * hidden * (inner if isinstance(inner, int) else 4 * hidden)))


def rope_switch(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """Say where rotary frequencies depend on the request's length.

    Returns:
        The length in tokens beyond which they do (None: never), and whether all longer requests have the same ones
        ("longrope"; with "dynamic", each length has its own).
    """
    config = text_config(config)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    switches = {
        int(
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        ): rope.get("rope_type", rope.get("type"))
        for rope in sets
        if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope")
    }
    return min(switches, default=None), list(switches.values()) == ["longrope"]


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has that looks them up in a table, where a longer prompt cannot work; else None."""
    config = text_config(model.config)
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None):
        return None
    limit = getattr(config, "max_position_embeddings", None)
    has_table = any(
        isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in ("wpe", "embed_positions", "position_embeddings")
        for name, module in model.named_modules()
    )
    return int(limit) if limit and has_table else None


def has_virtual_tokens(model: PreTrainedModel) -> bool:
    """Say whether PEFT's prompt learning puts something in front of every prompt, behind the back of generate()."""
    peft_model = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", None)
    return bool(getattr(getattr(peft_model, "active_peft_config", None), "is_prompt_learning", False))


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Say whether a token's K/V may depend on later tokens, so that a prefix has no K/V of its own."""
    config = text_config(config)
    return bool(getattr(config, "use_bidirectional_attention", False)) or getattr(config, "is_causal", True) is False
