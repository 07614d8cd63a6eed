"""The words in which a cache says what it did."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tiered_cache.errors import TieredCacheError
from tiered_cache.matching import Match
from tiered_cache.usage import MissReason, Usage

logger = logging.getLogger(__name__)

NOT_KEPT = "Storing failed, this call's K/V are not kept"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why less was reused than possible: the counted reason, the particulars in words, and whether K/V are stored anyway."""

    reason: MissReason
    why: str
    stores: bool = False

    @classmethod
    def first(cls, refusals: Iterable[Self]) -> Self | None:
        """Return the one to report of several, the first in the order of reasons; it stores only if all would."""
        found = list(refusals)
        if not found:
            return None
        order = list(MissReason)
        chosen = min(found, key=lambda refusal: order.index(refusal.reason))
        return replace(chosen, stores=all(refusal.stores for refusal in found))


def why_not_more(pads: Sequence[int], matches: Sequence[Match], columns: int, takes_snapshots: bool) -> Refusal:
    """Say why no more than `columns` columns of a prompt are reused, given what is stored of each row behind its pads."""
    for trouble, why in _TROUBLES.items():
        if any(match.trouble is trouble for match in matches):
            return Refusal(trouble, why)
    shortest = min(pad + match.num_tokens for pad, match in zip(pads, matches, strict=True))
    if any(match.num_tokens > max(0, shortest - pad) for pad, match in zip(pads, matches, strict=True)):
        return Refusal(MissReason.ROW_LIMIT, "one row of the batch shares less with what is stored than others do")
    known = min(pad + match.known_tokens for pad, match in zip(pads, matches, strict=True))
    if known > max(columns, min(pads)):
        why = "not all that its sliding-window layers need before that point"
        if takes_snapshots:
            why = "its recurrent layers go on from snapshots only, of which none is nearer"
        return Refusal(MissReason.NOT_STORED, f"more of this prompt is stored, but {why}")
    return Refusal(MissReason.NOT_STORED, "no more of this prompt is stored")


_TROUBLES = {
    MissReason.CORRUPT: "a stored block was damaged; it was removed",
    MissReason.DEADLINE: "the disk tier did not answer in time",
    MissReason.TIER_ERROR: "the disk tier failed",
}


def describe(usage: Usage, refusal: Refusal | None, hosted: int, layers: int) -> str:
    """Return one paragraph on a call: what was reused from where, what was not and why, what was stored.

    `hosted`: how many of the `layers` have their K/V in host memory.
    """
    if not usage.prompt_tokens and refusal is None:
        return "This cache has not served a prompt yet."
    if usage.cached_tokens:
        places = " and ".join(f"{count:,} from {_PLACES[name]}" for name, count in usage.cached_by_tier.items())
        text = (
            f"Reused {usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens ({places}, "
            f"{usage.fetch_seconds * 1e3:.1f} ms) and computed {usage.computed_tokens:,}."
        )
    elif usage.prompt_tokens:
        text = f"Computed all {usage.prompt_tokens:,} prompt tokens."
    else:
        text = "Computed the whole prompt."
    if refusal is not None:
        text += f" {refusal.reason.name}: {refusal.why}."
    if usage.created_tokens:
        text += f" Stored {usage.created_tokens:,} new tokens for later calls."
    if hosted:
        text += f" K/V of {hosted} of {layers} layers are in host memory and fetched at each step."
    return text


_PLACES = {"resident": "this cache itself", "device": "device memory", "host": "host memory", "disk": "disk"}


def warn(what: str, error: Exception) -> None:
    """Log a failure that costs the reuse, never a result; with a traceback where it is not one that is expected."""
    logger.warning("%s: %r", what, error, exc_info=not isinstance(error, TieredCacheError | MemoryError))
