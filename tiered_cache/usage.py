"""What happened: `Usage` of one call, `Stats` of a stack, and the reasons for computing more than one token."""

import enum
from dataclasses import dataclass, field


class MissReason(enum.StrEnum):
    """Why a call computed more than the last prompt token. Where several apply, the first in this order is reported."""

    DISABLED_CALL = "disabled_call"
    OUTPUTS_REQUESTED = "outputs_requested"
    UNSUPPORTED_LAYERS = "unsupported_layers"
    UNKNOWN_CONTENT = "unknown_content"
    IDENTITY = "identity"
    NOT_STORED = "not_stored"
    ROW_LIMIT = "row_limit"
    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    TIER_ERROR = "tier_error"


@dataclass(slots=True)
class Usage:
    """Token counts of one generate() or restore(), summed over the batch's rows as passed: no pads, no beam copies.

    Attributes:
        prompt_tokens: tokens of the prompt, always `cached_tokens + computed_tokens`.
        cached_tokens: prompt tokens whose K/V were reused.
        created_tokens: tokens newly stored, generated ones included, those that rows share counted once.
        cached_by_tier: `cached_tokens` by where they came from: "resident", "device", "host" or "disk".
        fetch_seconds: time spent to find and fetch the reused K/V, seconds.
        miss_reason: None if every row computed one token only.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    created_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    fetch_seconds: float = 0.0
    miss_reason: MissReason | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def __repr__(self) -> str:
        tiers = ", ".join(f"{count:,} {name}" for name, count in self.cached_by_tier.items())
        return (
            f"Usage(prompt_tokens={self.prompt_tokens:,}, cached_tokens={self.cached_tokens:,}"
            f"{f' ({tiers})' if tiers else ''}, computed_tokens={self.computed_tokens:,}, "
            f"created_tokens={self.created_tokens:,}, fetch_seconds={self.fetch_seconds:.4f}, "
            f"miss_reason={self.miss_reason and self.miss_reason.name})"
        )


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: pieces of blocks and bytes it holds now, and how many pieces were evicted from it so far.

    A block is one piece, or two where the model has sliding-window layers. On disk `corrupt_pieces` failed their checks
    and were removed, and `failures` of the operating system were survived.
    """

    pieces: int
    used_bytes: int
    capacity_bytes: int
    evicted_pieces: int
    corrupt_pieces: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of one TierStack since it was made.

    Attributes:
        requests: calls that looked for a prefix.
        prompt_tokens, cached_tokens, created_tokens: sums of the requests' `Usage`.
        dropped_blocks: blocks that were not stored because no room could be made or a copy failed.
        miss_reasons: how often each reason was reported.
        tiers: by tier name, fastest first.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    created_tokens: int
    dropped_blocks: int
    miss_reasons: dict[str, int]
    tiers: dict[str, TierStats]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were reused, 0..1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __repr__(self) -> str:
        lines = [
            f"Stats: {self.requests:,} requests, {self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens reused "
            f"({self.hit_rate:.0%}), {self.created_tokens:,} tokens stored, {self.dropped_blocks:,} blocks dropped"
        ]
        for name, tier in self.tiers.items():
            lines.append(
                f"  {name}: {format_bytes(tier.used_bytes)} of {format_bytes(tier.capacity_bytes)} in {tier.pieces:,} "
                f"pieces, {tier.evicted_pieces:,} evicted"
                f"{f', {tier.corrupt_pieces:,} damaged' if tier.corrupt_pieces else ''}"
                f"{f', {tier.failures:,} failures' if tier.failures else ''}"
            )
        if self.miss_reasons:
            lines.append("  misses: " + ", ".join(f"{name} {count:,}" for name, count in self.miss_reasons.items()))
        return "\n".join(lines)


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` for people: "812 B", "1.5 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def first_tokens(by_tier: dict[str, int], num_tokens: int) -> dict[str, int]:
    """Return how many of the first `num_tokens` tokens came from which tier; a sequence goes on in slower ones."""
    first = {}
    for tier, tokens in by_tier.items():
        if num_tokens > 0:
            first[tier] = min(tokens, num_tokens)
            num_tokens -= tokens
    return first
