"""What a stack's tiers hold: blocks in the index, their copies, the bytes counted for them, and who is evicted.

Owns the rules between index and budgets. Refuses to own locks and copies: the stack calls it under its lock and brings
buffers that are complete.
"""

from collections.abc import Callable, Iterable, Sequence

from tiered_cache.index import Block, Node, PrefixIndex, Root
from tiered_cache.keys import TOKEN_NBYTES
from tiered_cache.tiers.base import Buffer, MemoryTier


class Inventory:
    """The blocks of one stack and where their copies rest.

    Args:
        tiers: fastest first.
    """

    def __init__(self, index: PrefixIndex, tiers: Sequence[MemoryTier]) -> None:
        self.index = index
        self.tiers = tiers

    def reserve(self, nbytes: int, tiers: Sequence[MemoryTier], reserved: list[MemoryTier]) -> None:
        """Reserve `nbytes` in each of `tiers` that can make room, and append it to `reserved`."""
        for tier in tiers:
            if self._make_room(tier, nbytes):
                tier.reserve(nbytes)
                reserved.append(tier)

    def _make_room(self, tier: MemoryTier, nbytes: int) -> bool:
        """Evict from `tier` until `nbytes` fit. Evicts nothing if that cannot be reached."""
        victims: dict[bytes, Block] = {}
        spare = tier.capacity_bytes - tier.used_bytes
        for key in tier.policy.victims():
            if spare >= nbytes:
                break
            block = self.index.blocks[key]
            # A child is never left without its parent: it could not be found any more, yet would use up the budget.
            last_copy = len(block.copies) == 1
            if block.holds == 0 and not (last_copy and any(child.key not in victims for child in block.children)):
                victims[key] = block
                spare += block.nbytes
        if spare < nbytes:
            return False
        for block in victims.values():
            self._remove_copy(block, tier)
            tier.evicted_blocks += 1
            if not block.copies:
                self.index.unlink(block)
        return True

    def place(self, block: Block, copies: dict[str, Buffer]) -> None:
        """Enter the copies of a block, whose bytes were reserved before."""
        for tier in self.tiers:
            if tier.name in copies:
                block.copies[tier.name] = copies[tier.name]
                tier.num_blocks += 1
                tier.policy.touch(block.key)

    def _remove_copy(self, block: Block, tier: MemoryTier) -> None:
        del block.copies[tier.name]
        tier.policy.remove(block.key)
        tier.num_blocks -= 1
        tier.release(block.nbytes)

    def discard(self, block: Block) -> None:
        """Take a block, whose children are gone, out of the tree. Its bytes go now, or with its last hold."""
        self.index.unlink(block)
        for tier in self.tiers:
            tier.policy.remove(block.key)
        self._free_if_unused(block)

    def discard_roots(self, chosen: Callable[[Root], bool]) -> None:
        for root in [root for root in self.index.roots.values() if chosen(root)]:
            del self.index.roots[root.key]  # a commit under way sees that and ends
            for block in reversed(list(self.index.descendants(root))):
                self.discard(block)

    def _free_if_unused(self, block: Block) -> None:
        if block.holds == 0 and not block.linked:
            for tier in self.tiers:
                if tier.name in block.copies:
                    self._remove_copy(block, tier)

    def touch(self, chain: list[Block]) -> None:
        """Note that a chain, given from its root down, was used: tail first, so that leaves are evicted first."""
        for block in reversed(chain):
            for tier in self.tiers:
                if block.linked and tier.name in block.copies:
                    tier.policy.touch(block.key)

    def hold(self, blocks: Iterable[Block]) -> None:
        """Keep blocks from being evicted until `unhold`."""
        for block in blocks:
            block.holds += 1

    def unhold(self, blocks: Iterable[Block]) -> None:
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
