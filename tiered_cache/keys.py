"""Block keys: chained SHA-256 over tagged, length-prefixed fields.

Owns what a key is made of. Refuses to own the token comparison on a hit (index) and what an identity is (hf).
"""

import hashlib
import struct

import numpy as np

KEY_FORMAT = 1  # part of every root: a change of what is stored, or how, makes all older keys miss
MAIN = "main"  # kind of a block's piece: K/V of the layers that attend to everything
SIDE = "side"  # ... of the layers that attend to a window, or keep a state: read only for the last window of a hit
SNAPSHOT = -1  # as a window: a side piece is the state after its whole block, and serves no hit that ends elsewhere
TOKEN_NBYTES = 8  # token ids are hashed and compared as int64, little-endian


def encode_tokens(token_ids: np.ndarray) -> bytes:
    """Return token ids `[num_tokens]` as int64 little-endian bytes, the form that is hashed and compared."""
    return np.ascontiguousarray(token_ids, dtype="<i8").tobytes()


def root_key(identity: bytes, namespace: str, salt: bytes, block_tokens: int) -> bytes:
    """Return the key every first block has as its parent: all that changes K/V, or who may see them, besides the tokens."""
    return _digest(
        (b"format", str(KEY_FORMAT).encode()),
        (b"identity", identity),
        (b"namespace", namespace.encode()),
        (b"salt", salt),
        (b"block_tokens", str(block_tokens).encode()),
    )


def block_key(parent_key: bytes, tokens: bytes) -> bytes:
    """Return the key of the block that holds `tokens` (see `encode_tokens`) behind the block `parent_key`."""
    return _digest((b"parent", parent_key), (b"tokens", tokens))


def common_tokens(left: bytes, right: bytes) -> int:
    """Return how many leading tokens two encoded sequences share."""
    length = min(len(left), len(right)) // TOKEN_NBYTES
    different = np.frombuffer(left, "<i8", length) != np.frombuffer(right, "<i8", length)
    return int(different.argmax()) if different.any() else length


def _digest(*fields: tuple[bytes, bytes]) -> bytes:
    digest = hashlib.sha256()
    for tag, value in fields:
        digest.update(struct.pack("<II", len(tag), len(value)))
        digest.update(tag)
        digest.update(value)
    return digest.digest()
