"""TieredCache: the K/V of one batch of sequences.

Owns which tokens the layers' columns hold, and whether what they hold or what is stored serves a prompt better. Refuses
to own when that happens in a generate() call (session) and the way to and from the stack (binding).
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tiered_cache.defaults import default_stack
from tiered_cache.errors import CacheInUseError, ConfigError, TieredCacheError
from tiered_cache.hf import compat
from tiered_cache.hf.binding import Binding
from tiered_cache.hf.checks import check_commit, check_stay
from tiered_cache.hf.columns import Columns, count_tokens
from tiered_cache.hf.content import refuse_by_hand
from tiered_cache.hf.explain import NOT_KEPT, Refusal, describe, warn
from tiered_cache.hf.layers import GrowableLayer, begin_forward, capacity_for
from tiered_cache.hf.offload import Offload, check_offload
from tiered_cache.hf.prefill import split_points
from tiered_cache.hf.resident import Resident, fill, is_whole
from tiered_cache.hf.shapes import full_layers, is_hosted, is_stateful, lengths
from tiered_cache.hf.windows import CapturingSlidingLayer
from tiered_cache.interrupts import uninterrupted
from tiered_cache.stack import TierStack, check_stack
from tiered_cache.usage import MissReason, Usage

CAPTURE_NBYTES = 256 << 20  # of K/V that left the windows of sliding layers; beyond, they are stored in mid-generation


class TieredCache(DynamicCache):
    """A drop-in DynamicCache that reuses every prefix its stack has seen:

        model.generate(**inputs, past_key_values=TieredCache())

    One object is one batch of sequences: make one for each call, or keep one for a chat. Not for two calls at once.

    Args:
        stack: where K/V are kept between calls; the default stack if None.
        salt: str or bytes; what is stored under one salt is never found under another.
        ttl: seconds for which what its calls store may be reused; None: until it is evicted.
        pin: whether what its calls store is kept when others are evicted, up to half of a tier's capacity.
        offload: how many layers of the running sequence have their K/V on the accelerator, and not in host memory: all that
            fit ("auto"), a share of them (0.0 to 1.0), or what fits into so many bytes (an int, or a str such as "2GiB").

    Raises:
        ConfigError: `stack` is no TierStack, or another argument is of the wrong kind.
        ClosedError: `stack` is closed.
    """

    # Set by generation.py, which installs the hooks; without them a used cache cannot tell one prompt from another.
    install_hooks: ClassVar[Callable[[], None]]
    hooks_installed: ClassVar[bool] = False
    is_tiered: ClassVar[bool] = True  # how the hooks know their caches, also across reloads of this package

    layers: list[Any]
    _first_layer = 0  # that keeps anything

    def __init__(
        self,
        stack: TierStack | None = None,
        *,
        salt: str | bytes | None = None,
        ttl: float | None = None,
        pin: bool = False,
        offload: str | float | int = "auto",
    ) -> None:
        if salt is not None and not isinstance(salt, str | bytes):
            raise ConfigError(f"TieredCache(salt=...) must be a str or bytes, not {type(salt).__name__}.")
        self._stay = check_stay(ttl, pin, "TieredCache")
        type(self).install_hooks()
        super().__init__()
        self.layer_class_to_replicate = GrowableLayer
        self.stack = default_stack() if stack is None else check_stack(stack, "TieredCache(stack=...)")
        self._offload = Offload(check_offload(offload), self.stack.relieve)
        self.noted = Usage()
        self.split_points: list[int] = []  # columns after which a snapshot is to be taken in this call's prefill
        self.session: Any = None  # the generate() call that is using this cache
        self.columns: Columns | None = None  # the tokens of the layers' columns, as far as they are known
        self._salt = salt.encode() if isinstance(salt, str) else salt or b""
        self._binding: Binding | None = None
        self._may_store = False
        self._forwards: Counter[tuple[str, int]] = Counter()  # that came to the attention, and to the state, of each layer
        self._by_hand = False  # filled through restore(), which needs no hooks
        self._fed: Columns | None = None  # ... for this prompt
        self._refusal: Refusal | None = None

    @property
    def usage(self) -> Usage:
        """Token counts of the last generate() or restore(), once what it stored is stored."""
        self.stack.settle()
        return self.noted

    # --- for loops written by hand ----------------------------------------------------------------------------------

    def restore(self, model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Bring the longest known prefix of `input_ids` `[B, T]` into this cache and return its length n < T in columns.

        Then run the model on `input_ids[:, n:]` with this cache and the whole `attention_mask`, and `commit`. Where rows are
        left-padded, pass `position_ids` that count from each row's first token, as generate() does: else pads count too, and
        what is stored is of use only to loops that do the same.

        Args:
            model: the model that will run; its device holds the K/V.
            input_ids: the whole prompt, left-padded where rows differ in length.
            attention_mask: `[B, T]`, 0 for left pads; None for no pads.

        Raises:
            ConfigError: a shape does not fit.
            CacheInUseError: a generate() call is using this cache.
            UnsupportedModelError: an encoder-decoder model.
        """
        self.check_free()
        model = compat.inner_model(model)
        compat.check_decoder(model)
        prompt = Columns.of(input_ids, attention_mask)
        resident = self.take_out()
        refusal = self.bind(model, by_hand=True) or refuse_by_hand(model, input_ids)
        self._fed = prompt
        columns = self.reuse(prompt, count_tokens(input_ids, attention_mask), 1, resident, refusal, at_once=False)
        self.stack.record(self.noted)
        return columns

    def commit(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        """Store the K/V this cache holds for `input_ids` `[B, T]`, the tokens fed so far (and perhaps some not fed yet).

        A model with recurrent layers goes on only from where a commit was made: make one after the prompt too.

        Args:
            input_ids: all tokens from the first column on, restored ones included.
            attention_mask: `[B, T]`, as for `restore`.

        Raises:
            ConfigError: restore() was not called, or `input_ids` are not the tokens this cache was restored for.
            CacheInUseError: a generate() call is using this cache.
        """
        self.check_free()
        if not self._by_hand:
            raise ConfigError("commit() needs restore(model, input_ids) before it: that says which model fed this cache.")
        length = max(lengths(self.layers), default=0)
        self.columns = columns = check_commit(input_ids, attention_mask, length, self._fed).cut(length)
        self.store(range(columns.rows), [length] * columns.rows)

    def explain(self) -> str:
        """Say in one paragraph what the last call reused from where, what it did not, and why."""
        return describe(self.usage, self._refusal, sum(map(is_hosted, self.layers)), len(self.layers))

    # --- what a session does with it --------------------------------------------------------------------------------

    def take_out(self) -> Resident:
        """Take what this cache holds out of it; `put_back` undoes that."""
        resident = Resident(self.layers, self.columns, self._binding, self._forwards)
        self.columns, self.layers = None, []  # in this order: tokens are never known of layers that are not there
        return resident

    def put_back(self, resident: Resident) -> None:
        """Hold again what `take_out` returned."""
        self.layers, self._binding, self._forwards = resident.layers, resident.binding, resident.forwards
        self.columns = resident.columns

    def bind(self, model: PreTrainedModel, *, by_hand: bool = False) -> Refusal | None:
        """Make fresh layers for `model`; return why nothing may be reused with it, or None."""
        self.settle()
        self._binding = Binding(model, self.stack, self._salt, self._stay, self._offload, by_hand)
        self.layers, self.columns, self._forwards = self._binding.layers, None, Counter()
        self._by_hand, self._fed = by_hand, None
        self._first_layer = next(place for place, layer in enumerate(self.layers) if not isinstance(layer, compat.EMPTY_LAYERS))
        return self._binding.refusal

    def fresh_layers(self) -> list[Any]:
        """Return empty layers for the model this cache is bound to."""
        return self._bound.fresh_layers()

    def reuse(
        self,
        prompt: Columns | None,
        prompt_tokens: int,
        expand: int,
        resident: Resident,
        refusal: Refusal | None,
        *,
        at_once: bool,
        total: int = 0,
    ) -> int:
        """Fill the fresh layers with the longest known prefix of `prompt` and return its length in columns.

        Args:
            prompt: the batch as the user passed it; None if its mask hides what is attended to.
            prompt_tokens: how many tokens that is, pads not counted.
            expand: rows of K/V for each row of `prompt` (beams, samples).
            resident: what this cache held before.
            refusal: why nothing may be reused.
            at_once: what is left of the prompt is fed in one forward.
            total: how many columns there may be at the end of the call; 0 if that is not known.
        """
        started = time.perf_counter()
        columns, served = 0, dict[str, int]()
        if refusal is None and prompt is None:
            refusal = Refusal(MissReason.UNKNOWN_CONTENT, "the attention mask is not left padding followed by tokens")
        if prompt is not None and (refusal is None or refusal.stores):
            of_prompt = self._bound.refuse_prompt(prompt, at_once)
            refusal = Refusal.first([reason for reason in (refusal, of_prompt) if reason is not None])
        self._may_store = refusal is None or refusal.stores
        if prompt is not None:
            total = total or capacity_for(prompt.length)
            self._bound.plan(prompt.rows * expand, total, prompt.length, resident.device_nbytes)
        may_split = refusal is None  # else somebody wants what one forward of the whole prompt gives
        known = [0] * prompt.rows if prompt is not None else []
        if refusal is None and prompt is not None:
            try:
                with uninterrupted():  # a hold that is never released would keep its blocks for ever
                    columns, served, refusal, known = fill(self._bound, prompt, expand, resident, total)
            except Exception as error:  # noqa: BLE001  a tier that fails, in whatever way, is a miss
                warn("Reuse failed, the whole prompt is computed", error)
                refusal = Refusal(MissReason.TIER_ERROR, f"a tier failed ({error})")
                self._bound.relieve()
                self._bound.place(self._bound.layers)
            self.layers = self._bound.layers
            if self._by_hand:  # who knows when the loop's forward is over
                self._bound.settle()
        cached = sum(served.values())
        every_row_one = prompt is not None and prompt_tokens - cached == prompt.rows
        reason = refusal.reason if refusal is not None and not every_row_one else None
        self.note(Usage(prompt_tokens, cached, 0, served, time.perf_counter() - started, reason), refusal)
        self.columns = prompt.cut(columns).repeat(expand) if prompt is not None and columns else None
        may_split = may_split and self._bound.takes_snapshots
        points = split_points(prompt, columns, known) if prompt is not None and may_split else []
        self.split_points = [point for point in points if prompt is not None and self._bound.can_split(prompt, point)]
        return columns

    @property
    def takes_snapshots(self) -> bool:
        """Say whether a hit on this model can end only where a snapshot was taken."""
        return self._bound.takes_snapshots

    def take_snapshot(self) -> None:
        """Keep what recurrent layers hold now, to be stored with the columns so far."""
        if self._may_store and self._bound.takes_snapshots and (length := max(lengths(self.layers), default=0)):
            self._bound.take_snapshot(length)

    def settle(self) -> bool:
        """Let go of what this call's restore read, when that has arrived; return whether it has."""
        try:
            if self._binding is not None:
                self._binding.settle()
        except Exception as error:  # noqa: BLE001
            warn("A restore did not arrive", error)
            return False
        return True

    def end_call(self) -> None:
        """Free what was kept for this call only, and count it."""
        self.settle()
        if self._binding is not None:
            self._binding.snapshots.clear()
        self.stack.record(self.noted)

    def note(self, usage: Usage, refusal: Refusal | None) -> None:
        """Keep what the present call did, for `usage` and `explain()`."""
        self.noted, self._refusal = usage, refusal

    def store(self, rows: Sequence[int], stops: Sequence[int], *, is_complete: bool = True) -> None:
        """Store `rows` of the known columns, each up to its column `stop`, as far as they are not stored yet.

        `is_complete`: no forward was interrupted.

        A tier that fails costs the storing, never the caller's result.
        """
        if self.columns is None or not self._may_store:
            return
        try:
            is_complete = is_complete and is_whole(self._forwards)
            self._bound.store(self.columns, rows, stops, self.noted, is_complete=is_complete)
        except Exception as error:  # noqa: BLE001
            warn(NOT_KEPT, error)

    def truncate(self, length: int) -> int:
        """Keep the first `length` columns of every layer, where all can be cut, else none; return how many that are.

        What is beyond may be incomplete after an exception.
        """
        known = (GrowableLayer, CapturingSlidingLayer)
        can_cut = all(isinstance(layer, known) and layer.can_truncate(length) for layer in self.layers)
        if can_cut and not is_stateful(self.layers):  # who knows where in a forward a state is
            for layer in self.layers:
                layer.truncate(length)
            return length
        self.layers = self._bound.layers = self._bound.fresh_layers()
        return 0

    # --- as DynamicCache --------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's K/V `[B, H, t, D]`. Mirrors Cache.update."""
        self._note_forward(layer_idx)
        self._forwards["attention", layer_idx] += 1
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Shift columns `[B, D, t]` into one layer's convolution. Mirrors Cache.update_conv_state."""
        self._note_forward(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return one layer's convolution. Mirrors Cache.get_conv_state, which a forward calls once before it updates."""
        begin_forward(self.layers[layer_idx], state_idx)
        self._forwards["state", layer_idx] += state_idx == 0
        return super().get_conv_state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns a layer holds; of recurrent layers alone what they were fed, where stock raises."""
        is_recurrent = layer_idx == 0 and not compat.slices_prompts(self)
        if is_recurrent and self._binding is not None and self._binding.takes_snapshots:
            return max(lengths(self.layers), default=0)
        return super().get_seq_length(layer_idx)

    def _note_forward(self, layer_idx: int) -> None:
        if layer_idx != self._first_layer:
            return
        if not (self.hooks_installed or self._by_hand or self.session):
            raise TieredCacheError(
                "tiered_cache.uninstall() took the hooks off generate(), so this TieredCache cannot tell which prompt it "
                "serves. Make a new TieredCache (that installs them again), or pass a DynamicCache."
            )
        if self.session is not None:
            self.session.before_forward(self._bound.captured_nbytes > CAPTURE_NBYTES)

    @property
    def is_compileable(self) -> bool:
        """False: the buffers grow."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        self.stack.settle()  # what is being stored must not be written
        known, self.columns = self.columns, None  # should it raise, who knows which layers were cut
        self._forwards["cut", 0] = -1
        super().crop(tokens_to_remove)
        del self._forwards["cut", 0]
        self.columns = known
        self._follow(lambda columns: columns.cut(self.get_seq_length()))

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()
        self.columns = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._follow(lambda columns: columns.take(beam_idx.tolist()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._follow(lambda columns: columns.repeat(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._follow(lambda columns: columns.take(torch.arange(columns.rows)[indices.cpu()].tolist()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.check_free()
        self.stack.settle()
        for layer in full_layers(self.layers):
            layer.settle()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def __repr__(self) -> str:
        length = max(lengths(self.layers), default=0)
        held = f"{length:,} tokens in {len(self.layers)} layers" if length else "empty"
        last = f"; last call reused {self.noted.cached_tokens:,} of {self.noted.prompt_tokens:,} prompt tokens"
        return f"{type(self).__name__}({held}{last if self.noted.prompt_tokens else ''})"

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _bound(self) -> Binding:
        assert self._binding is not None
        return self._binding

    def check_free(self) -> None:
        """Raise CacheInUseError while a generate() call is under way."""
        if self.session is not None and self.session.is_alive():
            raise CacheInUseError("This TieredCache is used by a generate() call. Give each call a cache of its own.")

    def _follow(self, change: Callable[[Columns], Columns]) -> None:
        """Let the known tokens follow what was done to the rows. In a generate() call the session sees to that."""
        if self.columns is not None and self.session is None:
            self.columns = change(self.columns)
