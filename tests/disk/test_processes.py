"""Any number of processes share a directory: nothing wrong is read, the capacity is kept, and nothing is left over."""

import json
import os
import shutil
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from tests.disk import store
from tests.disk.worker import LARGE, Job, Workers, encode_tokens_of, lines_of, modes_of, report, sequence
from tiered_cache.format import Name
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, calls

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


def assert_in_order(root: Path, capacity: int) -> None:
    """Assert that one tidying up leaves nothing over, and that the next process counts what `du` does."""
    tier = DiskTier(root, capacity, min_free=0)
    tier.tidy()
    assert tier.used_bytes == store.du(root) <= capacity
    assert not list(root.rglob(".tmp-*"))
    assert modes_of(root) <= {"folder 700", "file 600"}


# --- everything at once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditions", [[], ["named"], ["named", "no_locks"]], ids=["nameless", "named", "no locks"])
@pytest.mark.parametrize("operations", [400, pytest.param(25_000, marks=SLOW)])
def test_four_processes_at_random(workers: Workers, tmp_path: Path, operations: int, conditions: list[str]) -> None:
    root, capacity = tmp_path / "kv", 3 << 20
    logs = [tmp_path / f"log{number}" for number in range(4)]
    pids = [
        workers.start(
            Job(
                root=str(root),
                log=str(log),
                program=[["open", capacity], ["mix", seed, operations, 200]],
                conditions=conditions,
                window=8,
                timeout_s=1500,
            )
        )
        for seed, log in enumerate(logs)
    ]
    codes = [workers.wait(pid) for pid in pids]
    lines = [line for log in logs for line in lines_of(log)]
    assert codes == [0] * 4, "\n".join(log.read_text()[-2000:] for log, code in zip(logs, codes, strict=True) if code)
    assert [line for line in lines if line[0] == "corrupt"] == [["corrupt", "0"]] * 4
    refused = Counter((line[1], line[2]) for line in lines if line[0] == "oserror")
    done = sum((Counter(json.loads(" ".join(line[1:]))) for line in lines if line[0] == "operations"), Counter[str]())
    report(f"{done} refused {refused}")
    assert done["remove_all"]
    assert done["clear"]
    assert refused.total() < 0.05 * done.total()
    assert_in_order(root, capacity)


# --- the capacity -------------------------------------------------------------------------------------------------------------


def du_now(path: str) -> int:
    """Return what `du` would say of a directory that is written to meanwhile."""
    total = os.lstat(path).st_blocks * 512
    try:
        found = list(os.scandir(path))
    except OSError:
        return total
    for entry in found:
        try:
            total += (
                du_now(entry.path) if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_blocks * 512
            )
        except OSError:
            continue
    return total


def fill_from_four(
    workers: Workers, folder: Path, capacity: int, num_entries: int, conditions: list[str]
) -> tuple[float, float]:
    """Have four processes write entries of 64 KiB; return the highest and the last share of the capacity that was used."""
    root = folder / "kv"
    DiskTier(root, capacity, min_free=0)
    each = num_entries // 4
    jobs = [
        Job(
            root=str(root),
            log=str(folder / f"log{number}"),
            program=[["open", capacity], ["fill", number * each, (number + 1) * each, 8]],
            conditions=conditions,
            width=7680,
            timeout_s=600,
        )
        for number in range(4)
    ]
    pids = [workers.start(job) for job in jobs]
    highest, samples = 0, 0
    until = time.monotonic() + jobs[0].timeout_s
    while not all(any(line[0] in ("done", "failed") for line in lines_of(job.log)) for job in jobs):
        assert time.monotonic() < until
        for _ in range(20):
            highest, samples = max(highest, du_now(str(root))), samples + 1
            time.sleep(0.002)
    assert [workers.wait(pid) for pid in pids] == [0] * 4, "\n".join(Path(job.log).read_text()[-2000:] for job in jobs)
    refused = Counter(line[2] for job in jobs for line in lines_of(job.log) if line[0] == "oserror")
    evicted = sum(int(line[1]) for job in jobs for line in lines_of(job.log) if line[0] == "evicted")
    report(f"{samples} samples, highest {highest / capacity:.1%}, {evicted} evicted, {refused} refused")
    return highest / capacity, store.du(root) / capacity


