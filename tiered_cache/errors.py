"""The errors this package raises. A failing tier inside generate() is never one of them: it is a counted miss."""


class TieredCacheError(Exception):
    """Base of every error raised by tiered_cache."""


class ConfigError(TieredCacheError, ValueError):
    """An argument is wrong, or arguments contradict each other. The message names the argument and the way out."""


class UnsupportedModelError(TieredCacheError, NotImplementedError):
    """This kind of model cannot use a TieredCache."""


class CapacityError(TieredCacheError, MemoryError):
    """A budget asks for more memory than the machine (or its container) has."""


class StoreError(TieredCacheError, OSError):
    """A tier failed in an explicit call, such as flush() or clear()."""


class CorruptEntryError(StoreError):
    """Stored bytes do not match their checksum."""


class ClosedError(TieredCacheError):
    """The TierStack was closed."""


class CacheInUseError(TieredCacheError):
    """One TieredCache is used by two generate() calls at once. Give each thread a cache of its own; they may share a stack."""
