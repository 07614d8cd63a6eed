"""The part of `gpu_check` that asks whether what comes back is what was computed."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_link import torture
from benchmarks.gpu_machine import GIB, Machine, Report, token_nbytes
from benchmarks.gpu_models import held_by, ready
from tiered_cache import TieredCache


def exactness(machine: Machine, report: Report) -> None:
    """E1."""
    torture(machine, report)
    machine.tidy()
    model = machine.model("0.6B")
    ids = machine.tokens(machine.pick(2 * 1024 + 150, 100), 0)  # ends within a block
    for tier in ("device", "host", "disk"):
        _from_tier(machine, report, model, ids, tier)
    _offloaded(machine, report, model, ids)
    _same_tokens(machine, report)


@torch.inference_mode()
def _from_tier(machine: Machine, report: Report, model: Any, ids: torch.Tensor, tier: str) -> None:
    host = 4 * token_nbytes(model) * ids.shape[1]
    with tempfile.TemporaryDirectory(dir=machine.folder) as folder:
        disk = Path(folder) if tier == "disk" else None
        stack = machine.stack(host, device=host if tier == "device" else 0, disk=disk)
        cold = ready(model, ids, TieredCache(stack))
        cold.commit(ids)
        if disk is not None:
            assert stack.flush(timeout=60), stack.stats()
            stack.close()
            stack = machine.stack(GIB if not machine.toy else host, disk=disk)
        warm = TieredCache(stack)
        num_tokens = warm.restore(model, ids)
        machine.settle()
        report.row(f"from {tier}: K and V that differ, of {2 * len(cold.layers)}", differ(cold, warm, num_tokens), "<= 0")
        from_there = warm.usage.cached_by_tier.get(tier, 0)
        report.row(f"from {tier}: tokens of {num_tokens:,}", from_there, f">= {num_tokens}", served=warm.usage.cached_by_tier)
        stack.close()


def differ(one: Any, other: Any, num_tokens: int) -> int:
    """Return how many K and V of two caches differ in some byte of their first `num_tokens` tokens."""
    pairs = zip(held_by(one), held_by(other), strict=True)
    both = [each for ones, others in pairs for each in zip(ones, others, strict=True)]
    return sum(_bytes_of(a, num_tokens) != _bytes_of(b, num_tokens) for a, b in both)


def _bytes_of(tensor: torch.Tensor, num_tokens: int) -> bytes:
    return tensor[:, :, :num_tokens].contiguous().cpu().view(torch.uint8).numpy().tobytes()


@torch.inference_mode()
def _offloaded(machine: Machine, report: Report, model: Any, ids: torch.Tensor) -> None:
    """Decode with layers in host memory, beside a cache that is resident, and fetch into layers that are in host memory."""
    with machine.stack(4 * token_nbytes(model) * ids.shape[1]) as stack:
        caches = {}
        for share in (1.0, 0.5, 0.0):
            caches[share] = ready(model, ids, TieredCache(stack, offload=share))
            if share == 1.0:
                caches[share].commit(ids)
        fed = ids[:, :1]
        furthest, tokens = dict.fromkeys(caches, 0.0), {share: [] for share in caches}
        for _ in range(machine.pick(16, 4)):
            logits = {
                share: model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1:] for share, cache in caches.items()
            }
            for share, values in logits.items():
                furthest[share] = max(furthest[share], float((values - logits[1.0]).abs().max()))
                tokens[share].append(int(values.argmax()))
            fed = logits[1.0].argmax(-1)  # the same for all, so that steps compare
        for share in (0.5, 0.0):
            same = sum(one == other for one, other in zip(tokens[share], tokens[1.0], strict=True))
            report.row(f"offload={share}: tokens as with all resident, of {len(tokens[1.0])}", same, f">= {len(tokens[1.0])}")
            report.row(f"offload={share}: furthest logit from all resident", furthest[share])


def _same_tokens(machine: Machine, report: Report) -> None:
    """In fp32 a generation from a prefix in host memory gives the tokens of a cold one."""
    model = machine.model("toy", torch.float32)
    ids = machine.tokens(machine.pick(700, 90), 5)
    length = machine.pick(64, 8)

    def generate(**options: Any) -> torch.Tensor:
        found: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
        )
        return found[0, ids.shape[1] :]

    with machine.stack(64 << 20) as stack:
        cold = generate()
        for offload in ("auto", 0.5, 0.0):
            generate(past_key_values=TieredCache(stack, offload=offload))
            warm = generate(past_key_values=TieredCache(stack, offload=offload))
            report.row(f"fp32, offload={offload}: tokens as cold, of {length}", int((warm == cold).sum()), f">= {length}")
