"""How pieces get from layers into tiers, from tier to tier, and on their way to disk.

Owns that a piece is published when its bytes are complete, or not at all. Refuses to own which sequences are stored (stack) and
the rules of room (inventory).
"""

import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from tiered_cache import progress
from tiered_cache.archive import Archive, ReadAhead
from tiered_cache.index import Block, Node, Piece, PrefixIndex
from tiered_cache.inventory import Inventory
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT, TOKEN_NBYTES, block_key
from tiered_cache.matching import Match, Step
from tiered_cache.tiers.base import BlockPort, Buffer, MemoryTier, Part, Transfer
from tiered_cache.tiers.disk import Branch, Stay, StoredBlock
from tiered_cache.writeback import Outcome, Write

About = Mapping[str, object]

SAVED_S = 60.0  # for which a piece that was on disk is believed to be there still


RUN_NBYTES = 128 << 20  # of blocks that are copied to a device one behind the other, and put into the layers at once


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought.

    Attributes:
        num_tokens: that are in the layers now, from the first on; fewer than asked for where a disk let it down.
        is_complete: whether that is all, side pieces included.
        served: tokens by the tier they came from.
        used: blocks in memory that were read.
        num_sides: how many side pieces were read.
        match: the match, without what could not be had.
        arriving: copies under way. What they read is the match's, which must be held until they are complete.
    """

    num_tokens: int
    is_complete: bool
    served: dict[str, int]
    used: list[Block]
    num_sides: int
    match: Match
    arriving: list[Transfer]


class Movement:
    """The moves of one stack.

    Args:
        lock: the stack's; taken for what others may see, never while bytes are copied.
        index, inventory, tiers: the stack's.
        archive: its disk tier, if it has one.
    """

    def __init__(
        self,
        lock: threading.RLock,
        index: PrefixIndex,
        inventory: Inventory,
        tiers: Sequence[MemoryTier],
        archive: Archive | None,
    ) -> None:
        self.dropped_blocks = 0
        self._queued: set[Piece] = set()  # on their way to disk; their blocks are held
        self._lock = lock
        self._index = index
        self._inventory = inventory
        self._tiers = tiers
        self._archive = archive

    # --- into layers ------------------------------------------------------------------------------------------------

    def fetch(self, match: Match, num_tokens: int, port: BlockPort, have: int) -> Fetched:
        """Copy the first `num_tokens` tokens of a match to the layers. See `TierStack.fetch`."""
        steps = list(match.steps(num_tokens))
        needed = [step for step in steps if step.kind == SIDE or step.start + step.take > have]
        reads = [(step.block, step.kind) for step in needed if isinstance(step.block, StoredBlock)]
        to_read = sum(step.take for step in needed if isinstance(step.block, StoredBlock) and step.kind == MAIN)
        ahead = None
        if reads:
            assert self._archive is not None and match.branch is not None
            ahead = ReadAhead(self._archive, match.branch, port, reads)
        borrowed: list[tuple[Transfer, Buffer]] = []
        arriving: list[Transfer] = []
        reached, trouble = num_tokens, None
        with progress.show(to_read, "Loading", " tokens") if ahead else _NO_BAR as bar:
            for run in self._runs(needed, port):
                first = run[0]
                if isinstance(first.block, Block):
                    arriving.append(port.load(first.kind, first.start, [self._part(step, port) for step in run]))
                    continue
                assert ahead is not None
                try:
                    buffer = ahead.next()
                except (OSError, FutureTimeoutError) as error:
                    assert self._archive is not None and isinstance(first.block, StoredBlock)
                    trouble = match.without(first.block, first.kind, self._archive.reason_of(error))
                    reached = first.start
                    break
                part = Part(buffer, first.block.block_tokens, first.take)
                borrowed.append((port.load(first.kind, first.start, [part]), buffer))
                if len(borrowed) > 1:  # two under way: the bytes of one land while the other's are put in place
                    self._give_back(*borrowed.pop(0), port)
                if first.kind == MAIN:
                    bar.update(first.take)
        for each in borrowed:
            self._give_back(*each, port)
        done = [step for step in steps if step.start < reached]
        served: dict[str, int] = {}
        for step in (step for step in done if step.kind == MAIN):
            name = self._fastest(step.block.pieces[MAIN]).name if isinstance(step.block, Block) else "disk"
            served[name] = served.get(name, 0) + step.take
        used = [step.block for step in done if isinstance(step.block, Block) and step.kind == MAIN]
        num_sides = sum(step.kind == SIDE for step in done)
        return Fetched(reached, trouble is None, served, used, num_sides, trouble or match, arriving)

    def _runs(self, steps: Sequence[Step], port: BlockPort) -> Iterator[list[Step]]:
        """Yield steps in order, those together that one `load` can take."""
        run: list[Step] = []
        for step in steps:
            if isinstance(step.block, Block):
                self.promote(step.block.pieces[step.kind], port)
            if run and not self._goes_on(run, step):
                yield run
                run = []
            run.append(step)
        if run:
            yield run

    def _goes_on(self, run: list[Step], step: Step) -> bool:
        first, last = run[0].block, run[-1]
        if not (isinstance(first, Block) and isinstance(step.block, Block)) or step.kind != MAIN or last.kind != MAIN:
            return False
        one, other = first.pieces[MAIN], step.block.pieces[MAIN]
        follows = step.start == last.start + last.take
        is_whole = first.num_tokens == step.block.num_tokens == step.take == run[0].take
        is_small = (len(run) + 1) * one.nbytes <= RUN_NBYTES
        return follows and is_whole and is_small and self._fastest(one) is self._fastest(other)

    def _part(self, step: Step, port: BlockPort) -> Part:
        assert isinstance(step.block, Block)
        piece = step.block.pieces[step.kind]
        return Part(piece.copies[self._fastest(piece).name], step.block.num_tokens, step.take)

    def _fastest(self, piece: Piece) -> MemoryTier:
        return next(tier for tier in self._tiers if tier.name in piece.copies)

    def _give_back(self, transfer: Transfer, borrowed: Buffer, port: BlockPort) -> None:
        transfer.wait()
        if self._archive is not None:
            self._archive.give_back(port, borrowed)

    # --- into tiers -------------------------------------------------------------------------------------------------

    def commit_block(
        self, parent: Node, tokens: bytes, start: int, port: BlockPort, chain: list[Block]
    ) -> tuple[Block | None, int]:
        """Make sure `tokens` behind `parent` are stored, and append their block, held, to `chain`.

        Returns:
            The block and how many of its tokens are new; (None, 0) where the commit must end.
        """
        with self._lock:
            if self._inventory.hold_existing(parent, tokens, chain, exactly=port.window == SNAPSHOT):
                return chain[-1], 0
        block = Block(block_key(parent.key, tokens), parent, tokens)
        created = self._store(Piece(block, MAIN, port.nbytes(MAIN, block.num_tokens)), start, port)
        with self._lock:
            if block.holds:  # published, and held since
                chain.append(block)
            elif not self._inventory.hold_existing(
                parent, tokens, chain, exactly=port.window == SNAPSHOT
            ):  # nor another thread
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
                if self._is_wanted(piece, port):
                    self._inventory.reserve(piece.nbytes, self._tiers, reserved)
            if not reserved:
                raise MemoryError
            self._allocate(piece.nbytes, reserved, copies, port)
            port.save(piece.kind, start, block.num_tokens, list(copies.values())).wait()
            with self._lock:
                if not self._is_wanted(piece, port):  # another thread was faster, or it was cleared meanwhile
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
                    has_use = port.window == SNAPSHOT and SIDE in tail.pieces
                    if not (tail.holds or has_use):  # else it ages out by itself
                        self._inventory.discard(tail)
                return block.num_tokens - known
        except MemoryError:
            return 0
        finally:
            if not published:
                copies.clear()  # the bytes go before their reservation
                with self._lock:
                    for tier in reserved:
                        tier.release(piece.nbytes)

    def _allocate(self, nbytes: int, reserved: list[MemoryTier], copies: dict[str, Buffer], port: BlockPort) -> None:
        """Allocate what is reserved; what is not to be had of a faster tier, the slowest one does without."""
        for tier in list(reserved):
            try:
                copies[tier.name] = port.allocate(tier.memory, nbytes)
            except MemoryError:
                if tier is self._tiers[-1]:
                    raise
                with self._lock:
                    tier.release(nbytes)
                    reserved.remove(tier)
                    self._inventory.shrink(nbytes)  # others need that memory more
        if not copies:
            raise MemoryError

    def store_side(self, block: Block, start: int, port: BlockPort, gain: int = 0) -> None:
        """Store the side piece of a held block whose first token is `start`; of a snapshot, `gain` is what it saves."""
        self._store(Piece(block, SIDE, port.nbytes(SIDE, block.num_tokens), gain), start, port)

    def _is_wanted(self, piece: Piece, port: BlockPort) -> bool:
        """Say whether a piece can still be published: it is not there yet, and what it hangs on is."""
        block = piece.block
        if piece.kind == SIDE:
            return block.linked and SIDE not in block.pieces
        closest, shared = block.parent.closest_child(block.tokens)
        is_new = shared < block.num_tokens or (
            port.window == SNAPSHOT and closest is not None and closest.tokens != block.tokens
        )
        return is_new and self._index.is_linked(block.parent)

    def promote(self, piece: Piece, port: BlockPort) -> None:
        """Copy a held block's piece to the fastest tier that has room for it, unless a faster one holds it."""
        for tier in self._tiers:
            if tier.name in piece.copies:
                return
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
                            return
            except MemoryError:
                pass
            finally:
                with self._lock:
                    for tier in reserved:
                        tier.release(piece.nbytes)

    # --- on its way to disk -----------------------------------------------------------------------------------------

    def save(self, block: Block, branch: Branch, port: BlockPort, stay: Stay, about: About) -> None:
        """Queue those pieces of a held block that are not surely on disk. Under the stack's lock.

        A piece whose parent is not there could not be found, so it waits until a later commit of its sequence.
        """
        parent = block.parent
        if self._archive is None or (isinstance(parent, Block) and not parent.pieces[MAIN].is_safe):
            return
        for kind, piece in block.pieces.items():
            buffer = piece.copies.get("host")
            wanted = stay.ttl_s, stay.pin
            if piece.queued:
                is_seen_to = piece.stay == wanted
            else:  # what is there for a time only may have to stay longer
                is_fresh = piece.saved_at > 0 and time.monotonic() - piece.saved_at < SAVED_S
                is_seen_to = is_fresh and piece.stay[0] is None and not stay.pin
            if buffer is None or is_seen_to:
                continue
            write = Write(
                branch, parent.key, block.key, kind, block.tokens, port.view(buffer), piece.nbytes, stay, about,
                functools.partial(self._saved, piece),
            )  # fmt: skip
            piece.queued += 1
            piece.stay = wanted
            self._queued.add(piece)
            self._inventory.hold([block])
            if not self._archive.writes.put(write):
                self._saved(piece, Outcome.DROPPED)
                return

    def spill(
        self,
        node: Node,
        segments: Sequence[tuple[int, bytes]],
        reused: int,
        branch: Branch,
        port: BlockPort,
        stay: Stay,
        about: About,
    ) -> int:
        """Queue blocks for which no tier in memory has room, from bytes of their own; return how many tokens are seen to.

        Args:
            node: what they hang on.
            segments: (place in the sequence of the first token, encoded tokens) of each, in order.
            reused: tokens of the sequence that were fetched: those came from the disk, and are there.
        """
        first = done = segments[0][0]
        if self._archive is None or (isinstance(node, Block) and not node.pieces[MAIN].is_safe):
            return 0
        parent = node.key
        for start, chunk in segments:
            stop = start + len(chunk) // TOKEN_NBYTES
            kinds = (MAIN, SIDE) if port.window and port.has_side(start, stop) else (MAIN,)
            for kind in kinds if stop > reused else ():
                if not self._spill_piece(branch, parent, kind, chunk, start, port, stay, about):
                    return done - first
            done = stop
            if stop - start == self._index.block_tokens:
                parent = block_key(parent, chunk)
        return done - first

    def spill_side(self, block: Block, start: int, branch: Branch, port: BlockPort, stay: Stay, about: About) -> None:
        """Queue the side piece of a held block, for which memory has no room, from bytes of its own."""
        if self._archive is not None and block.pieces[MAIN].is_safe:
            self._spill_piece(branch, block.parent.key, SIDE, block.tokens, start, port, stay, about)

    def _spill_piece(
        self, branch: Branch, parent: bytes, kind: str, tokens: bytes, start: int, port: BlockPort, stay: Stay, about: About
    ) -> bool:
        archive = self._archive
        assert archive is not None
        num_tokens = len(tokens) // TOKEN_NBYTES
        nbytes = port.nbytes(kind, num_tokens)
        if not archive.take_spill(nbytes):
            return False
        try:
            buffer = archive.borrow(port, nbytes)
            port.save(kind, start, num_tokens, [buffer]).wait()
        except BaseException:
            archive.end_spill(port, None, nbytes)
            raise
        payload = port.view(buffer)[: branch.layout.nbytes(kind, num_tokens)]
        finish = functools.partial(self._spilled, port, buffer, nbytes)
        if archive.writes.put(Write(branch, parent, block_key(parent, tokens), kind, tokens, payload, 0, stay, about, finish)):
            return True
        archive.end_spill(port, buffer, nbytes)
        return False

    def _saved(self, piece: Piece, outcome: Outcome) -> None:
        with self._lock:
            piece.queued -= 1
            piece.saved_at = time.monotonic() if outcome is Outcome.STORED else 0.0
            main = piece.block.pieces.get(MAIN)
            is_half = piece.kind == SIDE and main is not None and main.is_safe  # else the main piece was counted
            self.dropped_blocks += outcome is Outcome.DROPPED and (piece.kind == MAIN or is_half)
            if not piece.queued:
                self._queued.discard(piece)
            self._inventory.unhold([piece.block])

    def _spilled(self, port: BlockPort, buffer: Buffer, nbytes: int, outcome: Outcome) -> None:
        assert self._archive is not None
        self._archive.end_spill(port, buffer, nbytes)
        with self._lock:
            self.dropped_blocks += outcome is Outcome.DROPPED

    def after_fork(self) -> None:
        """In a child process, whose parent writes what is queued. Under the stack's lock."""
        for piece in list(self._queued):
            while piece.queued:
                self._saved(piece, Outcome.STORED)


_NO_BAR = progress.no_bar(0, "", "")
