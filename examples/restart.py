"""What was computed is still there after a restart: two processes, one directory.

The first answers a question about a document of some 2,000 tokens and exits. The second, another process, answers another
question about it: nearly all of its prompt comes from disk.

python examples/restart.py                        # in a temporary directory
python examples/restart.py --directory ~/kv       # in one that stays: run it twice
"""

import argparse
import subprocess
import sys
import tempfile

from quickstart import DOCUMENT, ask
from smollm import load

from tiered_cache import DiskTier, HostTier, TieredCache, TierStack

CATALOGUE = (
    DOCUMENT
    + "\nOpening hours.\n"
    + "\n".join(
        f"On day {day} of the month the museum is open from {6 + day % 5} to {15 + day % 7} o'clock." for day in range(1, 25)
    )
)
QUESTIONS = ("What is in the first room?", "When is the museum open on day 7?")


def answer(directory: str, step: int) -> None:
    """Answer one question, as a process of its own."""
    model, tokenizer = load()
    with TierStack(HostTier("2GiB"), DiskTier(directory, "8GiB")) as stack:
        cache = TieredCache(stack)
        question = QUESTIONS[step]
        print(f"\nProcess {step + 1}: {question}", flush=True)
        got, seconds = ask(model, tokenizer, question, cache, document=CATALOGUE)
        print(f"  {cache.explain()}\n  Answer: {tokenizer.decode(got, skip_special_tokens=True)!r}")
        if step == 0:
            return
        cold, cold_seconds = ask(model, tokenizer, question, None, document=CATALOGUE)
        share = cache.usage.cached_by_tier.get("disk", 0) / cache.usage.prompt_tokens
        print(f"  Time to first token: {cold_seconds:.3f} s cold, {seconds:.3f} s from disk, {share:.1%} of the prompt.")
        print(f"  Answers equal, token for token: {'yes' if got == cold else 'NO'}.")
        if got != cold or share < 0.95:
            raise SystemExit("That is not as it should be. Please report it.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where K/V are kept (default: a temporary directory)")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        answer(options.directory, options.step)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or f"{temporary}/kv"
        for step in range(len(QUESTIONS)):
            subprocess.run([sys.executable, __file__, "--directory", directory, "--step", str(step)], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
