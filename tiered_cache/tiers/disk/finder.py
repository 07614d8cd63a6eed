"""Finding the blocks of a prompt in a directory, and reading them.

Owns lookups by name and by first tokens, and the check of every byte that leaves the directory. Refuses to own writing (tier).
"""

import functools
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tiered_cache.errors import CorruptEntryError
from tiered_cache.format import (
    CHUNK_NBYTES,
    HEAD_TOKENS,
    SHORT_KEY_NBYTES,
    Header,
    Layout,
    Name,
    Spec,
    checksums,
    head_of,
    num_chunks,
    parse_header,
)
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES, block_key, common_tokens
from tiered_cache.tiers.disk import calls, files
from tiered_cache.tiers.disk.listing import Entry, Listing, Shard

MAX_CANDIDATES = 16  # files opened in a lookup to find the one that shares most with a prompt
TOUCH_S = 60.0  # a file's time of last use is written at most this often

_KNOWN_TOKENS_NBYTES = 8 << 20  # of token ids of files looked at lately


class ExpiredEntryError(CorruptEntryError):
    """A piece whose time is over."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The part of a directory that serves one model in one namespace.

    Attributes:
        identity: digest of the model.
        namespace: of the stack.
        layout: of the live model's blocks.
        window: tokens before the end of a hit whose side pieces it takes, or SNAPSHOT; 0: there are none.
    """

    identity: bytes
    namespace: str
    layout: Layout
    window: int

    @property
    def folder(self) -> bytes:
        """Return the identity with a digest of the layout: what is laid out otherwise lies elsewhere, and is never met."""
        return self.identity + _layout_digest(self.layout, self.window)

    @property
    def namespace_digest(self) -> bytes:
        return namespace_digest(self.namespace)

    def spec(self, parent: bytes, kind: str, num_tokens: int) -> Spec:
        """Return what is known of a piece behind the block `parent` before its file is opened."""
        return Spec(self.identity, self.namespace_digest, parent, kind, num_tokens, self.layout)

    def shard(self, listing: Listing, parent: bytes) -> Shard:
        """Return the folder of a block's children."""
        return listing.shard(self.folder, self.namespace_digest, parent)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block on disk that shares its first `num_tokens` tokens with a prompt. Its bytes are not verified yet."""

    key: bytes
    parent: bytes
    tokens: bytes
    num_tokens: int
    has_side: bool

    @property
    def block_tokens(self) -> int:
        """Return how many tokens the whole block holds."""
        return len(self.tokens) // TOKEN_NBYTES


class Finder:
    """Lookups and verified reads in one directory."""

    def __init__(self, listing: Listing) -> None:
        self.corrupt_pieces = 0
        self._listing = listing
        self._tokens: OrderedDict[bytes, bytes] = OrderedDict()  # of files looked at lately, by short key
        self._tokens_lock = threading.Lock()

    def extend(self, branch: Branch, parent: bytes, tokens: bytes, block_tokens: int) -> list[StoredBlock]:
        """Return the stored blocks that continue a sequence behind the block `parent` with encoded `tokens`.

        The last one may share only its first tokens. A full block is found by its name alone; of others, those that share
        at least 16 tokens (or all they have) are told by theirs, and at most `MAX_CANDIDATES` are opened.

        Raises:
            OSError: the directory cannot be read.
        """
        found: list[StoredBlock] = []
        step = block_tokens * TOKEN_NBYTES
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            block = self._find_full(branch, parent, chunk) if len(chunk) == step else None
            if block is None:
                block = self._find_partial(branch, parent, chunk, block_tokens)
            if block is not None:
                found.append(block)
            if block is None or block.num_tokens < block_tokens:
                break
            parent = block.key
        last = found[-1] if found else None
        if branch.window and last is not None and last.num_tokens == block_tokens and not last.has_side:
            # Whoever wrote it was killed: what it was to cover may still be there.
            other = self._find_partial(branch, last.parent, last.tokens, block_tokens)
            if other is not None and other.has_side:
                found[-1] = other
        return found

    def find_endings(
        self, branch: Branch, parent: bytes, tokens: bytes, block_tokens: int
    ) -> tuple[list[StoredBlock], list[tuple[int, StoredBlock]]]:
        """Return the full blocks of a sequence, and all of its blocks that have a snapshot, each with its first token's place.

        All are found by their names alone: the key of one that may serve follows from the prompt. Raises OSError.
        """
        full: list[StoredBlock] = []
        endings: list[tuple[int, StoredBlock]] = []
        step = block_tokens * TOKEN_NBYTES
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            tails = self._whole_tails(branch, parent, chunk, block_tokens)
            endings += [(start // TOKEN_NBYTES, tail) for tail in tails]
            block = self._find_full(branch, parent, chunk) if len(chunk) == step else None
            if block is None:
                break
            full.append(block)
            if block.has_side:
                endings.append((start // TOKEN_NBYTES, block))
            parent = block.key
        return full, endings

    def read(self, branch: Branch, block: StoredBlock, kind: str, target: memoryview) -> None:
        """Fill `target` with the verified payload of a block's piece.

        Raises:
            CorruptEntryError: the file is not what it should be, or its time is over; it was removed.
            OSError: it is not there any more, or cannot be read. What is in `target` then is not to be used.
        """
        spec = branch.spec(block.parent, kind, block.block_tokens)
        shard = branch.shard(self._listing, block.parent)
        name = Name.of(block.key, block.parent, block.tokens, kind == SIDE)

        def verify(fd: int, header: Header) -> None:
            if header.tokens != block.tokens:
                raise CorruptEntryError("the file holds other tokens")
            offset = spec.header_nbytes
            for start in range(0, len(target), files.TRANSFER_NBYTES):
                part = target[start : start + files.TRANSFER_NBYTES]
                files.read_exactly(fd, part, offset + start)
                first = start // CHUNK_NBYTES
                expected = header.checksums[first : first + num_chunks(len(part))]
                if checksums(part) != expected:  # of every chunk, while it is still in the processor's cache
                    raise CorruptEntryError("a checksum does not fit")

        assert len(target) == spec.payload_nbytes
        self._open_verified(shard, name, spec, verify, will_read_all=True)

    def _find_full(self, branch: Branch, parent: bytes, tokens: bytes) -> StoredBlock | None:
        key = block_key(parent, tokens)
        shard = branch.shard(self._listing, parent)
        if not self._is_there(shard, Name.of(key, parent, tokens, is_side=False)):
            return None
        return StoredBlock(key, parent, tokens, len(tokens) // TOKEN_NBYTES, self._has_side(branch, shard, key, parent, tokens))

    def find_side(self, branch: Branch, parent: bytes, tokens: bytes) -> StoredBlock | None:
        """Return a block if its side piece is stored. Raises OSError."""
        key = block_key(parent, tokens)
        if not self._has_side(branch, branch.shard(self._listing, parent), key, parent, tokens):
            return None
        return StoredBlock(key, parent, tokens, len(tokens) // TOKEN_NBYTES, True)

    def _has_side(self, branch: Branch, shard: Shard, key: bytes, parent: bytes, tokens: bytes) -> bool:
        return branch.window != 0 and self._is_there(shard, Name.of(key, parent, tokens, is_side=True))

    def _is_there(self, shard: Shard, name: Name) -> bool:
        if shard.find(name.key, name.is_side) is not None:
            return True
        try:
            found = calls.stat(f"{shard.path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._listing.add(shard, Entry(name, calls.used_bytes(found)))
        return True

    def _find_partial(self, branch: Branch, parent: bytes, tokens: bytes, block_tokens: int) -> StoredBlock | None:
        shard = branch.shard(self._listing, parent)
        self._listing.refresh(shard)
        heads: dict[int, bytes] = {}
        candidates = []
        for entry in self._listing.children(shard, parent[:SHORT_KEY_NBYTES]):
            count = min(entry.num_tokens, HEAD_TOKENS)
            if count * TOKEN_NBYTES <= len(tokens) and entry.num_tokens <= block_tokens:
                if count not in heads:
                    heads[count] = head_of(parent, tokens[: count * TOKEN_NBYTES])
                if entry.head == heads[count]:
                    candidates.append(entry)
        candidates.sort(key=lambda entry: entry.num_tokens, reverse=True)
        best: StoredBlock | None = None
        for entry in candidates[:MAX_CANDIDATES]:
            try:
                stored = self._tokens_of(branch, shard, entry, parent)
            except (CorruptEntryError, FileNotFoundError):
                continue
            shared = common_tokens(stored, tokens)
            # A last block without its side piece is of no use: whoever wrote it was killed, or the side piece was evicted.
            if shared and (branch.window or shared > (best.num_tokens if best else 0)):
                key = block_key(parent, stored)
                has_side = self._has_side(branch, shard, key, parent, stored)
                if best is None or (has_side, shared) > (best.has_side, best.num_tokens):
                    best = StoredBlock(key, parent, stored, shared, has_side)
        return best

    def _whole_tails(self, branch: Branch, parent: bytes, tokens: bytes, block_tokens: int) -> list[StoredBlock]:
        """Return the blocks that are not full, with which `tokens` begin, that have a snapshot; the shortest first."""
        shard = branch.shard(self._listing, parent)
        self._listing.refresh(shard)
        tails = []
        for entry in self._listing.children(shard, parent[:SHORT_KEY_NBYTES]):
            if entry.num_tokens < block_tokens and entry.num_tokens * TOKEN_NBYTES <= len(tokens):
                start = tokens[: entry.num_tokens * TOKEN_NBYTES]
                if entry.head == head_of(parent, start) and entry.key == block_key(parent, start)[:SHORT_KEY_NBYTES]:
                    key = block_key(parent, start)
                    if self._has_side(branch, shard, key, parent, start):
                        tails.append(StoredBlock(key, parent, start, entry.num_tokens, True))
        return sorted(tails, key=lambda tail: tail.num_tokens)

    def _tokens_of(self, branch: Branch, shard: Shard, entry: Entry, parent: bytes) -> bytes:
        """Return the tokens of a piece from its header, or as they are remembered."""
        with self._tokens_lock:
            known = self._tokens.get(entry.key)
            if known is not None:
                self._tokens.move_to_end(entry.key)
                return known
        spec = branch.spec(parent, MAIN, entry.num_tokens)
        tokens = self._open_verified(shard, entry.name, spec).tokens
        with self._tokens_lock:
            self._tokens[entry.key] = tokens
            while len(self._tokens) * 256 * TOKEN_NBYTES > _KNOWN_TOKENS_NBYTES:
                self._tokens.popitem(last=False)
        return tokens

    def _open_verified(
        self,
        shard: Shard,
        name: Name,
        spec: Spec,
        verify: Callable[[int, Header], None] = lambda fd, header: None,
        *,
        will_read_all: bool = False,
    ) -> Header:
        """Open a piece's file, check its header, let `verify` check more, and note its use; what is bad is removed."""
        path = f"{shard.path}/{name}"
        try:
            fd = calls.open_to_read(path)
        except OSError as error:
            self._forget_entry(shard, name)  # it may have been evicted or cleared by somebody else
            if not files.is_unfit(path):
                raise
            self.corrupt_pieces += 1
            quietly(lambda: files.remove_unfit(path))
            raise CorruptEntryError("there is no file that can be read") from error
        with files.opened(fd):
            seen = calls.stat_open(fd)
            try:
                if not calls.is_file(seen) or seen.st_uid != os.geteuid() or seen.st_size != spec.file_nbytes:
                    raise CorruptEntryError("the file has another size, kind or owner than it should")
                if will_read_all:
                    quietly(lambda: calls.will_read(fd))
                raw = bytearray(spec.header_nbytes)
                files.read_exactly(fd, memoryview(raw), 0)
                header = parse_header(spec, bytes(raw))
                if block_key(spec.parent, header.tokens)[:SHORT_KEY_NBYTES] != name.key:
                    raise CorruptEntryError("the file holds another block than its name says")
                if header.is_expired(int(calls.now() * 1000)):
                    raise ExpiredEntryError("its time is over")
                verify(fd, header)
            except CorruptEntryError as error:
                self.corrupt_pieces += not isinstance(error, ExpiredEntryError)
                self._forget_entry(shard, name)
                quietly(lambda: files.unlink_if_same(path, seen))
                quietly(lambda: files.remove_unfit(path))
                raise
            now = calls.now()
            if will_read_all and not 0 <= now - seen.st_mtime < TOUCH_S:
                quietly(lambda: calls.set_used_open(fd, now))
            return header

    def _forget_entry(self, shard: Shard, name: Name) -> None:
        entry = shard.find(name.key, name.is_side)
        if entry is not None:
            self._listing.remove(shard, entry)
        with self._tokens_lock:
            self._tokens.pop(name.key, None)

    def forget_tokens(self) -> None:
        """Forget what was read of headers."""
        with self._tokens_lock:
            self._tokens.clear()


@functools.lru_cache(maxsize=64)
def _layout_digest(layout: Layout, window: int) -> bytes:
    tables = [layout.tensors(kind, 1) if kind == MAIN or window else () for kind in (MAIN, SIDE)]
    return hashlib.sha256(repr([tuple(tables[0]), tuple(tables[1]), window]).encode()).digest()[:8]


def namespace_digest(namespace: str) -> bytes:
    """Return what a namespace is called on disk, where its name is not to be read."""
    return hashlib.sha256(b"namespace" + namespace.encode()).digest()[:16]


def quietly(what: Callable[[], object]) -> None:
    """Do what is good to have and may fail."""
    try:
        what()
    except OSError:
        return
