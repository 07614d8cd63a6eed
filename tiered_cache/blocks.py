"""K/V of all layers of one sequence <-> one flat buffer per block.

Owns the layout: for each layer its K `[H_k, tokens, D_k]`, then its V `[H_v, tokens, D_v]`, layer after layer, each piece
contiguous. Refuses to own copies between memories (devices) and which blocks exist (stack).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered_cache.devices.base import Device, Transfer


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the bytes of a block are laid out, for any number of tokens.

    Attributes:
        shapes: per layer (H_k, D_k, H_v, D_v): heads and width of K and V, which may differ.
        dtype: of all K and V.
        device: of all K and V.
    """

    shapes: tuple[tuple[int, int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "BlockLayout | None":
        """Return the layout of live (K, V) pairs `[B, H, T, D]`, or None where they differ in dtype or device."""
        if len({(tensor.dtype, tensor.device) for pair in layers for tensor in pair}) != 1:
            return None
        shapes = tuple((keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]) for keys, values in layers)
        return cls(shapes, layers[0][0].dtype, layers[0][0].device)

    def nbytes(self, num_tokens: int) -> int:
        """Return the size in bytes of a block of `num_tokens` tokens."""
        return num_tokens * self.dtype.itemsize * sum(h_k * d_k + h_v * d_v for h_k, d_k, h_v, d_v in self.shapes)

    def pieces(self, flat: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Return views into a flat block of `num_tokens` tokens: K and V `[H, num_tokens, D]` of each layer in turn."""
        typed = flat.view(self.dtype)
        views = []
        start = 0
        for h_k, d_k, h_v, d_v in self.shapes:
            for heads, width in ((h_k, d_k), (h_v, d_v)):
                stop = start + heads * num_tokens * width
                views.append(typed[start:stop].view(heads, num_tokens, width))
                start = stop
        return views


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
        for piece, tensor in zip(self.layout.pieces(staged, num_tokens), self._tensors, strict=True):
            piece.copy_(tensor[row, :, columns])
        return self._device.store(staged, buffers)

    def load(self, start: int, num_tokens: int, buffer: torch.Tensor, block_tokens: int) -> Transfer:
        transfer = self._device.fetch(buffer)
        columns = self._columns(start, num_tokens)
        for piece, tensor in zip(self.layout.pieces(transfer.target(), block_tokens), self._tensors, strict=True):
            tensor[self._rows, :, columns] = piece[:, :num_tokens]
        return transfer

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._device.copy(source, target)

    def _columns(self, start: int, num_tokens: int) -> slice:
        return slice(self._first_column + start, self._first_column + start + num_tokens)
