"""What this process knows of a directory: which pieces lie where and how much they take.

Owns a copy of the directory, brought up to date by looking at folders' times; the directory itself is the truth, since other
processes write to it and remove from it. Refuses to own what is in the files and which of them go.

    <root>/<identity and layout>/<namespace>/<first byte of the parent>/<name of the piece>

All children of a block lie in one folder, so those that a prompt may share its next tokens with are found with one look.
Safe to use from several threads; a lock is held while a folder is read, so nobody who may not wait calls this.
"""

import os
import threading
from collections.abc import Iterator

from tiered_cache.format import Name
from tiered_cache.tiers.disk import calls
from tiered_cache.tiers.disk.files import TEMP_PREFIX

PIN, TTL = ".pin", ".ttl"  # empty files beside a piece: it is pinned; it may go at this file's time

_SETTLED_S = 1.0  # after a folder's time, before another change can be told from the one that set it
_LARGE = 4096  # names, from which on a folder is read again at most once in _SETTLED_S


class Entry:
    """One piece's file. `nbytes` as `du` counts it."""

    __slots__ = ("head", "is_side", "key", "nbytes", "num_tokens", "parent")

    def __init__(self, name: Name, nbytes: int) -> None:
        self.key = name.key
        self.parent = name.parent
        self.num_tokens = name.num_tokens
        self.head = name.head
        self.is_side = name.is_side
        self.nbytes = nbytes

    @property
    def name(self) -> Name:
        return Name(self.key, self.parent, self.num_tokens, self.head, self.is_side)


