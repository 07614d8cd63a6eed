"""The prefix tree over stored blocks: longest match, parents before children, holds.

Owns which token prefixes exist and which blocks are in use. Refuses to own bytes: a block's buffers are opaque, and who
is evicted is decided by the stack and its policies. Not thread-safe by itself: the stack calls it under its lock.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiered_cache.format import Layout
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES, common_tokens, root_key


class Node:
    """A point in the tree: `children` are the blocks that continue it, sorted by their tokens."""

    __slots__ = ("children", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.children: list[Block] = []

    def closest_child(self, tokens: bytes) -> tuple["Block | None", int]:
        """Return the child that shares most leading tokens with `tokens`, and how many. (None, 0) when none shares any."""
        # In sorted order the longest common prefix is always with a neighbour of the insertion point.
        place = bisect.bisect_left(self.children, tokens, key=_tokens_of)
        best: Block | None = None
        shared = 0
        for child in self.children[max(place - 1, 0) : place + 1]:
            common = common_tokens(child.tokens, tokens)
            if common > shared:
                best, shared = child, common
        return best, shared

    def whole_children(self, tokens: bytes) -> Iterator["Block"]:
        """Yield the children that `tokens` begin with, the longest first."""
        # Prefixes sort before what they begin; what stands between two of them tells how short the next one must be.
        while tokens:
            place = bisect.bisect_right(self.children, tokens, key=_tokens_of)
            if place == 0:
                return
            child = self.children[place - 1]
            common = common_tokens(child.tokens, tokens) * TOKEN_NBYTES
            if common == len(child.tokens):
                yield child
                common -= TOKEN_NBYTES
            tokens = tokens[:common]


class Root(Node):
    """Where all prefixes of one model identity, namespace and salt begin. Goes with its last block, unless it is held."""

    __slots__ = ("holds", "identity", "layout", "window")

    def __init__(self, key: bytes, identity: bytes, layout: Layout, window: int) -> None:
        super().__init__(key)
        self.identity = identity
        self.layout = layout  # how the bytes of its blocks are laid out; opaque here, equal for all of them
        self.window = window  # tokens before the end of a hit whose side pieces it takes, or SNAPSHOT; 0: there are none
        self.holds = 0  # commits under way


class Piece:
    """One part of a block's K/V that rests in tiers by itself, `nbytes` large.

    `gain`: of a snapshot, how many tokens it saves over the one before it; 0 of all others.
    `copies`: tier name -> its buffer, of tiers in memory. `saved_at`: when it was last known to be on disk, as
    `time.monotonic()` counts; 0 if never. `queued`: how often it is on its way there, the last time with (ttl_s, pin) `stay`.
    """

    __slots__ = ("block", "copies", "gain", "key", "kind", "nbytes", "queued", "saved_at", "stay")

    def __init__(self, block: "Block", kind: str, nbytes: int, gain: int = 0) -> None:
        self.block = block
        self.kind = kind
        self.key = block.key if kind == MAIN else block.key + kind.encode()
        self.nbytes = nbytes
        self.gain = gain
        self.copies: dict[str, Any] = {}
        self.saved_at = 0.0
        self.queued = 0
        self.stay: tuple[float | None, bool] = (None, False)

    @property
    def value(self) -> float:
        """Return the tokens that a byte of a snapshot saves."""
        return self.gain / max(self.nbytes, 1)

    @property
    def is_safe(self) -> bool:
        """Say whether it is on disk, or on its way there."""
        return self.queued > 0 or self.saved_at > 0


class Block(Node):
    """Up to `block_tokens` consecutive tokens behind `parent`.

    `pieces` are those stored, by kind; a linked block has its main piece. `holds` counts who is reading it: of a held
    block nothing is evicted. `linked` turns False when it leaves the tree; its bytes live on until the last hold is released.
    `expires_at`: seconds since 1970, from when on it is not used; a commit sets it. `pinned_bytes`: what it counts among
    what is pinned, that is, not evicted while memory is all that holds it; 0 if it is not.
    """

    __slots__ = ("expires_at", "holds", "linked", "parent", "pieces", "pinned_bytes", "tokens")

    def __init__(self, key: bytes, parent: Node, tokens: bytes) -> None:
        super().__init__(key)
        self.parent = parent
        self.tokens = tokens
        self.pieces: dict[str, Piece] = {}
        self.holds = 0
        self.linked = False
        self.expires_at = 0.0
        self.pinned_bytes = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_NBYTES


@dataclass(frozen=True, slots=True)
class Part:
    """The first `num_tokens` tokens of `block`, as one piece of a matched prefix."""

    block: Block
    num_tokens: int


class PrefixIndex:
    """All roots and blocks of one stack."""

    def __init__(self, block_tokens: int, namespace: str) -> None:
        self.block_tokens = block_tokens
        self.namespace = namespace
        self.roots: dict[bytes, Root] = {}
        self.blocks: dict[bytes, Block] = {}

    def find_root(self, identity: bytes, salt: bytes) -> Root | None:
        """Return the root of all that is stored for an identity and salt."""
        return self.roots.get(root_key(identity, self.namespace, salt, self.block_tokens))

    def root(self, identity: bytes, salt: bytes, layout: Layout, window: int) -> Root:
        """Return the root for an identity and salt, a new one if need be, for blocks of `layout`."""
        key = root_key(identity, self.namespace, salt, self.block_tokens)
        root = self.roots.setdefault(key, Root(key, identity, layout, window))
        if root.layout != layout:
            raise RuntimeError(f"K/V of one identity came in two layouts: {root.layout} and {layout}")
        return root

    def match(self, root: Root, tokens: bytes, now: float) -> list[Part]:
        """Return the longest stored prefix of `tokens` as parts, the last of which may be used only in part.

        Compares the token ids themselves, all of them. What expired before `now` (seconds since 1970) ends it.
        """
        parts: list[Part] = []
        node: Node = root
        for chunk in self.chunks(tokens):
            child, shared = node.closest_child(chunk)
            if child is None or child.expires_at <= now:
                break
            parts.append(Part(child, shared))
            if shared < self.block_tokens:
                break
            node = child
        return parts

    def endings(self, root: Root, tokens: bytes, now: float) -> list[tuple[int, Block]]:
        """Return where a snapshot is stored on the way of `tokens`: (its block's first token, the block), in order."""
        found: list[tuple[int, Block]] = []
        node: Node = root
        for place, chunk in enumerate(self.chunks(tokens)):
            whole = [child for child in node.whole_children(chunk) if child.expires_at > now]
            found += [(place * self.block_tokens, child) for child in reversed(whole) if SIDE in child.pieces]
            if not whole or whole[0].num_tokens < self.block_tokens:
                break
            node = whole[0]
        return found

    def chunks(self, tokens: bytes) -> Iterator[bytes]:
        """Cut encoded tokens into blocks of `block_tokens`; the last one may be shorter."""
        step = self.block_tokens * TOKEN_NBYTES
        for start in range(0, len(tokens), step):
            yield tokens[start : start + step]

    def link(self, block: Block) -> list[Block]:
        """Add `block` under its parent and return the sibling tails it covers, which are now superfluous."""
        self.blocks[block.key] = block
        siblings = block.parent.children
        bisect.insort(siblings, block, key=_tokens_of)
        block.linked = True
        # Prefixes of a string sort before it, the longest right before it.
        place = bisect.bisect_left(siblings, block.tokens, key=_tokens_of)
        covered = []
        while place > 0 and block.tokens.startswith(siblings[place - 1].tokens):
            place -= 1
            covered.append(siblings[place])
        return covered

    def unlink(self, block: Block) -> None:
        """Take `block`, which must have no children, out of the tree."""
        assert block.linked and not block.children
        siblings = block.parent.children
        place = bisect.bisect_left(siblings, block.tokens, key=_tokens_of)
        assert siblings[place] is block
        del siblings[place]
        del self.blocks[block.key]
        block.linked = False
        if isinstance(block.parent, Root):
            self.drop_if_empty(block.parent)

    def drop_if_empty(self, root: Root) -> None:
        """Forget a root with neither blocks nor holds."""
        if not root.children and not root.holds and self.roots.get(root.key) is root:
            del self.roots[root.key]

    def descendants(self, root: Root) -> Iterator[Block]:
        """Yield all blocks under `root`, parents before children."""
        waiting = list(root.children)
        while waiting:
            block = waiting.pop()
            waiting.extend(block.children)
            yield block

    def is_linked(self, node: Node) -> bool:
        return node.linked if isinstance(node, Block) else self.roots.get(node.key) is node


def _tokens_of(block: Block) -> bytes:
    return block.tokens
