"""Time to first token from disk in new processes, and what saving costs.

    python -m benchmarks.restart [--smoke] [--rounds 21] [--output benchmarks/results/restart.json]

Every round is a process of its own, which loads the model, fingerprints it, and then asks in turn:

ours, cached    a new TieredCache on a new stack; the files are in the page cache
ours, dropped   the same; the files were dropped from the page cache (posix_fadvise)
floor           a DynamicCache that already holds the prefix, copied outside the timing
recompute       a new DynamicCache

`saving` compares two prompts in a row that nobody saw before, on a stack with and without a disk tier: what the first of them
left to write is written while the second is computed.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.pairs import arguments, measure, ratio, show, small_model, summary, write
from benchmarks.ttft import first_token
from examples.smollm import load
from tiered_cache import DiskTier, HostTier, TieredCache, TierStack
from tiered_cache.hf import identity

SHARED, NEW = 1920, 128
CONTESTANTS = ("ours, cached", "floor", "ours, dropped", "recompute")


def tokens(model: Any, count: int, seed: int) -> torch.Tensor:
    """Return random ids `[1, count]`."""
    return torch.randint(3, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(seed))


def stack_on(directory: str) -> TierStack:
    return TierStack(HostTier("2GiB"), DiskTier(directory, "16GiB"))


def touch_pages(directory: str, *, drop: bool) -> None:
    """Bring all files into the page cache, or out of it."""
    for file in Path(directory).rglob("*.kv"):
        fd = os.open(file, os.O_RDONLY)
        if drop:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            file.read_bytes()
        os.close(fd)


def one_process(folder: str, directory: str, shared: int, new: int, round_: int) -> dict[str, float]:
    """Measure every contestant once, in this process; return seconds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    started = time.perf_counter()
    identity.identify(model)
    seconds = {"identity": time.perf_counter() - started}
    first_token(model, tokens(model, 16, 7), DynamicCache(config=model.config))  # no call pays for starting up
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(model, shared, 0), past_key_values=filled)
    for place, name in enumerate(CONTESTANTS):
        prompt = torch.cat([tokens(model, shared, 0), tokens(model, new, 10_000 + 10 * round_ + place)], dim=1)
        if name.startswith("ours"):
            with stack_on(directory) as stack:
                touch_pages(directory, drop=name.endswith("dropped"))
                cache = TieredCache(stack)
                seconds[name] = first_token(model, prompt, cache)
                assert shared <= cache.usage.cached_by_tier["disk"] < shared + new, cache.explain()
                seconds[f"{name}: fetch"] = cache.usage.fetch_seconds
        else:
            cache = copy.deepcopy(filled) if name == "floor" else DynamicCache(config=model.config)
            seconds[name] = first_token(model, prompt, cache)
    return seconds


def save_plain(model: Any, folder: str) -> None:
    """Save weights that came from GGUF as the plain ones they are now, which load in a second."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


def restarts(model: Any, rounds: int, sizes: tuple[int, int], threads: int) -> dict[str, Any]:
    """Run the processes, one after another; return seconds and ratios."""
    shared, new = sizes
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:  # not in memory, as /tmp may be
        folder, directory = f"{temporary}/model", f"{temporary}/kv"
        save_plain(model, folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with stack_on(directory) as stack:
            first_token(loaded, torch.cat([tokens(model, shared, 0), tokens(model, new, 1)], dim=1), TieredCache(stack))
        seconds: dict[str, list[float]] = {}
        for round_ in range(-1, rounds):
            command = [sys.executable, "-m", "benchmarks.restart", "--threads", str(threads), "--process"]
            command.append(json.dumps([folder, directory, shared, new, round_]))
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
            for name, value in json.loads(output.splitlines()[-1]).items():
                if round_ >= 0:
                    seconds.setdefault(name, []).append(value)
    pairs = (
        ("ours, cached", "floor"),
        ("ours, dropped", "floor"),
        ("recompute", "ours, cached"),
        ("recompute", "ours, dropped"),
    )
    return {
        "shared": shared,
        "new": new,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        **{f"{one} / {other}": ratio(seconds, one, other) for one, other in pairs},
        "raw": seconds,
    }


def saving(model: Any, rounds: int, length: int) -> dict[str, Any]:
    """Compare two calls in a row with and without a disk tier; what is left to write after them is not counted."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:
        stacks = {"with": stack_on(f"{temporary}/kv"), "without": TierStack(HostTier("2GiB"))}
        first: dict[str, list[float]] = {"with": [], "without": []}

        def two_calls(name: str, round_: int) -> float:
            stack = stacks[name]
            started = time.perf_counter()
            for call in range(2):
                prompt = tokens(model, length, 100 + 2 * round_ + call)
                cache = TieredCache(stack)
                taken = first_token(model, prompt, cache)
                if round_ >= 0:
                    first[name].append(taken)
                assert cache.usage.cached_tokens < length // 2
            seconds = time.perf_counter() - started
            assert stack.flush()
            stack.clear()
            return seconds

        seconds = measure(
            {"with": lambda n: two_calls("with", n), "without": lambda n: two_calls("without", n)},
            rounds,
        )
        for stack in stacks.values():
            stack.close()
    return {
        "tokens": length,
        "with / without": ratio(seconds, "with", "without"),
        "first token, with / without": ratio(first, "with", "without"),
        "raw": seconds,
    }


def main() -> None:
    if "--process" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--threads", type=int)
        parser.add_argument("--process", type=json.loads)
        options = parser.parse_args()
        torch.set_num_threads(options.threads)
        print(json.dumps(one_process(*options.process)))
        return
    options = arguments(__doc__, "restart.json")
    model, sizes = (small_model(), (64, 8)) if options.smoke else (load()[0], (SHARED, NEW))
    result = restarts(model, options.rounds, sizes, options.threads)
    print("| what | median (quartiles) |\n|---|---|")
    for name, value in result["seconds"].items():
        print(f"| {name} | {value['median'] * 1e3:.0f} ms |")
    for name in ("ours, cached / floor", "ours, dropped / floor", "recompute / ours, cached", "recompute / ours, dropped"):
        print(f"| {name} | {show(result[name])} |")
    saved = saving(model, options.rounds, sum(sizes))
    for name in ("with / without", "first token, with / without"):
        print(f"| saving: {name} | {show(saved[name])} |")
    write(options.output, {"restart": result, "saving": saved})


if __name__ == "__main__":
    main()
