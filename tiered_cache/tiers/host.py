"""Host memory: the top tier on a machine without an accelerator, pinned memory below the device on one with."""

from pathlib import Path

import psutil  # comes with accelerate

from tiered_cache.errors import CapacityError
from tiered_cache.tiers.base import MemoryTier
from tiered_cache.usage import format_bytes

DEFAULT_SHARE = 0.25  # of the memory that is available when the default stack is made

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class HostTier(MemoryTier):
    """Blocks in host memory.

    Args:
        capacity: budget in bytes, or a string such as "8GiB". Never exceeded.

    Raises:
        ConfigError: `capacity` is not a positive size.
        CapacityError: `capacity` is more than this machine's (or container's) memory.
    """

    name = "host"
    memory = "host"
    speed = 1

    def __init__(self, capacity: int | str) -> None:
        super().__init__(capacity)
        total = total_memory()
        if self.capacity_bytes > total:
            raise CapacityError(
                f"HostTier(capacity={capacity!r}) asks for {format_bytes(self.capacity_bytes)}, but this machine has "
                f"{format_bytes(total)} of memory. Ask for less; {format_bytes(default_capacity())} is the default here."
            )


def default_capacity() -> int:
    """Return the host budget in bytes used when nobody names one: a quarter of the memory available now."""
    return max(1, int(available_memory() * DEFAULT_SHARE))


def total_memory() -> int:
    """Return the memory of this machine in bytes, or its container's limit where that is lower."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_limits())])


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, or what the container's limit leaves where that is less."""
    return min([int(psutil.virtual_memory().available), *(max(limit - used, 0) for limit, used in _container_limits())])


def _container_limits() -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of the control groups this process is in, from its own up (v2 and v1)."""
    limits = []
    for folder, (limit_file, used_file, reclaimable) in _control_groups():
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # not mounted, or "max"
            continue
        # Cached file pages (a model's weights, just read) count as used, but are given back on demand.
        limits.append((limit, used - int(stat.get(reclaimable, 0))))
    return limits


def _control_groups() -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders that may limit this process's memory. A container sees its own group as the top one."""
    folders = [(_CGROUPS, _V2), (_CGROUPS / "memory", _V1)]
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return folders
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers in ("", "memory"):
            top, files = (_CGROUPS, _V2) if not controllers else (_CGROUPS / "memory", _V1)
            own = top / path.strip("/")
            folders += [(folder, files) for folder in (own, *own.parents) if folder != top and folder.is_relative_to(top)]
    return folders
