"""Finding the longest stored prefix of a prompt: in memory, then on disk.

Owns that what was found in memory is held. Refuses to own what a prefix is good for (matching) and bytes (movement).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from tiered_cache.archive import Archive
from tiered_cache.format import Layout
from tiered_cache.index import PrefixIndex, Root
from tiered_cache.inventory import Inventory
from tiered_cache.keys import SIDE, SNAPSHOT, TOKEN_NBYTES, root_key
from tiered_cache.matching import Ending, Match
from tiered_cache.tiers.disk import Branch


class Lookup:
    """The lookups of one stack.

    Args:
        lock: the stack's.
        index, inventory: the stack's.
        archive: its disk tier, if it has one.
    """

    def __init__(self, lock: threading.RLock, index: PrefixIndex, inventory: Inventory, archive: Archive | None) -> None:
        self._lock = lock
        self._index = index
        self._inventory = inventory
        self._archive = archive

    def match(self, identity: bytes, salt: bytes, tokens: bytes, shapes: Sequence[tuple[Layout, int]]) -> Match:
        """Find and hold the longest stored prefix of encoded `tokens`. See `TierStack.match`."""
        with self._lock:
            root = self._index.find_root(identity, salt)
            match = self._in_memory(root, tokens) if root is not None else Match(None, ())
            self._inventory.hold(match.held)
        if self._archive is None or not shapes:
            return match
        if root is not None:
            shapes = [(root.layout, root.window)]
        branches = [Branch(identity, self._index.namespace, layout, window) for layout, window in shapes]
        first = root_key(identity, self._index.namespace, salt, self._index.block_tokens)
        try:
            if branches[0].window == SNAPSHOT:
                return self._with_endings(match, self._archive, branches, first, tokens[:-TOKEN_NBYTES])
            return self._extended(match, self._archive, branches, first, tokens)
        except BaseException:
            self.release(match)
            raise

    def release(self, match: Match) -> None:
        """End the hold on a match. Once per match."""
        with self._lock:
            self._inventory.unhold(match.held)

    def _in_memory(self, root: Root, tokens: bytes) -> Match:
        now = time.time()
        parts = tuple(self._index.match(root, tokens, now))
        if root.window != SNAPSHOT:
            return Match(root, parts)
        # One token is always left to compute, so a snapshot after the last one serves nobody.
        endings = self._index.endings(root, tokens[:-TOKEN_NBYTES], now)
        return Match(root, parts, endings=tuple(Ending(start, block) for start, block in endings))

    def _extended(self, match: Match, archive: Archive, branches: Sequence[Branch], first: bytes, tokens: bytes) -> Match:
        """Return a held match with what follows on disk, where that reaches further than memory.

        Args:
            first: key of what the first block hangs on.
        """
        block_tokens = self._index.block_tokens
        whole = [part for part in match.parts if part.num_tokens == block_tokens]
        rest = tokens[len(whole) * block_tokens * TOKEN_NBYTES :]
        in_part = match.num_tokens - len(whole) * block_tokens
        halves = [part.block for part in match.parts if match.window and SIDE not in part.block.pieces]
        if len(rest) // TOKEN_NBYTES - in_part <= 1:  # one token is always left to compute
            if not halves:
                return match
            rest = b""
        parent = whole[-1].block.key if whole else first
        wanted = [(block.parent.key, block.tokens) for block in halves]
        found = archive.extend(branches, parent, rest, block_tokens, wanted)
        match = replace(match, branch=found.branch, sides={block.key: block for block in found.sides}, trouble=found.trouble)
        if sum(block.num_tokens for block in found.stored) <= in_part:
            return match
        if in_part:
            with self._lock:
                self._inventory.unhold([match.parts[-1].block])
        return replace(match, parts=tuple(whole), stored=tuple(found.stored))

    def _with_endings(self, match: Match, archive: Archive, branches: Sequence[Branch], first: bytes, tokens: bytes) -> Match:
        """Return a held match with the snapshots on disk, where memory has none that serves all of `tokens`."""
        if match.num_tokens * TOKEN_NBYTES == len(tokens):
            return match
        found = archive.find_endings(branches, first, tokens, self._index.block_tokens)
        whole = [part for part in match.parts if part.num_tokens == self._index.block_tokens]
        here = {end.block.key for end in match.endings}
        endings = [Ending(start, block) for start, block in found.endings if block.key not in here]
        match = replace(match, branch=found.branch, endings=(*match.endings, *endings), trouble=found.trouble)
        if len(found.stored) <= len(whole):
            return match
        with self._lock:
            self._inventory.unhold([part.block for part in match.parts[len(whole) :]])
        return replace(match, parts=tuple(whole), stored=tuple(found.stored[len(whole) :]))
