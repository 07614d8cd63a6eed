"""The words in which a cache says what it did."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from tiered_cache.usage import MissReason, Usage


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


def describe(usage: Usage, refusal: Refusal | None) -> str:
    """Return one paragraph on a call: what was reused from where, what was not and why, what was stored."""
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
    return text


_PLACES = {"resident": "this cache itself", "device": "device memory", "host": "host memory", "disk": "disk"}
