"""How K/V of all layers of one sequence lie in one flat buffer per block.

For each layer its K `[H_k, tokens, D_k]`, then its V `[H_v, tokens, D_v]`, layer after layer, each contiguous and aligned; and
a snapshot: what layers keep of a sequence in place of its tokens, tensor after tensor. Refuses to own how bytes get there
(port) and which blocks exist (stack).
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tiered_cache.format import TensorSpec
from tiered_cache.keys import SIDE

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip  # as safetensors names them
_ALIGNMENT = 16  # bytes; lets a piece be viewed in any dtype and be read by vector loads


Shapes = list[tuple[str, tuple[int, ...], torch.dtype]]


class FlatLayout(ABC):
    """How some tensors lie in one flat buffer, each contiguous and aligned."""

    __slots__ = ()

    @abstractmethod
    def shapes(self, num_tokens: int) -> Shapes:
        """Return (name, shape, dtype) of each tensor of a piece of `num_tokens` tokens, in order."""

    def nbytes(self, num_tokens: int) -> int:
        """Return the size in bytes of a piece of `num_tokens` tokens."""
        return sum(_aligned(_nbytes(shape, dtype)) for _, shape, dtype in self.shapes(num_tokens))

    def has_gaps(self, num_tokens: int) -> bool:
        """Say whether some bytes of a piece belong to no tensor."""
        return any(_nbytes(shape, dtype) % _ALIGNMENT for _, shape, dtype in self.shapes(num_tokens))

    def tensors(self, num_tokens: int) -> list[TensorSpec]:
        """Return what is in a piece of `num_tokens` tokens, gaps included, as safetensors names it."""
        specs = []
        start = 0
        for name, shape, dtype in self.shapes(num_tokens):
            stop = start + _nbytes(shape, dtype)
            known = dtype in _DTYPES
            specs.append(TensorSpec(name, _DTYPES[dtype] if known else "U8", shape if known else (stop - start,), start, stop))
            start += _aligned(stop - start)
            if start > stop:
                specs.append(TensorSpec(f"{name}.padding", "U8", (start - stop,), stop, start))
        return specs

    def extents(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return (start, stop) in bytes of each tensor of a piece of `num_tokens` tokens, with the gap behind it."""
        stops = list(itertools.accumulate(_aligned(_nbytes(shape, dtype)) for _, shape, dtype in self.shapes(num_tokens)))
        return list(zip([0, *stops], stops, strict=False))

    def ranges(self, num_tokens: int, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return (start, stop) in bytes of runs of those tensors of a piece that are at `places`, gaps included."""
        extents, ranges = self.extents(num_tokens), list[tuple[int, int]]()
        for start, stop in (extents[place] for place in places):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return ranges

    def views(self, flat: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Return views into flat pieces of `num_tokens` tokens each, `[N, nbytes]` or one `[nbytes]`: each tensor in turn."""
        views = []
        start = 0
        for _, shape, dtype in self.shapes(num_tokens):
            nbytes = _nbytes(shape, dtype)
            views.append(flat[..., start : start + nbytes].view(dtype).view(*flat.shape[:-1], *shape))
            start += _aligned(nbytes)
        return views


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class BlockLayout(FlatLayout):
    """K and V `[H, tokens, D]` of each layer in turn.

    Attributes:
        pieces: (H, D, dtype) of each; heads, width and dtype of K and V may differ.
        device: where all of them are.
    """

    pieces: tuple[tuple[int, int, torch.dtype], ...]
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], device: torch.device) -> Self:
        """Return the layout of live K and V `[B, H, T, D]` in turn, all on `device`."""
        return cls(tuple((tensor.shape[1], tensor.shape[3], tensor.dtype) for tensor in tensors), device)

    def shapes(self, num_tokens: int) -> Shapes:
        return [
            (f"{place // 2}.{'values' if place % 2 else 'keys'}", (heads, num_tokens, width), dtype)
            for place, (heads, width, dtype) in enumerate(self.pieces)
        ]


@dataclass(frozen=True, slots=True)
class SnapshotLayout(FlatLayout):
    """What layers keep of a sequence in place of its tokens, however many those are.

    Attributes:
        pieces: (layer, name, shape, dtype) of each tensor, in order; `shape` is that of one sequence.
        device: where all of them are.
    """

    pieces: tuple[tuple[int, str, tuple[int, ...], torch.dtype], ...]
    device: torch.device

    def shapes(self, num_tokens: int) -> Shapes:
        return [(f"{layer}.{name}", shape, dtype) for layer, name, shape, dtype in self.pieces]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Of a block's pieces: "main" and, where `window` is not 0, "side"; a snapshot, where it is SNAPSHOT."""

    main: BlockLayout
    side: BlockLayout | SnapshotLayout
    window: int

    def nbytes(self, kind: str, num_tokens: int) -> int:
        """Return the size in bytes of a piece of `num_tokens` tokens."""
        return (self.side if kind == SIDE else self.main).nbytes(num_tokens)

    def tensors(self, kind: str, num_tokens: int) -> list[TensorSpec]:
        """Return what is in such a piece, gaps included, as safetensors names it."""
        return (self.side if kind == SIDE else self.main).tensors(num_tokens)


@dataclass(frozen=True, slots=True)
class Strip:
    """K and V `[B, H, T, D]` of some layers in turn; their index 0 on the token axis is column `origin` of the batch.

    Attributes:
        hosted: the places of those that are in host memory, where the others are in a device's.
    """

    tensors: tuple[torch.Tensor, ...]
    origin: int = 0
    hosted: frozenset[int] = frozenset()
