"""K/V of all layers of one sequence <-> one flat buffer per block.

Owns the layout: for each layer its K `[H_k, tokens, D_k]`, then its V `[H_v, tokens, D_v]`, layer after layer, each piece
contiguous and aligned; and that of a snapshot: what layers keep of a sequence in place of its tokens, tensor after tensor.
Refuses to own copies between memories (devices) and which blocks exist (stack).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tiered_cache.devices.base import Device, Transfer
from tiered_cache.format import TensorSpec
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT

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

    def views(self, flat: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Return views into a flat piece of `num_tokens` tokens: each tensor in turn."""
        views = []
        start = 0
        for _, shape, dtype in self.shapes(num_tokens):
            nbytes = _nbytes(shape, dtype)
            views.append(flat[start : start + nbytes].view(dtype).view(shape))
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
    """K and V `[B, H, T, D]` of some layers in turn; their index 0 on the token axis is column `origin` of the batch."""

    tensors: tuple[torch.Tensor, ...]
    origin: int = 0


class SequencePort:
    """One sequence's columns in the layers' K/V, as the stack's `BlockPort`.

    Args:
        layout: of the layers.
        strips: their K/V by kind of piece, read by `save` and written by `load`.
        rows: the batch rows that hold the sequence. `save` reads the first, `load` writes all (beams start as copies).
        first_column: the column of the sequence's token 0 (its number of left pads).
        device: moves the bytes.
        side_from: the first column whose "side" K/V are there.
        snapshots: tensors `[B, ...]` of each snapshot, by the tokens it stands for: read by `save`, written by `load`.
        restored_end: the tokens of the snapshot that the sequence went on from; 0 if none.
        reads: blocks on their way to the device, by buffer: ports of several rows that share them read each once.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        strips: dict[str, Strip],
        rows: slice,
        first_column: int,
        device: Device,
        side_from: int = 0,
        reads: dict[int, Transfer] | None = None,
        snapshots: Mapping[int, Sequence[torch.Tensor]] = {},
        restored_end: int = 0,
    ) -> None:
        self.layout = layout
        # The one that was restored is there already; it stays as long as what is stored behind it.
        self.ends = tuple(dict.fromkeys([*snapshots, *([restored_end] if restored_end > 0 else [])]))
        self._snapshots = snapshots
        self._reads = {} if reads is None else reads
        self._shares_reads = reads is not None
        self._layouts: dict[str, FlatLayout] = {MAIN: layout.main, SIDE: layout.side}
        self._strips = strips
        self._rows = rows
        self._first_column = first_column
        self._device = device
        self._side_from = side_from

    @property
    def window(self) -> int:
        return self.layout.window

    def has_side(self, start: int, stop: int) -> bool:
        if self.window == SNAPSHOT:
            return stop in self._snapshots
        return self._first_column + start >= self._side_from

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return self._device.footprint(self._layouts[kind].nbytes(num_tokens))

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        return self._device.allocate(memory, nbytes)

    def save(self, kind: str, start: int, num_tokens: int, buffers: Sequence[torch.Tensor]) -> Transfer:
        staged = self._device.stage(buffers)
        if self._layouts[kind].has_gaps(num_tokens):
            staged.zero_()  # what was in memory before must not get into a file
        for view, rows in self._pairs(kind, staged, start, num_tokens, num_tokens):
            view.copy_(rows[0])
        return self._device.store(staged, buffers)

    @property
    def staging(self) -> str:
        return type(self._device).__name__

    def view(self, buffer: torch.Tensor) -> memoryview:
        return buffer.numpy().data

    def load(
        self, kind: str, start: int, num_tokens: int, buffer: torch.Tensor, block_tokens: int, *, once: bool = False
    ) -> Transfer:
        transfer = None if once else self._reads.get(id(buffer))  # held, so no other buffer has its id
        transfer = transfer or self._device.fetch(buffer)
        if self._shares_reads and not once:
            self._reads[id(buffer)] = transfer
        for view, rows in self._pairs(kind, transfer.target(), start, num_tokens, block_tokens):
            rows[:] = view
        return transfer

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._device.copy(source, target)

    def _pairs(
        self, kind: str, flat: torch.Tensor, start: int, num_tokens: int, block_tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a part of a flat block and the rows of the layers' tensors that it belongs to, tensor by tensor."""
        views = self._layouts[kind].views(flat, block_tokens)
        if kind == SIDE and self.window == SNAPSHOT:
            for view, tensor in zip(views, self._snapshots[start + block_tokens], strict=True):
                yield view, tensor[self._rows]
            return
        first = self._first_column + start - self._strips[kind].origin
        assert first >= 0
        for view, tensor in zip(views, self._strips[kind].tensors, strict=True):
            yield view[:, :num_tokens], tensor[self._rows, :, first : first + num_tokens]
