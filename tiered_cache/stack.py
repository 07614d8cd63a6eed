"""TierStack: the tiers of one process, what is stored in them, and every decision about it.

Owns the index, the budgets, eviction and promotion. Refuses to own bytes in flight: a `BlockPort` copies them. Buffers
are opaque here and no torch is imported, so all of this is tested in milliseconds.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from tiered_cache.errors import ClosedError, ConfigError
from tiered_cache.index import Block, Node, Part, Piece, PrefixIndex, Root
from tiered_cache.interrupts import uninterrupted
from tiered_cache.inventory import Inventory
from tiered_cache.keys import MAIN, SIDE, block_key, encode_tokens
from tiered_cache.tiers.base import BlockPort, Buffer, MemoryTier
from tiered_cache.tiers.host import HostTier, default_capacity
from tiered_cache.usage import Stats, TierStats, Usage


@dataclass(frozen=True, slots=True)
class Match:
    """A stored prefix, held until `TierStack.release`: nothing of it is evicted meanwhile."""

    root: Root | None
    parts: tuple[Part, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    def usable(self, limit: int) -> int:
        """Return the longest length up to `limit` before which the side pieces of a whole window are stored."""
        window = self.root.window if self.root is not None else 0
        best = covered_from = start = 0
        for part in self.parts:
            stop = min(start + part.num_tokens, limit)
            if window and SIDE not in part.block.pieces:
                covered_from = start + part.num_tokens
            elif stop > start and (covered_from == 0 or stop - covered_from >= window):
                best = stop
            start += part.num_tokens
        return best


class TierStack:
    """Stores blocks of K/V in tiers of memory and finds the longest stored prefix of a prompt.

    One stack serves any number of models, caches and threads; make one per process and close it once.

    Args:
        *tiers: one HostTier, and above it at most one DeviceTier.
        block_tokens: tokens in a full block. Reuse is exact to the token whatever this is.
        namespace: keeps what is stored apart from other namespaces.

    Raises:
        ConfigError: no HostTier, a tier given twice or already in another stack, or a bad argument.
    """

    def __init__(self, *tiers: MemoryTier, block_tokens: int = 256, namespace: str = "default") -> None:
        self.tiers = _check_tiers(tiers)
        if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
            raise ConfigError(f"TierStack(block_tokens={block_tokens!r}) must be a whole number of at least 1, such as 256.")
        if not isinstance(namespace, str) or not namespace:
            raise ConfigError(f'TierStack(namespace={namespace!r}) must be a non-empty str, such as "default".')
        for tier in self.tiers:
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
        self._dropped_blocks = 0
        self._dropped_at_flush = 0

    # --- what a session asks for ------------------------------------------------------------------------------------

    def match(self, identity: bytes, salt: bytes, token_ids: np.ndarray) -> Match:
        """Find and hold the longest stored prefix of `token_ids` `[num_tokens]`. The caller must `release` it."""
        with self._lock:
            self._check_open()
            root = self._index.find_root(identity, salt)
            parts = tuple(self._index.match(root, encode_tokens(token_ids))) if root is not None else ()
            self._inventory.hold([part.block for part in parts])
            return Match(root, parts)

    def fetch(self, match: Match, num_tokens: int, port: BlockPort) -> dict[str, int]:
        """Copy the first `num_tokens` tokens of a held match to the layers; return tokens by the tier they came from.

        Side pieces only where they reach into the last window, but those from their beginning. Runs and waits on the
        calling thread. The match stays held.
        """
        served: dict[str, int] = {}
        used: list[Block] = []
        transfers = []
        start = num_sides = 0
        for part in match.parts:
            take = min(part.num_tokens, num_tokens - start)
            if take <= 0:
                break
            in_window = port.window > 0 and start + take > num_tokens - port.window
            num_sides += in_window
            for kind in (MAIN, SIDE) if in_window else (MAIN,):
                piece = part.block.pieces[kind]
                tier = self._promote(piece, port)
                transfers.append(port.load(kind, start, take, piece.copies[tier.name], part.block.num_tokens))
                if len(transfers) > 1:  # two under way: the bytes of one land while the other's are put in place
                    transfers.pop(0).wait()
                if kind == MAIN:
                    served[tier.name] = served.get(tier.name, 0) + take
            used.append(part.block)
            start += take
        for transfer in transfers:
            transfer.wait()
        with self._lock:
            self._inventory.touch(used, num_sides)
        return served

    def release(self, match: Match) -> None:
        """End the hold on a match. Once per match."""
        with self._lock:
            self._inventory.unhold([part.block for part in match.parts])

    def commit(self, identity: bytes, salt: bytes, token_ids: np.ndarray, port: BlockPort) -> int:
        """Store the K/V of `token_ids` `[num_tokens]`, as far as it is not stored yet; return how many tokens are new.

        Each block is published when its bytes are complete, parents before children: whatever interrupts this, nothing
        half-written is ever found. Stops at the first block for which no room can be made (counted as dropped).
        """
        created = 0
        chain: list[Block] = []  # held, from the root down
        with uninterrupted() as ctrl_c:
            with self._lock:
                self._check_open()
                root = self._index.root(identity, salt, port.layout, port.window)
                root.holds += 1
            try:
                node: Node = root
                start = 0
                for chunk in self._index.chunks(encode_tokens(token_ids)):
                    block, new_tokens = self._commit_block(node, chunk, start, port, chain)
                    created += new_tokens
                    if block is None:
                        break
                    if port.window and SIDE not in block.pieces and block.tokens == chunk and port.has_side(start):
                        self._store(Piece(block, SIDE, port.nbytes(SIDE, block.num_tokens)), start, port)
                    if ctrl_c.requested:
                        break
                    node, start = block, start + block.num_tokens
            finally:
                with self._lock:
                    self._totals.created_tokens += created
                    self._inventory.touch(chain, -(-port.window // self.block_tokens) + 1)
                    self._inventory.unhold(chain)
                    root.holds -= 1
                    self._index.drop_if_empty(root)
        return created

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
        """Wait up to `timeout` seconds until all that was committed is stored. False if anything was dropped since the last.

        Memory tiers store before commit returns, so this never waits yet.
        """
        with self._lock:
            self._check_open()
            dropped = self._dropped_blocks - self._dropped_at_flush
            self._dropped_at_flush = self._dropped_blocks
            return dropped == 0

    def clear(self, namespace: str | None = None) -> None:
        """Drop everything stored, or only what is in `namespace`. Blocks in use are freed when their last reader is done."""
        with self._lock:
            self._check_open()
            if namespace in (None, self.namespace):
                self._inventory.discard_roots(lambda root: True)

    def forget(self, identity: bytes) -> None:
        """Drop everything stored for one model identity."""
        with self._lock:
            self._check_open()
            self._inventory.discard_roots(lambda root: root.identity == identity)

    def stats(self) -> Stats:
        """Return counters since the stack was made."""
        with self._lock:
            return Stats(
                requests=self._requests,
                prompt_tokens=self._totals.prompt_tokens,
                cached_tokens=self._totals.cached_tokens,
                created_tokens=self._totals.created_tokens,
                dropped_blocks=self._dropped_blocks,
                miss_reasons=dict(self._miss_reasons),
                tiers={
                    tier.name: TierStats(tier.num_pieces, tier.used_bytes, tier.capacity_bytes, tier.evicted_pieces)
                    for tier in self.tiers
                },
            )

    def close(self) -> None:
        """Free everything. Caches that use this stack go on without reuse. Closing twice is fine."""
        with self._lock:
            if not self.closed:
                self._inventory.discard_roots(lambda root: True)
                self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # half made, or the interpreter is ending
            self.close()  # blocks and their parents hold on to each other: free their bytes now, not when gc comes by

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a copied cache shares the stack

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._index.blocks):,} blocks of up to {self.block_tokens} tokens"
        return f"TierStack({', '.join(map(repr, self.tiers))}; {state}, namespace {self.namespace!r})"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("This TierStack is closed. Make a new one, or use TieredCache() with the default stack.")

    def _commit_block(
        self, parent: Node, tokens: bytes, start: int, port: BlockPort, chain: list[Block]
    ) -> tuple[Block | None, int]:
        """Make sure `tokens` behind `parent` are stored, and append their block, held, to `chain`.

        Returns:
            The block and how many of its tokens are new; (None, 0) where the commit must end.
        """
        with self._lock:
            if self._inventory.hold_existing(parent, tokens, chain):
                return chain[-1], 0
        block = Block(block_key(parent.key, tokens), parent, tokens)
        created = self._store(Piece(block, MAIN, port.nbytes(MAIN, block.num_tokens)), start, port)
        with self._lock:
            if block.holds:  # published, and held since
                chain.append(block)
            elif not self._inventory.hold_existing(parent, tokens, chain):  # nor did another thread
                return None, 0
        return chain[-1], created

    def _store(self, piece: Piece, start: int, port: BlockPort) -> int:
        """Copy a new piece's bytes from the layers and publish it when they are complete; return how many tokens are new."""
        reserved: list[MemoryTier] = []
        copies: dict[str, Buffer] = {}
        block = piece.block
        published = False
        try:
            with self._lock:
                if self._is_wanted(piece):
                    self._inventory.reserve(piece.nbytes, self.tiers, reserved)
            if not reserved:
                raise MemoryError
            copies.update({tier.name: port.allocate(tier.memory, piece.nbytes) for tier in reserved})
            port.save(piece.kind, start, block.num_tokens, list(copies.values())).wait()
            with self._lock:
                if not self._is_wanted(piece):  # another thread was faster, or it was cleared meanwhile
                    return 0
                published = True
                if piece.kind == SIDE:
                    self._inventory.place(piece, copies)
                    return 0
                _, known = block.parent.closest_child(block.tokens)
                covered = self._index.link(block)
                block.holds += 1
                self._inventory.place(piece, copies)
                for tail in covered:
                    if not tail.holds:  # else it ages out by itself
                        self._inventory.discard(tail)
                return block.num_tokens - known
        except MemoryError:
            with self._lock:
                self._dropped_blocks += piece.kind == MAIN
            return 0
        finally:
            if not published:
                copies.clear()  # the bytes go before their reservation
                with self._lock:
                    for tier in reserved:
                        tier.release(piece.nbytes)

    def _is_wanted(self, piece: Piece) -> bool:
        """Say whether a piece can still be published: it is not there yet, and what it hangs on is."""
        block = piece.block
        if piece.kind == SIDE:
            return block.linked and SIDE not in block.pieces
        _, shared = block.parent.closest_child(block.tokens)
        return shared < block.num_tokens and self._index.is_linked(block.parent)

    def _promote(self, piece: Piece, port: BlockPort) -> MemoryTier:
        """Copy a held block's piece to the faster tiers that have room for it; return the fastest tier that holds it."""
        for tier in self.tiers:
            if tier.name in piece.copies:
                return tier
            reserved: list[MemoryTier] = []
            with self._lock:
                source = next(iter(piece.copies.values()))
                if piece.block.linked:  # else it was cleared, and goes when its readers are done
                    self._inventory.reserve(piece.nbytes, [tier], reserved)
            try:
                if reserved:
                    copy = port.allocate(tier.memory, piece.nbytes)
                    port.copy(source, copy).wait()
                    with self._lock:
                        if tier.name not in piece.copies and piece.block.linked:  # neither overtaken nor cleared
                            self._inventory.place(piece, {tier.name: copy})
                            reserved.clear()
                            return tier
            except MemoryError:
                pass
            finally:
                with self._lock:
                    for tier in reserved:
                        tier.release(piece.nbytes)
        raise AssertionError("a held block's pieces rest in some tier")


