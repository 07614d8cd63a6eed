"""What the parts of `gpu_check` share: the machine under test, how time is taken on it, random models, and the report.

Without an accelerator the CPU passes for one (`tiered_cache.testing.pretend_accelerator`): the same code at toy sizes, timed by
the wall clock, and figures that mean nothing.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.generation.streamers import BaseStreamer
from transformers.initialization import no_init_weights

from benchmarks.pairs import show, write
from tiered_cache import DeviceTier, DiskTier, HostTier, TierStack
from tiered_cache.devices.base import Device, Lane

GIB = 1 << 30
WRITE_EVERY_S = 5.0
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
Row = dict[str, Any]


class Clock(BaseStreamer):
    """Time between two points of the current stream; as a streamer of generate(), up to its first token."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._puts = 0
        self._points: list[Any] = []

    def start(self) -> "Clock":
        """Start once everything given before is done."""
        self._machine.settle()
        self._points = [self._point()]
        return self

    def stop(self) -> float:
        self._points.append(self._point())
        return self.seconds

    @property
    def seconds(self) -> float:
        first, last = self._points
        if self._machine.pretends:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self._points.append(self._point())

    def end(self) -> None:
        pass

    def _point(self) -> Any:
        if self._machine.pretends:
            return time.perf_counter()
        event = torch.Event(self._machine.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._machine.device))
        return event


class Machine:
    """The device, what is on it, and how much time is left.

    Args:
        device: where models are.
        mover: moves bytes to and from it.
        toy: whether sizes are toy sizes.
        folder: on the disk to be tested.
    """

    SHAPES: ClassVar[dict[str, Callable[[], PreTrainedConfig]]] = {
        "8B": lambda: LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=1 << 18,
        ),
        "0.6B": lambda: Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=1 << 18, tie_word_embeddings=True,
        ),
        "toy": lambda: LlamaConfig(
            vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096,
        ),
    }  # fmt: skip

    def __init__(self, device: torch.device, mover: Device, *, toy: bool, folder: Path) -> None:
        self.device = device
        self.mover = mover
        self.toy = toy
        self.folder = folder
        self.pretends = device.type == "cpu"
        self.deadline = time.perf_counter()
        self._models: dict[tuple[str, torch.dtype], Any] = {}
        self._link: dict[Lane, float] = {}
        self._room: int | None = None  # bytes left to K/V, where that can only be pretended

    # --- time -------------------------------------------------------------------------------------------------------

    def left(self) -> float:
        """Return the seconds left to this part."""
        return self.deadline - time.perf_counter()

    def rounds(self, wanted: int, cost: float) -> int:
        """Return how many of the `wanted` rounds of `cost` seconds this part has time for, at least one."""
        return max(1, min(2 if self.toy else wanted, int(self.left() / max(cost, 1e-6)) - 2))

    def seconds(self, work: Callable[[], object]) -> float:
        clock = Clock(self).start()
        work()
        return clock.stop()

    def wall(self, work: Callable[[], object]) -> float:
        """Return the seconds that something takes of this part's budget."""
        started = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - started

    def settle(self) -> None:
        """Wait for everything the device was given."""
        if not self.pretends:
            torch.accelerator.synchronize(self.device)

    def delay(self, milliseconds: float) -> None:
        """Keep the current stream busy for about so long."""
        if self.device.type == "cuda":
            torch.cuda._sleep(int(milliseconds * 1.8e6))  # cycles

    def link_rate(self, lane: Lane) -> float:
        """Return the bytes per second of one large pinned copy."""
        if lane not in self._link:
            one = [self.mover.allocate(where, self.pick(GIB, 1 << 20)) for where in ("host", "device")]
            source, target = one if lane is Lane.UP else one[::-1]
            source.zero_()  # memory that nobody touched is not there yet
            times = sorted(self.seconds(lambda: self.mover.copy(lane, source, target).order()) for _ in range(4))
            self._link[lane] = source.nbytes / times[1]
        return self._link[lane]

    # --- memory -----------------------------------------------------------------------------------------------------

    def pick(self, real: Any, toy: Any) -> Any:
        return toy if self.toy else real

    def tidy(self) -> None:
        """Give back what nobody uses any more."""
        self.settle()
        gc.collect()
        if not self.pretends:
            torch.accelerator.empty_cache()
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()  # a newer torch: what `offloading=True` pinned

    @contextlib.contextmanager
    def cramped(self, room: int) -> Iterator[None]:
        """Leave `room` bytes of device memory. A ballast and no limit of the allocator's: all contestants see what is free."""
        self.tidy()
        if self.pretends:
            self._room = room
            try:
                yield
            finally:
                self._room = None
            return
        ballast = torch.empty(max(self.mover.free_bytes() - room, 0), dtype=torch.uint8, device=self.device)
        try:
            yield
        finally:
            del ballast
            self.tidy()

    def check_room(self, nbytes: int) -> None:
        """Fail as the device would, where its memory can only be pretended."""
        if self._room is not None and nbytes > self._room:
            raise torch.OutOfMemoryError(f"{nbytes} bytes of K/V, and room for {self._room}")

    def stack(self, host: float, *, device: float = 0, disk: Path | None = None) -> TierStack:
        """Return a stack with so many bytes of host and of device memory, and a disk tier in a folder."""
        tiers: list[Any] = [DeviceTier(int(device))] if device else []
        tiers.append(HostTier(int(host) + self.pick(256 << 20, 8 << 20)))
        if disk is not None:
            tiers.append(DiskTier(disk, self.pick("40GiB", "64MiB")))
        return TierStack(*tiers)

    # --- models -----------------------------------------------------------------------------------------------------

    def model(self, shape: str, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Return a random model; the one before is let go."""
        if self.toy:
            shape, dtype = "toy", torch.float32
        if (shape, dtype) not in self._models:
            self._models.clear()
            self.tidy()
            torch.manual_seed(0)
            with torch.device(self.device), no_init_weights():
                model = AutoModelForCausalLM.from_config(self.SHAPES[shape](), dtype=dtype, attn_implementation="sdpa")
            model.tie_weights()
            with torch.no_grad():
                for weight in model.parameters():
                    _ = weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
            model.generation_config.pad_token_id = 0
            model.generation_config.eos_token_id = None
            self._models[shape, dtype] = model.eval()
        return self._models[shape, dtype]

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        """Return `[1, count]` random tokens that every model knows."""
        return torch.randint(3, 500, (1, count), generator=torch.Generator().manual_seed(seed)).to(self.device)

    def first_token(self, model: Any, ids: torch.Tensor, cache: Any) -> float:
        """Return the seconds from the call of generate() to its first token."""
        clock = Clock(self).start()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, do_sample=False, streamer=clock
        )
        return clock.seconds


def token_nbytes(model: Any) -> int:
    """Return the bytes of one token's K/V."""
    config = model.config
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)


