"""Whatever moment a process dies at, the directory stays right: nothing wrong is read, nothing acknowledged is lost.

Children (worker.py) are killed at every call to the operating system, at every system call, and at random; then a new DiskTier
is opened on what they left and held against what they had written into their logs.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.disk import store
from tests.disk.worker import LARGE, Job, Step, Workers, get, lines_of, modes_of, names_of, report, sequence, unverified_read
from tiered_cache.errors import ConfigError
from tiered_cache.tiers.disk import DiskTier
from tiered_cache.tiers.disk.finder import Finder

OURS = {"CACHEDIR.TAG", "lock"}  # files that stay when all is cleared


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


# --- what must hold -----------------------------------------------------------------------------------------------------------


@dataclass
class Oracle:
    """What logs say of a directory: which sequences were begun, and how much of each was acknowledged, by kind of piece."""

    window: int = 0
    tried: set[tuple[str, int, int]] = field(default_factory=set)
    acknowledged: dict[tuple[str, int, int], dict[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # whatever a process ended with that nobody killed
    refusals: list[str] = field(default_factory=list)  # OSErrors that the tier raised

    def learn(self, log: str | Path) -> None:
        """Take in what a process wrote down."""
        for kind, *words in lines_of(log):
            if kind in ("try", "ack"):
                which = words[0], int(words[1]), int(words[2])
                if kind == "try":
                    self.tried.add(which)
                else:
                    stored = self.acknowledged.setdefault(which, {})
                    stored[words[4]] = max(stored.get(words[4], 0), int(words[3]))
            elif kind == "failed":
                self.failures.append(Path(log).read_text())
            elif kind == "oserror":
                self.refusals.append(" ".join(words))

    def may_be_there(self) -> set[str]:
        """Return the names of all files of pieces that there may be."""
        return {
            name
            for namespace, *which in self.tried
            for name in names_of(store.branch(namespace=namespace, window=self.window), *which)
        }

    def wrong_reads(self, tier: DiskTier, which: Sequence[tuple[str, int, int]]) -> list[str]:
        """Read sequences; say of which there is less than was acknowledged, or a wrong byte."""
        wrong = []
        for each in which:
            namespace, number, length = each
            where = store.branch(namespace=namespace, window=self.window)
            try:
                found = get(tier, where, sequence(number, length))
            except AssertionError:
                wrong.append(f"wrong bytes in {each}")
                continue
            acknowledged = self.acknowledged.get(each, {})
            wanted = acknowledged.get("main", 0)
            if self.window:  # a main piece is of use once its side piece is there: until then the shorter block may serve
                found, wanted = (min(found), found[1]), min(wanted, acknowledged.get("side", 0))
            if found[0] < wanted:
                wrong.append(f"lost: {found} of {acknowledged} in {each}")
        return wrong


def problems_after(root: Path, oracle: Oracle) -> list[str]:
    """Open a directory that a process left when it died, use it in all ways, and say what is not as it must be."""
    problems = oracle.failures + oracle.refusals
    found = {path.name for path in store.files_under(root)}
    problems += [f"nobody wrote {name}" for name in found - oracle.may_be_there()]
    try:
        tier = DiskTier(root, LARGE, min_free=0)
    except ConfigError as error:
        return [*problems, f"cannot be opened: {error}"]
    problems += oracle.wrong_reads(tier, sorted(oracle.tried))
    tier.tidy()
    problems += [f"left over: {path}" for path in root.rglob(".tmp-*")]
    problems += [f"mode: {mode}" for mode in modes_of(root) - {"folder 700", "file 600"}]
    if tier.used_bytes != store.du(root):
        problems.append(f"{tier.used_bytes} bytes counted, {store.du(root)} used")
    if tier.corrupt_pieces:
        problems.append(f"{tier.corrupt_pieces} corrupt pieces")
    for namespace, number, length in sorted(oracle.tried):
        store.put(tier, store.branch(namespace=namespace, window=oracle.window), sequence(number, length))
    tier.tidy()
    again = Oracle(oracle.window, acknowledged={which: {"main": which[2]} for which in oracle.tried})
    problems += [f"stored again, {problem}" for problem in again.wrong_reads(tier, sorted(oracle.tried))]
    tier.clear()
    problems += [f"stays when all is cleared: {path}" for path in root.rglob("*") if path.name not in OURS]
    return problems


# --- at every call to the operating system ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A program to be killed in, and what comes before it. `keeps`: nothing that is acknowledged may be lost."""

    setup: list[Step]
    program: list[Step]
    keeps: bool = True
    block: int = 8
    window: int = 0
    durability: str = "process"


