"""Accelerator memory: the hottest blocks, kept where they are used."""

from collections.abc import Callable

from tiered_cache.errors import ConfigError
from tiered_cache.tiers.base import MemoryTier

# Says whether this machine has an accelerator. Set by devices/, since nothing below the stack may import torch.
accelerator_present: Callable[[], bool] = lambda: True  # noqa: E731


class DeviceTier(MemoryTier):
    """Blocks in the accelerator's own memory, above a HostTier.

    Args:
        capacity: budget in bytes, or a string such as "2GiB". Never exceeded.

    Raises:
        ConfigError: `capacity` is not a positive size, or this machine has no accelerator.
    """

    name = "device"
    memory = "device"
    speed = 0

    def __init__(self, capacity: int | str) -> None:
        super().__init__(capacity)
        if not accelerator_present():
            raise ConfigError(
                f"DeviceTier(capacity={capacity!r}) needs an accelerator, and this machine has none. "
                "Use TierStack(HostTier(...)) alone: here host memory is the top tier."
            )
