"""Prefixes by name: compute and keep one ahead of time, or forget all of a model's."""

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm  # silent where transformers' progress bars are off

from tiered_cache.hf import compat, identity
from tiered_cache.hf.cache import TieredCache
from tiered_cache.stack import TierStack, check_stack, default_stack
from tiered_cache.usage import Usage

CHUNK_TOKENS = 512  # computed at a time by warm(), between two moves of its progress bar
BAR_DELAY_S = 1.0  # before that no bar is shown


def warm(model: PreTrainedModel, input_ids: torch.Tensor, *, stack: TierStack | None = None) -> Usage:
    """Compute and keep the K/V of `input_ids` `[B, T]` ahead of time, as far as they are not kept yet.

    Args:
        model: the model that will generate.
        input_ids: token ids on any device, no pads.
        stack: where to keep them; the default stack if None.

    Returns:
        What was found, computed and stored.

    Raises:
        ConfigError, ClosedError: an argument is wrong.
    """
    cache, inner = TieredCache(stack), compat.inner_model(model)
    options = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
    if inner._supports_logits_to_keep():
        options["logits_to_keep"] = 1
    with torch.no_grad():
        start = cache.restore(model, input_ids)
        left = input_ids[:, start:].to(inner.device)
        with tqdm(total=left.shape[1], desc="Warming", unit=" tokens", delay=BAR_DELAY_S, leave=False) as bar:
            for chunk in torch.split(left, CHUNK_TOKENS, dim=1):
                inner(chunk, **options)
                bar.update(chunk.shape[1])
        cache.commit(input_ids)
    return cache.usage


def forget(model: PreTrainedModel, *, stack: TierStack | None = None) -> None:
    """Drop all that is stored for `model` as it is now, under any salt, and look at its weights afresh at the next call.

    Raises:
        ConfigError, ClosedError: `stack` is not an open TierStack.
    """
    stack = default_stack() if stack is None else check_stack(stack, "forget(stack=...)")
    inner = compat.inner_model(model)
    fingerprint = identity.identify(inner)
    if fingerprint is not None:
        stack.forget(fingerprint.digest)
    identity.forget(inner)
