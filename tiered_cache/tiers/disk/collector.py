"""The room in a directory: how much is used, which files go when it is full, and what nobody needs any more.

Owns capacity, the order of eviction and the removal of temps, expired pieces and marks without a piece. Any number of processes
may do this at once: each file goes once, and what is read meanwhile stays readable to those who have it open.
"""

import contextlib
import threading
from collections.abc import Iterable

from tiered_cache.tiers.disk import calls, files, root
from tiered_cache.tiers.disk.listing import PIN, TTL, Entry, Listing, Shard
from tiered_cache.usage import format_bytes

ORPHAN_S = 3600.0  # a mark without a piece is kept so long: its piece may be on its way

PINNED_SHARE = 0.5  # of the capacity may be pinned

_EVICT_TO = 0.9  # of the capacity, when it is reached
_REFRESH_SHARE = 1 / 64  # of the capacity may be written before it is looked what others wrote
_LOCK_TIMEOUT_S = 10.0


class Collector:
    """Keeps what is under one root within its capacity, whoever wrote it.

    Args:
        capacity_bytes: for all files and folders.
        min_free_bytes: of the file system to leave free.
    """

    def __init__(self, listing: Listing, capacity_bytes: int, min_free_bytes: int) -> None:
        self.listing = listing
        self.capacity_bytes = capacity_bytes
        self.min_free_bytes = min_free_bytes
        self.pinned_capacity_bytes = int(capacity_bytes * PINNED_SHARE)
        self.evicted_pieces = 0
        self.unseen_bytes = 0  # written since it was looked what others wrote
        self._is_listed = False
        import filelock  # here, since it takes 10 ms, for which nobody without a disk tier has to wait

        path = f"{listing.root}/{root.LOCK}"
        self._lock = filelock.FileLock(path, timeout=_LOCK_TIMEOUT_S, mode=0o600, thread_local=False)
        self._collecting = threading.Lock()

    def make_room(self, nbytes: int, parent: bytes) -> None:
        """Evict until `nbytes` more fit, but neither the block `parent` (short key), which they hang on, nor what is before it.

        Raises:
            OSError: that cannot be reached.
        """
        if nbytes > self.capacity_bytes * _EVICT_TO:
            raise OSError(f"a piece of {format_bytes(nbytes)} does not fit into the disk tier")
        if not self._is_listed or self.unseen_bytes + nbytes > self.capacity_bytes * _REFRESH_SHARE:
            self.refresh()
        if self._over(nbytes):
            self._collect(nbytes, parent)
            if self._over(nbytes):
                raise OSError(
                    f"no room for {format_bytes(nbytes)} in the disk tier, which holds {format_bytes(self.listing.nbytes)}"
                )

    def _over(self, nbytes: int) -> bool:
        if self.listing.nbytes + nbytes > self.capacity_bytes:
            return True
        try:
            return self.min_free_bytes > 0 and calls.free_bytes(self.listing.root) - nbytes < self.min_free_bytes
        except FileNotFoundError:  # somebody removed all of it
            return False

    def refresh(self) -> None:
        self.listing.refresh_all()
        self.unseen_bytes, self._is_listed = 0, True

    def _collect(self, nbytes: int, parent: bytes = b"") -> None:
        """Evict down to nine tenths, one process at a time: not because it would be wrong otherwise, but too much."""
        with self._collecting:
            try:
                self._lock.acquire()
            except TimeoutError:  # somebody else collects for long
                self.refresh()
                return
            except (OSError, NotImplementedError):  # this file system has no locks: more may go than had to, nothing else
                self._collect_alone(nbytes, parent)
                return
            try:
                self._collect_alone(nbytes, parent)
            finally:
                with contextlib.suppress(OSError):
                    self._lock.release()

    def _collect_alone(self, nbytes: int, parent: bytes) -> None:
        self.refresh()  # somebody else may just have done it
        if sweep(self.listing):
            self.refresh()
        if not self._over(nbytes):
            return
        goal = int(self.capacity_bytes * _EVICT_TO) - nbytes
        if self.min_free_bytes:
            missing = self.min_free_bytes + nbytes - calls.free_bytes(self.listing.root)
            goal = min(goal, self.listing.nbytes - missing)
        self.evicted_pieces += evict(self.listing, goal, self.pinned_capacity_bytes, parent)
        if self._over(nbytes):
            remove_empty_folders(self.listing)
            self.refresh()

    def tidy(self) -> None:
        """See what others did, remove what is expired or abandoned, and evict if too much is there. Raises OSError."""
        self.refresh()
        if sweep(self.listing):
            self.refresh()
        if self._over(0):
            self._collect(0)


