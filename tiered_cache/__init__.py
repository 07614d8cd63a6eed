"""KV cache for Hugging Face generate() that reuses every prefix it ever computed.

    model.generate(**inputs, past_key_values=TieredCache())

Names are loaded when they are first used, so that importing a part below (such as `tiered_cache.tiers`) loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_cache.defaults import default_stack, set_default_stack
    from tiered_cache.errors import (
        CacheInUseError,
        CapacityError,
        ClosedError,
        ConfigError,
        CorruptEntryError,
        StoreError,
        TieredCacheError,
        UnsupportedModelError,
    )
    from tiered_cache.hf.cache import TieredCache
    from tiered_cache.hf.generation import disable, enable, uninstall
    from tiered_cache.hf.prefixes import forget, warm
    from tiered_cache.stack import TierStack
    from tiered_cache.tiers.device import DeviceTier
    from tiered_cache.tiers.disk import DiskTier
    from tiered_cache.tiers.host import HostTier
    from tiered_cache.usage import MissReason, Stats, TierStats, Usage

__version__ = "0.1.0"

__all__ = [
    "CacheInUseError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "CorruptEntryError",
    "DeviceTier",
    "DiskTier",
    "HostTier",
    "MissReason",
    "Stats",
    "StoreError",
    "TierStack",
    "TierStats",
    "TieredCache",
    "TieredCacheError",
    "UnsupportedModelError",
    "Usage",
    "default_stack",
    "disable",
    "enable",
    "forget",
    "set_default_stack",
    "uninstall",
    "warm",
]

_HOMES = {
    "tiered_cache.errors": (
        "CacheInUseError", "CapacityError", "ClosedError", "ConfigError", "CorruptEntryError", "StoreError",
        "TieredCacheError", "UnsupportedModelError",
    ),
    "tiered_cache.hf.cache": ("TieredCache",),
    "tiered_cache.hf.generation": ("disable", "enable", "uninstall"),
    "tiered_cache.hf.prefixes": ("forget", "warm"),
    "tiered_cache.stack": ("TierStack",),
    "tiered_cache.defaults": ("default_stack", "set_default_stack"),
    "tiered_cache.tiers.device": ("DeviceTier",),
    "tiered_cache.tiers.disk": ("DiskTier",),
    "tiered_cache.tiers.host": ("HostTier",),
    "tiered_cache.usage": ("MissReason", "Stats", "TierStats", "Usage"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "DeviceTier":
        importlib.import_module("tiered_cache.devices")  # tells the tier whether there is an accelerator
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
