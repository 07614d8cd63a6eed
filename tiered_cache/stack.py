"""TierStack: the tiers of one process, what is stored in them, and every decision about it.

Owns the index, the budgets, eviction and promotion. Refuses to own bytes in flight: a `BlockPort` copies them. Buffers
are opaque here and no torch is imported, so all of this is tested in milliseconds.
"""

import atexit
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self

import numpy as np

from tiered_cache.archive import Archive
from tiered_cache.errors import ClosedError, ConfigError
from tiered_cache.format import Layout
from tiered_cache.index import Block, Node, PrefixIndex, Root
from tiered_cache.interrupts import uninterrupted
from tiered_cache.inventory import Inventory
from tiered_cache.keys import SIDE, SNAPSHOT, TOKEN_NBYTES, encode_tokens
from tiered_cache.lookup import Lookup
from tiered_cache.matching import Match
from tiered_cache.movement import Fetched, Movement
from tiered_cache.tiers.arrangement import arrange
from tiered_cache.tiers.base import BlockPort, MemoryTier
from tiered_cache.tiers.disk import Branch, DiskTier, Stay
from tiered_cache.usage import Stats, TierStats, Usage
from tiered_cache.workers import Workers
from tiered_cache.writeback import EXIT_FLUSH_S

FOREVER = Stay()
QUEUED_SHARE = 0.75  # of the host tier may wait to be written to disk

_all: "weakref.WeakSet[TierStack]" = weakref.WeakSet()


