"""Total prefill time of a six-turn chat that grows to 3,000 tokens.

    python -m benchmarks.chat [--smoke] [--rounds 21] [--output benchmarks/results/chat.json]

ours       nothing kept by the user: a new TieredCache in every turn, on one stack
carried    one DynamicCache carried along by hand: the floor
scratch    a new DynamicCache in every turn, in three rounds of its own after those of the other two

A turn's prefill time is its time to first token; answers of 16 tokens are decoded outside the timing, the same in all.
"""

from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.pairs import arguments, measure, ratio, show, small_model, summary, write
from examples.smollm import FirstToken, load
from tiered_cache import HostTier, TieredCache, TierStack

ANSWER = 16


def chat(model: Any, turns: list[torch.Tensor], make_cache: Any) -> float:
    """Return the sum of the turns' times to first token, seconds."""
    ids, total = torch.empty(1, 0, dtype=torch.long), 0.0
    for turn in turns:
        ids = torch.cat([ids, turn], dim=1)
        clock = FirstToken()
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=make_cache(), max_new_tokens=ANSWER,
            min_new_tokens=ANSWER, do_sample=False, streamer=clock,
        )  # fmt: skip
        total += clock.seconds
    return total


def main() -> None:
    options = arguments(__doc__, "chat.json")
    model, lengths = (small_model(), [40] * 3) if options.smoke else (load()[0], [1200, 300, 350, 350, 350, 354])

    def turns(round_: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(round_ + 10)
        return [torch.randint(3, model.config.vocab_size, (1, length), generator=generator) for length in lengths]

    def ours(round_: int) -> float:
        with TierStack(HostTier("1GiB")) as stack:
            return chat(model, turns(round_), lambda: TieredCache(stack))

    def carried(round_: int) -> float:
        cache = DynamicCache(config=model.config)
        return chat(model, turns(round_), lambda: cache)

    def scratch(round_: int) -> float:
        return chat(model, turns(round_), lambda: DynamicCache(config=model.config))

    seconds = measure({"ours": ours, "carried": carried}, options.rounds)
    slow = measure({"ours": ours, "scratch": scratch}, min(options.rounds, 3))
    ratios = {"ours / carried": ratio(seconds, "ours", "carried"), "scratch / ours": ratio(slow, "scratch", "ours")}
    seconds["scratch"] = slow["scratch"]
    print(f"{len(lengths)} turns, {sum(lengths) + (len(lengths) - 1) * ANSWER:,} tokens in the last prompt")
    for name, values in seconds.items():
        print(f"  {name}: {show(summary(values), ' s')}")
    for name, value in ratios.items():
        print(f"  {name}: {show(value)}")
    write(options.output, {"lengths": lengths, **ratios, "raw": seconds})


if __name__ == "__main__":
    main()
