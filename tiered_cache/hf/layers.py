"""Attention layers whose K/V grow in steps, and what those that keep a state have in common.

Owns the memory of one layer of a running sequence. Refuses to own which tokens it holds (cache).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

GROWTH_TOKENS = 256  # smallest step; a long sequence grows by an eighth of its length, so growing stays a small share


class GrowingTensor:
    """A tensor `[B, H, T, D]` that is a view of a buffer with room for more tokens.

    Whoever holds the view may replace it (crop, batch_select_indices, ...): that ends its tie to the buffer, and the next
    append moves what is there to a new one.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._view: torch.Tensor | None = None

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised view of `shape` (B, H, T, D), with room for more tokens."""
        batch, heads, length, width = shape
        # A tensor made in inference mode cannot be written outside of it; one made outside can be written anywhere.
        with torch.inference_mode(False):
            self._buffer = torch.empty((batch, heads, _capacity(length), width), dtype=dtype, device=device)
        return self.show(length)

    def append(self, present: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return `present` `[B, H, T, D]` and `new` `[B, H, t, D]` as one; copies `new` only, where there is room."""
        length = present.shape[2] if present.numel() else 0
        total = length + new.shape[2]
        if length and _kind(present) != _kind(new):  # as stock: an error, or a promotion
            return torch.cat([present, new], dim=-2)
        buffer = self._buffer
        if buffer is None or present is not self._view or buffer.shape[2] < total:
            view = self.allocate((new.shape[0], new.shape[1], total, new.shape[3]), new.dtype, new.device)
            if length:
                view[:, :, :length] = present
            buffer = self._buffer
            assert buffer is not None
        buffer.narrow(2, length, new.shape[2]).copy_(new)
        return self.show(total)

    def show(self, length: int) -> torch.Tensor:
        """Return the first `length` tokens of the buffer as the view from now on."""
        assert self._buffer is not None
        self._view = self._buffer.narrow(2, 0, length)
        return self._view

    def is_view(self, tensor: torch.Tensor | None) -> bool:
        """Say whether `tensor` is still the view that was handed out last."""
        return tensor is not None and tensor is self._view

    def is_wasteful(self, length: int) -> bool:
        """Say whether the buffer is more than twice as large as `length` tokens need."""
        return self._buffer is not None and self._buffer.shape[2] > 2 * _capacity(length)

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Put rows `[B]` in place of the present ones, room included, and return the new view."""
        assert self._buffer is not None and self._view is not None
        length = self._view.shape[2]
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = self._buffer.index_select(0, rows.to(self._buffer.device))
        return self.show(length)


class GrowableLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Full attention, as DynamicLayer, except that appending does not copy what is there.

    Where gradients are recorded it concatenates as DynamicLayer does, since a buffer must not change under autograd.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._growing_keys = GrowingTensor()
        self._growing_values = GrowingTensor()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K `[B, H_k, t, D_k]` and V `[B, H_v, t, D_v]`; return all of both. Mirrors DynamicLayer.update."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if torch.is_grad_enabled():
            keys = torch.cat([self.keys, key_states], dim=-2)
            values = torch.cat([self.values, value_states], dim=-2)
        else:
            keys = self._growing_keys.append(self.keys, key_states)
            values = self._growing_values.append(self.values, value_states)
        self.keys, self.values = keys, values
        return keys, values

    def allocate(
        self,
        batch: int,
        num_tokens: int,
        keys: tuple[int, int, torch.dtype],
        values: tuple[int, int, torch.dtype],
        device: torch.device,
    ) -> None:
        """Hold `num_tokens` uninitialised tokens of K and V, each given as (H, D, dtype), to be filled."""
        both = [torch.empty(0, dtype=dtype, device=device) for _, _, dtype in (keys, values)]
        self.lazy_initialization(*both)
        self.keys = self._growing_keys.allocate((batch, keys[0], num_tokens, keys[1]), keys[2], device)
        self.values = self._growing_values.allocate((batch, values[0], num_tokens, values[1]), values[2], device)

    def can_truncate(self, num_tokens: int) -> bool:
        """Say whether there are `num_tokens` tokens at least."""
        return self.get_seq_length() >= num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, in place."""
        if self.get_seq_length() <= num_tokens:
            return
        if num_tokens == 0:
            self.reset()
        elif self._tied and not self._growing_keys.is_wasteful(num_tokens):
            self._show(num_tokens)
        else:
            assert self.keys is not None and self.values is not None
            # Copies: a view would keep all of the old memory.
            self.keys, self.values = self.keys[:, :, :num_tokens].clone(), self.values[:, :, :num_tokens].clone()
            self._growing_keys, self._growing_values = GrowingTensor(), GrowingTensor()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end, as DynamicLayer.crop of the installed transformers does. The buffers are kept."""
        tied, length = self._tied, self.get_seq_length()
        super().crop(tokens_to_remove)
        if tied and 0 < self.get_seq_length() < length:
            self._show(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put rows `beam_idx` `[B]` in place of the present ones. The next update need not grow."""
        if self._tied:
            self.keys, self.values = self._growing_keys.select(beam_idx), self._growing_values.select(beam_idx)
        else:
            super().reorder_cache(beam_idx)

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = None
        self.is_initialized = False
        self._growing_keys, self._growing_values = GrowingTensor(), GrowingTensor()

    @property
    def _tied(self) -> bool:
        return self._growing_keys.is_view(self.keys) and self._growing_values.is_view(self.values)

    def _show(self, length: int) -> None:
        self.keys, self.values = self._growing_keys.show(length), self._growing_values.show(length)


