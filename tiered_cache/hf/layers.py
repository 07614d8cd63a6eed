"""Attention layers whose K/V grow in steps, and what those that keep a state have in common.

Owns the memory of one layer of a running sequence. Refuses to own which tokens it holds (cache).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

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
            self._buffer = torch.empty((batch, heads, capacity_for(length), width), dtype=dtype, device=device)
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
        return self._buffer is not None and self._buffer.shape[2] > 2 * capacity_for(length)

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Put rows `[B]` in place of the present ones, room included, and return the new view."""
        assert self._buffer is not None and self._view is not None
        length = self._view.shape[2]
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = self._buffer.index_select(0, rows.to(self._buffer.device))
        return self.show(length)


class Home(ABC):
    """Host memory that holds a layer's K/V in place of its device's."""

    @abstractmethod
    def allocate(
        self, batch: int, num_tokens: int, keys: tuple[int, int], values: tuple[int, int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold `num_tokens` uninitialised tokens of K and V, each given as (H, D); return host views `[B, H, T, D]` to fill."""

    @abstractmethod
    def append(self, length: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V `[B, H, t, D]` to the first `length` tokens: more are left over from a forward that failed.

        Returns:
            All of both on the device, valid until the next layer's turn.

        Raises:
            CapacityError: the device has no room for one layer.
        """

    @abstractmethod
    def show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the first `length` tokens and return host views of them. What is in them is known after `settle`."""

    @abstractmethod
    def reorder(self, rows: torch.Tensor) -> None:
        """Put rows `[B]` in place of the present ones."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the host's memory holds everything, in the order of the rows."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all tokens."""


class GrowableLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Full attention, as DynamicLayer, except that appending does not copy what is there.

    Where gradients are recorded it concatenates as DynamicLayer does, since a buffer must not change under autograd.

    Attributes:
        home: where its K/V live, if not on its device; then `keys` and `values` are views of host memory.
        arriving: brings what a restore did not bring yet; until then `keys` and `values` are not to be read.
    """

    home: Home | None = None
    arriving: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._growing_keys = GrowingTensor()
        self._growing_values = GrowingTensor()
        self._shown: torch.Tensor | None = None  # by `home`, last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K `[B, H_k, t, D_k]` and V `[B, H_v, t, D_v]`; return all of both. Mirrors DynamicLayer.update."""
        self.receive()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.home is not None and (torch.is_grad_enabled() or key_states.dtype != value_states.dtype):
            self.move(None)
        if self.home is not None:
            appended: tuple[torch.Tensor, torch.Tensor] = self._append_home(self.home, key_states, value_states)
            return appended
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
        if self.home is not None and keys[2] == values[2]:
            self.home.allocate(batch, num_tokens, keys[:2], values[:2], keys[2])
            self._show_home(self.home, num_tokens)
            return
        self.home = None
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
        elif self.home is not None:
            self._follow(self.home)
            self._show_home(self.home, num_tokens)
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
        if self.home is not None:
            self._follow(self.home)
        super().crop(tokens_to_remove)
        if self.home is not None and self.get_seq_length() < length:
            self._show_home(self.home, self.get_seq_length())
        if tied and 0 < self.get_seq_length() < length:
            self._show(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put rows `beam_idx` `[B]` in place of the present ones. The next update need not grow."""
        if self.home is not None and self.get_seq_length() > 0:
            self._follow(self.home)
            if len(beam_idx) == len(self._both[0]):
                self.home.reorder(beam_idx)
            else:
                self.home.settle()
                super().reorder_cache(beam_idx)
        elif self._tied:
            self.keys, self.values = self._growing_keys.select(beam_idx), self._growing_values.select(beam_idx)
        else:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.settle()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.settle()
        super().batch_select_indices(indices if self.home is None else indices.cpu())

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = None
        self.is_initialized = False
        self._growing_keys, self._growing_values = GrowingTensor(), GrowingTensor()
        if self.home is not None:
            self.home.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def move(self, home: Home | None) -> None:
        """Let the K/V live in `home` from now on, an empty one, or on the device if None."""
        before, self.home, held = self.home, None, self.get_seq_length() > 0
        if held and before is not None:
            self._follow(before)
            nothing = [tensor[:, :, :0].to(self.device) for tensor in self._both]
            both = before.append(self.get_seq_length(), nothing[0], nothing[1])
            self.keys, self.values = (tensor.clone(memory_format=torch.contiguous_format) for tensor in both)
        self.home = home
        if held and home is not None:
            home.append(0, *self._both)
            self._show_home(home, self.get_seq_length())
        self._growing_keys, self._growing_values = GrowingTensor(), GrowingTensor()

    def receive(self) -> None:
        """Let what a restore brings be there, for whatever the current stream does next."""
        bring, self.arriving = self.arriving, None
        if bring is not None:
            bring()

    def settle(self) -> None:
        """Let `keys` and `values` be what they show, where they are in host memory."""
        if self.home is not None and self.get_seq_length() > 0:
            self._follow(self.home)
            self.home.settle()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _append_home(
        self, home: Home, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._follow(home)
        keys, values = home.append(self.get_seq_length(), key_states, value_states)
        self._show_home(home, keys.shape[2])
        return keys, values

    def _show_home(self, home: Home, length: int) -> None:
        self.keys, self.values = home.show(length)
        self._shown = self.keys

    def _follow(self, home: Home) -> None:
        """Let `home` hold what somebody put in place of the views that it showed (batch_select_indices, ...)."""
        if self.keys is self._shown or self.get_seq_length() == 0:
            return
        keys, values = self._both
        batch, heads, length, width = keys.shape
        target = home.allocate(batch, length, (heads, width), (values.shape[1], values.shape[3]), keys.dtype)
        for new, there in zip(target, (keys, values), strict=True):
            new.copy_(there)
        self._show_home(home, length)

    @property
    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

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


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    shape = tensor.shape
    return shape[0], shape[1], shape[3], tensor.dtype, tensor.device


def capacity_for(num_tokens: int) -> int:
    """Return for how many tokens to make room where there are `num_tokens`."""
    wanted = num_tokens + max(num_tokens // 8, 1)
    return -(-wanted // GROWTH_TOKENS) * GROWTH_TOKENS
