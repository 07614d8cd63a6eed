"""Where a prefill is split, so that what layers keep in place of tokens can be kept at that point.

Owns the points, and the arguments of each part. Refuses to own what a prefill is (session) and snapshots (binding).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiered_cache.hf.columns import Columns

BRANCH_TOKENS = 32  # that a snapshot must save, where prompts were seen to part
MAX_BRANCHES = 2  # points of a prefill besides the last, each of which costs a forward


def split_points(prompt: Columns, reused: int, known: Sequence[int]) -> list[int]:
    """Return the columns of `prompt` at which snapshots are to be taken, in order, all beyond the `reused` ones.

    The last is where one token is left: there the same prompt, and the next turn of a chat, will go on. Those before it are
    where rows part, from what is stored and from each other: there a third prompt is likely to part as well.

    Args:
        known: of each row, how many tokens are stored, whether a hit can end there or not.
    """
    last = prompt.length - 1
    parted = {pad + tokens for pad, tokens in zip(prompt.pads, known, strict=True)}
    if prompt.rows > 1:
        parted.add(min(prompt.take([0]).shared(prompt.take([row])) for row in range(1, prompt.rows)))
    # A row of pads alone has no state, and after few tokens one is not worth its room.
    lowest = max(reused, max(prompt.pads)) + BRANCH_TOKENS
    branches = sorted(column for column in parted if lowest <= column < last)
    return [*branches[-MAX_BRANCHES:], *([last] if last > max(reused, max(prompt.pads)) else [])]


def feed(
    call: Callable[[torch.Tensor, dict[str, Any]], Any],
    ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    points: Sequence[int],
    held: int | None,
    note: Callable[[], None],
) -> Any:
    """Run a prefill up to each of `points` in turn, then to its end; return what that returns.

    Args:
        call: generate()'s prefill of ids `[B, t]`, given arguments.
        held: columns the cache holds, where generate() does not leave them out of ids by itself; else None.
        note: called after each part but the last.
    """
    start = held or 0
    for stop in points:
        call(ids[:, start:stop], _part_of(model_kwargs, len(ids), stop, ids.device))
        note()
        start = 0 if held is None else stop
    return call(ids[:, start:], model_kwargs)


def _part_of(model_kwargs: dict[str, Any], rows: int, stop: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a forward that ends at column `stop`, for ids `[rows, ...]` from the first column on."""
    part = dict(model_kwargs)
    mask, positions = part.get("attention_mask"), part.get("position_ids")
    part["attention_mask"] = torch.ones((rows, stop), dtype=torch.long, device=device) if mask is None else mask[:, :stop]
    if positions is not None:
        part["position_ids"] = positions[..., :stop]
    return part
