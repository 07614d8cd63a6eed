"""A BlockPort without torch: a token's "K/V" is the token itself, so that what is restored can be told from its value."""

from collections.abc import Hashable, Sequence

import numpy as np

from tiered_cache.tiers.base import Transfer

TOKEN_NBYTES = 8


class Complete:
    """A transfer that is complete."""

    def wait(self) -> None:
        return


class TokenPort:
    """One sequence whose K/V are `tokens` `[T]`, as int64; what `load` brings in lands in `loaded` `[T]`."""

    layout: Hashable = "tokens"

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens.astype(np.int64)
        self.loaded = np.full(len(tokens), -1, dtype=np.int64)
        self.allocated_nbytes = 0

    def nbytes(self, num_tokens: int) -> int:
        return num_tokens * TOKEN_NBYTES

    def allocate(self, memory: str, nbytes: int) -> np.ndarray:
        self.allocated_nbytes += nbytes
        return np.full(nbytes // TOKEN_NBYTES, -2, dtype=np.int64)

    def save(self, start: int, num_tokens: int, buffers: Sequence[np.ndarray]) -> Transfer:
        for buffer in buffers:
            buffer[:] = self.tokens[start : start + num_tokens]
        return Complete()

    def load(self, start: int, num_tokens: int, buffer: np.ndarray, block_tokens: int) -> Transfer:
        assert len(buffer) == block_tokens
        self.loaded[start : start + num_tokens] = buffer[:num_tokens]
        return Complete()

    def copy(self, source: np.ndarray, target: np.ndarray) -> Transfer:
        target[:] = source
        return Complete()
