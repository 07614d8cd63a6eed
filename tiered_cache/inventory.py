"""What a stack's tiers hold: blocks in the index, the copies of their pieces, the bytes counted for them, who is evicted.

Owns the rules between index and budgets. Refuses to own locks and copies: the stack calls it under its lock and brings
buffers that are complete.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

from tiered_cache.index import Block, Node, Piece, PrefixIndex, Root
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES
from tiered_cache.tiers.base import Buffer, MemoryTier

PINNED_SHARE = 0.5  # of the slowest tier in memory may be pinned


class Inventory:
    """The pieces of one stack's blocks and where their copies rest.

    Args:
        tiers: fastest first.
    """

    def __init__(self, index: PrefixIndex, tiers: Sequence[MemoryTier]) -> None:
        self.index = index
        self.tiers = tiers
        self.pieces: dict[bytes, Piece] = {}
        self._pinned_bytes = 0

    # --- room -------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, tiers: Sequence[MemoryTier], reserved: list[MemoryTier]) -> None:
        """Reserve `nbytes` in each of `tiers` that can make room, and append it to `reserved`."""
        for tier in tiers:
            if self._make_room(tier, nbytes):
                tier.reserve(nbytes)
                reserved.append(tier)

    def _make_room(self, tier: MemoryTier, nbytes: int) -> bool:
        """Evict from `tier` until `nbytes` fit. Evicts nothing if that cannot be reached."""
        victims: dict[bytes, Piece] = {}
        spare = tier.capacity_bytes - tier.used_bytes
        for key in tier.policy.victims():
            if spare >= nbytes:
                break
            for piece in self._evictable(self.pieces[key], tier, victims):
                victims[piece.key] = piece
                spare += piece.nbytes
        if spare < nbytes:
            return False
        for piece in victims.values():
            self._remove_copy(piece, tier)
            tier.evicted_pieces += 1
            if piece.kind == MAIN and not piece.copies:
                self._unlink(piece.block)
        return True

    def _evictable(self, piece: Piece, tier: MemoryTier, victims: dict[bytes, Piece]) -> list[Piece]:
        """Return what goes from `tier` if `piece` does, besides `victims`; nothing if it must stay."""
        block = piece.block
        if block.holds or piece.key in victims:
            return []
        if block.pinned_bytes and len(piece.copies) == 1 and not piece.saved_at:
            return []
        if piece.kind == SIDE or len(piece.copies) > 1:
            return [piece]
        # A child is never left without its parent, nor a side piece without its main piece: neither could be found any
        # more, yet would use up the budget.
        if any(child.key not in victims for child in block.children):
            return []
        side = block.pieces.get(SIDE)
        if side is None or side.key in victims:
            return [piece]
        return [side, piece] if list(side.copies) == [tier.name] else []

    # --- pieces -----------------------------------------------------------------------------------------------------

    def place(self, piece: Piece, copies: dict[str, Buffer]) -> None:
        """Enter copies of a linked block's piece, whose bytes were reserved. A side piece goes first until it is used."""
        assert piece.block.linked
        piece.block.pieces[piece.kind] = piece
        self.pieces[piece.key] = piece
        for tier in self.tiers:
            if tier.name in copies:
                piece.copies[tier.name] = copies[tier.name]
                tier.num_pieces += 1
                tier.policy.touch(piece.key)
                if piece.kind == SIDE:
                    tier.policy.chill(piece.key)

    def _remove_copy(self, piece: Piece, tier: MemoryTier) -> None:
        del piece.copies[tier.name]
        tier.num_pieces -= 1
        tier.release(piece.nbytes)
        if piece.block.linked:  # else another block may have its key by now
            tier.policy.remove(piece.key)
        if not piece.copies:
            del piece.block.pieces[piece.kind]
            if piece.block.linked:
                del self.pieces[piece.key]

    # --- blocks -----------------------------------------------------------------------------------------------------

    def discard(self, block: Block) -> None:
        """Take a block, whose children are gone, out of the tree. Its bytes go now, or with its last hold."""
        self._unlink(block)
        for piece in block.pieces.values():
            del self.pieces[piece.key]
            for tier in self.tiers:
                tier.policy.remove(piece.key)
        self._free_if_unused(block)

    def discard_roots(self, chosen: Callable[[Root], bool]) -> None:
        """Discard all blocks of the roots that are `chosen`."""
        for root in [root for root in self.index.roots.values() if chosen(root)]:
            del self.index.roots[root.key]  # a commit under way sees that and ends
            for block in reversed(list(self.index.descendants(root))):
                self.discard(block)

    def _free_if_unused(self, block: Block) -> None:
        if block.holds == 0 and not block.linked:
            for piece in list(block.pieces.values()):
                for tier in self.tiers:
                    if tier.name in piece.copies:
                        self._remove_copy(piece, tier)

    def touch(self, chain: list[Block], num_window_blocks: int) -> None:
        """Note that a chain, given from its root down, was used, and the side pieces of its last `num_window_blocks`.

        Tail first, and side pieces before their main piece, so that they are evicted in this order.
        """
        for distance, block in enumerate(reversed(chain)):
            for kind in (SIDE, MAIN) if distance < num_window_blocks else (MAIN,):
                piece = block.pieces.get(kind)
                for tier in self.tiers:
                    if block.linked and piece is not None and tier.name in piece.copies:
                        tier.policy.touch(piece.key)

    def let_stay(self, block: Block, ttl_s: float | None, pin: bool) -> None:
        """Note how long a block is to stay: the longest of what was ever asked for; pinned while there is room for pins."""
        block.expires_at = max(block.expires_at, math.inf if ttl_s is None else time.time() + ttl_s)
        if pin and block.linked and not block.pinned_bytes:
            nbytes = sum(piece.nbytes for piece in block.pieces.values())
            if self._pinned_bytes + nbytes <= self.tiers[-1].capacity_bytes * PINNED_SHARE:
                block.pinned_bytes = nbytes
                self._pinned_bytes += nbytes

    def _unlink(self, block: Block) -> None:
        self.index.unlink(block)
        self._pinned_bytes -= block.pinned_bytes
        block.pinned_bytes = 0

    def hold(self, blocks: Iterable[Block]) -> None:
        """Keep blocks from being evicted until `unhold`."""
        for block in blocks:
            block.holds += 1

    def unhold(self, blocks: Iterable[Block]) -> None:
        """End one hold on each block."""
        for block in blocks:
            block.holds -= 1
            self._free_if_unused(block)

    def hold_existing(self, parent: Node, tokens: bytes, chain: list[Block]) -> bool:
        """Hold the block that stores `tokens` behind `parent`, if one does. For a tail, a longer sibling serves as well."""
        block, shared = parent.closest_child(tokens)
        if block is None or shared * TOKEN_NBYTES < len(tokens):
            return False
        block.holds += 1
        chain.append(block)
        return True
