"""A BlockPort without torch: a token's "K/V" is the token itself, so that what is restored can be told from its value."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiered_cache.format import TensorSpec
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT
from tiered_cache.tiers.base import Part, Transfer

TOKEN_NBYTES = 8
NOTHING = -(1 << 40)  # in memory that nobody wrote


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How a piece of a `TokenPort` is laid out. `state_tokens`: as how many tokens any snapshot is counted."""

    state_tokens: int = 0

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return (self.state_tokens if kind == SIDE and self.state_tokens else num_tokens) * TOKEN_NBYTES

    def tensors(self, kind: str, num_tokens: int) -> list[TensorSpec]:
        nbytes = self.nbytes(kind, num_tokens)
        return [TensorSpec("tokens", "I64", (nbytes // TOKEN_NBYTES,), 0, nbytes)]


SNAPSHOT_LAYOUT = TokenLayout(state_tokens=20)


class Complete:
    """A transfer that is complete."""

    def wait(self) -> None:
        return


class TokenPort:
    """One sequence whose K/V are `tokens` `[T]`, as int64, and minus them in side pieces, if there is a window.

    What `load` brings in lands in `loaded` and `loaded_side` `[T]`.

    Args:
        tokens: token ids `[T]`.
        window: of the layers that have one; 0 if none has.
        side_from: the first token whose side K/V the layers still hold.
        ends: token counts after which there is a snapshot, where `window` is SNAPSHOT.
    """

    layout = TokenLayout()  # of a port with snapshots: SNAPSHOT_LAYOUT
    staging = "tokens"

    def __init__(self, tokens: np.ndarray, window: int = 0, side_from: int = 0, ends: Sequence[int] = ()) -> None:
        self.tokens = tokens.astype(np.int64)
        self.window = window
        self.side_from = side_from
        self.ends = ends
        if window == SNAPSHOT:
            self.layout = SNAPSHOT_LAYOUT
        self.loaded = np.full(len(tokens), NOTHING, dtype=np.int64)
        self.loaded_side = self.loaded.copy()

    def has_side(self, start: int, stop: int) -> bool:
        return stop in self.ends if self.window == SNAPSHOT else start >= self.side_from

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return self.layout.nbytes(kind, num_tokens)

    def allocate(self, memory: str, nbytes: int) -> np.ndarray:
        return np.full(nbytes // TOKEN_NBYTES, NOTHING, dtype=np.int64)

    def save(self, kind: str, start: int, num_tokens: int, buffers: Sequence[np.ndarray]) -> Transfer:
        assert kind == MAIN or self.has_side(start, start + num_tokens)
        for buffer in buffers:
            buffer[:num_tokens] = self._sign(kind) * self.tokens[start : start + num_tokens]
        return Complete()

    def view(self, buffer: np.ndarray) -> memoryview:
        return buffer.data.cast("B")

    def load(self, kind: str, start: int, parts: Sequence[Part]) -> Transfer:
        assert len({part.num_tokens for part in parts}) == 1
        assert len(parts) == 1 or all(part.take == part.num_tokens for part in parts)
        loaded = self.loaded if kind == MAIN else self.loaded_side
        for part in parts:
            assert len(part.buffer) >= self.layout.nbytes(kind, part.num_tokens) // TOKEN_NBYTES
            loaded[start : start + part.take] = self._sign(kind) * part.buffer[: part.take]
            start += part.take
        return Complete()

    def copy(self, source: np.ndarray, target: np.ndarray) -> Transfer:
        target[:] = source
        return Complete()

    def _sign(self, kind: str) -> int:
        return 1 if kind == MAIN else -1