@pytest.mark.parametrize("temps", [[], ["named"]], ids=["nameless", "named"])
@pytest.mark.parametrize("capacity", [8 << 20, pytest.param(64 << 20, marks=SLOW)])
def test_capacity_is_kept(workers: Workers, tmp_path: Path, capacity: int, temps: list[str]) -> None:
    highest, last = fill_from_four(workers, tmp_path, capacity, 10 * capacity // (64 << 10), temps)
    assert 0.9 < highest <= 1.1
    assert last <= 1.0
    assert_in_order(tmp_path / "kv", capacity)


def test_control_no_collector_is_noticed(workers: Workers, tmp_path: Path) -> None:
    highest, _ = fill_from_four(workers, tmp_path, 4 << 20, 160, ["no_collector"])
    assert highest > 1.1


# --- two handles, in one process and across a fork ----------------------------------------------------------------------------


def test_two_handles_see_the_same_at_once(tmp_path: Path) -> None:
    where, left, right = store.branch(), DiskTier(tmp_path, LARGE, min_free=0), DiskTier(tmp_path, LARGE, min_free=0)
    for number in range(0, 80, 4):
        writer, reader = (left, right) if number % 8 else (right, left)
        tokens = sequence(number, 21)
        assert store.get(reader, where, tokens) == store.get(writer, where, tokens) == 0
        for length in (5, 8, 13, 21):
            store.put(writer, where, tokens[:length])
            assert store.get(reader, where, tokens[:length]) == length
        for folder in tmp_path.glob("*/*/*"):
            os.utime(folder, (0, 0))  # long ago: no reason to look again until this changes
        assert store.get(reader, where, sequence(number, 8)) == 8
        left.tidy()
        right.tidy()
        assert left.num_pieces == right.num_pieces
        assert left.used_bytes == right.used_bytes == store.du(tmp_path)


def test_what_one_handle_removes_is_a_miss_in_the_other(tmp_path: Path) -> None:
    left, right = DiskTier(tmp_path, LARGE, min_free=0), DiskTier(tmp_path, LARGE, min_free=0)
    default, scratch = store.branch(), store.branch(namespace="scratch")
    all_tokens = [sequence(number, 21) for number in range(0, 40, 4)]

    def fill() -> None:
        for tokens in all_tokens:
            for where in (default, scratch):
                store.put(left, where, tokens)
                assert store.get(right, where, tokens) == 21

    def found(where: Branch) -> list[int]:
        return [store.get(right, where, tokens) for tokens in all_tokens]

    fill()
    left.clear(namespace="scratch")
    assert found(scratch) == [0] * 10
    assert found(default) == [21] * 10
    left.clear()
    assert found(default) == [0] * 10
    fill()
    small = DiskTier(tmp_path, left.used_bytes // 2, min_free=0)
    small.tidy()
    assert small.evicted_pieces > 0
    assert sum(found(default)) + sum(found(scratch)) < 2 * 10 * 21
    assert sum(found(default)) + sum(found(scratch)) > 0
    assert (left.corrupt_pieces, right.corrupt_pieces) == (0, 0)


@pytest.mark.parametrize("call", ["rename", "link", "link_nameless"])
def test_what_is_stored_again_after_its_time_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    if call == "link":
        monkeypatch.setattr(calls, "TEMP_FILE", calls.NO_TEMP_FILE_FLAG)
    where, tier, other = store.branch(), DiskTier(tmp_path, LARGE, min_free=0), DiskTier(tmp_path, LARGE, min_free=0)
    store.put(tier, where, sequence(0, 8), Stay(ttl_s=0.01))
    time.sleep(0.02)
    real = getattr(calls, call)

    def then_sweep(*arguments: Any) -> None:
        real(*arguments)
        other.tidy()

    monkeypatch.setattr(calls, call, then_sweep)
    store.put(tier, where, sequence(0, 8))
    assert store.get(DiskTier(tmp_path, LARGE, min_free=0), where, sequence(0, 8)) == 8


def test_a_directory_that_a_lock_made_is_private_again_at_the_next_write(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    tier = DiskTier(root, LARGE, min_free=0)
    shutil.rmtree(root)
    filelock.FileLock(root / "lock", mode=0o600).acquire()  # as whoever collects at this moment does
    store.put(tier, store.branch(), sequence(0, 8))
    assert modes_of(root) == {"folder 700", "file 600"}
    assert_in_order(root, LARGE)


@pytest.mark.parametrize("temps", [[], ["named"]], ids=["nameless", "named"])
def test_a_handle_works_on_both_sides_of_a_fork(workers: Workers, tmp_path: Path, temps: list[str]) -> None:
    root, capacity, log = tmp_path / "kv", 1 << 20, tmp_path / "log"
    program = [["open", capacity], ["mix", 0, 100, 200, ["open", "remove_all"]], ["part", 1, 300]]
    code = workers.run(Job(root=str(root), log=str(log), program=program, conditions=temps, window=8))
    assert code == 0, log.read_text()[-3000:]
    lines = list(lines_of(log))
    assert [line for line in lines if line[0] == "corrupt"] == [["corrupt", "0"]] * 3
    assert ["done", "in", "child"] in lines
    assert_in_order(root, capacity)


# --- a large directory --------------------------------------------------------------------------------------------------------


def make_large(root: Path, where: Branch, num_entries: int) -> None:
    """Write files with valid names, in sequences of 20 blocks behind the root, and little in them."""
    folder = Path(store.files_under(root)[0].parents[1])
    keys = np.random.default_rng(0).bytes(num_entries * 16)
    parent = store.root_of(where)[:16]
    for byte in range(256):
        Path(folder, f"{byte:02x}").mkdir(0o700, exist_ok=True)
    for number in range(num_entries):
        key = keys[number * 16 : number * 16 + 16]
        if number % 20 == 0:
            parent = store.root_of(where)[:16]
        os.close(
            os.open(folder / parent[:1].hex() / str(Name(key, parent, 32, key[:4], False)), os.O_CREAT | os.O_WRONLY, 0o600)
        )
        parent = key


class Counted:
    """Counts the calls to the operating system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = Counter[str]()
        for name in calls.FAULTABLE:
            monkeypatch.setattr(calls, name, self._counting(name, getattr(calls, name)))

    def _counting(self, name: str, call: Any) -> Any:
        def wrapper(*arguments: Any) -> Any:
            self.calls[name] += 1
            return call(*arguments)

        return wrapper


@pytest.mark.parametrize("num_entries", [2000, pytest.param(100_000, marks=SLOW)])
def test_large_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_entries: int) -> None:
    monkeypatch.setattr(store, "BLOCK", 32)
    where, root, capacity = store.branch(), tmp_path / "kv", 1 << 40
    tokens = sequence(0, 90)
    siblings = [[*tokens[:20], *sequence(number, 12)] for number in range(4, 204, 4)]  # one head, 50 blocks
    writer = DiskTier(root, capacity, min_free=0)
    for each in (tokens, *siblings):
        store.put(writer, where, each)
    make_large(root, where, num_entries)

    begun = time.perf_counter()
    tier = DiskTier(root, capacity, min_free=0)
    opened = time.perf_counter()
    assert store.get(tier, where, tokens) == 90
    found = time.perf_counter()
    tier.tidy()
    tidied = time.perf_counter()
    tier.tidy()
    again = time.perf_counter()
    assert tier.num_pieces == num_entries + 3 + len(siblings)
    assert tier.used_bytes == store.du(root)
    report(f"{num_entries} entries: opened in {opened - begun:.4f} s, first lookup {found - opened:.4f} s, tidied in "
           f"{tidied - found:.2f} s, again in {again - tidied:.2f} s")  # fmt: skip

    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tier = DiskTier(root, capacity, min_free=0)
    tier.tidy()
    after, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report(f"{(after - before) / tier.num_pieces:.0f} bytes an entry, {(highest - before) / tier.num_pieces:.0f} at most")
    assert after - before <= 500 * tier.num_pieces + 256 * 2000  # folders

    counted = Counted(monkeypatch)
    lookups = [tokens, tokens, sequence(9, 70), siblings[3][:25], siblings[3][:25]]
    for number, each in enumerate(lookups):
        counted.calls.clear()
        blocks = tier.extend(where, store.root_of(where), encode_tokens_of(each), 32)
        report(f"lookup {number}: {sum(block.num_tokens for block in blocks)} tokens, {dict(counted.calls)}")
        assert counted.calls["open_to_read"] <= 16
        assert counted.calls.total() < 20 or number == 3  # there 16 headers are read
