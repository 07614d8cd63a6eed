"""docs/models.md: every kind of model x every way a prompt meets what is stored, as seen when this was run.

    python -m tests.hf.report            write it
    python -m tests.hf.report --check    fail where it is not what a run gives

A cell says how many tokens of the prompt were reused, where the answer was that of a cold run: same tokens, and logits within
the tolerance of the tests. Where it is not, this fails.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests.hf.harness import RECURRENT_TOLERANCE, ROUGH, TOLERANCE, assert_same, run
from tests.hf.models import FULL_ATTENTION, INDEXED, RECURRENT, REFUSED, SHARING, SLIDING, prompt, tiny
from tiered_cache import DiskTier, HostTier, MissReason, TieredCache, TierStack
from tiered_cache.hf.shapes import is_stateful
from tiered_cache.keys import MAIN

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
LENGTH, SYSTEM = 85, 64  # tokens of the prompt, and of what it shares with others
KINDS = {
    "GrowableLayer": "full attention",
    "CapturingSlidingLayer": "window",
    "StateLayer": "recurrent",
    "HybridLayer": "recurrent and full attention",
    "WindowLayer": "window",
    "WindowHybridLayer": "recurrent and window",
    "DummyLayer": "none of its own",
    "DynamicIndexedLayer": "indexed attention",
    "DeepseekV4HCACache": "heavily compressed attention",
    "DeepseekV4CSACache": "compressed sparse attention",
}


HEADING = """# Models

Written by `python -m tests.hf.report` with transformers {version}: {kinds} kinds of models, tiny and with random weights. A
cell is how many of the prompt's tokens were reused. In every cell the answer was that of a cold run: the same tokens, and
logits within {tolerance} (fp32; {recurrent} with recurrent layers, {rough} for NemotronH, whose single steps differ from its
scan in transformers itself). A model that is refused runs as with a cache of transformers' own; the reasons are below.

A prompt of {length} tokens was stored, with 5 generated ones. It is then asked again; followed by a next turn; its first
{system} tokens followed by another question, and by a third (recurrent layers go on from snapshots: the second question shows
where prompts part, and leaves one there); cut short; and so on.
"""


@dataclass(frozen=True)
class Way:
    """One way a prompt meets what is stored: `ids` of the prompt given the stored one, and what generate() is asked for."""

    name: str
    ids: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    options: dict[str, Any]
    prepare: Callable[[TierStack], None] = lambda stack: None


def other_question(ids: torch.Tensor, turn: torch.Tensor, seed: int = 5) -> torch.Tensor:
    asked = torch.cat([ids[:, :SYSTEM], prompt(20, seed)], dim=1)
    asked[0, SYSTEM] = 3 + seed if ids[0, SYSTEM] != 3 + seed else 100 + seed
    return asked


def stripped(ids: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    again = torch.cat([turn[:, : LENGTH + 2], prompt(9, seed=3)], dim=1)
    again[0, LENGTH + 2] = 3 if turn[0, LENGTH + 2] != 3 else 4
    return again


def evict_the_end(stack: TierStack) -> None:
    for root in list(stack._index.roots.values()):
        for block in reversed(list(stack._index.descendants(root))):
            start, node = 0, block.parent
            while hasattr(node, "tokens"):
                start, node = start + node.num_tokens, node.parent
            if start >= 48 and MAIN in block.pieces:
                stack._inventory.discard(block)


WAYS = (
    Way("cold", lambda ids, turn: prompt(LENGTH, seed=9), {}),
    Way("warm", lambda ids, turn: ids, {}),
    Way("next turn", lambda ids, turn: torch.cat([turn, prompt(9, seed=1)], dim=1), {}),
    Way("other question", other_question, {}),
    Way("third question", lambda ids, turn: other_question(ids, turn, seed=6), {}),
    Way("shorter prefix", lambda ids, turn: ids[:, :40], {}),
    Way("answer stripped", stripped, {}),
    Way("beams", lambda ids, turn: ids, {"num_beams": 3}),
    Way("samples", lambda ids, turn: ids, {"num_return_sequences": 3, "do_sample": True}),
    Way("padded batch", lambda ids, turn: torch.cat([ids, ids]), {"pads": 7}),
    Way("in chunks", lambda ids, turn: torch.cat([ids, prompt(9, seed=2)], dim=1), {"prefill_chunk_size": 16}),
    Way("after eviction", lambda ids, turn: ids, {}, evict_the_end),
)


def serve(model: PreTrainedModel, ids: torch.Tensor, stack: TierStack, options: dict[str, Any]) -> str:
    """Run one prompt; return what was reused, or the reason why nothing may be. Raises AssertionError if it is wrong."""
    options = dict(options)
    if pads := options.pop("pads", 0):
        mask = torch.ones_like(ids)
        ids = ids.clone()
        ids[1] = torch.cat([torch.zeros(pads, dtype=torch.long), ids[1, :-pads]])
        mask[1, :pads] = 0
        options["attention_mask"] = mask
    cache = TieredCache(stack)
    try:
        out = run(model, ids, past_key_values=cache, **options)
    except ValueError:
        with pytest.raises(ValueError):
            run(model, ids, **options)
        return "an error, as without"
    rough = ROUGH.get(model.config.model_type, RECURRENT_TOLERANCE * 3) if is_stateful(cache.layers) else TOLERANCE
    reason = cache.usage.miss_reason
    is_refused = reason in (MissReason.UNSUPPORTED_LAYERS, MissReason.UNKNOWN_CONTENT, MissReason.DISABLED_CALL)
    # At once, but where transformers' own answer is another one in chunks: there it is that one.
    cold = {name: value for name, value in options.items() if name != "prefill_chunk_size" or is_refused}
    assert_same(out, run(model, ids, **cold), rough)
    if is_refused:
        return "refused"
    return f"{cache.usage.cached_tokens} of {cache.usage.prompt_tokens}"


def row(name: str, folder: Path) -> tuple[list[str], str]:
    """Return a model's cells, and the reason where it is refused."""
    model, ids = tiny(name), prompt(LENGTH)
    stack = TierStack(HostTier("64MB"), DiskTier(folder / name, "1GB", min_free=0), block_tokens=16)
    with stack:
        first = TieredCache(stack)
        turn = run(model, ids, past_key_values=first).sequences
        kinds = dict.fromkeys(KINDS.get(type(layer).__name__, type(layer).__name__) for layer in first.layers)
        why = (
            first.explain().partition("UNSUPPORTED_LAYERS: ")[2].rstrip(".") or first.explain().partition("DISABLED_CALL: ")[2]
        )
        cells = []
        for way in WAYS:
            stack.flush(60)
            way.prepare(stack)
            try:
                cells.append(serve(model, way.ids(ids, turn), stack, way.options))
            except Exception as error:
                error.add_note(f"{name}, {way.name}")
                raise
        stack.flush(60)
    return [", ".join(kinds), *cells], why.partition(" (Runtime")[0]