class Shard:
    """One folder of pieces."""

    __slots__ = ("_children", "entries", "listed_at", "marks", "nbytes", "path", "settled", "stamp", "temps")

    def __init__(self, path: str) -> None:
        self.path = path
        self.empty()

    def empty(self) -> None:
        """Know nothing."""
        self.entries: dict[bytes, Entry] = {}  # by `_place`
        self._children: dict[bytes, Entry | dict[bytes, Entry]] = {}  # main pieces by parent; most have one child
        self.marks: dict[str, dict[bytes, float]] = {PIN: {}, TTL: {}}  # key -> the mark's time
        self.temps: list[str] = []
        self.nbytes = 0
        self.stamp = -1  # the folder's time when it was read
        self.settled = False
        self.listed_at = 0.0

    def become(self, other: "Shard") -> None:
        """Know what `other` knows."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def block_nbytes(self, key: bytes) -> int:
        """Return what the pieces of a block take."""
        return sum(entry.nbytes for is_side in (False, True) if (entry := self.find(key, is_side)) is not None)

    def find(self, key: bytes, is_side: bool = False) -> Entry | None:
        return self.entries.get(_place(key, is_side))

    def add(self, entry: Entry) -> None:
        place = _place(entry.key, entry.is_side)
        old = self.entries.get(place)
        if old is not None:
            self.remove(old)
        self.entries[place] = entry
        self.nbytes += entry.nbytes
        if not entry.is_side:
            found = self._children.setdefault(entry.parent, entry)
            if isinstance(found, dict):
                found[entry.key] = entry
            elif found is not entry:
                self._children[entry.parent] = {found.key: found, entry.key: entry}

    def remove(self, entry: Entry) -> None:
        if self.entries.pop(_place(entry.key, entry.is_side), None) is None:
            return
        self.nbytes -= entry.nbytes
        if not entry.is_side:
            found = self._children[entry.parent]
            if isinstance(found, dict):
                found.pop(entry.key, None)
            if not isinstance(found, dict) or not found:
                del self._children[entry.parent]

    def children(self, parent: bytes) -> list[Entry]:
        """Return the main pieces behind `parent`."""
        found = self._children.get(parent, {})
        return list(found.values()) if isinstance(found, dict) else [found]


class Listing:
    """The shards under one root."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.shards: dict[str, Shard] = {}
        self._above = 0  # bytes of the folders above the shards

    @property
    def nbytes(self) -> int:
        """What is known to lie under the root, folders included, in bytes as `du` counts them."""
        return self._above + sum(shard.nbytes for shard in list(self.shards.values()))

    @property
    def num_entries(self) -> int:
        return sum(len(shard.entries) for shard in list(self.shards.values()))

    def shard(self, model: bytes, namespace: bytes, parent: bytes) -> Shard:
        """Return the folder of a block's children, as it is known; it need not exist."""
        return self._shard(f"{model.hex()}/{namespace.hex()}/{parent[:1].hex()}")

    def _shard(self, place: str) -> Shard:
        with self.lock:
            shard = self.shards.get(place)
            if shard is None:
                shard = self.shards[place] = Shard(f"{self.root}/{place}")
            return shard

    def add(self, shard: Shard, entry: Entry) -> None:
        with self.lock:
            shard.add(entry)

    def remove(self, shard: Shard, entry: Entry) -> None:
        with self.lock:
            shard.remove(entry)

    def children(self, shard: Shard, parent: bytes) -> list[Entry]:
        """Return the main pieces behind `parent`, as they are known."""
        with self.lock:
            return shard.children(parent)

    def refresh(self, shard: Shard) -> None:
        """Read a folder again if it may have changed. Raises OSError."""
        with self.lock:
            now = calls.now()
            try:
                found = calls.stat(shard.path)
            except FileNotFoundError:
                shard.empty()
                return
            if found.st_mtime_ns == shard.stamp and shard.settled:
                return
            if len(shard.entries) > _LARGE and 0 <= now - shard.listed_at < _SETTLED_S:
                return
            try:
                fresh = self._read(shard)
            except FileNotFoundError:  # removed since
                shard.empty()
                return
            fresh.nbytes += calls.used_bytes(found)
            fresh.stamp, fresh.settled = found.st_mtime_ns, now - found.st_mtime > _SETTLED_S
            fresh.listed_at = now
            shard.become(fresh)  # at once: others count its entries without the lock

    def refresh_all(self) -> None:
        """Bring everything up to date. Raises OSError."""
        above, places = 0, set[str]()
        for identity in self.folders(""):
            above += self._other_bytes(identity)
            for namespace in self.folders(identity):
                above += self._other_bytes(namespace)
                places.update(self.folders(namespace))
            above += sum(self._other_files(identity))
        above += self._other_bytes("") + sum(self._other_files(""))
        self._above = above
        for place in places:
            self.refresh(self._shard(place))
        for place in [place for place in list(self.shards) if place not in places]:
            with self.lock:
                self.shards[place].empty()

    def _other_bytes(self, place: str) -> int:
        try:
            return calls.used_bytes(calls.stat(f"{self.root}/{place}"))
        except FileNotFoundError:
            return 0

    def folders(self, place: str) -> list[str]:
        """Return the places of ours below a place: their names are hexadecimal."""
        try:
            found = calls.names(f"{self.root}/{place}" if place else self.root)
        except FileNotFoundError:
            return []
        names = [name for name in found if len(name) % 2 == 0 and not set(name) - set("0123456789abcdef")]
        return [f"{place}/{name}" if place else name for name in names]

    def _other_files(self, place: str) -> Iterator[int]:
        path = f"{self.root}/{place}" if place else self.root
        try:
            found = calls.entries(path)
        except FileNotFoundError:
            return
        for entry in found:
            try:
                status = calls.stat_entry(entry)
            except FileNotFoundError:
                continue
            if calls.is_file(status):
                yield calls.used_bytes(status)

    def _read(self, shard: Shard) -> Shard:
        """Return what a shard's folder holds. Files that were known are not looked at again: they never change."""
        known, fresh = shard.entries, Shard(shard.path)
        for found in calls.entries(shard.path):
            name = Name.parse(found.name)
            entry = known.get(_place(name.key, name.is_side)) if name is not None else None
            if entry is None:
                try:
                    status = calls.stat_entry(found)
                except FileNotFoundError:
                    continue
                if name is None:
                    self._note_other(fresh, found.name, status)
                    continue
                entry = Entry(name, calls.used_bytes(status))
            fresh.add(entry)
        return fresh

    def _note_other(self, shard: Shard, name: str, status: os.stat_result) -> None:
        shard.nbytes += calls.used_bytes(status)
        stem, suffix = name[:-4], name[-4:]
        if name.startswith(TEMP_PREFIX):
            shard.temps.append(name)
        elif suffix in shard.marks:
            try:
                shard.marks[suffix][bytes.fromhex(stem)] = status.st_mtime
            except ValueError:
                return


def _place(key: bytes, is_side: bool) -> bytes:
    return key + b"s" if is_side else key