def evict(listing: Listing, goal_bytes: int, pinned_bytes: int, parent: bytes = b"") -> int:
    """Remove pieces, the coldest first, until at most `goal_bytes` are used; return how many were removed.

    Args:
        pinned_bytes: what is pinned is kept up to so many bytes, with all before it in its sequences.
        parent: short key of a block that is kept, with all before it.
    """
    evicted = 0
    for shard, entry in coldest_first(listing, pinned_bytes, parent):
        if listing.nbytes <= goal_bytes:
            break
        try:
            remove(listing, shard, entry)
        except OSError:  # one strange thing does not stop all the others
            continue
        evicted += 1
        if not shard.entries:
            with contextlib.suppress(OSError):  # somebody fills it right now
                calls.remove_folder(shard.path)
                shard.empty()
    return evicted


def remove(listing: Listing, shard: Shard, entry: Entry) -> None:
    """Remove a piece's file, and with a main piece the marks beside it."""
    files.unlink_if_there(f"{shard.path}/{entry.name}")
    listing.remove(shard, entry)
    if not entry.is_side:
        for suffix, marked in shard.marks.items():
            if marked.pop(entry.key, None) is not None:
                files.unlink_if_there(f"{shard.path}/{entry.key.hex()}{suffix}")


def coldest_first(listing: Listing, pinned_bytes: int, parent: bytes = b"") -> list[tuple[Shard, Entry]]:
    """Return all pieces that may go, in the order in which they do: least recently used first, children before parents."""
    now = calls.now()
    mains: dict[bytes, tuple[Shard, Entry]] = {}
    sides: list[tuple[Shard, Entry]] = []
    used: dict[tuple[bytes, bool], float] = {}
    pins: set[bytes] = set()
    for shard in list(listing.shards.values()):
        with listing.lock:
            entries = list(shard.entries.values())
            pins.update(shard.marks[PIN])
        for entry in entries:
            try:
                # A clock that was ahead must not protect for ever what was used then.
                used[entry.key, entry.is_side] = min(calls.stat(f"{shard.path}/{entry.name}").st_mtime, now)
            except FileNotFoundError:
                listing.remove(shard, entry)
                continue
            if entry.is_side:
                sides.append((shard, entry))
            else:
                mains[entry.key] = shard, entry
    depth = _depths({key: entry.parent for key, (_, entry) in mains.items()})
    for key in sorted(mains, key=depth.__getitem__, reverse=True):  # a parent was used when its children were
        above = mains[key][1].parent
        if above in mains:
            used[above, False] = max(used[above, False], used[key, False])
    kept = _kept(pins, mains, used, pinned_bytes)
    stays = kept | _chain(parent, mains)  # their side pieces may go: only those of a hit's last window are read
    order = [((used[key, False], -depth[key], 1), place) for key, place in mains.items() if key not in stays]
    for shard, entry in sides:
        main = used.get((entry.key, False), 0.0)
        if entry.key not in kept:
            order.append(((min(used[entry.key, True], main), -depth.get(entry.key, 0), 0), (shard, entry)))
    return [place for _, place in sorted(order, key=lambda item: item[0])]