def read_in_a_new_process(names: list[str], folder: Path) -> list[str]:
    """Return the last column: what one new process reuses of all that was stored."""
    program = (
        "import sys; from pathlib import Path; from tests.hf.report import LENGTH, serve\n"
        "from tests.hf.models import prompt, tiny; from tiered_cache import DiskTier, HostTier, TierStack\n"
        "for name in sys.argv[2:]:\n"
        "    tiers = HostTier('64MB'), DiskTier(Path(sys.argv[1]) / name, '1GB', min_free=0)\n"
        "    with TierStack(*tiers, block_tokens=16) as stack:\n"
        "        print('cell', serve(tiny(name), prompt(LENGTH), stack, {}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder), *names], check=True, capture_output=True, text=True)
    return [line.removeprefix("cell ") for line in done.stdout.splitlines() if line.startswith("cell ")]


def available() -> Iterator[str]:
    for name in (*FULL_ATTENTION, *SLIDING, *SHARING, *RECURRENT, *INDEXED, *REFUSED):
        if hasattr(transformers, f"{name}Config"):
            with contextlib.suppress(ValueError):  # a config that this release does not take
                tiny(name)
                yield name


def document() -> str:
    names = list(available())
    with tempfile.TemporaryDirectory() as folder:
        rows, refused = {}, {}
        for name in names:
            cells, why = row(name, Path(folder))
            rows[name] = cells
            if why:
                refused[name] = why
        for name, cell in zip(names, read_in_a_new_process(names, Path(folder)), strict=True):
            rows[name].append(cell)
    header = ["model", "layers", *(way.name for way in WAYS), "from disk, new process"]
    lines = [
        HEADING.format(
            version=transformers.__version__, kinds=len(names), tolerance=TOLERANCE, recurrent=RECURRENT_TOLERANCE * 3,
            rough=ROUGH["nemotron_h"], length=LENGTH, system=SYSTEM,
        ),
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        "",
        "## Refused",
        "",
        *(f"- **{name}**: {why}." for name, why in refused.items()),
        "- **Layer kinds that are not named above**: they run as with transformers' own cache, and `explain()` names them.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = document() if parser.parse_args().check else None
    if text is None:
        DOCUMENT.write_text(document())
    elif text != DOCUMENT.read_text():
        sys.exit(f"{DOCUMENT} is not what a run gives: write it with `python -m tests.hf.report`")


if __name__ == "__main__":
    main()
