"""K/V of all layers of one sequence <-> one flat buffer per block.

Owns the layout: for each layer its K `[H_k, tokens, D_k]`, then its V `[H_v, tokens, D_v]`, layer after layer, each piece
contiguous and aligned. Refuses to own copies between memories (devices) and which blocks exist (stack).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered_cache.devices.base import Device, Transfer

_ALIGNMENT = 16  # bytes; lets a piece be viewed in any dtype and be read by vector loads


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the bytes of a block are laid out, for any number of tokens.

    Attributes:
        pieces: (H, D, dtype) of K and V of each layer in turn; heads, width and dtype of K and V may differ.
        device: where all of them are.
    """

    pieces: tuple[tuple[int, int, torch.dtype], ...]
    device: torch.device

    @classmethod
    def of(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "BlockLayout | None":
        """Return the layout of live (K, V) pairs `[B, H, T, D]`, or None where they are on several devices."""
        tensors = [tensor for pair in layers for tensor in pair]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            return None
        return cls(tuple((tensor.shape[1], tensor.shape[3], tensor.dtype) for tensor in tensors), devices.pop())

    def nbytes(self, num_tokens: int) -> int:
        """Return the size in bytes of a block of `num_tokens` tokens."""
        return sum(_aligned(heads * num_tokens * width * dtype.itemsize) for heads, width, dtype in self.pieces)

    def views(self, flat: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Return views into a flat block of `num_tokens` tokens: K and V `[H, num_tokens, D]` of each layer in turn."""
        views = []
        start = 0
        for heads, width, dtype in self.pieces:
            nbytes = heads * num_tokens * width * dtype.itemsize
            views.append(flat[start : start + nbytes].view(dtype).view(heads, num_tokens, width))
            start += _aligned(nbytes)
        return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SequencePort:
    """One sequence's columns in the layers' K/V, as the stack's `BlockPort`.

    Args:
        layout: of the layers.
        layers: per layer K and V `[B, H, T, D]`, read by `save` and written by `load`.
        rows: the batch rows that hold the sequence. `save` reads the first, `load` writes all (beams start as copies).
        first_column: the column of the sequence's token 0 (its number of left pads).
        device: moves the bytes.
    """

    def __init__(
        self,
        layout: BlockLayout,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: slice,
        first_column: int,
        device: Device,
    ) -> None:
        self.layout = layout
        self._tensors = [tensor for pair in layers for tensor in pair]
        self._rows = rows
        self._first_column = first_column
        self._device = device

    def nbytes(self, num_tokens: int) -> int:
        return self.layout.nbytes(num_tokens)

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        return self._device.allocate(memory, nbytes)

    def save(self, start: int, num_tokens: int, buffers: Sequence[torch.Tensor]) -> Transfer:
        staged = self._device.stage(buffers)
        columns = self._columns(start, num_tokens)
        row = self._rows.start
        for piece, tensor in zip(self.layout.views(staged, num_tokens), self._tensors, strict=True):
            piece.copy_(tensor[row, :, columns])
        return self._device.store(staged, buffers)

    def load(self, start: int, num_tokens: int, buffer: torch.Tensor, block_tokens: int) -> Transfer:
        transfer = self._device.fetch(buffer)
        columns = self._columns(start, num_tokens)
        for piece, tensor in zip(self.layout.views(transfer.target(), block_tokens), self._tensors, strict=True):
            tensor[self._rows, :, columns] = piece[:, :num_tokens]
        return transfer

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._device.copy(source, target)

    def _columns(self, start: int, num_tokens: int) -> slice:
        return slice(self._first_column + start, self._first_column + start + num_tokens)
