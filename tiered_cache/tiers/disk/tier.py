"""DiskTier: pieces of blocks in the files of one directory, shared by any number of processes.

Owns finding, reading, writing and giving up files. Refuses to own threads and deadlines (archive calls all of this from threads
of its own: everything here may wait for the disk) and what is worth storing (stack). No torch.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tiered_cache.errors import ConfigError
from tiered_cache.format import ALIGNMENT, HEAD_TOKENS, SHORT_KEY_NBYTES, Header, Name, checksums, encode_header
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT, TOKEN_NBYTES, block_key
from tiered_cache.tiers.base import parse_capacity
from tiered_cache.tiers.disk import calls, collector, files, root
from tiered_cache.tiers.disk.collector import Collector
from tiered_cache.tiers.disk.finder import TOUCH_S, Branch, Finder, StoredBlock, namespace_digest, quietly
from tiered_cache.tiers.disk.listing import PIN, TTL, Entry, Listing, Shard
from tiered_cache.usage import format_bytes

DURABILITIES = ("process", "crash")
DEFAULT_MIN_FREE = "1GiB"

_TRIES = 3  # to put a file into a folder that others may remove while it is empty
MAX_TTL_S = 100 * 365 * 86_400  # what is to live longer lives so long: headers and file systems have room for no more


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a piece is to stay: `ttl_s` seconds (None: until it is evicted), `pin`ned against eviction."""

    ttl_s: float | None = None
    pin: bool = False