_SOME: list[Step] = [["open"], *(["put", "default", number, 11] for number in range(3)), ["put", "scratch", 0, 11]]

SCENES = {
    "new directory": Scene([], [["open"], ["put", "default", 0, 20]]),
    "existing directory": Scene(
        [["open"], ["put", "default", 0, 20], ["age", 100]],
        [["open"], ["put", "default", 0, 20], ["put", "default", 1, 11], ["put", "scratch", 4, 8], ["get", "default", 0, 20]],
    ),
    "power loss": Scene([["open"]], [["put", "default", 0, 20]], durability="crash"),
    "side pieces, pins and times": Scene(
        [["open"]],
        [["put", "default", 0, 11, 3600.0], ["put", "default", 4, 8, None, True], ["put", "default", 8, 8, 3600.0, True]],
        window=8,
    ),
    "longer blocks": Scene(
        [["open"], ["put", "default", 0, 20], ["put", "default", 0, 60]],
        [["put", "default", 0, 24], ["put", "default", 0, 32], ["put", "default", 0, 64]],
        block=32,
        window=32,
    ),
    "other times": Scene(
        [["open"], ["put", "default", 0, 11, 3600.0], ["put", "default", 4, 8, 3600.0, True], ["put", "default", 8, 8]],
        [["put", "default", 0, 11], ["put", "default", 4, 8, 9000.0], ["put", "default", 8, 8, 3600.0]],
    ),
    "eviction": Scene(
        [*_SOME, ["put", "default", 9, 11, None, True], ["age", 100]],
        [["open", 120_000], ["put", "default", 20, 11], ["put", "default", 21, 11], ["tidy"]],
        keeps=False,
    ),
    "tidying": Scene(
        [["travel", -7200], *_SOME, ["put", "default", 9, 11, 3600.0], ["travel", 7200], ["litter"]], [["open"], ["tidy"]]
    ),
    "clearing": Scene([*_SOME, ["put", "default", 9, 11, None, True]], [["open"], ["clear"]], keeps=False),
    "clearing a namespace": Scene(
        _SOME, [["open"], ["clear", "scratch"], ["put", "scratch", 0, 11], ["clear", "default"]], keeps=False
    ),
}