class Report:
    """Results, printed as they come, and written as often: a run that is killed leaves what it had.

    Args:
        path: of the JSON.
        head: what is said of the whole run.
        judges: whether figures are held against their targets.
    """

    def __init__(self, path: Path, head: Row, *, judges: bool) -> None:
        self.part = ""
        self.results: dict[str, Any] = {**head, "seconds": {}, "rows": []}
        self._path = path
        self._judges = judges
        self._written = 0.0
        print("| part | what | measured | target | met |\n|---|---|---|---|---|", flush=True)

    def row(self, what: str, value: Any, target: str = "", unit: str = "", **data: Any) -> None:
        """Note a figure.

        Args:
            what: it is.
            value: a number, a summary, or words; None: it could not be measured.
            target: such as ">= 0.9", of the median.
            unit: of `value`.
            data: to be kept with it.
        """
        judges = self._judges or self.part == "E1"  # bytes are right or wrong at any size
        met = meets(value, target) if target and value is not None and judges else None
        self.results["rows"].append(
            {"part": self.part, "what": what, "value": value, "unit": unit, "target": target, "met": met, **data}
        )
        text = show(value, unit) if isinstance(value, dict) else "-" if value is None else f"{value:,.4g}{unit}"
        self._print(what, text, target, {True: "yes", False: "**no**", None: ""}[met])

    def note(self, what: str, words: str, **data: Any) -> None:
        """Note what is no figure: what was left out, and why."""
        self.results["rows"].append({"part": self.part, "what": what, "note": words, **data})
        self._print(what, words, "", "")

    def close_part(self, seconds: float) -> None:
        self.results["seconds"][self.part] = seconds
        self._write()

    def _print(self, *cells: str) -> None:
        print(f"| {self.part} | {' | '.join(cells)} |", flush=True)
        if time.perf_counter() > self._written + WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        write(self._path, self.results)
        self._written = time.perf_counter()


def meets(value: Any, target: str) -> bool:
    """Say whether a number, or the median of a summary, is what a target such as ">= 0.9" asks for."""
    number = value["median"] if isinstance(value, dict) else value
    sign, bound = target.split()[:2]
    return bool(number >= float(bound) if sign == ">=" else number <= float(bound))