class DiskTier:
    """K/V blocks in a directory that survives restarts and is shared by any number of processes.

    Files appear whole or not at all, and every byte is verified whenever it is read. Made for its owner only (0700/0600).

    Args:
        path: the directory, "~" allowed; made if it is not there. Nothing else may be in it.
        capacity: budget in bytes, or a string such as "64GiB", for all that is in the directory, whoever wrote it.
        durability: "process": what flush() acknowledged survives the death of processes. "crash": that of the machine too.
        min_free: bytes of the file system to leave free.

    Raises:
        ConfigError: an argument is wrong, or the directory is not fit (not yours, holds other files, cannot be made).
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | str,
        durability: str = "process",
        min_free: int | str = DEFAULT_MIN_FREE,
    ) -> None:
        if os.name != "posix":
            raise ConfigError("DiskTier needs a POSIX system (Linux, macOS). Use TierStack(HostTier(...)) here.")
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
            raise ConfigError(f'DiskTier(path={path!r}) must be the path of a directory, such as "~/kv".')
        if durability not in DURABILITIES:
            raise ConfigError(f'DiskTier(durability={durability!r}) must be "process" or "crash".')
        self.capacity_bytes = parse_capacity(capacity, "DiskTier(capacity=...)")
        self.min_free_bytes = (
            0 if type(min_free) is int and min_free == 0 else parse_capacity(min_free, "DiskTier(min_free=...)")
        )
        self.durability = durability
        self.path, self._device = root.open_root(path)
        self.is_taken = False
        self.written_bytes = 0  # by this process
        self._renewed = b""  # short key of the block whose main piece was replaced last
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without knowing anything of the directory; for a child process, whose locks nobody will ever release."""
        self._listing = Listing(self.path)
        self._finder = Finder(self._listing)
        self._collector = Collector(self._listing, self.capacity_bytes, self.min_free_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files and folders, as far as this process knows, as `du` counts them."""
        return self._listing.nbytes

    @property
    def num_pieces(self) -> int:
        return self._listing.num_entries

    @property
    def evicted_pieces(self) -> int:
        return self._collector.evicted_pieces

    @property
    def corrupt_pieces(self) -> int:
        """Files that were not what they should be, when they were read here."""
        return self._finder.corrupt_pieces

    def has(self, branch: Branch) -> bool:
        """Say whether anything was ever stored for a model of this layout."""
        return files.exists(f"{self.path}/{branch.folder.hex()}")

    def extend(self, branch: Branch, parent: bytes, tokens: bytes, block_tokens: int) -> list[StoredBlock]:
        """Return the stored blocks that continue a sequence. See `Finder.extend`."""
        return self._finder.extend(branch, parent, tokens, block_tokens)

    def find_endings(
        self, branch: Branch, parent: bytes, tokens: bytes, block_tokens: int
    ) -> tuple[list[StoredBlock], list[tuple[int, StoredBlock]]]:
        """Return the full blocks of a sequence, and where snapshots are stored. See `Finder.find_endings`."""
        return self._finder.find_endings(branch, parent, tokens, block_tokens)

    def find_side(self, branch: Branch, parent: bytes, tokens: bytes) -> StoredBlock | None:
        """Return a block if its side piece is stored."""
        return self._finder.find_side(branch, parent, tokens)

    def read(self, branch: Branch, block: StoredBlock, kind: str, target: memoryview) -> None:
        """Fill `target` with the verified payload of a block's piece. See `Finder.read`."""
        self._finder.read(branch, block, kind, target)

    # --- writing ----------------------------------------------------------------------------------------------------

    def ensure(
        self,
        branch: Branch,
        parent: bytes,
        kind: str,
        tokens: bytes,
        payload: memoryview,
        stay: Stay,
        about: Mapping[str, object],
    ) -> bool:
        """Have a piece stored: write it, or note its use where it is there already; say whether it was written.

        Args:
            parent: full key of the block before it.
            tokens: of its block, encoded.
            payload: its K/V, all of it.
            about: what the identity is, in words, for people.

        Raises:
            OSError: it is not stored: the disk is full or fails, or no room could be made.
        """
        root.check_still_there(self.path, self._device)
        spec = branch.spec(parent, kind, len(tokens) // TOKEN_NBYTES)
        name = Name.of(block_key(parent, tokens), parent, tokens, kind == SIDE)
        shard = branch.shard(self._listing, parent)
        path = f"{shard.path}/{name}"
        is_there = self._touch(path, kind == MAIN or branch.window == SNAPSHOT) and not (
            kind == MAIN and self._remove_expired(shard, name)
        )
        is_outdated = is_there and self._ends_too_soon(shard, name, stay)
        written = is_outdated or not is_there
        if written:
            payload = payload[: spec.payload_nbytes]
            rounded = -(-spec.file_nbytes // ALIGNMENT) * ALIGNMENT
            hangs_on = name.key if name.is_side else name.parent
            self._collector.make_room(rounded + self._new_folders_nbytes(shard), hangs_on)
            ttl_ms = 0 if stay.ttl_s is None else max(1, int(min(stay.ttl_s, MAX_TTL_S) * 1000))
            header = encode_header(spec, Header(tokens, int(calls.now() * 1000), ttl_ms, checksums(payload)))
            nbytes = self._publish(branch, shard, name, [memoryview(header), payload], ttl_ms, is_outdated, about)
            if nbytes is not None:
                self._listing.add(shard, Entry(name, nbytes))
                self._collector.unseen_bytes += nbytes
                self.written_bytes += nbytes
                if shard.stamp < 0:  # a new folder: it takes room too
                    self._listing.refresh(shard)
                if is_outdated and kind == MAIN:
                    self._mark_end(shard, name.key, ttl_ms)
                self._renewed = name.key if is_outdated and kind == MAIN else b""
                if branch.window != SNAPSHOT and kind == (SIDE if branch.window else MAIN) and not ttl_ms:
                    self._drop_covered(branch, shard, parent, tokens)
        if stay.pin and kind == MAIN and self._pinned_bytes() + spec.file_nbytes <= self._collector.pinned_capacity_bytes:
            self._mark(shard, name.key, PIN)
        return written

    def _publish(
        self,
        branch: Branch,
        shard: Shard,
        name: Name,
        parts: Sequence[memoryview],
        ttl_ms: int,
        is_outdated: bool,
        about: Mapping[str, object],
    ) -> int | None:
        """Create a piece's file in its folder, which is made if need be. See `files.publish`."""
        for tries_left in reversed(range(_TRIES)):
            try:
                folder = self._folder(branch, shard, about)
                if not name.is_side and not is_outdated:  # before it is there; of one that is replaced, after
                    self._mark_end(shard, name.key, ttl_ms)
                used_at = 0.0 if name.is_side and branch.window > 0 else None  # such go first until a hit uses them
                is_durable = self.durability == "crash"
                return files.publish(folder, str(name), parts, durable=is_durable, used_at=used_at, replace=is_outdated)
            except FileNotFoundError:  # a folder was removed, being empty, before the file was in it
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _touch(self, path: str, notes_use: bool) -> bool:
        """Say whether a piece is there, and note its use. Those of windows go first, until a hit reads them."""
        try:
            found = calls.stat(path)
        except FileNotFoundError:
            return False
        now = calls.now()
        if notes_use and not 0 <= now - found.st_mtime < TOUCH_S:
            quietly(lambda: calls.set_used(path, now))
        return True

    def _remove_expired(self, shard: Shard, name: Name) -> bool:
        """Remove a block whose time is over: it cannot be replaced, since whoever sweeps may remove it at any moment."""
        try:
            if calls.stat(f"{shard.path}/{name.key.hex()}{TTL}").st_mtime > calls.now():
                return False
        except FileNotFoundError:
            return False
        for is_side in (True, False):
            each = dataclasses.replace(name, is_side=is_side)
            collector.remove(self._listing, shard, shard.find(name.key, is_side) or Entry(each, 0))
        self._mark_end(shard, name.key, 0)
        return True

    def _ends_too_soon(self, shard: Shard, name: Name, stay: Stay) -> bool:
        """Say whether a piece is to go before it is wanted to, so that another must take its place."""
        if name.is_side:  # like its main piece, which was seen to just before
            return name.key == self._renewed
        try:
            ends = calls.stat(f"{shard.path}/{name.key.hex()}{TTL}").st_mtime
        except FileNotFoundError:  # it stays until it is evicted
            return False
        return stay.ttl_s is None or ends <= calls.now() + min(stay.ttl_s, MAX_TTL_S) / 2

    def _new_folders_nbytes(self, shard: Shard) -> int:
        """Return what must be made for the first piece in a folder takes, besides that piece."""
        if shard.stamp >= 0:
            return 0
        namespace = shard.path.rpartition("/")[0]
        model = namespace.rpartition("/")[0]
        return ALIGNMENT * (1 + (not files.exists(namespace)) + 2 * (not files.exists(model)))

    def _folder(self, branch: Branch, shard: Shard, about: Mapping[str, object]) -> str:
        """Make the folder of a shard, and say in words beside it what the identity is."""
        namespace = branch.namespace_digest.hex()
        above = f"{self.path}/{branch.folder.hex()}"
        if not files.exists(f"{above}/{root.MODEL}"):
            root.make_root(self.path)  # which may have failed before, or somebody removed all that was in it
            files.make_folders(self.path, branch.folder.hex())
            words = json.dumps(dict(about), indent=1, sort_keys=True, default=str) + "\n"
            files.publish(above, root.MODEL, [memoryview(words.encode())])
        return files.make_folders(above, namespace, shard.path.rpartition("/")[2])

    def _mark(self, shard: Shard, key: bytes, suffix: str, at: float | None = None) -> None:
        """Put an empty file beside a piece. Its time, if it matters, is `at`."""
        if files.publish(shard.path, f"{key.hex()}{suffix}", [], used_at=at) is None and at is not None:
            calls.set_used(f"{shard.path}/{key.hex()}{suffix}", at)
        shard.marks[suffix][key] = calls.now() if at is None else at

    def _mark_end(self, shard: Shard, key: bytes, ttl_ms: int) -> None:
        """Mark when a piece may be removed without looking into it, or that it stays."""
        if ttl_ms:
            self._mark(shard, key, TTL, calls.now() + ttl_ms / 1000)
        else:
            shard.marks[TTL].pop(key, None)
            files.unlink_if_there(f"{shard.path}/{key.hex()}{TTL}")

    def _pinned_bytes(self) -> int:
        shards = list(self._listing.shards.values())
        return sum(shard.block_nbytes(key) for shard in shards for key in list(shard.marks[PIN]))

    def _drop_covered(self, branch: Branch, shard: Shard, parent: bytes, tokens: bytes) -> None:
        """Remove siblings whose tokens a new, longer block begins with, where a lookup will find it in their place."""
        for entry in self._listing.children(shard, parent[:SHORT_KEY_NBYTES]):
            if not HEAD_TOKENS <= entry.num_tokens < len(tokens) // TOKEN_NBYTES or entry.key in shard.marks[PIN]:
                continue
            covered = tokens[: entry.num_tokens * TOKEN_NBYTES]
            if block_key(parent, covered)[:SHORT_KEY_NBYTES] == entry.key:
                side = shard.find(entry.key, is_side=True)
                for each in (side, entry) if side is not None else (entry,):
                    collector.remove(self._listing, shard, each)

    # --- clearing ---------------------------------------------------------------------------------------------------

    def clear(self, *, namespace: str | None = None, identity: bytes | None = None) -> None:
        """Remove everything, or all of one namespace, or all of one model. Raises OSError if something stays."""
        self._finder.forget_tokens()
        self._collector.refresh()
        for place, shard in list(self._listing.shards.items()):
            model, space, _ = place.split("/")
            if namespace is not None and space != namespace_digest(namespace).hex():
                continue
            if identity is not None and not model.startswith(identity.hex()):
                continue
            self._listing.refresh(shard)
            for entry in list(shard.entries.values()):
                collector.remove(self._listing, shard, entry)
            for suffix, keys in shard.marks.items():
                for key in list(keys):
                    files.unlink_if_there(f"{shard.path}/{key.hex()}{suffix}")
        collector.sweep(self._listing)
        collector.remove_empty_folders(self._listing)
        self._collector.refresh()

    def tidy(self) -> None:
        """See what others did, remove what is expired or abandoned, and evict if too much is there. Raises OSError."""
        self._collector.tidy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {format_bytes(self.capacity_bytes)})"
