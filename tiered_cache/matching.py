"""A stored prefix of a prompt: blocks in memory first, then blocks on disk.

Owns how long a hit can be. Refuses to own finding it (stack).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from tiered_cache.index import Part, Root
from tiered_cache.keys import MAIN, SIDE
from tiered_cache.tiers.disk import Branch, StoredBlock
from tiered_cache.usage import MissReason


@dataclass(frozen=True, slots=True)
class Match:
    """A stored prefix. What is in memory is held until `TierStack.release`: nothing of it is evicted meanwhile.

    Attributes:
        root: where its blocks in memory hang, if there are any of this model.
        parts: blocks in memory, in order.
        branch: where its blocks on disk are, if a disk was asked.
        stored: blocks on disk behind `parts`, in order. They are verified when they are fetched.
        sides: of blocks in memory, by key, whose side pieces are on disk only.
        trouble: what kept more from being found or fetched.
    """

    root: Root | None
    parts: tuple[Part, ...]
    branch: Branch | None = None
    stored: tuple[StoredBlock, ...] = ()
    sides: Mapping[bytes, StoredBlock] = field(default_factory=dict)
    trouble: MissReason | None = None

    @property
    def on_disk(self) -> list[StoredBlock]:
        """Return the blocks of which something is to be read from disk."""
        return [*self.sides.values(), *self.stored]

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for num_tokens, _ in self._lengths())

    @property
    def window(self) -> int:
        """Tokens before the end of a hit whose side pieces it takes."""
        if self.root is not None:
            return self.root.window
        return self.branch.window if self.branch is not None else 0

    @property
    def layout(self) -> object:
        """How the bytes of its blocks are laid out."""
        if self.root is not None:
            return self.root.layout
        return self.branch.layout if self.branch is not None else None

    def usable(self, limit: int) -> int:
        """Return the longest length up to `limit` before which the side pieces of a whole window are stored."""
        best = covered_from = start = 0
        for num_tokens, has_side in self._lengths():
            stop = min(start + num_tokens, limit)
            if self.window and not has_side:
                covered_from = start + num_tokens
            elif stop > start and (covered_from == 0 or stop - covered_from >= self.window):
                best = stop
            start += num_tokens
        return best

    def without(self, block: StoredBlock, kind: str, trouble: MissReason) -> Self:
        """Return this match without a piece on disk that could not be had, nor what hangs on it."""
        if block.key in self.sides:
            return replace(self, sides={key: side for key, side in self.sides.items() if key != block.key}, trouble=trouble)
        at = self.stored.index(block)
        kept = self.stored[:at] if kind == MAIN else (*self.stored[:at], replace(block, has_side=False), *self.stored[at + 1 :])
        return replace(self, stored=kept, trouble=trouble)

    def _lengths(self) -> Iterator[tuple[int, bool]]:
        for part in self.parts:
            yield part.num_tokens, SIDE in part.block.pieces or part.block.key in self.sides
        for block in self.stored:
            yield block.num_tokens, block.has_side
