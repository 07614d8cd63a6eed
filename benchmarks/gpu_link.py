"""The parts of `gpu_check` that need no model: how fast bytes move, and whether they are right when everything comes late."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu_machine import GIB, Machine, Report
from benchmarks.pairs import measure, ratio, summary
from tiered_cache.blocks import BlockLayout, SequenceLayout, Strip
from tiered_cache.devices.base import Device, Event, Lane
from tiered_cache.keys import MAIN
from tiered_cache.port import SequencePort
from tiered_cache.tiers.base import Part

BLOCK_TOKENS = 256
RUN_NBYTES = 128 << 20  # of blocks in one load(), as the stack has it
ROUNDS = 7


def probe(machine: Machine, report: Report) -> None:
    """E0: block sizes one by one, then the way K/V really go."""
    for lane in Lane:
        rate = machine.link_rate(lane)
        report.row(f"{lane.value}, one large pinned copy", rate / 1e9, unit=" GB/s")
    for lane in Lane:
        for size in machine.pick([4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20], [4 << 10, 64 << 10]):
            _probe_size(machine, report, lane, size)
    _probe_both(machine, report)
    for lane in Lane:
        machine.tidy()
        _probe_path(machine, report, lane)


def _probe_size(machine: Machine, report: Report, lane: Lane, size: int) -> None:
    mover = machine.mover
    count = machine.pick(max(8, min(1024, (256 << 20) // size)), 8)
    host, local = mover.allocate("host", size * count), mover.allocate("device", size * count)
    pageable = torch.zeros(size * count, dtype=torch.uint8)
    host.zero_()
    blocks = [slice(place * size, (place + 1) * size) for place in range(count)]

    def plain(memory: torch.Tensor) -> Callable[[], None]:
        source, target = (memory, local) if lane is Lane.UP else (local, memory)

        def copies() -> None:
            for block in blocks:
                target[block].copy_(source[block], non_blocking=True)

        return copies

    def ours() -> None:
        source, target = (host, local) if lane is Lane.UP else (local, host)
        after, done = [mover.mark()], mover.mark()
        for block in blocks:
            done = mover.copy(lane, source[block], target[block], after)
            after = []  # a lane keeps its order
        done.order()

    ways = {"pinned": plain(host), "ours": ours, "pageable": plain(pageable)}
    each = {name: _per_gib(machine, size * count, way) for name, way in ways.items()}
    times = measure(each, machine.rounds(ROUNDS, 0.2))
    what = f"{lane.value}, copies of {size >> 10:,} KiB"
    for name, values in times.items():
        report.row(f"{what}: {name}", _rates(values), unit=" GB/s")
    large = GIB / machine.link_rate(lane)
    report.row(f"{what}: ours / one large copy", summary([large / value for value in times["ours"]]), raw=times)


def _probe_both(machine: Machine, report: Report) -> None:
    """Both directions at once: what a spilled layer's way up costs the commit's way down."""
    mover, nbytes = machine.mover, machine.pick(GIB // 2, 1 << 20)
    up, down = ([mover.allocate(where, nbytes) for where in ("host", "device")] for _ in range(2))

    def both() -> None:
        after = [mover.mark()]
        done = [mover.copy(Lane.UP, up[0], up[1], after), mover.copy(Lane.DOWN, down[1], down[0], after)]
        for event in done:
            event.order()

    values = measure({"both": _per_gib(machine, 2 * nbytes, both)}, machine.rounds(ROUNDS, 0.1))["both"]
    report.row("both ways at once, sum", _rates(values), unit=" GB/s")


def _probe_path(machine: Machine, report: Report, lane: Lane) -> None:
    """Whole blocks of the 8B shape: copied, copied and put into (taken from) the layers, and as a simple loop would."""
    mover = machine.mover
    layers, heads, width = machine.pick((32, 8, 128), (2, 2, 16))
    tokens, blocks = machine.pick((BLOCK_TOKENS, 16), (8, 4))
    tensors = [
        torch.randn(1, heads, blocks * tokens, width, dtype=torch.bfloat16, device=machine.device) for _ in range(2 * layers)
    ]
    layout = _layout(tensors, machine.device)
    nbytes = layout.nbytes(MAIN, tokens)
    buffers = [mover.allocate("host", nbytes) for _ in range(blocks)]
    large, local = mover.allocate("host", blocks * nbytes), mover.allocate("device", blocks * nbytes)
    for buffer in (*buffers, large):
        buffer.zero_()

    def one_copy() -> None:
        source, target = (large, local) if lane is Lane.UP else (local, large)
        mover.copy(lane, source, target, [mover.mark()]).order()

    def block_copies() -> None:
        after = [mover.mark()]
        for place, buffer in enumerate(buffers):
            there = local[place * nbytes : (place + 1) * nbytes]
            done = mover.copy(lane, *((buffer, there) if lane is Lane.UP else (there, buffer)), after)
        done.order()

    def path() -> None:
        port = SequencePort(layout, {MAIN: Strip(tuple(tensors))}, slice(0, 1), 0, mover)
        _move(port, lane, buffers, tokens, nbytes)

    naive_blocks = min(blocks, 4)
    on_host = large[: naive_blocks * nbytes].view(torch.bfloat16).view(2 * layers, heads, naive_blocks * tokens, width)

    def naive() -> None:
        for layer, tensor in enumerate(tensors):
            for head in range(heads):
                for start in range(0, naive_blocks * tokens, tokens):
                    there, here = tensor[0, head, start : start + tokens], on_host[layer, head, start : start + tokens]
                    source, target = (here, there) if lane is Lane.UP else (there, here)
                    target.copy_(source, non_blocking=True)

    total = blocks * nbytes
    times = measure(
        {
            "one": _per_gib(machine, total, one_copy),
            "blocks": _per_gib(machine, total, block_copies),
            "path": _per_gib(machine, total, path),
            "naive": _per_gib(machine, naive_blocks * nbytes, naive),
        },
        machine.rounds(ROUNDS, 0.4),
    )
    what = f"{lane.value}, blocks of {nbytes / (1 << 20):,.3g} MiB"
    kind = "scattered" if lane is Lane.UP else "gathered"
    labels = {"one": "as one pinned copy", "blocks": "ours", "path": f"ours, {kind}", "naive": "a layer, a head"}
    for name, label in labels.items():
        report.row(f"{what}: {label}", _rates(times[name]), unit=" GB/s")
    report.row(f"{what}: ours / one pinned copy", ratio(times, "one", "blocks"), ">= 0.90", raw=times)
    report.row(f"{what}: ours, {kind} / one pinned copy", ratio(times, "one", "path"), ">= 0.85")
    report.row(f"{what}: ours, {kind} / a layer, a head", ratio(times, "naive", "path"), ">= 4")


def _move(port: SequencePort, lane: Lane, buffers: Sequence[torch.Tensor], tokens: int, nbytes: int) -> None:
    """Bring blocks up into the layers, or down from them, as the stack does; what the current stream does next comes after."""
    if lane is Lane.DOWN:
        for place, buffer in enumerate(buffers):
            done = port.save(MAIN, place * tokens, tokens, [buffer])
        done.order()
        return
    run = max(1, RUN_NBYTES // nbytes)
    for first in range(0, len(buffers), run):
        parts = [Part(buffer, tokens, tokens) for buffer in buffers[first : first + run]]
        port.load(MAIN, first * tokens, parts)  # the layers are written on the current stream


def _layout(tensors: Sequence[torch.Tensor], device: torch.device) -> SequenceLayout:
    return SequenceLayout(BlockLayout.of(tensors, device), BlockLayout.of([], device), 0)


def _per_gib(machine: Machine, nbytes: int, work: Callable[[], None]) -> Callable[[int], float]:
    """Return a contestant for `measure`: seconds per GiB, so that those who move different amounts compare."""
    return lambda _: machine.seconds(work) / nbytes * GIB


def _rates(values: Sequence[float]) -> dict[str, float]:
    return summary([GIB / value / 1e9 for value in values])


# --- E1, the part of it without a model -----------------------------------------------------------------------------


def torture(machine: Machine, report: Report) -> None:
    """Save and load while every stream is late, and all memory that is given back is overwritten at once."""
    rounds, dice = machine.pick(500, 20), random.Random(0)  # noqa: S311
    wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
    for done in range(rounds):
        if machine.left() < 1:
            rounds = done
            break
        wrong += _torture_once(machine, dice)
    report.row(f"stream torture, {rounds} rounds: tensors that differ", int(wrong), "<= 0", rounds=rounds)


def _torture_once(machine: Machine, dice: random.Random) -> torch.Tensor:
    """Return how many tensors came back with other bytes."""
    mover = machine.mover
    heads, width, tokens, tail = 4, 64, 32, dice.randrange(1, 32)
    length, first_column = 3 * tokens + tail, dice.randrange(4)
    shape = (1, heads, first_column + length, width)
    expected = [torch.randn(shape, dtype=torch.bfloat16, device=machine.device) for _ in range(8)]
    layout = _layout(expected, machine.device)

    machine.delay(dice.uniform(0, 0.4))  # the model is still computing what is to be saved
    sources = [tensor.clone() for tensor in expected]
    port = SequencePort(layout, {MAIN: Strip(tuple(sources))}, slice(0, 1), first_column, mover)
    _delay_lane(machine, Lane.DOWN, dice)
    sizes = [tokens] * 3 + [tail]
    starts = [place * tokens for place in range(4)]
    buffers = [mover.allocate("host", layout.nbytes(MAIN, size)) for size in sizes]
    for buffer in buffers:
        buffer.fill_(0xFF)
    local = mover.allocate("device", layout.nbytes(MAIN, tail))  # the last piece goes to a device tier as well
    copies = [[buffer] for buffer in buffers[:3]] + [[buffers[3], local]]
    saved = [port.save(MAIN, *piece) for piece in zip(starts, sizes, copies, strict=True)]
    saved[-1].order()
    for tensor in sources:
        tensor.fill_(float("nan"))
    del sources, port, copies
    _churn(machine, dice)
    for event in saved:
        event.wait()

    machine.delay(dice.uniform(0, 0.4))  # something is still reading where the K/V will be
    targets = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=machine.device) for _ in range(8)]
    port = SequencePort(layout, {MAIN: Strip(tuple(targets))}, slice(0, 1), first_column, mover)
    _delay_lane(machine, Lane.UP, dice)
    pieces = [Part(buffer, tokens, tokens) for buffer in buffers[:3]]
    pieces.append(Part(dice.choice([local, buffers[3]]), tail, tail))
    # A run at once; or one by one, and then the second staging buffer is needed again while the first load is still late.
    runs = dice.choice([[pieces[:3], pieces[3:]], [[piece] for piece in pieces]])
    loaded, start = [], 0
    for run in runs:
        loaded.append(port.load(MAIN, start, run))
        start += sum(part.take for part in run)
        machine.delay(dice.uniform(0, 0.2))
    del buffers, port, local, pieces, runs, run  # what a lane still reads must not be given out again
    _churn(machine, dice)
    differ = [
        (target[:, :, first_column:].view(torch.int16) != tensor[:, :, first_column:].view(torch.int16)).any()
        for target, tensor in zip(targets, expected, strict=True)
    ]
    for event in loaded:
        event.wait()
    return torch.stack(differ).sum()


def _delay_lane(machine: Machine, lane: Lane, dice: random.Random) -> Event:
    milliseconds = dice.uniform(0, 0.4)
    return machine.mover.run(lane, lambda: machine.delay(milliseconds), reads=[], writes=[])


def _churn(machine: Machine, dice: random.Random) -> None:
    """Take memory of both kinds, in sizes that were just given back, and overwrite it."""
    mover: Device = machine.mover
    taken: list[Any] = []
    for _ in range(6):
        nbytes = dice.choice([1, 2, 3, 4]) * 8 * 4 * 64 * 32 * 2
        taken.append(mover.allocate("host", nbytes).fill_(0xFF))
        taken.append(torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=machine.device))