class StatefulLayer(ABC):
    """A layer of which a hit takes a snapshot: it keeps less of a sequence than its tokens.

    Attributes:
        num_tokens: how many it was fed, of a layer without attention.
    """

    num_tokens = 0

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """Return what it keeps now, by name, each `[B, ...]`: of the same shape at every length. They change as it goes on."""

    @abstractmethod
    def put_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        """Let a fresh layer go on from a state after `num_tokens` tokens. Copies it."""


def begin_forward(layer: Any, state_idx: int) -> None:
    """Count a forward of a recurrent layer, when it asks for its state."""
    if state_idx == 0 and isinstance(layer, StatefulLayer):
        layer.num_tokens += 1


class CapturingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Sliding-window (or chunked) attention, as DynamicSlidingWindowLayer, that also keeps K/V which left the window.

    They are kept until they were stored: `captured` are K and V of the columns from `captured_from` on. At most
    `max_captured_nbytes` are held; beyond, those before the window go, unstored.
    """

    def __init__(self, sliding_window: int, max_captured_nbytes: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.captured: tuple[torch.Tensor, torch.Tensor] | None
        self._growing_keys: GrowingTensor
        self._growing_values: GrowingTensor
        self._max_captured_nbytes = max_captured_nbytes
        self._capturing = True
        self._forget_captured()

    @property
    def window(self) -> int:
        """How many tokens before the next one its K/V are needed of."""
        return int(self.sliding_window) - 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K/V `[B, H, t, D]`; return those in the window and the new ones. Mirrors DynamicSlidingWindowLayer.update."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if torch.is_grad_enabled():
            self._forget_captured()
        elif self._capturing:
            nothing = key_states[:, :, :0]
            before = self.captured or (nothing, value_states[:, :, :0])
            self.captured = (
                self._growing_keys.append(before[0], key_states),
                self._growing_values.append(before[1], value_states),
            )
            if self.captured_nbytes > self._max_captured_nbytes:
                self.drop_captured(self.cumulative_length - self.window)
        return keys, values

    def allocate(
        self,
        batch: int,
        num_tokens: int,
        captured_from: int,
        keys: tuple[int, int, torch.dtype],
        values: tuple[int, int, torch.dtype],
        device: torch.device,
    ) -> None:
        """Hold `num_tokens` tokens, uninitialised K/V from column `captured_from` on, to be filled before `settle`.

        K and V are given as (H, D, dtype).
        """
        both = [torch.empty(0, dtype=dtype, device=device) for _, _, dtype in (keys, values)]
        self.lazy_initialization(*both)
        captured = num_tokens - captured_from
        self.captured = (
            self._growing_keys.allocate((batch, keys[0], captured, keys[1]), keys[2], device),
            self._growing_values.allocate((batch, values[0], captured, values[1]), values[2], device),
        )
        self.captured_from = captured_from
        self.cumulative_length = num_tokens

    def settle(self) -> None:
        """Let the last window of what was filled in be what attention sees."""
        assert self.captured is not None
        self.keys, self.values = (tensor[:, :, -self.window :] for tensor in self.captured)

    @property
    def captured_nbytes(self) -> int:
        """Bytes of captured K/V."""
        # By shape: `nbytes` is not known to torch.compile.
        return sum(math.prod(tensor.shape) * tensor.itemsize for tensor in self.captured) if self.captured is not None else 0

    def drop_captured(self, before: int) -> None:
        """Free captured K/V before the column `before`."""
        count = before - self.captured_from
        if self.captured is None or count <= 0:
            return
        keys, values = (tensor[:, :, count:].clone() for tensor in self.captured)
        self._growing_keys, self._growing_values = GrowingTensor(), GrowingTensor()
        self.captured = keys, values
        self.captured_from = before

    def stop_capturing(self) -> None:
        """Keep what is captured and capture no more: rows will change places."""
        self._capturing = False

    def can_truncate(self, num_tokens: int) -> bool:
        """Say whether the last window of the first `num_tokens` tokens is still there."""
        if num_tokens == self.cumulative_length:
            return True
        kept = num_tokens - self.captured_from
        if self.captured is None or min(tensor.shape[2] for tensor in self.captured) < kept:
            return False
        return kept > 0 and (self.captured_from == 0 or kept >= self.window)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, in place. Only where `can_truncate` says so."""
        if num_tokens != self.cumulative_length:
            assert self.captured is not None
            kept = num_tokens - self.captured_from
            keys, values = self.captured
            self.captured = keys[:, :, :kept], values[:, :, :kept]
            self.cumulative_length = num_tokens
            self.settle()
        self._capturing = True

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self._capturing:
            self._forget_captured()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._forget_captured()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._forget_captured()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._forget_captured()

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0
        self._capturing = True
        self._forget_captured()

    def _forget_captured(self) -> None:
        self._growing_keys, self._growing_values = GrowingTensor(), GrowingTensor()
        self.captured = None
        self.captured_from = self.cumulative_length
        self.valid_from: tuple[int, ...] = ()  # by row, where not captured_from


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    shape = tensor.shape
    return shape[0], shape[1], shape[3], tensor.dtype, tensor.device


def _capacity(num_tokens: int) -> int:
    wanted = num_tokens + max(num_tokens // 8, 1)
    return -(-wanted // GROWTH_TOKENS) * GROWTH_TOKENS