def _depths(parents: dict[bytes, bytes]) -> dict[bytes, int]:
    """Return how many known blocks are before each."""
    depth: dict[bytes, int] = {}
    for key in parents:
        above = []
        at = key
        while at in parents and at not in depth:
            above.append(at)
            depth[at] = 0  # a name that claims to be its own ancestor ends here
            at = parents[at]
        base = depth[at] + 1 if at in parents and at not in above else 0
        for distance, each in enumerate(reversed(above)):
            depth[each] = base + distance
    return depth


def _kept(
    pins: set[bytes],
    mains: dict[bytes, tuple[Shard, Entry]],
    used: dict[tuple[bytes, bool], float],
    pinned_bytes: int,
) -> set[bytes]:
    """Return what is pinned and what is before it, the most recently used first, up to `pinned_bytes`."""
    kept: set[bytes] = set()
    total = 0
    for key in sorted(pins & mains.keys(), key=lambda key: used[key, False], reverse=True):
        chain = _chain(key, mains) - kept
        total += sum(mains[each][0].block_nbytes(each) for each in chain)
        if total > pinned_bytes:
            break
        kept |= chain
    return kept


def _chain(key: bytes, mains: dict[bytes, tuple[Shard, Entry]]) -> set[bytes]:
    """Return a block and all before it."""
    chain = set[bytes]()
    while key in mains and key not in chain:
        chain.add(key)
        key = mains[key][1].parent
    return chain


def sweep(listing: Listing) -> int:
    """Remove temps of processes that are gone, pieces whose time is over, and marks of pieces that are; return how many."""
    removed = 0
    now = calls.now()
    for folder in (listing.root, *(f"{listing.root}/{model}" for model in listing.folders(""))):
        with contextlib.suppress(OSError):
            removed += _sweep_temps(folder, [name for name in calls.names(folder) if name.startswith(files.TEMP_PREFIX)])
    for shard in list(listing.shards.values()):
        with listing.lock:
            temps = list(shard.temps)
            marks = [(suffix, key, at) for suffix, keys in shard.marks.items() for key, at in keys.items()]
        removed += _sweep_temps(shard.path, temps)
        for suffix, key, at in marks:
            is_expired = suffix == TTL and at <= now
            if is_expired or shard.find(key) is None:
                removed += _sweep_mark(listing, shard, suffix, key, now)
    return removed


def _sweep_temps(folder: str, names: Iterable[str]) -> int:
    removed = 0
    for name in names:
        with contextlib.suppress(OSError):  # gone, or none of ours
            removed += files.is_abandoned(f"{folder}/{name}") and files.unlink_if_there(f"{folder}/{name}")
    return removed


def _sweep_mark(listing: Listing, shard: Shard, suffix: str, key: bytes, now: float) -> int:
    """Remove the pieces of an expired mark with it, and a mark whose piece is gone for long."""
    path = f"{shard.path}/{key.hex()}{suffix}"
    try:
        at = calls.stat(path)
    except FileNotFoundError:
        return 0
    entries = [entry for entry in (shard.find(key, is_side=True), shard.find(key)) if entry is not None]
    if suffix == TTL and at.st_mtime <= now:
        for entry in entries:
            remove(listing, shard, entry)
        return len(entries) + files.unlink_if_there(path)
    if not entries and at.st_ctime < now - ORPHAN_S:
        return int(files.unlink_if_there(path))
    return 0


def remove_empty_folders(listing: Listing) -> None:
    """Remove folders that hold nothing. One that is filled at this moment stays, or is made again by who fills it."""
    for model in listing.folders(""):
        for namespace in listing.folders(model):
            for byte in listing.folders(namespace):
                if byte not in listing.shards or not listing.shards[byte].entries:
                    _remove_folder(f"{listing.root}/{byte}")
            _remove_folder(f"{listing.root}/{namespace}")
        path = f"{listing.root}/{model}"
        with contextlib.suppress(OSError):
            if calls.names(path) == [root.MODEL]:
                files.unlink_if_there(f"{path}/{root.MODEL}")
        _remove_folder(path)


def _remove_folder(path: str) -> None:
    with contextlib.suppress(OSError):  # it is not empty, or gone
        calls.remove_folder(path)
