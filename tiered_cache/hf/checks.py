"""What a generate() call asks for, held against what tokens and mask determine.

Owns the allow-list of calls whose K/V may be reused or stored, and clear errors for those that cannot work. Refuses to own
what is done about a refusal (session).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from tiered_cache.errors import ConfigError
from tiered_cache.hf import compat, identity
from tiered_cache.hf.columns import Columns
from tiered_cache.hf.explain import Refusal
from tiered_cache.hf.layers import GrowableLayer, StatefulLayer
from tiered_cache.hf.offloaded import layer_devices
from tiered_cache.hf.windows import CapturingSlidingLayer
from tiered_cache.tiers.disk import Stay
from tiered_cache.usage import MissReason


def refuse_class(model: PreTrainedModel) -> Refusal | None:
    """Refuse where a model class does by itself what the hooks would have to see."""
    for name in ("generate", "_prefill"):
        if getattr(type(model), name) is not getattr(GenerationMixin, name):
            return Refusal(MissReason.DISABLED_CALL, f"{type(model).__name__} has a {name}() of its own")
    return None


def refuse_call(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    mode: object,
    plain: frozenset[str] = frozenset(),
) -> list[Refusal]:
    """Refuse what makes K/V depend on more than tokens and mask, and ways of decoding that need the prompt's own forward.

    Args:
        plain: arguments that make no difference here, beyond those that never do.
    """
    passed = {name for name, value in model_kwargs.items() if not is_absent(value)}
    refusals = []
    if mode not in compat.REUSING_MODES:
        refusals.append(Refusal(MissReason.DISABLED_CALL, "this way of decoding does not continue from a cache"))
    if generation_config.prefill_chunk_size is not None and not compat.CHUNKED_PREFILL_CONTINUES:
        why = "prefill_chunk_size needs transformers 5.24 or newer to continue from a cache"
        refusals.append(Refusal(MissReason.DISABLED_CALL, why, stores=True))
    if passed & set(compat.OUTPUT_ARGUMENTS) or generation_config.output_attentions or generation_config.output_hidden_states:
        why = "attentions or hidden states of the whole prompt were asked for"
        refusals.append(Refusal(MissReason.OUTPUTS_REQUESTED, why, stores=True))
    others = sorted(passed - compat.PLAIN_MODEL_ARGUMENTS - plain - set(compat.OUTPUT_ARGUMENTS))
    if others:
        refusals.append(
            Refusal(MissReason.UNKNOWN_CONTENT, f"the call passes {', '.join(others)}, which token ids do not tell")
        )
    if input_ids.ndim != 2 or generation_config.token_healing:
        refusals.append(Refusal(MissReason.UNKNOWN_CONTENT, "the prompt is not plain rows of token ids"))
    return refusals


def is_absent(value: Any) -> bool:
    """Say whether an argument makes no difference: nothing, False, or an empty collection."""
    return value is None or value is False or (isinstance(value, dict | list | tuple) and not value)


def covered_columns(input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Return how many columns the attention mask has: more than `input_ids` where only new tokens were passed."""
    columns = compat.mask_columns(generation_config, model_kwargs)
    return int(input_ids.shape[1]) if columns is None else columns


def has_plain_positions(model: PreTrainedModel, prompt: Columns, position_ids: torch.Tensor | None) -> bool:
    """Say whether positions count each row's tokens from 0, as generate() numbers them when it is given none."""
    if position_ids is None:  # generate() makes none where forward() names none: then pads may count
        return not any(prompt.pads) or model.config.model_type in compat.POSITIONS_FROM_MASK
    if position_ids.ndim != 2 or position_ids.shape[1] != prompt.length:
        return False
    pads = np.array(prompt.pads)[:, None]
    places = np.arange(prompt.length)[None, :] - pads
    given = position_ids.cpu().numpy()
    given = given[:: len(given) // prompt.rows] if len(given) > 1 else given
    return bool(((given == places) | (places < 0)).all())


def check_length(model: PreTrainedModel, prompt: Columns | None) -> None:
    """Raise ConfigError if a prompt is longer than a model's table of positions."""
    limit = compat.learned_positions(model)
    if limit is not None and prompt is not None and prompt.length - min(prompt.pads) > limit:
        raise ConfigError(
            f"input_ids has {prompt.length - min(prompt.pads)} tokens, but {type(model).__name__} has {limit} positions. "
            "Shorten the prompt, or use a model with a longer context."
        )


def check_stay(ttl: float | None, pin: bool, caller: str) -> Stay:
    """Return how long something is to stay. Raises ConfigError naming the argument."""
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < math.inf):
        raise ConfigError(f"{caller}(ttl={ttl!r}) must be a positive number of seconds, or None: until it is evicted.")
    if not isinstance(pin, bool):
        raise ConfigError(f"{caller}(pin={pin!r}) must be True or False.")
    return Stay(ttl, pin)


def refuse_model(model: PreTrainedModel, layers: Sequence[Any]) -> Refusal | None:
    """Say why nothing is reused of a model, whose cache has `layers`, or None."""
    known = (GrowableLayer, CapturingSlidingLayer, StatefulLayer, *compat.EMPTY_LAYERS)
    kinds = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, known)})
    if identity.is_training(model):
        return Refusal(MissReason.DISABLED_CALL, "the model is in training mode (call model.eval())")
    if kinds or not layers:
        why = f"the model has layers without prefix reuse so far ({', '.join(kinds)})"
        return Refusal(MissReason.UNSUPPORTED_LAYERS, why)
    if model.config.model_type in compat.NOT_CONTINUING:
        why = f"{model.config.model_type} in transformers cannot continue from a prefix"
        return Refusal(MissReason.UNSUPPORTED_LAYERS, why)
    if compat.has_virtual_tokens(model):
        return Refusal(MissReason.UNKNOWN_CONTENT, "PEFT puts learned virtual tokens in front of the prompt")
    if layer_devices(model, len(layers)) is None:
        return Refusal(MissReason.UNSUPPORTED_LAYERS, "it is not clear on which device each of its layers computes")
    if compat.is_bidirectional(model.config):
        why = "the model's attention looks at later tokens, so a prefix has no K/V of its own"
        return Refusal(MissReason.UNSUPPORTED_LAYERS, why)
    return None


def check_commit(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, length: int, fed: Columns | None) -> Columns:
    """Return the columns that a loop written by hand commits: `length` are held, after a restore for `fed`.

    Raises:
        ConfigError: they are not.
    """
    columns = Columns.of(input_ids, attention_mask)
    if columns is None:
        raise ConfigError("attention_mask must be left pads (0) followed by tokens (1) in every row to commit.")
    if columns.length < length:
        raise ConfigError(
            f"input_ids has {columns.length} columns, but this cache holds {length}. Pass all tokens that were fed, "
            "restored ones included."
        )
    if fed is not None and fed.shared(columns) < min(fed.length, length):
        raise ConfigError("input_ids differ from the tokens this cache was restored for. Call restore() for a new prompt.")
    return columns
