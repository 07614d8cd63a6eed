"""Seconds per decoded token with a TieredCache and with a DynamicCache.

    python -m benchmarks.decode [--smoke] [--rounds 21] [--output benchmarks/results/decode.json]

Each round decodes 16 tokens by hand behind a context of random tokens, in turn with either cache. A second model with
random weights and other shapes (8 query heads to 2 K/V heads, 16 layers) stands beside SmolLM2.
"""

import time
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.pairs import arguments, grouped_model, measure, ratio, show, small_model, summary, write
from examples.smollm import load
from tiered_cache import HostTier, TieredCache, TierStack

STEPS = 16


@torch.inference_mode()
def compare(model: Any, context: int, rounds: int) -> dict[str, Any]:
    """Measure one model at one context length; return seconds per token and their ratio."""
    stack = TierStack(HostTier("1GiB"))
    tokens = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    ours, stock = TieredCache(stack), DynamicCache(config=model.config)
    ours.restore(model, tokens)
    for cache in (ours, stock):
        model(tokens, past_key_values=cache, logits_to_keep=1)

    def decode(cache: Any) -> float:
        started = time.perf_counter()
        fed = tokens[:, :1]
        for _ in range(STEPS):
            fed = model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        seconds = (time.perf_counter() - started) / STEPS
        cache.crop(-STEPS)
        return seconds

    seconds = measure({"ours": lambda round_: decode(ours), "DynamicCache": lambda round_: decode(stock)}, rounds)
    stack.close()
    return {
        "context": context,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "ours / DynamicCache": ratio(seconds, "ours", "DynamicCache"),
        "raw": seconds,
    }


def main() -> None:
    options = arguments(__doc__, "decode.json")
    if options.smoke:
        models, contexts = {"tiny": small_model()}, (64,)
    else:
        models, contexts = {"SmolLM2-135M": load()[0], "random GQA": grouped_model()}, (128, 4096)
    results = []
    print("| model | dtype | context | ours | DynamicCache | ours / DynamicCache |\n|---|---|---|---|---|---|")
    for name, model in models.items():
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            for context in contexts:
                result = {"model": name, **compare(model, context, options.rounds)}
                results.append(result)
                times = " | ".join(f"{result['seconds'][who]['median'] * 1e3:.1f} ms" for who in ("ours", "DynamicCache"))
                print(
                    f"| {name} | {result['dtype']} | {context:,} | {times} | {show(result['ours / DynamicCache'])} |",
                    flush=True,
                )
    write(options.output, {"results": results})


if __name__ == "__main__":
    main()
