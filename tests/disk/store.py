"""What the tests of the disk tier share: sequences whose bytes follow from their tokens, so that a wrong byte shows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_cache.errors import CorruptEntryError
from tiered_cache.format import TensorSpec
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES, block_key, encode_tokens, root_key
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, StoredBlock

BLOCK = 8  # tokens


@dataclass(frozen=True)
class Flat:
    """A layout of `width` bytes a token, side pieces as large as main ones."""

    width: int = 64

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return self.width * num_tokens

    def tensors(self, kind: str, num_tokens: int) -> Sequence[TensorSpec]:
        return [TensorSpec("layers.0.key", "U8", (num_tokens, self.width), 0, self.width * num_tokens)]


def branch(width: int = 64, identity: bytes = b"model" * 6 + b"__", namespace: str = "default", window: int = 0) -> Branch:
    return Branch(identity, namespace, Flat(width), window)


def root_of(where: Branch) -> bytes:
    return root_key(where.identity, where.namespace, b"", BLOCK)


def payload_of(where: Branch, parent: bytes, tokens: bytes, kind: str = MAIN) -> bytes:
    """Return the only right bytes of a piece: they follow from its place in the tree."""
    nbytes = where.layout.nbytes(kind, len(tokens) // TOKEN_NBYTES)
    seed = int.from_bytes(block_key(parent, tokens)[:8], "little") + (kind == SIDE)
    return np.random.default_rng(seed).bytes(nbytes)


def blocks_of(where: Branch, token_ids: Sequence[int]) -> list[tuple[bytes, bytes]]:
    """Return (parent key, encoded tokens) of each block of a sequence."""
    encoded, parent, blocks = encode_tokens(np.asarray(token_ids)), root_of(where), []
    for start in range(0, len(encoded), BLOCK * TOKEN_NBYTES):
        tokens = encoded[start : start + BLOCK * TOKEN_NBYTES]
        blocks.append((parent, tokens))
        parent = block_key(parent, tokens)
    return blocks


def put(tier: DiskTier, where: Branch, token_ids: Sequence[int], stay: Stay | None = None) -> int:
    """Store a sequence, parents first; return how many pieces were written. Raises OSError as the tier does."""
    written = 0
    for parent, tokens in blocks_of(where, token_ids):
        for kind in (MAIN, SIDE) if where.window else (MAIN,):
            payload = memoryview(payload_of(where, parent, tokens, kind))
            written += tier.ensure(where, parent, kind, tokens, payload, stay or Stay(), {"model": "test"})
    return written


def get(tier: DiskTier, where: Branch, token_ids: Sequence[int]) -> int:
    """Read a sequence as far as it is stored, assert that every byte is right, and return how many tokens came back."""
    encoded = encode_tokens(np.asarray(token_ids))
    length = 0
    for block in tier.extend(where, root_of(where), encoded, BLOCK):
        start = length * TOKEN_NBYTES
        assert encoded[start : start + block.num_tokens * TOKEN_NBYTES] == block.tokens[: block.num_tokens * TOKEN_NBYTES]
        try:
            read(tier, where, block)
        except (CorruptEntryError, FileNotFoundError):
            break
        length += block.num_tokens
    return length


def read(tier: DiskTier, where: Branch, block: StoredBlock, kind: str = MAIN) -> None:
    """Read one piece and assert that every byte of it is right. Raises as the tier does."""
    target = memoryview(bytearray(where.layout.nbytes(kind, len(block.tokens) // TOKEN_NBYTES)))
    tier.read(where, block, kind, target)
    assert bytes(target) == payload_of(where, block.parent, block.tokens, kind)


def files_under(path: str | os.PathLike[str], suffix: str = ".kv") -> list[Path]:
    """Return all files whose name ends so."""
    return sorted(file for file in Path(path).rglob("*") if file.is_file() and file.name.endswith(suffix))


def du(path: str | os.PathLike[str]) -> int:
    """Return what `du` says a directory takes, in bytes."""
    files = [Path(path), *Path(path).rglob("*")]
    return sum(os.lstat(file).st_blocks * 512 for file in files)
