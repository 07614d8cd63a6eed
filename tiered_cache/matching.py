"""A stored prefix of a prompt: blocks in memory first, then blocks on disk.

Owns how long a hit can be, and which pieces it takes. Refuses to own finding it (lookup).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from tiered_cache.index import Block, Part, Root
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT
from tiered_cache.tiers.disk import Branch, StoredBlock
from tiered_cache.usage import MissReason


@dataclass(frozen=True, slots=True)
class Ending:
    """A block whose snapshot is stored: a hit may end after it. `start` is the place of its first token."""

    start: int
    block: Block | StoredBlock

    @property
    def stop(self) -> int:
        return self.start + self.block.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One piece to fetch: its first `take` tokens go to the layers at `start`."""

    block: Block | StoredBlock
    kind: str
    start: int
    take: int


@dataclass(frozen=True, slots=True)
class Match:
    """A stored prefix. What is in memory is held until `TierStack.release`: nothing of it is evicted meanwhile.

    Attributes:
        root: where its blocks in memory hang, if there are any of this model.
        parts: blocks in memory, in order.
        branch: where its blocks on disk are, if a disk was asked.
        stored: blocks on disk behind `parts`, in order. They are verified when they are fetched.
        sides: of blocks in memory, by key, whose side pieces are on disk only.
        endings: where snapshots are stored, if a hit takes one.
        trouble: what kept more from being found or fetched.
    """

    root: Root | None
    parts: tuple[Part, ...]
    branch: Branch | None = None
    stored: tuple[StoredBlock, ...] = ()
    sides: Mapping[bytes, StoredBlock] = field(default_factory=dict)
    endings: tuple[Ending, ...] = ()
    trouble: MissReason | None = None

    @property
    def held(self) -> list[Block]:
        """Return its blocks in memory, each as often as it is held."""
        return [part.block for part in self.parts] + [end.block for end in self.endings if isinstance(end.block, Block)]

    @property
    def on_disk(self) -> list[StoredBlock]:
        """Return the blocks of which something is to be read from disk."""
        ends = [end.block for end in self.endings if isinstance(end.block, StoredBlock)]
        return [*self.sides.values(), *self.stored, *(block for block in ends if block not in self.stored)]

    @property
    def known_tokens(self) -> int:
        """Return how many tokens of the prompt are stored, whether a hit can end there or not."""
        return sum(num_tokens for num_tokens, _ in self._lengths())

    @property
    def num_tokens(self) -> int:
        """Return how long a hit may be, as far as its blocks go."""
        if self.window == SNAPSHOT:
            return max((end.stop for end in self.endings), default=0)
        return self.known_tokens

    @property
    def window(self) -> int:
        """Tokens before the end of a hit whose side pieces it takes, or SNAPSHOT."""
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
        """Return the longest length up to `limit` at which a hit can end.

        Before that point the side pieces of a whole window are stored; or at it a snapshot.
        """
        if self.window == SNAPSHOT:
            return max((end.stop for end in self.endings if end.stop <= limit), default=0)
        best = covered_from = start = 0
        for num_tokens, has_side in self._lengths():
            stop = min(start + num_tokens, limit)
            if self.window and not has_side:
                covered_from = start + num_tokens
            elif stop > start and (covered_from == 0 or stop - covered_from >= self.window):
                best = stop
            start += num_tokens
        return best

    def steps(self, num_tokens: int) -> Iterator[Step]:
        """Yield the pieces that a hit of `num_tokens` tokens takes: side pieces only where they reach into the last window."""
        ending = next((end for end in self.endings if end.stop == num_tokens), None)
        start = 0
        for block, length in self._blocks():
            take = min(length, (num_tokens if ending is None else ending.start) - start)
            if take <= 0:
                break
            yield Step(block, MAIN, start, take)
            if self.window > 0 and start + take > num_tokens - self.window:
                is_here = isinstance(block, StoredBlock) or SIDE in block.pieces
                yield Step(block if is_here else self.sides[block.key], SIDE, start, take)
            start += take
        if ending is not None:
            for kind in (MAIN, SIDE):
                yield Step(ending.block, kind, ending.start, ending.block.num_tokens)

    def without(self, block: StoredBlock, kind: str, trouble: MissReason) -> Self:
        """Return this match without a piece on disk that could not be had, nor what hangs on it."""
        if block.key in self.sides:
            return replace(self, sides={key: side for key, side in self.sides.items() if key != block.key}, trouble=trouble)
        lost = {end for end in self.endings if end.block is block}
        kept = self.stored
        if block in kept:
            at = kept.index(block)
            if kind == MAIN:
                stop = sum(length for _, length in self._blocks()) - sum(each.num_tokens for each in kept[at + 1 :])
                lost |= {end for end in self.endings if end.start >= stop and isinstance(end.block, StoredBlock)}
                kept = kept[:at]
            else:
                kept = (*kept[:at], replace(block, has_side=False), *kept[at + 1 :])
        endings = tuple(end for end in self.endings if end not in lost)
        return replace(self, stored=kept, endings=endings, trouble=trouble)

    def _blocks(self) -> Iterator[tuple[Block | StoredBlock, int]]:
        for part in self.parts:
            yield part.block, part.num_tokens
        for block in self.stored:
            yield block, block.num_tokens

    def _lengths(self) -> Iterator[tuple[int, bool]]:
        for part in self.parts:
            yield part.num_tokens, SIDE in part.block.pieces or part.block.key in self.sides
        for block in self.stored:
            yield block.num_tokens, block.has_side
