"""Sliding-window and chunked attention layers, which keep what left their window until it was stored.

Owns the memory of one such layer. Refuses to own which tokens it holds (cache) and when they are stored (session).
"""

import math
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from tiered_cache.hf.layers import GrowingTensor


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
