"""What a cache held before a call, and how much of it serves the next prompt."""

from dataclasses import dataclass
from typing import Any

from tiered_cache.hf.binding import Binding
from tiered_cache.hf.columns import Columns
from tiered_cache.hf.shapes import is_stateful, lengths


@dataclass(frozen=True, slots=True)
class Resident:
    """Layers, and the tokens of their columns as far as they are known."""

    layers: list[Any]
    columns: Columns | None
    binding: Binding | None

    @property
    def length(self) -> int:
        """Columns in the layers, known or not."""
        return max(lengths(self.layers), default=0)

    def serves(self, prompt: Columns, binding: Binding, limit: int) -> int:
        """Return how many leading columns of `prompt`, up to `limit`, these layers hold for the model that `binding` binds."""
        if self.columns is None or self.binding is None or not self.binding.computed_as(binding):
            return 0
        whole = min(lengths(self.layers), default=0)
        columns = prompt.end(min(self.columns.shared(prompt), whole, limit, self.binding.room(self.columns)))
        if is_stateful(self.layers) and columns < self.length:  # a state goes forward only
            return 0
        return columns if all(layer.can_truncate(columns) for layer in self.layers if hasattr(layer, "can_truncate")) else 0
