"""Paired measurements: every contestant once per round, in turn, so that a slow minute of the machine hits all of them."""

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def arguments(description: str | None, output: str) -> argparse.Namespace:
    """Read the command line all benchmarks share, and set the number of threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and two rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / output)
    options = parser.parse_args()
    if options.smoke:
        options.rounds = 2
    torch.set_num_threads(options.threads)
    return options


def small_model() -> Any:
    """Return the tiny random model of smoke runs."""
    config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def grouped_model() -> Any:
    """Return a random model with grouped-query attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def measure(contestants: dict[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Run every contestant, given the round's number, `rounds` times in turn after one round that does not count.

    Returns:
        Seconds by contestant.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(-1, rounds):
        for name, run in contestants.items():
            taken = run(round_)
            if round_ >= 0:
                seconds[name].append(taken)
    return seconds


def summary(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high, "n": len(values)}


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Return median and quartiles of the ratio within each round."""
    return summary([one / other for one, other in zip(seconds[name], seconds[base], strict=True)])


def show(summary_: dict[str, float], unit: str = "") -> str:
    """Return "1.05 (1.04 to 1.07)"."""
    return f"{summary_['median']:.3g}{unit} ({summary_['low']:.3g} to {summary_['high']:.3g})"


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results with the machine and versions they are from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
    }
    path.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
