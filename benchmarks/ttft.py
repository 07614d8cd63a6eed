"""Time to first token of a prompt whose beginning was seen before: ours, recomputing, and the floor.

    python -m benchmarks.ttft [--smoke] [--rounds 21] [--output benchmarks/results/ttft.json]

ours       a new TieredCache on a stack that holds the prefix
recompute  a new DynamicCache
floor      a DynamicCache that already holds the prefix, copied outside the timing
miss       a new TieredCache on a stack that holds nothing of the prompt (what a miss costs over `recompute`)

The new tokens differ in every round, so that only the prefix is ever reused.
"""

import copy
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.pairs import arguments, grouped_model, measure, ratio, show, small_model, summary, write
from examples.smollm import FirstToken, load
from tiered_cache import HostTier, TieredCache, TierStack

SIZES = ((1920, 128), (512, 64))  # shared, new


def first_token(model: Any, ids: torch.Tensor, cache: Any) -> float:
    """Return the seconds from the call of generate() to its first token."""
    clock = FirstToken()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, do_sample=False, streamer=clock
    )
    return clock.seconds


def compare(model: Any, shared: int, new: int, rounds: int) -> dict[str, Any]:
    """Measure one size; return seconds and ratios."""
    vocabulary = model.config.vocab_size

    def tokens(count: int, seed: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))

    def prompt(round_: int) -> torch.Tensor:
        return torch.cat([tokens(shared, 0), tokens(new, 1000 + round_)], dim=1)

    stack = TierStack(HostTier("3GiB"))
    first_token(model, prompt(999), TieredCache(stack))
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(shared, 0), past_key_values=filled)

    def ours(round_: int) -> float:
        cache = TieredCache(stack)
        seconds = first_token(model, prompt(round_), cache)
        assert shared <= cache.usage.cached_tokens < shared + new, cache.explain()
        return seconds

    def floor(round_: int) -> float:
        cache = copy.deepcopy(filled)
        return first_token(model, prompt(round_), cache)

    def recompute(round_: int) -> float:
        return first_token(model, prompt(round_), DynamicCache(config=model.config))

    def miss(round_: int) -> float:
        other = prompt(round_)
        other[0, 0] = 3 + round_ + 1  # parts from everything stored at the first token
        with TierStack(HostTier("1GiB")) as empty:
            return first_token(model, other, TieredCache(empty))

    seconds = measure({"ours": ours, "floor": floor, "recompute": recompute, "miss": miss}, rounds)
    stack.close()
    return {
        "shared": shared,
        "new": new,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "ours / floor": ratio(seconds, "ours", "floor"),
        "recompute / ours": ratio(seconds, "recompute", "ours"),
        "miss / recompute": ratio(seconds, "miss", "recompute"),
        "raw": seconds,
    }


def main() -> None:
    options = arguments(__doc__, "ttft.json")
    if options.smoke:
        models, sizes = {"tiny": small_model()}, ((64, 8),)
    else:
        models, sizes = {"SmolLM2-135M": load()[0], "random GQA": grouped_model()}, SIZES

    results = []
    print("| model | shared + new | ours | floor | recompute | ours / floor | recompute / ours | a miss / recompute |")
    print("|---|---|---|---|---|---|---|---|")
    for name, model in models.items():
        for shared, new in sizes:
            result = {"model": name, **compare(model, shared, new, options.rounds)}
            results.append(result)
            times = " | ".join(f"{result['seconds'][who]['median'] * 1e3:.0f} ms" for who in ("ours", "floor", "recompute"))
            ratios = " | ".join(show(result[what]) for what in ("ours / floor", "recompute / ours", "miss / recompute"))
            print(f"| {name} | {shared:,} + {new} | {times} | {ratios} |", flush=True)
    write(options.output, {"results": results})


if __name__ == "__main__":
    main()
