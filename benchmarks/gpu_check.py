"""Everything that only an accelerator can show, in one run of nine minutes at most.

    python -m benchmarks.gpu_check [--parts E0,E3] [--budget-s E2=200,E5=40] [--limit-s 540] [--disk /tmp]
                                   [--smoke] [--output benchmarks/results/gpu_check.json]

E0  the link: block sizes, pinned, pageable, ours; whole blocks into the layers, beside one copy for each layer and head
E1  exactness: streams that are late and memory that is overwritten; from device, host and disk; decoding from host memory
E2  time to first token of an 8B-shaped model: recomputed, resident (the floor), from host, from disk
E3  decoding: DynamicCache, DynamicCache(offloading=True), ours with all, half and none of the layers resident, and "auto"
E4  overlap of fetching and computing
E5  the longest context under a cap
E6  chats kept warm under a cap
E7  a 0.6B shape at short prompts

Time is by events on the device. Each part has a budget: it makes fewer rounds, then leaves out sizes, and says so. What is done
is in the JSON at once. A machine without an accelerator runs all of it at toy sizes (so does --smoke): a test that it runs.
"""

import argparse
import contextlib
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu_exact import exactness
from benchmarks.gpu_link import probe
from benchmarks.gpu_machine import Machine, Report
from benchmarks.gpu_models import decoding, first_tokens, longest_context, overlap, sessions, small_model
from tiered_cache.devices import device_for

PARTS: dict[str, tuple[Callable[[Machine, Report], None], float]] = {  # and seconds
    "E0": (probe, 45),
    "E1": (exactness, 45),
    "E2": (first_tokens, 175),
    "E3": (decoding, 90),
    "E4": (overlap, 35),
    "E5": (longest_context, 85),
    "E6": (sessions, 25),
    "E7": (small_model, 25),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which ones, such as E0,E3")
    parser.add_argument("--budget-s", default="", help="seconds of some parts, such as E2=200,E5=40")
    parser.add_argument("--limit-s", type=float, default=540, help="seconds of the whole run")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, as always without an accelerator")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to be tested")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_check.json")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    options.budgets = {name: seconds for name, (_, seconds) in PARTS.items()}
    for pair in filter(None, options.budget_s.split(",")):
        name, seconds = pair.split("=")
        options.budgets[name] = float(seconds)
    unknown = {*options.parts, *options.budgets} - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


@contextlib.contextmanager
def machine_of(options: argparse.Namespace) -> Iterator[Machine]:
    """Give the accelerator, or the CPU that passes for one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        yield Machine(device, device_for(device), toy=options.smoke, folder=options.disk)
        return
    from tiered_cache.testing import pretend_accelerator

    torch.set_num_threads(1)
    with pretend_accelerator() as mover:
        yield Machine(torch.device("cpu"), mover, toy=True, folder=options.disk)


def main() -> None:
    started = time.perf_counter()
    warnings.filterwarnings("ignore", message=".*past_key_values", category=FutureWarning)
    options = arguments()
    with machine_of(options) as machine:
        name = "pretended" if machine.pretends else torch.cuda.get_device_name() if machine.device.type == "cuda" else ""
        report = Report(options.output, {"device": f"{machine.device} {name}", "toy": machine.toy}, judges=not machine.toy)
        for part in options.parts:
            begun = time.perf_counter()
            report.part, (run, _) = part, PARTS[part]
            machine.deadline = min(begun + options.budgets[part], started + options.limit_s)
            if machine.left() < 5:
                report.note("the whole part", "left out: no time left")
                continue
            try:
                run(machine, report)
            except Exception as error:  # noqa: BLE001  the machine is lent for minutes: what fails must not cost the rest
                traceback.print_exc()
                report.note("failed", f"{type(error).__name__}: {error}".splitlines()[0], traceback=traceback.format_exc())
            machine.tidy()
            report.close_part(time.perf_counter() - begun)
    rows = report.results["rows"]
    wrong = [row for row in rows if row["what"] == "failed" or (row["part"] == "E1" and row.get("met") is False)]
    if wrong:
        raise SystemExit("Failed: " + "; ".join(f"{row['part']} {row['what']}" for row in wrong))


if __name__ == "__main__":
    main()
