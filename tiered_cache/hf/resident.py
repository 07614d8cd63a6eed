"""What a cache held before a call, and whether that or what is stored serves the next prompt better.

Refuses to own which tokens the cache holds afterwards (cache) and how K/V are fetched (binding).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered_cache.hf.binding import Binding
from tiered_cache.hf.columns import Columns
from tiered_cache.hf.explain import Refusal, why_not_more
from tiered_cache.hf.shapes import full_layers, is_stateful, lengths, truncate
from tiered_cache.matching import Match


def is_whole(forwards: Counter[tuple[str, int]]) -> bool:
    """Say whether as many forwards came to each part of each layer: else one was interrupted, and some states are ahead."""
    return len(set(forwards.values())) <= 1


@dataclass(frozen=True, slots=True)
class Resident:
    """Layers, the tokens of their columns as far as they are known, and how many forwards came to each (see TieredCache)."""

    layers: list[Any]
    columns: Columns | None
    binding: Binding | None
    forwards: Counter[tuple[str, int]]

    @property
    def length(self) -> int:
        """Columns in the layers, known or not."""
        return max(lengths(self.layers), default=0)

    @property
    def device_nbytes(self) -> int:
        """Bytes of K/V with full attention that are not in host memory already."""
        layers = [layer for layer in full_layers(self.layers) if layer.home is None and layer.get_seq_length()]
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None)

    def serves(self, prompt: Columns, binding: Binding, limit: int) -> int:
        """Return how many leading columns of `prompt`, up to `limit`, these layers hold for the model that `binding` binds."""
        if self.columns is None or self.binding is None or not self.binding.computed_as(binding):
            return 0
        whole = min(lengths(self.layers), default=0)
        columns = prompt.end(min(self.columns.shared(prompt), whole, limit, self.binding.room(self.columns)))
        if is_stateful(self.layers) and (columns < self.length or not is_whole(self.forwards)):  # a state goes forward only
            return 0
        return columns if all(layer.can_truncate(columns) for layer in self.layers if hasattr(layer, "can_truncate")) else 0


def fill(
    binding: Binding, prompt: Columns, expand: int, resident: Resident, total: int
) -> tuple[int, dict[str, int], Refusal | None, list[int]]:
    """Let the layers of `binding` hold the longest known prefix of `prompt`, `expand` rows of each.

    Args:
        total: how many columns there may be at the end of the call.

    Returns:
        Its columns, tokens by tier, why it is not all but one token, and how many tokens are stored of each row.
    """
    limit = prompt.length - 1  # one token is left to compute: its logits are wanted
    kept = resident.serves(prompt.repeat(expand), binding, limit)
    matches = binding.match(prompt)
    try:
        columns, served = 0, dict[str, int]()
        while columns == 0 and (stored := usable(prompt, matches, limit)) > kept:
            if not any(match.on_disk for match in matches):  # nothing can fail any more
                resident.layers.clear()  # not needed any more: frees their memory before more is taken
            binding.plan(prompt.rows * expand, total, prompt.length - stored, resident.device_nbytes)
            try:
                loaded = binding.load(prompt, expand, matches, stored)
            except (MemoryError, torch.OutOfMemoryError):
                binding.relieve()
                loaded = binding.load(prompt, expand, matches, stored)
            columns, served, matches = loaded.columns, loaded.served, loaded.matches
        if kept > columns:
            columns, served = kept, {"resident": sum(max(0, kept - pad) for pad in prompt.pads)}
            binding.layers = resident.layers
            truncate(resident.layers, kept)
            binding.plan(prompt.rows * expand, total, prompt.length - kept, resident.device_nbytes)
    finally:
        binding.release(matches)
    known = [match.known_tokens for match in matches]
    why = why_not_more(prompt.pads, matches, columns, binding.takes_snapshots) if columns < limit else None
    return columns, served, why, known


def usable(prompt: Columns, matches: Sequence[Match], limit: int) -> int:
    """Return how many columns, up to `limit`, every row can restore: the window before their end is stored too."""
    columns = prompt.end(min([limit, *(pad + match.num_tokens for pad, match in zip(prompt.pads, matches, strict=True))]))
    while columns > min(prompt.pads):  # more than pads
        reach = [
            pad + match.usable(columns - pad) if columns > pad else columns
            for pad, match in zip(prompt.pads, matches, strict=True)
        ]
        if min(reach) == columns:
            return columns
        columns = prompt.end(min(reach))
    return 0
