"""What is asserted of every reuse: same tokens and logits as a cold run, as few columns forwarded as predicted, stored
bytes unchanged, counters consistent."""

import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from tiered_cache import HostTier, TieredCache, TierStack
from tiered_cache.hf import compat
from tiered_cache.hf.shapes import is_stateful

TOLERANCE = 1e-4  # of fp32 logits
RECURRENT_TOLERANCE = 2e-3  # ... of models with recurrent layers, whose scans round by where a prompt is split
ROUGH = {"nemotron_h": 3e-2}  # whose single steps differ from its scan by more, in transformers itself and in fp64 too


def new_stack(capacity: int | str = "256MB", block_tokens: int = 16, **options: Any) -> TierStack:
    return TierStack(HostTier(capacity), block_tokens=block_tokens, **options)


@contextmanager
def forwarded(model: PreTrainedModel) -> Iterator[list[int]]:
    """Collect the number of columns of each forward of `model`. A global hook: one on the model would be identity."""
    columns: list[int] = []
    embeddings = model.get_input_embeddings()

    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module is embeddings:
            columns.append(args[0].shape[-1])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield columns
    finally:
        handle.remove()


def run(model: PreTrainedModel, ids: torch.Tensor, *, new_tokens: int = 5, seed: int = 0, **options: Any) -> Any:
    """Generate with logits; the same seed gives the same samples."""
    torch.manual_seed(seed)
    settings = {"do_sample": False, "max_new_tokens": new_tokens, **options}
    return model.generate(ids, return_dict_in_generate=True, output_logits=True, **settings)


def assert_same(out: Any, cold: Any, tolerance: float = TOLERANCE) -> None:
    assert out.sequences.tolist() == cold.sequences.tolist()
    assert len(out.logits) == len(cold.logits)
    for got, expected in zip(out.logits, cold.logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def check(
    model: PreTrainedModel,
    ids: torch.Tensor,
    stack: TierStack,
    cached: int,
    *,
    cache: TieredCache | None = None,
    passed: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Assert that `ids` with a TieredCache answer as cold, with `cached` columns reused in each row; return the output.

    `passed` are the ids given to generate(), where those are not the whole prompt.
    """
    mask = options.get("attention_mask")
    cold = run(model, ids, **options)
    before = stored_bytes(stack)
    cache = TieredCache(stack) if cache is None else cache
    settle(model)
    with forwarded(model) as columns:
        out = run(model, ids if passed is None else passed, past_key_values=cache, **options)
    if passed is not None:
        out.sequences = torch.cat([ids[:, : -passed.shape[1]], out.sequences], dim=1)
    is_recurrent = is_stateful(cache.layers)
    assert_same(out, cold, ROUGH.get(model.config.model_type, RECURRENT_TOLERANCE) if is_recurrent else TOLERANCE)
    steps = len(out.logits) - 1
    assert sum(columns[: len(columns) - steps]) == ids.shape[1] - cached, cache.explain()
    assert is_recurrent or len(columns) == 1 + steps
    assert all(count == 1 for count in columns[len(columns) - steps :])
    pads = torch.zeros(len(ids)) if mask is None else (mask == 0).sum(dim=1)
    assert cache.usage.prompt_tokens == ids.numel() - int(pads.sum())
    assert cache.usage.cached_tokens == int((cached - pads).clamp(min=0).sum())
    assert cache.usage.cached_tokens == sum(cache.usage.cached_by_tier.values())
    assert (cache.usage.miss_reason is None) == (cached == ids.shape[1] - 1)
    after = stored_bytes(stack)
    assert all(after[key] == digest for key, digest in before.items() if key in after)
    assert_consistent(stack)
    return out


_settled: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def settle(model: PreTrainedModel) -> None:
    """Let the trial of a model with recurrent layers, if it takes one, be over before forwards are counted."""
    if model not in _settled:
        _settled.add(model)
        for pads in (0, 1) if is_stateful(compat.cache_layers(model.config, 1)) else ():
            ids = torch.ones((1, 4), dtype=torch.long)
            mask = torch.tensor([[1 - pads, 1, 1, 1]])
            model.generate(ids, attention_mask=mask, max_new_tokens=1, past_key_values=TieredCache(new_stack()))


def stored_bytes(stack: TierStack) -> dict[bytes, str]:
    """Return a digest of every stored block's bytes."""
    stack.settle()
    return {
        key: hashlib.sha256(next(iter(piece.copies.values())).cpu().numpy()).hexdigest()
        for key, piece in stack._inventory.pieces.items()
    }


def assert_consistent(stack: TierStack) -> None:
    """Assert that budgets count real storage, that nothing is held, and that every block can be reached."""
    stack.settle()
    reachable = {block.key for root in stack._index.roots.values() for block in stack._index.descendants(root)}
    assert reachable == set(stack._index.blocks)
    assert all(block.holds == 0 for block in stack._index.blocks.values())
    assert {key for block in stack._index.blocks.values() for key in pieces_of(block)} == set(stack._inventory.pieces)
    assert all("main" in block.pieces for block in stack._index.blocks.values())
    for tier in stack.tiers:
        pieces = stack._inventory.pieces.values()
        buffers = [piece.copies[tier.name] for piece in pieces if tier.name in piece.copies]
        assert tier.used_bytes == sum(buffer.untyped_storage().nbytes() for buffer in buffers) <= tier.capacity_bytes
        assert tier.num_pieces == len(buffers) == len([*tier.policy.victims(), *tier.snapshots.victims()])


def pieces_of(block: Any) -> list[bytes]:
    return [piece.key for piece in block.pieces.values()]


def block_nbytes(stack: TierStack) -> int:
    """Return the size of the largest piece stored."""
    return max(piece.nbytes for piece in stack._inventory.pieces.values())


def drop_pieces(stack: TierStack, kind: str, keep: Callable[[int], bool]) -> None:
    """Evict the "main" or "side" pieces of all blocks whose first token's place `keep` says no to."""
    tier = stack.tiers[0]
    for root in list(stack._index.roots.values()):
        for block in reversed(list(stack._index.descendants(root))):
            start, node = 0, block.parent
            while hasattr(node, "tokens"):
                start, node = start + node.num_tokens, node.parent
            if keep(start) or kind not in block.pieces:
                continue
            if kind == "main":
                stack._inventory.discard(block)
            else:
                stack._inventory._remove_copy(block.pieces[kind], tier)