def _check_tiers(tiers: Sequence[MemoryTier]) -> tuple[MemoryTier, ...]:
    """Return the tiers, fastest first. Raises ConfigError unless they make a stack."""
    for tier in tiers:
        if not isinstance(tier, MemoryTier):
            raise ConfigError(f'TierStack(*tiers) takes tiers, such as HostTier("8GiB"), not {type(tier).__name__}.')
        if tier.is_taken:
            raise ConfigError(f"{tier!r} already belongs to another TierStack. Give each stack tiers of its own.")
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"TierStack(*tiers) was given the {name} tier twice. Make one with the sum of their capacities.")
    if "host" not in names:
        raise ConfigError('TierStack(*tiers) needs a HostTier, such as TierStack(HostTier("8GiB")).')
    return tuple(sorted(tiers, key=lambda tier: tier.speed))


_default: TierStack | None = None
_default_lock = threading.Lock()


def default_stack() -> TierStack:
    """Return the stack that TieredCache() uses when it is given none.

    Made at first use: host memory, a quarter of what is available then (a container's limit counts). Made anew if it was
    closed.
    """
    global _default
    with _default_lock:
        if _default is None or _default.closed:
            _default = TierStack(HostTier(default_capacity()))
        return _default


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


def check_stack(stack: object, argument: str) -> TierStack:
    """Return `stack` if it is an open TierStack. Raises ConfigError or ClosedError naming `argument`."""
    if not isinstance(stack, TierStack):
        raise ConfigError(f'{argument} must be a TierStack, such as TierStack(HostTier("8GiB")), not {type(stack).__name__}.')
    if stack.closed:
        raise ClosedError(f"{argument} is closed. Make a new TierStack, or leave the argument out to use the default stack.")
    return stack
