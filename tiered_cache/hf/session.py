"""One generate() call on one TieredCache: what it may reuse, when it restores, and what it commits at its end.

Owns the checks that keep stock generate() from answering from a wrong prefix. Refuses to own the hooks themselves
(generation) and how K/V are fetched or stored (cache).
"""

import enum
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from tiered_cache.errors import CacheInUseError, ConfigError
from tiered_cache.hf import compat
from tiered_cache.hf.cache import TieredCache
from tiered_cache.hf.checks import check_length, covered_columns, refuse_call, refuse_class
from tiered_cache.hf.columns import Columns, Padding, count_tokens
from tiered_cache.hf.content import Content, plain_arguments, positions_follow, refuse_encoded, refuse_state
from tiered_cache.hf.explain import NOT_KEPT, Refusal, warn
from tiered_cache.hf.prefill import feed
from tiered_cache.hf.resident import Resident
from tiered_cache.hf.shapes import lengths, side_layers
from tiered_cache.usage import MissReason, Usage

_opening = threading.Lock()


class Stage(enum.Enum):
    """How far a call got."""

    OPENED = enum.auto()
    RESTORED = enum.auto()  # the cache holds the reused prefix
    PREFILLED = enum.auto()  # ... and the whole prompt


class Session:
    """A generate() call that uses `cache`. From `open` to `close` the cache belongs to it and to its thread.

    Args:
        model: the model that generates.
        cache: its cache.
        automatic: the cache was put in by enable(): then the session steps aside where it would have to complain.
        refusal: why this call may not reuse anything, if that is known before it starts.
        assistant: the call's assistant model, if any.
        own_positions: the call passes no position_ids, so that those seen are generate()'s own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        *,
        automatic: bool = False,
        refusal: Refusal | None = None,
        assistant: PreTrainedModel | None = None,
        own_positions: bool = False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._automatic = automatic
        self._refusal = refusal
        self._assistant = assistant
        self._own_positions = own_positions
        self._content: Content | None = None  # until it is fed
        self._covered = 0  # columns that were restored
        self._thread = threading.get_ident()
        self._frame: FrameType | None = None
        self._stage = Stage.OPENED
        self._in_prefill = False
        self._only_new_tokens = False  # the mask says that the cache is to hold what comes before
        self._plain = False  # the tokens returned are those that were fed
        self._prompt: Columns | None = None  # the rows as passed, suffix-only calls completed
        self._passed = np.empty((0, 0), np.int64)  # the ids generate() works on, rows expanded
        self._expand = 1
        self._beams = False
        self._padding = Padding(None)

    def open(self, prompt_tokens: int, only_new_tokens: bool) -> None:
        """Take the cache, for as long as the caller runs. Raises CacheInUseError or UnsupportedModelError.

        Args:
            prompt_tokens: tokens passed, as far as it is known.
            only_new_tokens: the mask has more columns than that.
        """
        self._only_new_tokens = only_new_tokens
        cache = self._cache
        with _opening:
            if cache.session is not None and cache.session.is_alive():
                raise CacheInUseError(
                    "This TieredCache is used by another generate() call right now. Give each call a TieredCache of its own; "
                    "they may share one stack."
                )
            if cache.session is not None:  # left over by a call that Ctrl-C kept from closing: who knows how far it got
                cache.columns = None
            self._frame = sys._getframe(1)
            cache.session = self
        try:
            compat.check_decoder(self._model)
            self._resident = cache.take_out()
            self._refusal = self._refusal or refuse_class(self._model) or refuse_state(self._model)
            self._bound_refusal = cache.bind(self._model)
        except BaseException:
            if hasattr(self, "_resident"):
                cache.put_back(self._resident)
            cache.session = self._frame = None
            raise
        # Stands unless _prefill is reached.
        why = Refusal(MissReason.DISABLED_CALL, "this way of decoding does not continue from a cache")
        refusals = [refusal for refusal in (self._refusal, self._bound_refusal, why) if refusal is not None]
        cache.note(Usage(prompt_tokens, miss_reason=why.reason), Refusal.first(refusals))

    def close(self) -> None:
        """Give the cache back to its user."""
        self._cache.session = self._frame = None
        self._cache.end_call()

    def encloses_this(self) -> bool:
        """Say whether this code runs inside the call that opened this session."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def is_alive(self) -> bool:
        """Say whether the call is under way: on another thread, or further up on this one."""
        return self._thread != threading.get_ident() or self.encloses_this()

    def encode(
        self, original: Callable[..., Any], inputs: torch.Tensor, model_kwargs: dict[str, Any], input_name: str, config: Any
    ) -> Any:
        """Run the step of generate() that encodes images, but without those that `_feed` may find held already."""
        call = functools.partial(original, self._model, inputs, model_input_name=input_name, generation_config=config)
        before = model_kwargs.copy()
        if config.get_generation_mode(self._assistant) in compat.REUSING_MODES and input_name == "input_ids":
            self._content = Content.defer(self._model, model_kwargs, len(inputs), call)
        after = call(model_kwargs)
        if self._content is None:
            self._refusal = self._refusal or refuse_encoded(before, after)
        return after

    # --- prefill ----------------------------------------------------------------------------------------------------

    def prefill(
        self,
        original: Callable[..., Any],
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run generate()'s `_prefill` on a cache that holds the prompt's longest known prefix. generate() slices by itself."""
        call = functools.partial(self._feed, original)
        if self._in_prefill:  # a second hook around this one
            return call(input_ids, generation_config, model_kwargs, *args, **kwargs)
        self._in_prefill = True
        try:
            return self._prefill(call, input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            self._in_prefill = False

    def _prefill(
        self,
        call: Callable[..., Any],
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        cache = self._cache
        if self._stage is not Stage.OPENED:  # a decoding method that generates more than once: from scratch each time
            self._plain, self._prompt, cache.columns = False, None, None
            if covered_columns(input_ids, generation_config, model_kwargs) == input_ids.shape[1]:
                cache.layers = cache.fresh_layers()
            return call(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache is False or model_kwargs.get("use_cache") is False:
            if not self._automatic:
                raise ConfigError(
                    "use_cache=False, from the call or from the model's generation_config, together with a TieredCache: "
                    "generate() would compute everything at every step and append to the cache as well. Pass use_cache=True, "
                    "or leave the cache out."
                )
            model_kwargs.pop(compat.CACHE_ARGUMENT, None)
            return call(input_ids, generation_config, model_kwargs, *args, **kwargs)

        self._expand = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        self._padding = Padding.of(generation_config)
        passed_tokens = cache.noted.prompt_tokens
        try:
            whole_ids, prompt_tokens, refusal = self._read_prompt(input_ids, generation_config, model_kwargs)
        except Exception:
            if not self._automatic:
                raise
            self._prompt = None
            refusal = Refusal(MissReason.UNKNOWN_CONTENT, "the prompt is not of a form that can be reused")
            whole_ids, prompt_tokens = input_ids, passed_tokens
        at_once = generation_config.prefill_chunk_size is None
        self._covered = cache.reuse(
            self._prompt, prompt_tokens, self._expand, self._resident, refusal, at_once=at_once,
            total=generation_config.max_length or 0,
        )  # fmt: skip
        self._resident = Resident([], None, None, Counter())  # frees what was not reused
        self._stage = Stage.RESTORED
        points = cache.split_points if at_once or compat.CHUNKED_PREFILL_CONTINUES else ()
        held = None if compat.slices_prompts(cache) else self._covered
        outputs = feed(
            lambda ids, arguments: call(ids, generation_config, arguments, *args, **kwargs),
            whole_ids, model_kwargs, points, held, cache.take_snapshot,
        )  # fmt: skip
        has_arrived = cache.settle()
        if self._prompt is not None and not (has_arrived and _uniform_length(cache) == self._prompt.length):
            self._prompt = None  # another cache took over, or something was put in front of the prompt
        self._stage = Stage.PREFILLED
        for slid in side_layers(cache.layers) if self._beams else ():
            slid.stop_capturing()
        return outputs

    def _feed(
        self,
        original: Callable[..., Any],
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the prefill with that content which the restored columns do not hold."""
        content, self._content = self._content, None
        if content is not None:
            content.feed(model_kwargs, input_ids, self._covered)
        return original(self._model, input_ids, generation_config, model_kwargs, *args, **kwargs)

    def before_forward(self, much_captured: bool) -> None:
        """Called when a forward begins. `much_captured`: sliding layers hold much that left their window."""
        if self._stage is Stage.OPENED and self._only_new_tokens:
            raise self._needs_all_tokens()
        if much_captured:
            self.store_captured()

    def store_captured(self) -> None:
        """Store what is complete of the prompt, before a forward begins: sliding layers hold much that left their window."""
        cache, length = self._cache, _uniform_length(self._cache)
        if self._stage is Stage.OPENED or self._prompt is None or not length:
            return
        known = cache.columns
        self._keep_prompt(self._prompt.cut(length))
        cache.columns = known

    def _read_prompt(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, int, Refusal | None]:
        """Find out what the columns will hold: (ids of all columns, tokens in the rows as passed, why not to reuse).

        Raises:
            ConfigError: only the new tokens were passed, and what comes before them is not known.
        """
        mode = generation_config.get_generation_mode(self._assistant)
        self._beams = mode in compat.BEAM_MODES
        self._passed = input_ids.cpu().numpy()
        self._plain = mode in compat.REUSING_MODES and self._refusal is None
        refusals = [refusal for refusal in (self._refusal, self._bound_refusal) if refusal is not None]
        new_only = model_kwargs.get("inputs_embeds") is None and (
            covered_columns(input_ids, generation_config, model_kwargs) != input_ids.shape[1]
        )
        if self._content is None and not refusals:
            self._content = Content.take(self._model, model_kwargs, len(input_ids) // self._expand)
        plain = frozenset() if new_only else plain_arguments(self._model, model_kwargs, self._content)
        refusals += refuse_call(input_ids, generation_config, model_kwargs, mode, plain)
        limits = {
            "with only the new tokens": new_only,
            "with prefill_chunk_size": generation_config.prefill_chunk_size is not None,
            "to a model with recurrent layers": self._cache.takes_snapshots,
        }
        for why in (why for why, holds in limits.items() if holds and self._content is not None):
            assert self._content is not None
            refusals.append(Refusal(MissReason.UNKNOWN_CONTENT, f"the call passes {self._content.names} {why}"))
        if new_only and self._automatic:
            refusals.append(Refusal(MissReason.UNKNOWN_CONTENT, "attention_mask and input_ids differ in length"))
        unknown = any(refusal.reason is MissReason.UNKNOWN_CONTENT for refusal in refusals)
        if unknown:
            if new_only and not self._automatic:
                raise self._needs_all_tokens()
            return input_ids, self._cache.noted.prompt_tokens, Refusal.first(refusals)
        if new_only:
            input_ids = self._completed(input_ids, generation_config, model_kwargs)
        if compat.mask_columns(generation_config, model_kwargs) != input_ids.shape[1]:
            why = "generate() made no attention mask, and does not continue from a cache without one"
            refusals.append(Refusal(MissReason.DISABLED_CALL, why, stores=True))
        mask = model_kwargs.get("attention_mask")
        rows = slice(None, None, self._expand)
        row_mask = None if mask is None else mask[rows]
        self._prompt = Columns.of(input_ids[rows], row_mask)
        if self._prompt is not None and self._content is not None:
            keyed = self._content.key(self._prompt.repeat(self._expand), model_kwargs)
            self._prompt = keyed if isinstance(keyed, Columns) else None
            refusals += [keyed] if isinstance(keyed, Refusal) else []
        positions = model_kwargs.get("position_ids")
        if self._prompt is not None and not positions_follow(self._model, self._prompt, positions, are_own=self._own_positions):
            self._prompt = None
            refusals.append(Refusal(MissReason.UNKNOWN_CONTENT, "positions are not those of the tokens' places in their rows"))
        if not self._automatic:
            check_length(self._model, self._prompt)
        return input_ids, count_tokens(input_ids[rows], row_mask), Refusal.first(refusals)

    def _completed(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the ids of all columns, where only the new tokens were passed: those the cache held come first."""
        passed = input_ids.shape[1]
        held = self._resident.columns
        earlier = covered_columns(input_ids, generation_config, model_kwargs) - passed
        fits = held is not None and held.length == self._resident.length == earlier
        if held is None or not fits or held.solid or held.rows * self._expand != len(input_ids):
            raise self._needs_all_tokens()
        held = held.repeat(self._expand)
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.ndim == 2 and positions.shape[1] == passed:
            pads = torch.tensor(held.pads, device=positions.device)[: len(positions), None]
            whole = (torch.arange(earlier + passed, device=positions.device)[None] - pads).clamp(min=0)
            if not torch.equal(whole[:, -passed:], positions):
                raise self._needs_all_tokens()
            model_kwargs["position_ids"] = whole.to(positions.dtype)
        return torch.cat([torch.from_numpy(held.ids).to(input_ids), input_ids], dim=1)

    def _needs_all_tokens(self) -> ConfigError:
        held = self._resident.columns
        known = held is not None and held.length == self._resident.length
        return ConfigError(
            "attention_mask has another length than input_ids, so the cache would have to hold the tokens that are not passed; "
            f"it holds {f'{held.length} in {held.rows} rows' if held is not None and known else 'none that it knows'}, and a "
            "call of this kind may not be able to continue from them. Pass the whole conversation as input_ids with a mask of "
            "the same length (what is known of it is not computed again), or only the new tokens with a mask that covers the "
            "known ones too."
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, result: Any) -> None:
        """Note which tokens the cache now holds, and store them. Called when generate() returned `result`."""
        cache = self._cache
        try:
            cache.columns = None
            if self._stage is not Stage.PREFILLED or self._prompt is None or not self._plain:
                return
            if self._beams:  # beams change rows as they go; their prompts stay the same
                self._keep_prompt(self._prompt)
                return
            prompt = self._prompt.repeat(self._expand)
            sequences = getattr(result, "sequences", result)
            ids = sequences.cpu().numpy()
            length, passed = _uniform_length(cache), self._passed.shape[1]
            if not np.array_equal(ids[:, :passed], self._passed) or length is None:
                return
            columns = prompt.extend(ids[:, passed:])
            if not prompt.length <= length <= columns.length:  # another cache took over, or something was put in front
                return
            cache.columns = columns.cut(length)
            cache.store(range(columns.rows), [min(self._padding.end_of(row, prompt.length), length) for row in columns.ids])
        except Exception as error:  # noqa: BLE001
            warn(NOT_KEPT, error)

    def fail(self) -> None:
        """Make the cache usable again after generate() raised: keep and store only what is surely complete."""
        cache = self._cache
        known, cache.columns = cache.columns, None  # until all layers are known to hold it, should this be interrupted too
        if not cache.settle():  # some of what was restored is not there
            cache.truncate(0)
        elif self._stage is Stage.PREFILLED and self._prompt is not None:
            self._keep_prompt(self._prompt)
            cache.columns = cache.columns if cache.truncate(self._prompt.length) else None
        elif self._stage is Stage.OPENED and _uniform_length(cache) == 0:  # nothing happened yet
            cache.put_back(self._resident)
        else:
            kept = cache.truncate(known.length if known is not None else 0)
            cache.columns = known if kept else None

    def _keep_prompt(self, prompt: Columns) -> None:
        """Note and store the prompt's columns only, one row of each group of copies."""
        if min(lengths(self._cache.layers), default=0) < prompt.length:
            self._cache.columns = None
            return
        self._cache.columns = prompt.repeat(self._expand)
        rows = range(0, prompt.rows * self._expand, self._expand)
        self._cache.store(rows, [prompt.length] * len(rows), is_complete=False)


def _uniform_length(cache: TieredCache) -> int | None:
    """Return how many columns all layers hold, or None where they differ (a forward was interrupted)."""
    held = lengths(cache.layers)
    return held.pop() if len(held) == 1 else None
