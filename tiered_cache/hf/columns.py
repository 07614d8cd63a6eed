"""The token ids behind the columns of a batch's K/V.

Owns left pads and comparisons by column. Refuses to own the K/V themselves (layers) and what is done about them (cache).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from transformers import GenerationConfig

from tiered_cache.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Token ids `[B, T]` on the host, how many left pads each row begins with, and within which columns no prefix may end.

    Ids below zero stand for content (see content).
    """

    ids: np.ndarray
    pads: tuple[int, ...]
    solid: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Self | None:
        """Read ids `[B, T]` and their mask `[B, T]` (None: all ones).

        Returns:
            None where the mask is not left pads followed by tokens: then columns do not say what was attended to.

        Raises:
            ConfigError: a shape or dtype is wrong.
        """
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
            shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise ConfigError(f"input_ids must be an integer tensor [batch, tokens], not {shape}.")
        if 0 in input_ids.shape:
            raise ConfigError(f"input_ids {tuple(input_ids.shape)} must hold at least one row and one token.")
        ids = input_ids.detach().cpu().numpy().astype(np.int64, copy=True)
        if attention_mask is None:
            return cls(ids, (0,) * len(ids))
        if tuple(attention_mask.shape) != ids.shape:
            raise ConfigError(
                f"attention_mask {tuple(attention_mask.shape)} must have the shape of input_ids {ids.shape}: one mask "
                "column for each token passed."
            )
        mask = attention_mask.detach().cpu().numpy() != 0
        pads = mask.argmax(axis=1)
        expected = np.arange(ids.shape[1]) >= pads[:, None]
        if not np.array_equal(mask, expected):
            return None
        return cls(ids, tuple(int(pad) for pad in pads))

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    def row(self, index: int, stop: int | None = None) -> np.ndarray:
        """Return the tokens of a row, without its pads, up to column `stop`."""
        return self.ids[index, self.pads[index] : stop]

    def cut(self, length: int) -> Self:
        """Keep the first `length` columns."""
        return type(self)(self.ids[:, :length], self.pads, self.solid)

    def take(self, rows: Sequence[int]) -> Self:
        """Return the given rows, in their order."""
        return type(self)(self.ids[list(rows)], tuple(self.pads[row] for row in rows), self.solid)

    def repeat(self, times: int) -> Self:
        """Repeat each row `times` times, as generate() expands its inputs for beams and samples."""
        return self.take([row for row in range(self.rows) for _ in range(times)])

    def extend(self, ids: np.ndarray) -> Self:
        """Append the columns `ids` `[B, t]`."""
        return type(self)(np.concatenate([self.ids, ids], axis=1), self.pads, self.solid)

    def end(self, length: int) -> int:
        """Return where a restored prefix of up to `length` columns may end."""
        for start, stop in sorted(self.solid, reverse=True):
            if start < length < stop:
                length = start
        return length

    def like(self, row: int, stop: int, *, same_pads: bool) -> tuple[int, int]:
        """Return which row before `row` has most leading tokens in common with it, up to column `stop`, and how many.

        `same_pads`: of those only that have as many pads.
        """
        tokens = self.row(row)
        best, source = 0, 0
        for earlier in range(row):
            count = stop - max(self.pads[row], self.pads[earlier])
            if count > best and (not same_pads or self.pads[row] == self.pads[earlier]):
                differs = np.flatnonzero(self.row(earlier)[:count] != tokens[:count])
                best, source = max((best, source), (int(differs[0]) if len(differs) else count, earlier))
        return source, best

    def shared(self, other: "Columns") -> int:
        """Return how many leading columns are the same in both: same pads, same tokens, in every row."""
        if self.pads != other.pads:
            return 0
        length = min(self.length, other.length)
        equal = self.ids[:, :length] == other.ids[:, :length]
        equal |= np.arange(length) < np.array(self.pads)[:, None]
        different = ~equal.all(axis=0)
        return int(different.argmax()) if different.any() else length


@dataclass(frozen=True, slots=True)
class Padding:
    """The `token` that generate() puts after a row that ended early, if any, and whether it is also what ends a row."""

    token: int | None
    ends: bool = False

    @classmethod
    def of(cls, generation_config: GenerationConfig) -> Self:
        """Read it from a generation config that generate() has prepared."""
        pad, ends = (getattr(generation_config, name, None) for name in ("_pad_token_tensor", "_eos_token_tensor"))
        if pad is None:
            return cls(None)
        return cls(int(pad), ends is not None and bool((ends == pad.to(ends.device)).any()))

    def end_of(self, row: np.ndarray, start: int) -> int:
        """Return the column after a row's own last token, at least `start`: what follows an early end is padding."""
        end = len(row)
        while end > start and row[end - 1] == self.token:
            end -= 1
        return end + 1 if end < len(row) and self.ends else end


def count_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    """Return the number of tokens in a batch, pads not counted."""
    return int(input_ids.numel() if attention_mask is None else (attention_mask != 0).sum())
