"""The stack of those who name none.

Owns what it is made of: host memory, and a disk where the environment names one. Refuses to own what a stack does.
"""

import os
import shutil
import threading
from pathlib import Path

from tiered_cache.errors import ConfigError
from tiered_cache.stack import TierStack, check_stack
from tiered_cache.tiers.disk import DiskTier
from tiered_cache.tiers.host import HostTier, default_capacity

DIRECTORY, SIZE = "TIERED_CACHE_DIR", "TIERED_CACHE_DISK_SIZE"
DEFAULT_DISK_SHARE = 0.25  # of the free space, where the environment names no size
MAX_DEFAULT_DISK = 64 << 30

_default: TierStack | None = None
_default_lock = threading.Lock()


def default_stack() -> TierStack:
    """Return the stack that TieredCache() uses when it is given none.

    Made at first use: host memory, a quarter of what is available then (a container's limit counts), and a disk tier if the
    environment variable TIERED_CACHE_DIR names a directory. TIERED_CACHE_DISK_SIZE, such as "64GiB", is its capacity (by
    default a quarter of the free space, 64 GiB at most). Made anew if it was closed.

    Raises:
        ConfigError: the directory or the size in the environment is not fit.
    """
    global _default
    with _default_lock:
        if _default is None or _default.closed:
            _default = TierStack(HostTier(default_capacity()), *_disk_of_environment())
        return _default


def _disk_of_environment() -> list[DiskTier]:
    path = os.environ.get(DIRECTORY)
    if not path:
        return []
    try:
        size: str | int | None = os.environ.get(SIZE)
        if not size:
            size = max(1, min(int(_free_bytes(path) * DEFAULT_DISK_SHARE), MAX_DEFAULT_DISK))
        return [DiskTier(path, size)]
    except ConfigError as error:
        raise ConfigError(
            f"{error} (It comes from the environment: {DIRECTORY}={path!r}, {SIZE}={os.environ.get(SIZE)!r}.)"
        ) from None


def _free_bytes(path: str) -> int:
    """Return the free space where `path` is or will be."""
    place = Path(path).expanduser().resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def set_default_stack(stack: TierStack) -> None:
    """Make TieredCache() use `stack` from now on. The old default stack stays as it is; close it if nobody uses it.

    Raises:
        ConfigError: `stack` is not a TierStack.
        ClosedError: `stack` is closed.
    """
    global _default
    check_stack(stack, "set_default_stack(stack=...)")
    with _default_lock:
        _default = stack
