"""What a stack's tiers hold: blocks in the index, the copies of their pieces, the bytes counted for them, who is evicted.

Owns the rules between index and budgets. Refuses to own locks and copies: the stack calls it under its lock and brings
buffers that are complete.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence

from tiered_cache.index import Block, Node, Piece, PrefixIndex, Root
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES
from tiered_cache.policies.eviction import EvictionPolicy
from tiered_cache.tiers.base import Buffer, MemoryTier

PINNED_SHARE = 0.5  # of the slowest tier in memory may be pinned
SNAPSHOT_SHARE = 0.5  # of a full tier snapshots may take, before they are the first to go


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

    def shrink(self, nbytes: int) -> None:
        """Evict `nbytes` from the tiers above the slowest one, or nearly all that may go."""
        for tier in self.tiers[:-1]:
            wanted = min(nbytes, tier.used_bytes)
            while wanted and not self._make_room(tier, tier.capacity_bytes - tier.used_bytes + wanted):
                wanted //= 2

    def _make_room(self, tier: MemoryTier, nbytes: int) -> bool:
        """Evict from `tier` until `nbytes` fit. Evicts nothing if that cannot be reached."""
        victims: dict[bytes, Piece] = {}
        spare = tier.capacity_bytes - tier.used_bytes
        much = tier.snapshot_bytes > tier.capacity_bytes * SNAPSHOT_SHARE
        orders = (tier.snapshots, tier.policy) if much else (tier.policy, tier.snapshots)
        for key in itertools.chain.from_iterable(order.victims() for order in orders):
            if spare >= nbytes:
                break
            for piece in self._evictable(self.pieces[key], tier, victims):
                victims[piece.key] = piece
                spare += piece.nbytes
        if spare < nbytes:
            return False
        for piece in victims.values():
            self._remove_copy(piece, tier, evicted=True)
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
        if len(piece.copies) > 1:
            return [piece]
        if piece.kind == SIDE:
            return [piece, *self._spent(block, tier, victims)] if piece.gain else [piece]
        # A child is never left without its parent, nor a side piece without its main piece: neither could be found any
        # more, yet would use up the budget.
        if any(child.key not in victims for child in block.children):
            return []
        side = block.pieces.get(SIDE)
        if side is None or side.key in victims:
            return [piece]
        return [side, piece] if list(side.copies) == [tier.name] else []

    def _spent(self, block: Block, tier: MemoryTier, victims: dict[bytes, Piece]) -> list[Piece]:
        """Return the main pieces that no snapshot makes use of once the one of `block` is gone, from there up."""
        spent: dict[bytes, Piece] = {}
        node: Node = block
        while isinstance(node, Block) and (node is block or SIDE not in node.pieces):
            main = node.pieces[MAIN]
            is_leaf = all(child.key in victims or child.key in spent for child in node.children)
            if not is_leaf or main.key in victims or node.holds or node.pinned_bytes or list(main.copies) != [tier.name]:
                break
            spent[main.key] = main
            node = node.parent
        return list(spent.values())

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
                tier.snapshot_bytes += piece.nbytes if piece.gain else 0
                _order(tier, piece).touch(piece.key, piece.value)
                if piece.kind == SIDE and not piece.gain:
                    tier.policy.chill(piece.key)

    def _remove_copy(self, piece: Piece, tier: MemoryTier, *, evicted: bool = False) -> None:
        del piece.copies[tier.name]
        tier.num_pieces -= 1
        tier.snapshot_bytes -= piece.nbytes if piece.gain else 0
        tier.release(piece.nbytes)
        if piece.block.linked:  # else another block may have its key by now
            _order(tier, piece).remove(piece.key, evicted=evicted)
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
                _order(tier, piece).remove(piece.key)
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
                        _order(tier, piece).touch(piece.key, piece.value)

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

    def hold_existing(self, parent: Node, tokens: bytes, chain: list[Block], *, exactly: bool) -> bool:
        """Hold the block that stores `tokens` behind `parent`, if one does.

        For a tail a longer sibling serves as well, unless `exactly` this one is wanted.
        """
        block, shared = parent.closest_child(tokens)
        if block is None or shared * TOKEN_NBYTES < len(tokens) or (exactly and block.tokens != tokens):
            return False
        block.holds += 1
        chain.append(block)
        return True


def _order(tier: MemoryTier, piece: Piece) -> EvictionPolicy:
    """Return the order in which a tier gives up pieces of this kind."""
    return tier.snapshots if piece.gain else tier.policy
