"""A live model and its place in a stack, for the length of one call.

Owns what may be reused and stored with this model as it is, and the way of K/V between its layers and the stack.
Refuses to own what the cache held before and which tokens its columns hold (cache).
"""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tiered_cache.arrival import Arrival, hides
from tiered_cache.blocks import SequenceLayout, SnapshotLayout
from tiered_cache.devices import device_for
from tiered_cache.hf import compat, identity, selfcheck
from tiered_cache.hf.checks import refuse_model
from tiered_cache.hf.columns import Columns
from tiered_cache.hf.explain import NOT_KEPT, Refusal, warn
from tiered_cache.hf.offload import Offload
from tiered_cache.hf.offloaded import device_of, layer_devices
from tiered_cache.hf.shapes import (
    allocate,
    expected_layouts,
    full_layers,
    is_stateful,
    layout_of,
    lengths,
    put_states,
    side_layers,
    states,
    strips_of,
    truncate,
)
from tiered_cache.interrupts import uninterrupted
from tiered_cache.keys import MAIN, SIDE
from tiered_cache.matching import Match
from tiered_cache.port import SequencePort
from tiered_cache.stack import TierStack
from tiered_cache.tiers.base import Transfer
from tiered_cache.tiers.disk import Stay
from tiered_cache.usage import MissReason, Usage, first_tokens


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: `columns` of every row, tokens by tier, and the matches without what could not be had."""

    columns: int
    served: dict[str, int]
    matches: list[Match]


class Binding:
    """A model as it was when a call began.

    Attributes:
        layers: fresh cache layers for it.
        identity: its fingerprint, or None where nothing may be reused.
        refusal: why nothing may be reused, or None.
        snapshots: what the layers kept in place of tokens, by column, to be stored: `[B, ...]` of each.
    """

    def __init__(
        self, model: PreTrainedModel, stack: TierStack, salt: bytes, stay: Stay, offload: Offload, by_hand: bool = False
    ) -> None:
        self._model = weakref.ref(model)
        self._offload = offload
        self._stack = stack
        self._salt = salt
        self._stay = stay
        self._reused = 0  # columns that came from the stack
        self._from = 0  # the column of the snapshot among them
        self.layers = self.fresh_layers()
        self.snapshots: dict[int, tuple[torch.Tensor, ...]] = {}
        self._arriving: list[Transfer] = []  # copies to the layers
        self._read: list[Match] = []  # ... and what they read, held
        self._by_hand = by_hand  # fed by a loop of the user's
        self._verdict: selfcheck.Verdict | None = None
        self.identity: bytes | None = None
        self._fingerprint: identity.Fingerprint | None = None
        self._autocast = torch.is_autocast_enabled(device_of(model).type)
        self._switch, self._one_long_regime = sys.maxsize, False
        self._long = False  # this call is longer than the switch
        self.refusal = refuse_model(model, self.layers)
        if self.refusal is None:
            why = None
            try:
                switch, self._one_long_regime = compat.rope_switch(model.config)
                self._switch = sys.maxsize if switch is None else switch
                self._fingerprint = identity.identify(model)
            except Exception as error:  # noqa: BLE001  whatever a model is made of, generate() goes on without reuse
                why = f"the model's weights could not be read ({error!r})"
            if self._fingerprint is None:
                self.refusal = Refusal(MissReason.IDENTITY, why or identity.why_not(model))
            else:
                self.identity = self._fingerprint.digest

    def _try_out(self, padded: bool) -> Refusal | None:
        """Refuse a model that does not go on from a prefix as it should, where that is not what it does at every step."""
        if self.identity is None or not is_stateful(self.layers):
            return None
        for pads in (False, True) if padded else (False,):
            self._verdict = selfcheck.verdict(self.model, self.identity, padded=pads, by_hand=self._by_hand)
            if self._verdict.why is not None:
                self.refusal = Refusal(MissReason.UNSUPPORTED_LAYERS, self._verdict.why)
                return self.refusal
        return None

    @property
    def takes_snapshots(self) -> bool:
        """Say whether a hit can end only where a snapshot was taken."""
        return self.refusal is None and is_stateful(self.layers)

    def take_snapshot(self, column: int) -> None:
        """Keep what the layers hold in place of their first `column` columns, to be stored."""
        self.snapshots[column] = tuple(tensor.clone() for _, _, tensor in states(self.layers))

    def refuse_prompt(self, prompt: Columns, at_once: bool) -> Refusal | None:
        """Refuse what the model does not go on from rightly, and rotary frequencies that are not known.

        Notes whether those are the ones of long requests, where they depend on the length.

        Args:
            at_once: the whole prompt is fed in one forward; in chunks, the first ones would be short requests.
        """
        self._long = False
        self._long = prompt.length > self.room(prompt)
        if self._long and not (self._one_long_regime and at_once):
            why = "the prompt is longer than the length at which its rotary embedding changes"
            return Refusal(MissReason.UNSUPPORTED_LAYERS, why)
        if any(prompt.pads) and not at_once and is_stateful(self.layers):
            # The step of one token of some models takes a pad for a token.
            why = "left pads in a prompt that may be fed token by token, to recurrent layers"
            self.refusal = Refusal(MissReason.UNSUPPORTED_LAYERS, why)
            return self.refusal
        return self._try_out(any(prompt.pads))

    def can_split(self, prompt: Columns, column: int) -> bool:
        """Say whether a forward up to `column` has the rotary frequencies of the whole prompt."""
        return not self._long or column > self._switch + min(prompt.pads)

    def room(self, columns: Columns) -> int:
        """Return up to which column K/V are of one regime: a short request that grew beyond the switch mixes two from there."""
        return sys.maxsize if self._long or self._switch == sys.maxsize else self._switch + min(columns.pads)

    def computed_as(self, other: "Binding") -> bool:
        """Say whether K/V computed under this binding are those that `other` would compute."""
        return self.identity is not None and self.identity == other.identity and self._long == other._long

    def match(self, prompt: Columns) -> list[Match]:
        """Find and hold what is stored of each row. The caller must `release` all of it."""
        assert self.identity is not None
        assert self._fingerprint is not None
        shapes: list[tuple[SequenceLayout, int]] = []
        if self._stack.disk is not None and self._fingerprint.is_portable:
            tried = self._verdict.layout if self._verdict is not None else None
            layouts = expected_layouts(self.model, self.layers) if tried is None else [tried]
            shapes = [(layout, layout.window) for layout in layouts]
        matches: list[Match] = []
        try:
            for row in range(prompt.rows):
                salt = self._salt_of(prompt, row)
                matches.append(self._stack.match(self.identity, salt, prompt.row(row), shapes))
        except BaseException:
            self.release(matches)
            raise
        return matches

    def release(self, matches: Sequence[Match]) -> None:
        """End the holds of `match`; where copies of what they hold are under way, with `settle`."""
        self._read += matches
        if not self._arriving:
            self.settle()

    def settle(self) -> None:
        """Wait until what was loaded has arrived, and let go of what it was read from.

        Raises:
            Exception: some of it did not.
        """
        with uninterrupted():
            try:
                while self._arriving:
                    self._arriving.pop().wait()
            finally:
                self._arriving.clear()
                while self._read:
                    self._stack.release(self._read.pop())

    def load(self, prompt: Columns, expand: int, matches: Sequence[Match], columns: int) -> Loaded:
        """Copy the first `columns` columns of every row, `expand` times, to fresh layers.

        Where a disk lets it down, the layers hold fewer; where they would not be complete, none: try again with what is left.
        """
        layouts = {match.layout for match in matches if match.num_tokens}
        layout = layouts.pop()
        if layouts or not isinstance(layout, SequenceLayout):
            raise RuntimeError(f"rows of one batch are stored in several layouts: {layout}, {layouts}")
        window = layout.window
        device = layout.main.device
        layers = self.fresh_layers()
        batch = prompt.rows * expand
        # Side pieces come whole, from their beginning: the block that a later commit makes of the last one needs that.
        step = self._stack.block_tokens
        first = [pad + max(columns - pad - window, 0) // step * step for pad in prompt.pads]
        origin = min([max(columns - window, 0), *first])
        devices = layer_devices(self.model, len(layers))
        assert devices is not None
        kept = allocate(layers, layout, batch, columns, origin, devices)
        for slid in side_layers(layers):
            slid.valid_from = tuple(column for column in first for _ in range(expand))
        strips = strips_of(layers)
        reached, is_complete = columns, True
        served_by_row: list[dict[str, int]] = []
        left = list(matches)
        for row, (pad, match) in enumerate(zip(prompt.pads, matches, strict=True)):
            rows = slice(row * expand, (row + 1) * expand)
            # Pads are masked, and so is what lies before the window; but what is masked must still be a number.
            for kind, start in ((MAIN, pad), (SIDE, first[row])):
                for tensor in strips[kind].tensors if start > strips[kind].origin else ():
                    tensor[rows, :, : start - strips[kind].origin] = 0
            served_by_row.append({})
            if reached > pad:
                # What an earlier row has is read once, and copied.
                source, have = prompt.like(row, reached, same_pads=self._by_hand)
                like = slice(source * expand, source * expand + 1)
                if have == reached - pad and prompt.pads[source] == pad:
                    for tensor in (*strips[MAIN].tensors, *strips[SIDE].tensors, *kept):
                        tensor[rows] = tensor[like]
                    served_by_row[row] = served_by_row[source]
                    continue
                for tensor in strips[MAIN].tensors if have else ():
                    tensor[rows, :, pad : pad + have] = tensor[like, :, prompt.pads[source] : prompt.pads[source] + have]
                snapshots = {columns - pad: kept} if kept else {}
                late = None
                is_one = len(set(devices)) == 1 and prompt.rows == 1
                flops = compat.token_flops(self.model.config) * (prompt.length - columns)
                is_simple = is_one and device_for(device).is_apart and not match.on_disk and not self._by_hand
                if is_simple and hides(layout.main, self._stack.block_tokens, columns, flops):
                    late = Arrival(device_for(device), rows, pad, strips[MAIN].tensors)
                port = SequencePort(layout, strips, rows, pad, device_for(device), snapshots=snapshots, late=late)
                fetched = self._stack.fetch(match, reached - pad, port, have)
                left[row], served_by_row[row] = fetched.match, fetched.served
                self._arriving += fetched.arriving
                if late is not None:
                    try:
                        late.begin()
                    except (MemoryError, torch.OutOfMemoryError):
                        late.cancel()
                        raise
                    for place, layer in enumerate(full_layers(layers)):
                        layer.arriving = functools.partial(late.bring, place)
                is_complete &= fetched.is_complete
                reached = min(reached, pad + fetched.num_tokens)
                if window and not is_complete:  # what other rows take before a shorter end is not what was made room for
                    return Loaded(0, {}, left)
        reached = prompt.end(reached)
        if not is_complete and reached <= min(prompt.pads):
            return Loaded(0, {}, left)
        if isinstance(layout.side, SnapshotLayout):
            put_states(layers, [(place, name) for place, name, _, _ in layout.side.pieces], kept, columns)
            if any("disk" in by_tier for by_tier in served_by_row):  # to be kept in memory from now on
                self.snapshots[columns] = kept
        for slid in side_layers(layers):
            slid.settle()
        if reached < columns:
            truncate(layers, reached)
        self.layers, self._reused, self._from = layers, reached, columns
        served: dict[str, int] = {}
        for pad, by_tier in zip(prompt.pads, served_by_row, strict=True):
            for tier, tokens in first_tokens(by_tier, reached - pad).items():
                served[tier] = served.get(tier, 0) + tokens
        return Loaded(reached, served, left)

    def relieve(self) -> None:
        """Make room on the device for a load that found none."""
        self.settle()
        self._stack.relieve(sys.maxsize)

    def store(self, columns: Columns, rows: Sequence[int], stops: Sequence[int], usage: Usage, *, is_complete: bool) -> None:
        """Store `rows` of the layers' K/V, each up to its column `stop`; `usage` is told how many tokens are new.

        On an accelerator behind the caller's back: until the stack is settled, what is stored must not be written.
        `is_complete`: no forward was interrupted, so that states are those after the last column.
        """
        self._stack.settle()
        # Weights or adapters may have changed during the call: then nobody knows which tokens saw which.
        if self.identity is None or self._fingerprint is None or not identity.is_unchanged(self.model, self._fingerprint):
            return
        strips, side = strips_of(self.layers), side_layers(self.layers)
        dtypes = {tensor.dtype for strip in strips.values() for tensor in strip.tensors}
        if not self._autocast and dtypes - {self.model.dtype}:  # not as the fingerprint says: autocast in the loop only
            return
        layout = layout_of(self.layers)
        device = device_for(layout.main.device)
        snapshots = dict(self.snapshots)
        if is_complete and is_stateful(self.layers) and lengths(self.layers) == {columns.length}:
            snapshots[columns.length] = tuple(
                tensor.clone() if device.is_apart else tensor for _, _, tensor in states(self.layers)
            )
        goes_to_disk = self._stack.disk is not None and self._fingerprint.is_portable
        about = identity.describe(self.model) if goes_to_disk else None
        commits = []
        for row, stop in zip(rows, stops, strict=True):
            tokens = columns.row(row, min(stop, self.room(columns)))
            if len(tokens):
                port = SequencePort(
                    layout,
                    strips,
                    slice(row, row + 1),
                    columns.pads[row],
                    device,
                    side_from=max([strips[SIDE].origin, *(slid.valid_from[row] for slid in side if slid.valid_from)]),
                    snapshots={
                        column - columns.pads[row]: kept
                        for column, kept in snapshots.items()
                        if columns.pads[row] < column <= columns.pads[row] + len(tokens)
                    },
                    restored_end=self._from - columns.pads[row] if is_stateful(self.layers) else 0,
                )
                commit = functools.partial(
                    self._stack.commit,
                    self.identity,
                    self._salt_of(columns, row),
                    tokens,
                    port,
                    reused=max(0, self._reused - columns.pads[row]),
                    stay=self._stay,
                    about=about,
                )
                commits.append(commit)
        if device.is_apart:
            self._stack.behind(functools.partial(_store_all, commits, usage))
        else:
            for commit in commits:
                usage.created_tokens += commit()
        for slid in side:  # stored, or never to be: the last window is what a later call may need
            slid.drop_captured(columns.length - layout.window - self._stack.block_tokens)

    def _salt_of(self, columns: Columns, row: int) -> bytes:
        """Return the salt of a row, with all that K/V depend on beyond tokens and identity.

        generate() counts positions from a row's first token; a user's loop may count pads too.
        """
        pads = columns.pads[row] if self._by_hand else 0
        return b"".join([b"long rope|" * self._long, b"after %d pads|" % pads if pads else b"", self._salt])

    def fresh_layers(self) -> list[Any]:
        """Return empty layers for the model, each where the last plan says."""
        layers = compat.cache_layers(self.model.config, self._stack.tiers[-1].capacity_bytes)
        self.place(layers)
        return layers

    def plan(self, rows: int, columns: int, computed: int, held: int) -> None:
        """Decide which layers are to live in host memory (see `Offload.plan`), and put the fresh ones there."""
        known = self._verdict.layout if self._verdict is not None else None
        self._offload.plan(self.model, rows, columns, computed, held, known)
        self.place(self.layers)

    def place(self, layers: Sequence[Any]) -> None:
        """Let layers live where the last plan says."""
        self._offload.place(self.model, layers)

    @property
    def captured_nbytes(self) -> int:
        """Bytes of K/V that left the windows of sliding layers and wait to be stored."""
        side = side_layers(self.layers)
        return len(side) * side[0].captured_nbytes if side else 0

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "the call that bound it keeps it alive"
        return model


def _store_all(commits: Sequence[Callable[[], int]], usage: Usage) -> None:
    """Run commits on a thread of the stack's."""
    try:
        with torch.no_grad():
            for commit in commits:
                usage.created_tokens += commit()
    except Exception as error:  # noqa: BLE001
        warn(NOT_KEPT, error)
