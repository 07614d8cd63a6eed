"""Prefixes by name: compute and keep one ahead of time, or forget all of a model's."""

import torch
from transformers import PreTrainedModel

from tiered_cache import progress
from tiered_cache.defaults import default_stack
from tiered_cache.hf import compat, identity
from tiered_cache.hf.cache import TieredCache
from tiered_cache.hf.checks import check_stay
from tiered_cache.hf.offloaded import device_of
from tiered_cache.stack import TierStack, check_stack
from tiered_cache.usage import Usage

CHUNK_TOKENS = 512  # computed at a time by warm(), between two moves of its progress bar


def warm(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    stack: TierStack | None = None,
    ttl: float | None = None,
    pin: bool = False,
) -> Usage:
    """Compute and keep the K/V of `input_ids` `[B, T]` ahead of time, as far as they are not kept yet.

    Returns when they are in all tiers, on disk too if there is one.

    Args:
        model: the model that will generate.
        input_ids: token ids on any device, no pads.
        stack: where to keep them; the default stack if None.
        ttl, pin: how long to keep them, as for TieredCache.

    Returns:
        What was found, computed and stored.

    Raises:
        ConfigError, ClosedError: an argument is wrong.
    """
    check_stay(ttl, pin, "warm")
    cache, inner = TieredCache(stack, ttl=ttl, pin=pin), compat.inner_model(model)
    options = {compat.CACHE_ARGUMENT: cache, "use_cache": True}
    if inner._supports_logits_to_keep():
        options["logits_to_keep"] = 1
    with torch.no_grad():
        start = cache.restore(model, input_ids)
        left = input_ids[:, start:].to(device_of(inner))
        with progress.show(left.shape[1], "Warming", " tokens") as bar:
            stops = [stop - start for stop in cache.split_points]
            for part in torch.tensor_split(left, stops, dim=1):
                for chunk in torch.split(part, CHUNK_TOKENS, dim=1):
                    inner(chunk, **options)
                    bar.update(chunk.shape[1])
                cache.take_snapshot()
        _keep_all(cache, input_ids)
    return cache.usage


def _keep_all(cache: TieredCache, input_ids: torch.Tensor) -> None:
    """Commit until all is stored, on disk too: what did not fit into the queue at first does when that was written."""
    disk, written = cache.stack.disk, -1
    while True:
        cache.commit(input_ids)
        if cache.stack.flush() or disk is None or disk.written_bytes == written:
            break
        written = disk.written_bytes
    cache.usage.created_tokens = min(cache.usage.created_tokens, cache.usage.computed_tokens)


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
