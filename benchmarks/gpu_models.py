"""The parts of `gpu_check` that generate: first tokens, decoding, overlap, how long a context and how many sessions fit."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.gpu_machine import OUT_OF_MEMORY, Clock, Machine, Report, token_nbytes
from benchmarks.pairs import measure, ratio, summary
from tiered_cache import TieredCache, TierStack
from tiered_cache.devices.base import Lane

SOONER = {4096: 8, 16384: 10, 65536: 15, 131072: 22}  # times, than recomputing, by tokens shared
SMALL_HOST = 1 << 30  # where a host tier is only on the way from the disk


def held_by(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.inference_mode()
def ready(model: Any, ids: torch.Tensor, cache: Any, start: int | None = None) -> Any:
    """Let a cache hold all of `ids`, what it does not find stored (or hold up to `start`) computed."""
    start = cache.restore(model, ids) if start is None else start
    model(ids[:, start:], past_key_values=cache, logits_to_keep=1)
    return cache


# --- E2, E7: time to first token ------------------------------------------------------------------------------------


def first_tokens(machine: Machine, report: Report) -> None:
    """E2."""
    sizes = machine.pick({4096: 7, 16384: 5, 65536: 2, 131072: 1}, {64: 2, 128: 1})
    _first_tokens(machine, report, "8B", sizes, machine.pick(64, 8), ("host", "disk"))


def small_model(machine: Machine, report: Report) -> None:
    """E7."""
    sizes = machine.pick({1024: 9, 4096: 9, 16384: 5}, {64: 2})
    _first_tokens(machine, report, "0.6B", sizes, machine.pick(64, 8), ("device", "host"))
    _decoding_at(machine, report, "0.6B", machine.pick(4096, 64))


def _first_tokens(
    machine: Machine, report: Report, shape: str, sizes: dict[int, int], new: int, tiers: tuple[str, ...]
) -> None:
    model = machine.model(shape)
    before, took = 0, 0.0
    for shared, rounds in sizes.items():
        expected = took * shared / before if before else 0.0  # longer ones make fewer rounds
        if machine.left() < max(expected, 1):
            report.note(f"first token, {shared:,} tokens", f"left out: {expected:.0f} s, and {machine.left():.0f} s left")
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=machine.folder) as folder:
            _first_token_of(machine, report, model, shape, shared, new, rounds, tiers, Path(folder))
        before, took = shared, time.perf_counter() - started
        machine.tidy()


def _first_token_of(
    machine: Machine, report: Report, model: Any, shape: str, shared: int, new: int, wanted: int, tiers: tuple[str, ...],
    folder: Path,
) -> None:  # fmt: skip
    what = f"{shape}, {shared:,} + {new} tokens"
    nbytes = token_nbytes(model) * (shared + 16 * (new + 256))
    prefix = machine.tokens(shared, 0)

    def prompt(round_: int, place: int = 0) -> torch.Tensor:  # of its own for whoever stores it
        return torch.cat([prefix, machine.tokens(new, 1000 * (place + 1) + round_)], dim=1)

    has_disk = "disk" in tiers
    # What waits to be written may take only a part of the host tier.
    stack = machine.stack(1.6 * nbytes, disk=folder if has_disk else None)
    started = time.perf_counter()
    machine.first_token(model, prompt(999), TieredCache(stack))
    cost = time.perf_counter() - started
    if has_disk and not stack.flush(timeout=max(5.0, machine.left() / 3)):
        report.note(f"{what}: disk", "left out: it was not written in time")
        has_disk = False
    resident = DynamicCache(held_by(ready(model, torch.cat([prefix, prefix[:, :1]], dim=1), TieredCache(stack))))
    resident.crop(-1)
    served: dict[str, list[dict[str, int]]] = {}

    def warm(name: str, round_: int, source: TierStack) -> float:
        cache = TieredCache(source)
        seconds = machine.first_token(model, prompt(round_, 1 + tiers.index(name)), cache)
        served.setdefault(name, []).append(cache.usage.cached_by_tier)
        return seconds

    def recompute(round_: int) -> float:
        if round_ < 0 and cost > 1:  # that was just done
            return 0.0
        return machine.first_token(model, prompt(round_), DynamicCache(config=model.config))

    def floor(round_: int) -> float:
        seconds = machine.first_token(model, prompt(round_), resident)
        resident.crop(-new)
        return seconds

    def from_disk(round_: int) -> float:
        with machine.stack(SMALL_HOST, disk=folder) as fresh:  # what was read once is in host memory
            return warm("disk", round_, fresh)

    contestants: dict[str, Callable[[int], float]] = {
        "recompute": recompute,
        "floor": floor,
        "host": lambda round_: warm("host", round_, stack),
    }
    if has_disk:
        contestants["disk"] = from_disk
    above = machine.stack(1.6 * nbytes, device=1.6 * nbytes) if "device" in tiers else None
    if above is not None:
        machine.first_token(model, prompt(999), TieredCache(above))
        contestants["device"] = lambda round_: warm("device", round_, above)
    seconds = measure(contestants, machine.rounds(wanted, 1.3 * cost))

    for name, values in seconds.items():
        report.row(f"{what}: {name}", summary([value * 1e3 for value in values]), unit=" ms", served=served.get(name))
    for name, of_calls in served.items():
        least = min(by_tier.get(name, 0) for by_tier in of_calls)
        report.row(f"{what}: tokens that came from {name}, at least", least, f">= {shared}")
    target = f">= {SOONER[shared]}" if shape == "8B" and shared in SOONER else ""
    report.row(f"{what}: recompute / host", ratio(seconds, "recompute", "host"), target, raw=seconds)
    for name in served.keys() - {"host"}:
        report.row(f"{what}: recompute / {name}", ratio(seconds, "recompute", name))
    fetch = token_nbytes(model) * shared / machine.link_rate(Lane.UP)
    bound = 1.15 * max(fetch, statistics.median(seconds["floor"])) + 0.010
    report.row(
        f"{what}: host, held against the slower of link and suffix", statistics.median(seconds["host"]) * 1e3,
        f"<= {bound * 1e3:.4g}", " ms", fetch_ms=fetch * 1e3,
    )  # fmt: skip
    stack.close()
    if above is not None:
        above.close()


# --- E3: decoding ---------------------------------------------------------------------------------------------------


def decoding(machine: Machine, report: Report) -> None:
    """E3."""
    for context in machine.pick((4096, 16384, 65536), (64,)):
        if machine.left() < machine.pick(context / 2000, 1):
            report.note(f"decoding, {context:,} tokens", f"left out: {machine.left():.0f} s left")
            continue
        _decoding_at(machine, report, "8B", context)
        machine.tidy()


@torch.inference_mode()
def _decoding_at(machine: Machine, report: Report, shape: str, context: int) -> None:
    model, mover = machine.model(shape), machine.mover
    what = f"{shape}, {context:,} tokens"
    ids, nbytes = machine.tokens(context, 0), token_nbytes(model) * context
    stack = machine.stack(1.3 * nbytes)
    machine.first_token(model, ids, TieredCache(stack))
    moved: dict[str, float] = {}

    def step(name: str, cache: Any, steps: int) -> Callable[[int], float]:
        def run(round_: int) -> float:
            fed, before = ids[:, :1], dict(mover.moved)
            clock = Clock(machine).start()
            for _ in range(steps):
                fed = model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
            seconds = clock.stop() / steps
            moved[name] = (mover.moved[Lane.UP] - before[Lane.UP]) / steps
            return seconds

        return run

    def ours(name: str, offload: Any) -> Callable[[int], float]:
        cache = ready(model, ids, TieredCache(stack, offload=offload))
        loose = [keys for keys, _ in held_by(cache) if keys.device != machine.device and not keys.is_pinned()]
        if not machine.pretends:
            report.row(f"{what}, {name}: layers in host memory that is not pinned", len(loose), "<= 0")
        return step(name, cache, 8)

    all_here = ready(model, ids, TieredCache(stack, offload=1.0))
    contestants = {"DynamicCache": step("DynamicCache", DynamicCache(held_by(all_here)), 8)}
    if not machine.pretends:  # it needs streams
        contestants["offloading=True"] = step("offloading=True", DynamicCache(held_by(all_here), offloading=True), 1)
    contestants["resident"] = step("resident", all_here, 8)
    for name, offload in (("share 0.5", 0.5), ("share 0", 0.0), ("auto", "auto")):
        contestants[name] = ours(name, offload)
    contestants["resident"](-2)
    rate = machine.link_rate(Lane.UP)
    share = max(0.0, 1 - 0.8 * contestants["resident"](-2) * rate / nbytes)  # what is spilled takes 0.8 of a step to come
    contestants["fits a step"] = ours("fits a step", share)
    cost = machine.wall(lambda: [run(-2) for run in contestants.values()])
    seconds = measure(contestants, machine.rounds(machine.pick(7, 2), cost))

    for name, values in seconds.items():
        report.row(f"{what}, a step: {name}", summary([value * 1e3 for value in values]), unit=" ms", moved_up=moved[name])
    at_64k = shape == "8B" and context == 65536
    if machine.pretends:
        report.row(f"{what}, a step: offloading=True", None)
    else:
        half = ratio(seconds, "offloading=True", "share 0.5")
        report.row(f"{what}: offloading=True / share 0.5", half, ">= 1.8" if at_64k else "", raw=seconds)
        report.row(f"{what}: offloading=True / share 0", ratio(seconds, "offloading=True", "share 0"))
    report.row(f"{what}: resident / DynamicCache", ratio(seconds, "resident", "DynamicCache"))
    report.row(f"{what}: auto / resident", ratio(seconds, "auto", "resident"), "<= 1.10")
    report.row(f"{what}: share {share:.2f}, which fits a step / resident", ratio(seconds, "fits a step", "resident"), "<= 1.10")
    for name in ("share 0.5", "share 0"):
        together = statistics.median(seconds[name])
        alone = statistics.median(seconds["resident"]), moved[name] / rate
        hidden = (sum(alone) - together) / min(alone) if alone[1] > alone[0] / 10 else None  # else there is nothing to hide
        report.row(f"{what}, a step: overlap efficiency, {name}", hidden)
    stack.close()


# --- E4: overlap ----------------------------------------------------------------------------------------------------


def overlap(machine: Machine, report: Report) -> None:
    """E4: (fetch + compute - both) / the shorter one of the two: 1 where it hides, 0 where one waits for the other."""
    model = machine.model("8B")
    for shared, new in machine.pick(((16384, 512), (16384, 2048), (65536, 2048)), ((64, 16),)):
        if machine.left() < machine.pick(shared / 3000, 1):
            report.note(f"overlap, {shared:,} + {new:,} tokens", f"left out: {machine.left():.0f} s left")
            continue
        _overlap_of(machine, report, model, shared, new)
        machine.tidy()


def _overlap_of(machine: Machine, report: Report, model: Any, shared: int, new: int) -> None:
    prefix = machine.tokens(shared, 0)

    def prompt(round_: int, place: int) -> torch.Tensor:  # of its own for whoever stores it
        return torch.cat([prefix, machine.tokens(new, 1000 * place + round_)], dim=1)

    stack = machine.stack(1.3 * token_nbytes(model) * (shared + 24 * (new + 256)))
    cost = machine.wall(lambda: machine.first_token(model, prefix, TieredCache(stack)))
    kept = TieredCache(stack)
    machine.first_token(model, prompt(999, 1), kept)
    served: dict[str, dict[str, int]] = {}

    def fetch(round_: int) -> float:
        cache, ids = TieredCache(stack), prompt(round_, 1)
        return machine.seconds(lambda: (cache.restore(model, ids), machine.settle()))

    def compute(round_: int) -> float:
        seconds = machine.first_token(model, prompt(round_, 2), kept)
        served["compute"] = kept.usage.cached_by_tier
        return seconds

    def both(round_: int) -> float:
        cache = TieredCache(stack)
        seconds = machine.first_token(model, prompt(round_, 3), cache)
        served["both"] = cache.usage.cached_by_tier
        return seconds

    seconds = measure({"fetch": fetch, "compute": compute, "both": both}, machine.rounds(9, cost))
    what = f"{shared:,} + {new:,} tokens"
    for name, values in seconds.items():
        report.row(f"{what}: {name}", summary([value * 1e3 for value in values]), unit=" ms", served=served.get(name))
    each = zip(seconds["fetch"], seconds["compute"], seconds["both"], strict=True)
    efficiency = summary([(one + other - together) / min(one, other) for one, other, together in each])
    report.row(f"{what}: overlap efficiency", efficiency, ">= 0.8", raw=seconds)
    stack.close()


# --- E5, E6: under a cap --------------------------------------------------------------------------------------------


def longest_context(machine: Machine, report: Report) -> None:
    """E5: a prefill in chunks and a few steps, in ever longer contexts, until memory runs out."""
    model = machine.model("0.6B")
    room, chunk = 64 * token_nbytes(model) if machine.pretends else 1 << 30, machine.pick(512, 32)
    stack = machine.stack(0)

    @torch.inference_mode()
    def run(cache: Any, count: int) -> None:
        ids = machine.tokens(count, 0)
        if isinstance(cache, TieredCache):
            cache.restore(model, ids)
        else:
            machine.check_room(token_nbytes(model) * count)
        for start in range(0, count, chunk):
            model(ids[:, start : start + chunk], past_key_values=cache, logits_to_keep=1)
        for _ in range(4):
            model(ids[:, :1], past_key_values=cache, logits_to_keep=1)
        machine.settle()

    kinds: dict[str, Callable[[], Any]] = {
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "ours": lambda: TieredCache(stack),
    }
    if not machine.pretends:
        kinds["offloading=True"] = lambda: DynamicCache(config=model.config, offloading=True)
    run(kinds["DynamicCache"](), chunk)  # what libraries allocate once is not K/V
    reached: dict[str, int] = {}
    for place, (name, make) in enumerate(kinds.items()):
        until = machine.left() * (1 - 1 / (len(kinds) - place))  # to be left for those that follow

        def fits(count: int, make: Callable[[], Any] = make) -> bool:
            try:
                with machine.cramped(room):
                    run(make(), count)
            except OUT_OF_MEMORY:
                return False
            return True

        reached[name], ended = _longest(machine, fits, machine.pick((4096, 131072), (32, 256)), until)
        text = f"longest context in {room / (1 << 20):,.3g} MiB: {name}{'' if ended else ', at least'}"
        report.row(text, reached[name], unit=" tokens", room=room)
    if "offloading=True" not in kinds:
        report.row("longest context: offloading=True", None)
    report.row("longest context: ours / DynamicCache", reached["ours"] / max(reached["DynamicCache"], 1), ">= 4")
    if reached.get("offloading=True"):
        report.row("longest context: ours / offloading=True", reached["ours"] / reached["offloading=True"])
    stack.close()


def _longest(machine: Machine, fits: Callable[[int], bool], span: tuple[int, int], until: float) -> tuple[int, bool]:
    """Return the longest context that fits, to an eighth of an octave, and whether time allowed to find its end."""
    low, high, most, took = 0, span[0], span[1], 0.0
    while high <= most:
        if machine.left() - 2.5 * took < until:
            return low, False
        started = time.perf_counter()
        if not fits(high):
            break
        took = time.perf_counter() - started
        low, high = high, 2 * high
    if high > most:
        return low, False
    for _ in range(3):
        if machine.left() - 2 * took < until:
            break
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, True


def sessions(machine: Machine, report: Report) -> None:
    """E6: how many chats keep their K/V, each of one turn, in a device's memory, and with host memory below it."""
    model = machine.model("0.6B")
    length, new = machine.pick((2048, 32), (64, 8))
    each = token_nbytes(model) * length
    room = 5 * each if machine.pretends else 2 << 30
    host, most = machine.pick(16 << 30, 64 << 20), machine.pick(64, 8)
    prompts = [machine.tokens(length, 1 + session) for session in range(most)]
    machine.first_token(model, prompts[0], DynamicCache(config=model.config))

    kept: list[Any] = []
    with machine.cramped(room):
        try:
            for prompt in prompts:
                machine.check_room(each * (len(kept) + 1))
                cache = DynamicCache(config=model.config)
                machine.first_token(model, prompt, cache)
                kept.append(cache)
        except OUT_OF_MEMORY:
            pass
        number = len(kept)
        kept.clear()
    report.row(f"chats of {length:,} tokens kept in {room / (1 << 20):,.4g} MiB: DynamicCache", number, unit=" chats")

    turns: dict[str, list[float]] = {"cold": [], "warm": []}
    warm = 0
    with machine.cramped(room), machine.stack(host, device=room // 4) as stack:
        begun = 0
        for prompt in prompts:
            if machine.left() < 3:
                break
            turns["cold"].append(machine.first_token(model, prompt, TieredCache(stack)))
            begun += 1
        for place, prompt in enumerate(prompts[:begun]):
            cache = TieredCache(stack)
            second = torch.cat([prompt, machine.tokens(new, 5000 + place)], dim=1)
            turns["warm"].append(machine.first_token(model, second, cache))
            warm += cache.usage.cached_tokens >= length - 1
    report.row(f"... ours, with {host / (1 << 20):,.5g} MiB of host memory, of {begun} begun", warm, unit=" chats", raw=turns)
    report.row("... a first turn", summary([value * 1e3 for value in turns["cold"]]), unit=" ms")
    report.row("... a second turn", summary([value * 1e3 for value in turns["warm"]]), unit=" ms")
    report.row("chats kept warm: ours / DynamicCache", warm / max(number, 1))
