"""Which tiers make a stack, and in which order."""

from collections.abc import Sequence

from tiered_cache.errors import ConfigError
from tiered_cache.tiers.base import MemoryTier
from tiered_cache.tiers.disk import DiskTier


def arrange(tiers: Sequence[MemoryTier | DiskTier]) -> tuple[tuple[MemoryTier, ...], DiskTier | None]:
    """Return the tiers in memory, fastest first, and the disk tier. Raises ConfigError unless they make a stack."""
    for tier in tiers:
        if not isinstance(tier, MemoryTier | DiskTier):
            raise ConfigError(f'TierStack(*tiers) takes tiers, such as HostTier("8GiB"), not {type(tier).__name__}.')
        if tier.is_taken:
            raise ConfigError(f"{tier!r} already belongs to another TierStack. Give each stack tiers of its own.")
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"TierStack(*tiers) was given the {name} tier twice. Make one with the sum of their capacities.")
    if "host" not in names:
        raise ConfigError('TierStack(*tiers) needs a HostTier, such as TierStack(HostTier("8GiB")).')
    in_memory = sorted((tier for tier in tiers if isinstance(tier, MemoryTier)), key=lambda tier: tier.speed)
    return tuple(in_memory), next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
