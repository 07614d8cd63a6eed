"""What our own work costs: short prompts, misses, identity, importing, keys and lookup, metadata.

python -m benchmarks.overhead [--smoke] [--rounds 21] [--output benchmarks/results/overhead.json]
"""

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.pairs import arguments, measure, show, small_model, summary, write
from examples.smollm import FirstToken, load
from tiered_cache import HostTier, TieredCache, TierStack
from tiered_cache.hf import identity
from tiered_cache.testing import TokenPort


def short_prompt(model: Any, rounds: int) -> dict[str, Any]:
    """Time to first token of 20 tokens, nothing stored of them, over DynamicCache."""
    stack = TierStack(HostTier("1GiB"))

    def first_token(round_: int, cache: Any) -> float:
        ids = torch.randint(3, model.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(round_ + 5))
        clock = FirstToken()
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=2, streamer=clock)
        return time.perf_counter() - clock.started  # the whole call: storing counts too

    seconds = measure(
        {"ours": lambda n: first_token(n, TieredCache(stack)), "DynamicCache": lambda n: first_token(n, DynamicCache())}, rounds
    )
    difference = [1e3 * (ours - stock) for ours, stock in zip(seconds["ours"], seconds["DynamicCache"], strict=True)]
    return {"ms more than DynamicCache": summary(difference), "raw": seconds}


def fingerprint(model: Any, rounds: int) -> dict[str, Any]:
    """The pass over all weights, per GB, and the check in every call."""
    gigabytes = sum(tensor.nbytes for tensor in {id(p): p for p in model.parameters()}.values()) / 1e9

    def whole(round_: int) -> float:
        identity.forget(model)
        return timed(lambda: identity.identify(model))

    seconds = measure({"whole": whole, "check": lambda round_: timed(lambda: identity.identify(model))}, rounds)
    return {
        "seconds per GB": summary([value / gigabytes for value in seconds["whole"]]),
        "check, ms": summary([value * 1e3 for value in seconds["check"]]),
    }


def imports(rounds: int) -> dict[str, Any]:
    """Importing tiered_cache's public names after transformers' own, in new processes."""
    code = (
        "import time, torch, transformers; from transformers import GenerationMixin, DynamicCache, PreTrainedModel;"
        "t = time.perf_counter(); from tiered_cache import TieredCache; print(time.perf_counter() - t)"
    )

    def run() -> float:
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)  # noqa: S603

    return {"ms over transformers": summary([1e3 * run() for _ in range(rounds)])}


def lookup(rounds: int, num_blocks: int, num_tokens: int) -> dict[str, Any]:
    """Matching a prompt that is stored whole among many blocks, and the bytes the index costs per block."""
    block_tokens = 256
    stack = TierStack(HostTier("4GiB"), block_tokens=block_tokens)
    random = np.random.default_rng(0)
    prompt = random.integers(0, 50_000, num_tokens)

    class NoBytes(TokenPort):
        def nbytes(self, kind: str, num_tokens: int) -> int:
            return 8

        def save(self, kind: str, start: int, num_tokens: int, buffers: Any) -> Any:
            return super().save(kind, start, 0, [buffer[:0] for buffer in buffers])

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    stack.commit(b"id", b"", prompt, NoBytes(prompt))
    while len(stack._index.blocks) < num_blocks:
        other = np.concatenate(
            [prompt[: block_tokens * int(random.integers(0, 4))], random.integers(0, 50_000, 16 * block_tokens)]
        )
        stack.commit(b"id", b"", other, NoBytes(other))
    per_block = (tracemalloc.get_traced_memory()[0] - before) / len(stack._index.blocks)
    tracemalloc.stop()

    def match(round_: int) -> float:
        found = []
        seconds = timed(lambda: found.append(stack.match(b"id", b"", prompt)))
        assert found[0].num_tokens == num_tokens
        stack.release(found[0])
        return seconds

    return {
        "ms": summary([1e3 * value for value in measure({"match": match}, rounds)["match"]]),
        "blocks": len(stack._index.blocks),
        "prompt tokens": num_tokens,
        "metadata bytes per block": per_block,
        # K/V of SmolLM2-135M in bf16: 30 layers, 3 heads of 64, K and V
        "share of SmolLM2 bf16 K/V": per_block / (block_tokens * 30 * 3 * 64 * 2 * 2),
    }


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    options = arguments(__doc__, "overhead.json")
    model = small_model() if options.smoke else load()[0]
    sizes = (200, 2048) if options.smoke else (100_000, 131_072)
    results = {
        "a 20-token prompt": short_prompt(model, options.rounds),
        "identity": fingerprint(model, options.rounds),
        "import": imports(min(options.rounds, 11)),
        "lookup": lookup(options.rounds, *sizes),
    }
    for name, result in results.items():
        for what, value in result.items():
            if what != "raw":
                print(f"{name}: {what}: {show(value) if isinstance(value, dict) else format(value, ',.5g')}")
    write(options.output, results)


if __name__ == "__main__":
    main()