class TierStack:
    """Stores blocks of K/V in tiers of memory and finds the longest stored prefix of a prompt.

    One stack serves any number of models, caches and threads; make one per process and close it once.

    Args:
        *tiers: one HostTier, above it at most one DeviceTier, and below it at most one DiskTier.
        block_tokens: tokens in a full block. Reuse is exact to the token whatever this is.
        namespace: keeps what is stored apart from other namespaces.

    Raises:
        ConfigError: no HostTier, a tier given twice or already in another stack, or a bad argument.
    """

    def __init__(self, *tiers: MemoryTier | DiskTier, block_tokens: int = 256, namespace: str = "default") -> None:
        self.tiers, self.disk = arrange(tiers)
        if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
            raise ConfigError(f"TierStack(block_tokens={block_tokens!r}) must be a whole number of at least 1, such as 256.")
        if not isinstance(namespace, str) or not namespace:
            raise ConfigError(f'TierStack(namespace={namespace!r}) must be a non-empty str, such as "default".')
        for tier in tiers:
            tier.is_taken = True
        self.block_tokens = block_tokens
        self.namespace = namespace
        self.closed = False
        self._lock = threading.RLock()
        self._index = PrefixIndex(block_tokens, namespace)
        self._inventory = Inventory(self._index, self.tiers)
        self._requests = 0
        self._totals = Usage()
        self._miss_reasons: Counter[str] = Counter()
        self._dropped_at_flush = 0
        self._archive: Archive | None = None
        if self.disk is not None:
            self._archive = Archive(self.disk, int(self.tiers[-1].capacity_bytes * QUEUED_SHARE))
            self._archive.writes.start()
        self._committer = Workers(1, "tiered_cache committer")
        self._behind: Future[None] | None = None
        self._behind_lock = threading.Lock()
        self._movement = Movement(self._lock, self._index, self._inventory, self.tiers, self._archive)
        self._lookup = Lookup(self._lock, self._index, self._inventory, self._archive)
        _all.add(self)

    # --- what a session asks for ------------------------------------------------------------------------------------

    def match(self, identity: bytes, salt: bytes, token_ids: np.ndarray, shapes: Sequence[tuple[Layout, int]] = ()) -> Match:
        """Find and hold the longest stored prefix of `token_ids` `[num_tokens]`. The caller must `release` it.

        Args:
            shapes: (layout, window) that the model's blocks may have, as far as that is known before its first forward. The
                disk tier is asked for what memory does not hold, if there are any; none if the identity means something in
                this process only.
        """
        self.settle()
        self._check_open()
        return self._lookup.match(identity, salt, encode_tokens(token_ids), shapes)

    def fetch(self, match: Match, num_tokens: int, port: BlockPort, have: int = 0) -> Fetched:
        """Copy the first `num_tokens` tokens of a held match to the layers.

        Side pieces only where they reach into the last window, but those from their beginning. Runs on the calling thread;
        what is on disk is read ahead by a few others and verified. The match stays held.

        Args:
            have: of how many of the first tokens the main pieces need not be copied.
        """
        fetched = self._movement.fetch(match, num_tokens, port, have)
        with self._lock:
            self._inventory.touch(fetched.used, fetched.num_sides)
        return fetched

    def release(self, match: Match) -> None:
        """End the hold on a match. Once per match."""
        self._lookup.release(match)

    def commit(
        self,
        identity: bytes,
        salt: bytes,
        token_ids: np.ndarray,
        port: BlockPort,
        *,
        reused: int = 0,
        stay: Stay = FOREVER,
        about: Mapping[str, object] | None = None,
    ) -> int:
        """Store the K/V of `token_ids` `[num_tokens]`, as far as it is not stored yet; return how many tokens are new.

        Each block is published when its bytes are complete, parents before children: whatever interrupts this, nothing
        half-written is ever found. Stops at the first block for which no room can be made (counted as dropped). What goes to
        disk is queued, and written behind.

        Args:
            reused: how many of the first tokens were fetched from here: they are not new.
            stay: how long they stay.
            about: what the identity is, in words; None if it means something in this process only, and nothing goes to disk.
        """
        created = spilled = 0
        chain: list[Block] = []  # held, from the root down
        with uninterrupted() as ctrl_c:
            with self._lock:
                self._check_open()
                root = self._index.root(identity, salt, port.layout, port.window)
                root.holds += 1
            branch = Branch(identity, self.namespace, port.layout, port.window)
            try:
                node: Node = root
                tokens = encode_tokens(token_ids)
                segments, gains = self._segments(tokens, port), self._gains(root, tokens, port.ends)
                for place, (start, chunk) in enumerate(segments):
                    block, new_tokens = self._movement.commit_block(node, chunk, start, port, chain)
                    created += min(new_tokens, max(0, start + len(chunk) // TOKEN_NBYTES - reused))
                    if block is None:
                        if about is not None and self._index.is_linked(node):  # else it was cleared meanwhile
                            spilled = self._movement.spill(node, segments[place:], reused, branch, port, stay, about)
                            created += max(0, start + spilled - max(start, reused))
                        last, end = segments[-1]
                        if start + spilled < last + len(end) // TOKEN_NBYTES and self._index.is_linked(root):
                            self._movement.dropped_blocks += 1
                        break
                    stop = start + block.num_tokens
                    has_side = port.window != 0 and block.tokens == chunk and port.has_side(start, stop)
                    if has_side and SIDE not in block.pieces:
                        self._movement.store_side(block, start, port, gains.get(stop, 0))
                    with self._lock:
                        self._inventory.let_stay(block, stay.ttl_s, stay.pin)
                        if about is not None:
                            self._movement.save(block, branch, port, stay, about)
                    is_new = stop > reused
                    if has_side and SIDE not in block.pieces and about is not None and is_new:  # memory has no room for it
                        self._movement.spill_side(block, start, branch, port, stay, about)
                    if ctrl_c.requested:
                        break
                    if block.num_tokens == self.block_tokens:
                        node = block
            finally:
                with self._lock:
                    self._totals.created_tokens += created
                    num_sides = len(chain) if port.window == SNAPSHOT else -(-port.window // self.block_tokens) + 1
                    self._inventory.touch(chain, num_sides)
                    self._inventory.unhold(chain)
                    root.holds -= 1
                    self._index.drop_if_empty(root)
        return created

    def behind(self, job: Callable[[], None]) -> None:
        """Run `job`, which commits and does not raise, on a thread of this stack's. One at a time: waits for the one before."""
        with self._behind_lock:
            self.settle()
            if self.closed:
                job()  # which notices
            else:
                self._behind = self._committer.submit(job)

    def settle(self) -> None:
        """Wait until all that was committed is stored in memory."""
        if self._behind is not None:
            wait([self._behind])

    def _segments(self, tokens: bytes, port: BlockPort) -> list[tuple[int, bytes]]:
        """Cut a sequence into what its blocks hold: (place of the first token, encoded tokens), parents first.

        Where a snapshot is inside a block, one that ends there comes before it; a last one without is of no use.
        """
        segments: list[tuple[int, bytes]] = []
        for place, chunk in enumerate(self._index.chunks(tokens)):
            start, num_tokens = place * self.block_tokens, len(chunk) // TOKEN_NBYTES
            inside = sorted({end - start for end in port.ends if start < end < start + num_tokens})
            segments += [(start, chunk[: length * TOKEN_NBYTES]) for length in inside]
            if port.window != SNAPSHOT or num_tokens == self.block_tokens or start + num_tokens in port.ends:
                segments.append((start, chunk))
        return segments

    def _gains(self, root: Root, tokens: bytes, ends: Sequence[int]) -> dict[int, int]:
        """Return how many tokens a snapshot at each of `ends` saves, over the one before it."""
        if not ends:
            return {}
        with self._lock:
            there = [start + block.num_tokens for start, block in self._index.endings(root, tokens, time.time())]
        known = [0, *there, *ends]
        return {end: max(1, end - max(other for other in known if other < end)) for end in ends if end > 0}

    def record(self, usage: Usage) -> None:
        """Count one request in `stats()`. What it created, `commit` counted."""
        with self._lock:
            self._requests += 1
            self._totals.prompt_tokens += usage.prompt_tokens
            self._totals.cached_tokens += usage.cached_tokens
            if usage.miss_reason is not None:
                self._miss_reasons[usage.miss_reason.value] += 1

    # --- what a user asks for ---------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until all that was committed is stored, on disk too if there is a disk tier.

        Returns:
            Whether it is. False also if anything was dropped since the last flush (see `stats()`).
        """
        self.settle()
        with self._lock:
            self._check_open()
        is_written = self._archive is None or self._archive.flush(timeout)
        with self._lock:
            dropped = self._movement.dropped_blocks - self._dropped_at_flush
            self._dropped_at_flush = self._movement.dropped_blocks
            return is_written and dropped == 0

    def clear(self, namespace: str | None = None) -> None:
        """Drop everything stored, or only what is in `namespace`: in every tier, and what is queued for one.

        Blocks in use are freed when their last reader is done. On disk that is everything anybody stored there; what other
        processes hold in memory, they keep.

        Raises:
            StoreError: something on disk could not be removed.
        """
        self.settle()
        with self._lock:
            self._check_open()
            if namespace in (None, self.namespace):
                self._inventory.discard_roots(lambda root: True)
                if self._archive is not None:
                    self._archive.writes.drop(lambda write: True)
        if self._archive is not None:
            self._archive.clear(namespace=namespace)

    def forget(self, identity: bytes) -> None:
        """Drop everything stored for one model identity. Raises StoreError as `clear` does."""
        self.settle()
        with self._lock:
            self._check_open()
            self._inventory.discard_roots(lambda root: root.identity == identity)
            if self._archive is not None:
                self._archive.writes.drop(lambda write: write.branch.identity == identity)
        if self._archive is not None:
            self._archive.clear(identity=identity)

    def relieve(self, nbytes: int) -> None:
        """Free `nbytes` of device memory, as far as that holds copies which nobody reads: it is needed for other things."""
        with self._lock:
            self._inventory.shrink(nbytes)

    def stats(self) -> Stats:
        """Return counters since the stack was made. Of a disk: as far as this process has looked."""
        self.settle()
        tiers: list[tuple[MemoryTier | DiskTier, TierStats]] = [
            (tier, TierStats(tier.num_pieces, tier.used_bytes, tier.capacity_bytes, tier.evicted_pieces)) for tier in self.tiers
        ]
        if self._archive is not None:
            tiers.append((self._archive.tier, self._archive.stats()))
        with self._lock:
            return Stats(
                requests=self._requests,
                prompt_tokens=self._totals.prompt_tokens,
                cached_tokens=self._totals.cached_tokens,
                created_tokens=self._totals.created_tokens,
                dropped_blocks=self._movement.dropped_blocks,
                miss_reasons=dict(self._miss_reasons),
                tiers={tier.name: tier_stats for tier, tier_stats in tiers},
            )

    def close(self) -> None:
        """Free all memory, after what is queued for a disk was written (for up to ten seconds). Closing twice is fine.

        Caches that use this stack go on without reuse.
        """
        self.settle()
        if self._archive is not None and not self.closed and not self._archive.flush(EXIT_FLUSH_S):
            self._archive.writes.give_up()
        self._close()

    def _close(self) -> None:
        with self._lock:
            if not self.closed:
                self._inventory.discard_roots(lambda root: True)
                self.closed = True
                self._committer.close()
                if self._archive is not None:
                    self._archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        try:  # noqa: SIM105  not contextlib: at the end of the interpreter what this module imported may be gone
            self._close()  # blocks and their parents hold on to each other: free their bytes now, not when gc comes by
        except Exception:  # noqa: BLE001, S110  half made, or the interpreter is ending
            pass

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a copied cache shares the stack

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._index.blocks):,} blocks of up to {self.block_tokens} tokens"
        return f"TierStack({', '.join(map(repr, self.tiers))}; {state}, namespace {self.namespace!r})"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("This TierStack is closed. Make a new one, or use TieredCache() with the default stack.")


def check_stack(stack: object, argument: str) -> TierStack:
    """Return `stack` if it is an open TierStack. Raises ConfigError or ClosedError naming `argument`."""
    if not isinstance(stack, TierStack):
        raise ConfigError(f'{argument} must be a TierStack, such as TierStack(HostTier("8GiB")), not {type(stack).__name__}.')
    if stack.closed:
        raise ClosedError(f"{argument} is closed. Make a new TierStack, or leave the argument out to use the default stack.")
    return stack


_fork_lock = threading.Lock()  # threads fork one after the other
_forking: list[TierStack] = []  # those whose locks are held while the process forks, so that a child's index is whole


def _before_fork() -> None:
    _fork_lock.acquire()
    _forking[:] = list(_all)
    for stack in _forking:
        stack._lock.acquire()


def _after_fork(in_child: bool) -> None:
    while _forking:
        stack = _forking.pop()
        if in_child:
            stack._behind, stack._behind_lock = None, threading.Lock()
        if in_child and stack._archive is not None:
            stack._archive.after_fork()
            stack._movement.after_fork()
        stack._lock.release()
    _fork_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _after_fork(False), after_in_child=lambda: _after_fork(True))


def _at_exit() -> None:
    for stack in list(_all):  # before what is stored then is written to disk, and before memory may not be freed any more
        stack.settle()


atexit.register(_at_exit)
