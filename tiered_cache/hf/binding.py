"""A live model and its place in a stack, for the length of one call.

Owns what may be reused and stored with this model as it is, and the way of K/V between its layers and the stack.
Refuses to own what the cache held before and which tokens its columns hold (cache).
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from tiered_cache.blocks import BlockLayout, SequencePort
from tiered_cache.devices import device_for
from tiered_cache.hf import compat, identity
from tiered_cache.hf.columns import Columns
from tiered_cache.hf.explain import Refusal
from tiered_cache.hf.layers import GrowableLayer
from tiered_cache.stack import Match, TierStack
from tiered_cache.usage import MissReason


class Binding:
    """A model as it was when a call began.

    Attributes:
        layers: fresh cache layers for it.
        identity: its fingerprint, or None where nothing may be reused.
        refusal: why nothing may be reused, or None.
    """

    def __init__(self, model: PreTrainedModel, stack: TierStack, salt: bytes) -> None:
        self._model = weakref.ref(model)
        self._stack = stack
        self._salt = salt
        self.layers = self.fresh_layers()
        self.identity: bytes | None = None
        self.refusal = self._refuse(model)
        if self.refusal is None:
            why = "the model's weights cannot be read here (offloaded, or of a quantised kind)"
            try:
                self.identity = identity.identify(model)
            except Exception as error:  # noqa: BLE001  whatever a model is made of, generate() goes on without reuse
                why = f"the model's weights could not be read ({error!r})"
            if self.identity is None:
                self.refusal = Refusal(MissReason.IDENTITY, why)
        switch = compat.rope_switch(model.config)
        self._switch = sys.maxsize if switch is None else switch

    def room(self, columns: Columns) -> int:
        """Return up to which column K/V are those of a short request, where rotary frequencies depend on the length."""
        return self._switch + min(columns.pads) if self._switch < sys.maxsize else self._switch

    def match(self, prompt: Columns) -> list[Match]:
        """Find and hold what is stored of each row. The caller must `release` all of it."""
        assert self.identity is not None
        matches: list[Match] = []
        try:
            for row in range(prompt.rows):
                matches.append(self._stack.match(self.identity, self._salt, prompt.row(row)))
        except BaseException:
            self.release(matches)
            raise
        return matches

    def release(self, matches: Sequence[Match]) -> None:
        """End the holds of `match`."""
        for match in matches:
            self._stack.release(match)

    def load(self, prompt: Columns, expand: int, matches: Sequence[Match], columns: int) -> dict[str, int]:
        """Copy the first `columns` columns of every row, `expand` times, to fresh layers; return tokens by tier."""
        root = matches[0].root
        assert root is not None and isinstance(root.layout, BlockLayout)
        layout = root.layout
        layers = self.fresh_layers()
        for layer, keys, values in zip(layers, layout.pieces[::2], layout.pieces[1::2], strict=True):
            layer.allocate(prompt.rows * expand, columns, keys, values, layout.device)
        tensors = [(layer.keys, layer.values) for layer in layers]
        served: dict[str, int] = {}
        for row, (pad, match) in enumerate(zip(prompt.pads, matches, strict=True)):
            rows = slice(row * expand, (row + 1) * expand)
            for tensor in (tensor for pair in tensors if pad for tensor in pair):
                tensor[rows, :, :pad] = 0  # masked, but what is masked must still be a number
            if columns > pad:
                port = SequencePort(layout, tensors, rows, pad, device_for(layout.device))
                for tier, tokens in self._stack.fetch(match, columns - pad, port).items():
                    served[tier] = served.get(tier, 0) + tokens
        self.layers = layers
        return served

    def store(self, columns: Columns, rows: Sequence[int], stops: Sequence[int]) -> int:
        """Store `rows` of the layers' K/V, each up to its column `stop`; return how many tokens are new."""
        tensors = [(layer.keys, layer.values) for layer in self.layers]
        layout = BlockLayout.of(tensors)
        # Weights or adapters may have changed during the call: then nobody knows which tokens saw which.
        if layout is None or self.identity is None or identity.identify(self.model) != self.identity:
            return 0
        created = 0
        for row, stop in zip(rows, stops, strict=True):
            tokens = columns.row(row, min(stop, self.room(columns)))
            if len(tokens):
                port = SequencePort(layout, tensors, slice(row, row + 1), columns.pads[row], device_for(layout.device))
                created += self._stack.commit(self.identity, self._salt, tokens, port)
        return created

    def fresh_layers(self) -> list[Any]:
        """Return empty layers for the model."""
        return compat.cache_layers(self.model.config)

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "the call that bound it keeps it alive"
        return model

    def _refuse(self, model: PreTrainedModel) -> Refusal | None:
        kinds = sorted({type(layer).__name__ for layer in self.layers if not isinstance(layer, GrowableLayer)})
        if identity.is_training(model):
            return Refusal(MissReason.DISABLED_CALL, "the model is in training mode (call model.eval())")
        if kinds or not self.layers:
            why = f"the model has layers without prefix reuse so far ({', '.join(kinds)})"
            return Refusal(MissReason.UNSUPPORTED_LAYERS, why)
        if compat.has_virtual_tokens(model):
            return Refusal(MissReason.UNKNOWN_CONTENT, "PEFT puts learned virtual tokens in front of the prompt")
        if compat.is_bidirectional(model.config):
            why = "the model's attention looks at later tokens, so a prefix has no K/V of its own"
            return Refusal(MissReason.UNSUPPORTED_LAYERS, why)
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            return Refusal(MissReason.UNSUPPORTED_LAYERS, "the model is spread over several devices")
        return None