def job_of(scene: Scene, folder: Path, conditions: Sequence[str] = (), kill: tuple[int, str] | None = None) -> Job:
    """Return a job in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Job(
        root=str(folder / "kv"),
        log=str(folder / "log"),
        program=scene.program,
        setup=scene.setup,
        conditions=list(conditions),
        kill=kill,
        durability=scene.durability,
        block=scene.block,
        window=scene.window,
    )


def problems_of(scene: Scene, job: Job, code: int) -> list[str]:
    """Say what is wrong with what a job left."""
    oracle = Oracle(scene.window)
    oracle.learn(job.log)
    if not scene.keeps:
        oracle.acknowledged.clear()
    if code not in (0, -signal.SIGKILL):
        oracle.failures.append(f"exit code {code}")
    if not Path(job.root).exists() and not oracle.acknowledged:
        return oracle.failures + oracle.refusals
    return problems_after(Path(job.root), oracle)


def kill_everywhere(
    workers: Workers, scene: Scene, folder: Path, when: str, conditions: Sequence[str] = (), step: int = 1
) -> tuple[int, list[str]]:
    """Kill a program at its first call to the operating system, and at each `step`-th after it, until it ends by itself.

    Returns:
        How many calls it made, and all that was wrong with what it left.
    """
    problems: list[str] = []
    for number in range(1, 10_000, step):
        job = job_of(scene, folder, conditions, (number, when))
        code = workers.run(job)
        problems += [f"{when} call {number}: {problem}" for problem in problems_of(scene, job, code)]
        if code != -signal.SIGKILL:
            return sum(int(words[1]) for words in lines_of(job.log) if words[0] == "done"), problems
    raise AssertionError("the program never ended by itself")


@pytest.fixture
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    found = SCENES[request.param]
    monkeypatch.setattr(store, "BLOCK", found.block)  # for the side that reads
    return found


def scenes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", names or SCENES, indirect=True)


TEMPS = pytest.mark.parametrize("temps", [pytest.param([], id="nameless"), pytest.param(["named"], id="named")])


@TEMPS
@pytest.mark.parametrize(
    ("when", "step"),
    [
        ("after", 7),
        ("partial", 1),
        pytest.param("before", 1, marks=pytest.mark.slow),
        pytest.param("after", 1, marks=pytest.mark.slow),
    ],
)
@scenes()
def test_killed_at_every_call(workers: Workers, tmp_path: Path, scene: Scene, when: str, step: int, temps: list[str]) -> None:
    num_calls, problems = kill_everywhere(workers, scene, tmp_path / "x", when, temps, step)
    report(f"{when} every {step}. of {num_calls} calls")
    assert not problems, "\n".join(problems[:10])
    assert num_calls > 50 or when == "partial"


def test_control_writing_in_place_is_noticed(workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = SCENES["existing directory"]
    _, problems = kill_everywhere(workers, scene, tmp_path / "x", "after", ["in_place"], 3)
    assert any("corrupt pieces" in problem for problem in problems)
    assert not any("wrong bytes" in problem for problem in problems)

    monkeypatch.setattr(Finder, "read", unverified_read)
    _, problems = kill_everywhere(workers, scene, tmp_path / "x", "after", ["in_place"], 3)
    assert any("wrong bytes" in problem for problem in problems)


def test_control_acknowledging_too_early_is_noticed(workers: Workers, tmp_path: Path) -> None:
    _, problems = kill_everywhere(workers, SCENES["existing directory"], tmp_path / "x", "after", ["ack_early"], 3)
    assert any("lost" in problem for problem in problems)


# --- at every system call that changes something ------------------------------------------------------------------------------

SYSTEM_CALLS = (
    "openat", "write", "pwrite64", "linkat", "link", "unlink", "unlinkat", "rename", "mkdir", "rmdir", "chmod", "utimensat",
    "fdatasync", "flock",
)  # fmt: skip


@pytest.fixture(scope="module")
def strace() -> str:
    found = shutil.which("strace")
    if found is None or subprocess.run([found, "-qq", "-e", "trace=none", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace is not installed, or may not trace")
    return found


def run_traced(workers: Workers, strace: str, job: Job, system_call: str, number: int) -> int:
    """Run a job until its `number`-th system call of a kind. That one is not carried out."""
    job.program = [["await_tracer"], *job.program]
    pid = workers.start(job)
    inject = f"inject={system_call}:signal=SIGKILL:when={number}"
    traced = subprocess.run(
        [strace, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={system_call}", "-e", inject, "-p", str(pid)],
        capture_output=True,
        check=False,
    )
    if traced.returncode:
        os.kill(pid, signal.SIGKILL)
    code = workers.wait(pid)
    assert not traced.returncode, traced.stderr
    return code


@TEMPS
@pytest.mark.parametrize("most", [1, pytest.param(1000, marks=pytest.mark.slow)])
@scenes("new directory", "power loss", "eviction", "clearing")
def test_killed_at_every_system_call(
    workers: Workers, strace: str, tmp_path: Path, scene: Scene, temps: list[str], most: int
) -> None:
    problems = []
    kills = 0
    for system_call in SYSTEM_CALLS:
        for number in range(1, most + 1):
            job = job_of(scene, tmp_path / "x", temps)
            code = run_traced(workers, strace, job, system_call, number)
            problems += [f"{system_call} {number}: {problem}" for problem in problems_of(scene, job, code)]
            if code != -signal.SIGKILL:
                break
            kills += 1
    report(f"{kills} kills")
    assert not problems, "\n".join(problems[:10])
    assert kills >= 4


# --- at random, many times in one directory -----------------------------------------------------------------------------------

NUMBERS, LENGTHS = 300, (8, 20, 31, 32, 50, 64, 70)  # of the sequences that are stored


class Loops:
    """Kills two writers, a reader and a collector on one directory, again and again, and looks at what they left."""

    def __init__(self, workers: Workers, folder: Path, capacity: int) -> None:
        self.workers = workers
        self.root, self.folder = folder / "kv", folder
        self.capacity = capacity
        self.choose = random.Random(capacity)
        self.oracle = Oracle(window=32)
        self.new = Oracle(window=32)  # of the last loop
        self.kills = self.loops = self.acknowledged = self.reads = self.refusals = 0
        self.highest_share = 0.0

    @property
    def evicts(self) -> bool:
        return self.capacity != LARGE

    def loop(self) -> list[str]:
        """Start all, kill each at a time of its own, and return what is wrong then."""
        self.loops += 1
        seed = self.choose.randrange(1 << 30)
        stored = [] if self.evicts else self._stored()
        programs: list[Step] = [
            ["write", seed, NUMBERS, LENGTHS],
            ["write", seed + 1, NUMBERS, LENGTHS],
            ["watch", seed + 2, NUMBERS, LENGTHS, self.choose.sample(stored, min(len(stored), 50))],
            ["collect", seed + 3],
        ]
        logs = [self.folder / f"log{number}" for number in range(len(programs))]
        logs[0].touch()
        pids = [
            self.workers.start(
                Job(
                    root=str(self.root),
                    log=str(log),
                    program=[["open", self.capacity], program],
                    conditions=["named"] if self.loops % 2 else [],
                    block=32,
                    window=32,
                )
            )
            for log, program in zip(logs, programs, strict=True)
        ]
        begun = time.monotonic()
        while self.loops % 5 and not logs[0].stat().st_size and time.monotonic() < begun + 2.0:
            time.sleep(0.001)  # in one loop of five they die while they open the directory
        begun = time.monotonic()
        for wait_s, pid in sorted((self.choose.uniform(0.002, 0.1), pid) for pid in pids):
            time.sleep(max(0.0, begun + wait_s - time.monotonic()))
            os.kill(pid, signal.SIGKILL)
        codes = [self.workers.wait(pid) for pid in pids]
        self.kills += codes.count(-signal.SIGKILL)
        self.new = Oracle(window=32)
        for log in logs:
            self.new.learn(log)
            self.oracle.learn(log)
            log.unlink(missing_ok=True)
        self.acknowledged += len(self.new.acknowledged)
        self.refusals += len(self.new.refusals)
        problems = [*self.new.failures, *(f"exit code {code}" for code in codes if code != -signal.SIGKILL)]
        return [f"loop {self.loops}: {problem}" for problem in problems + self.look()]

    def _stored(self) -> list[tuple[int, int]]:
        """Return what must be there to be read: all of it was acknowledged."""
        return [
            (number, length)
            for (namespace, number, length), stored in self.oracle.acknowledged.items()
            if namespace == "default" and stored.get("main") == stored.get("side") == length
        ]

    def look(self, *, at_all: bool = False) -> list[str]:
        """Open the directory as the next process would, and return what is wrong with it."""
        used = store.du(self.root)
        self.highest_share = max(self.highest_share, used / self.capacity)
        found = {path.name for path in store.files_under(self.root)}
        problems = [f"nobody wrote {name}" for name in found - self.oracle.may_be_there()]
        tier = DiskTier(self.root, self.capacity, min_free=0)
        judge = Oracle(32, acknowledged={} if self.evicts else self.oracle.acknowledged)
        judge.acknowledged = {which: stored for which, stored in judge.acknowledged.items() if which[0] != "scratch"}
        known = sorted(self.oracle.tried)
        some = known if at_all else sorted(self.new.tried | set(self.choose.sample(known, min(len(known), 30))))
        problems += judge.wrong_reads(tier, some)
        self.reads += len(some)
        never = [("default", number, 20) for number in range(NUMBERS, NUMBERS + 12, 4)]
        problems += [f"found {which}" for which in never if get(tier, store.branch(window=32), sequence(*which[1:])) != (0, 0)]
        if tier.corrupt_pieces:
            problems.append(f"{tier.corrupt_pieces} corrupt pieces")
        if at_all or self.loops % 10 == 0:
            tier.tidy()
            problems += [f"left over: {path}" for path in self.root.rglob(".tmp-*")]
            problems += [f"mode: {mode}" for mode in modes_of(self.root) - {"folder 700", "file 600"}]
            if tier.used_bytes != store.du(self.root) or store.du(self.root) > self.capacity:
                problems.append(f"{tier.used_bytes} bytes counted, {store.du(self.root)} used")
        return problems

    def start_afresh_when_full(self) -> None:
        """Clear the directory when there is little left to write."""
        if len(self.oracle.acknowledged) > NUMBERS * len(LENGTHS) * 0.8:
            DiskTier(self.root, self.capacity, min_free=0).clear()
            self.oracle = Oracle(window=32)


@pytest.mark.parametrize("capacity", [LARGE, 2 << 20], ids=["roomy", "evicting"])
@pytest.mark.parametrize("loops", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_at_random(workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int, loops: int) -> None:
    monkeypatch.setattr(store, "BLOCK", 32)
    run = Loops(workers, tmp_path, capacity)
    problems = []
    for _ in range(loops):
        problems += run.loop()
        run.start_afresh_when_full()
        assert len(problems) < 10, "\n".join(problems)
    problems += run.look(at_all=True)
    report(
        f"{run.kills} kills in {loops} loops, {run.acknowledged} sequences acknowledged, {run.reads} checked, "
        f"{run.refusals} refused, highest {run.highest_share:.1%}"
    )
    assert not problems, "\n".join(problems[:10])
    assert run.kills == loops * 4
    assert run.highest_share <= 1.1
