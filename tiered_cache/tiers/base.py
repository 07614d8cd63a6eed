"""What a tier in memory is, and what the stack needs from those who hand it bytes.

Owns budgets and their accounting. Refuses to own copying (devices, behind `BlockPort`) and who is evicted (the stack).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tiered_cache.errors import ConfigError
from tiered_cache.format import Layout
from tiered_cache.policies.eviction import LRU, EvictionPolicy, GreedyDual
from tiered_cache.usage import format_bytes

Buffer = Any  # a flat buffer that a device allocated; opaque here

_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?\s*", re.IGNORECASE)


class Transfer(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when the copy is complete and both ends may be used by anyone."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece to be loaded: of its `num_tokens` tokens the first `take`."""

    buffer: Buffer
    num_tokens: int
    take: int


class BlockPort(Protocol):
    """One sequence's K/V in the layers, as the stack sees it: the place blocks are read from and written to.

    `kind` is that of a piece: "main", or "side" where `window` is not 0.
    """

    @property
    def ends(self) -> Sequence[int]:
        """Token counts after which it has a snapshot, where `window` is SNAPSHOT."""

    @property
    def layout(self) -> Layout:
        """How a block's bytes are laid out. Blocks go only to a port of the layout they came from."""

    @property
    def staging(self) -> str:
        """What host buffers this port allocates: those of ports that say the same may be used in each other's place."""

    @property
    def window(self) -> int:
        """Tokens before the end of a hit whose side pieces it takes, or SNAPSHOT; 0: there are no side pieces."""

    def has_side(self, start: int, stop: int) -> bool:
        """Say whether the side piece of the block of tokens `start : stop` is there."""

    def nbytes(self, kind: str, num_tokens: int) -> int:
        """Return the size in bytes of a piece of `num_tokens` tokens."""

    def allocate(self, memory: str, nbytes: int) -> Buffer:
        """Return a new buffer in "host" or "device" memory. Raises MemoryError."""

    def save(self, kind: str, start: int, num_tokens: int, buffers: Sequence[Buffer]) -> Transfer:
        """Start to copy tokens `start : start + num_tokens` from the layers to every one of `buffers`."""

    def view(self, buffer: Buffer) -> memoryview:
        """Return the bytes of a host buffer, writable."""

    def load(self, kind: str, start: int, parts: Sequence[Part]) -> Transfer:
        """Start to copy pieces that follow each other to the layers, the first one's first token to `start`.

        Where there are several, all are of one size, whole, and in one memory.
        """

    def copy(self, source: Buffer, target: Buffer) -> Transfer:
        """Start to copy a whole buffer to one of the same size in another memory."""


class MemoryTier:
    """A byte budget in one kind of memory, and the order in which its blocks are given up.

    Every buffer is its own allocation, so the bytes counted are the bytes held. Used by one TierStack, under its lock.
    """

    name: ClassVar[str]  # key of `Usage.cached_by_tier`
    memory: ClassVar[str]  # what `BlockPort.allocate` is asked for
    speed: ClassVar[int]  # 0 is the fastest; a stack lists its tiers in this order

    def __init__(self, capacity: int | str) -> None:
        self.capacity_bytes = parse_capacity(capacity, f"{type(self).__name__}(capacity=...)")
        self.used_bytes = 0
        self.num_pieces = 0
        self.evicted_pieces = 0
        self.policy: EvictionPolicy = LRU()
        self.snapshots: EvictionPolicy = GreedyDual()  # pieces that are snapshots are ordered by themselves
        self.snapshot_bytes = 0
        self.is_taken = False  # by a stack

    def fits(self, nbytes: int) -> bool:
        """Say whether `nbytes` more stay within the budget."""
        return self.used_bytes + nbytes <= self.capacity_bytes

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` as used, before they are allocated."""
        assert self.fits(nbytes), "the stack makes room first"
        self.used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give `nbytes` back, after they were freed."""
        self.used_bytes -= nbytes
        assert self.used_bytes >= 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({format_bytes(self.used_bytes)} of {format_bytes(self.capacity_bytes)} used)"


def parse_capacity(capacity: int | str, argument: str) -> int:
    """Return a size in bytes from an int or a string such as "8GiB", "500MB" or "1.5 TiB".

    Raises:
        ConfigError: naming `argument`, when the size is not understood or not positive.
    """
    got = argument.replace("...", repr(capacity))
    way_out = f'Use a whole number of bytes or a string such as "8GiB" or "500MB" (got {got}).'
    if isinstance(capacity, str):
        match = _SIZE.fullmatch(capacity)
        if match is None:
            raise ConfigError(f"{capacity!r} is not a size. {way_out}")
        number, prefix, binary = match[1], (match[2] or "").lower(), bool(match[3])
        if binary and not prefix:
            raise ConfigError(f"{capacity!r} is not a size. {way_out}")
        nbytes = int(float(number) * (1024 if binary else 1000) ** (_UNITS[prefix] if prefix else 0))
    elif isinstance(capacity, int) and not isinstance(capacity, bool):
        nbytes = capacity
    else:
        raise ConfigError(f"A size must be an int or a str, not {type(capacity).__name__}. {way_out}")
    if nbytes <= 0:
        raise ConfigError(f"A size must be positive. {way_out}")
    return nbytes
