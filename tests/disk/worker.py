"""What the child processes of the crash and process tests run, and how tests start them.

    python -m tests.disk.worker          starts the jobs that it reads from stdin, each in a fork of itself (see `Workers`)
    python -m tests.disk.worker JOB      runs one, given as JSON

A job writes what it does to a log, line by line, before it does the next: that is what a test may hold the directory against.
"""

import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import filelock
import numpy as np

from tests.disk import store
from tiered_cache.errors import CorruptEntryError
from tiered_cache.format import Name
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES, block_key, encode_tokens
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, StoredBlock, calls, collector, files
from tiered_cache.tiers.disk.finder import Finder

REPOSITORY = Path(__file__).resolve().parents[2]
LARGE = 1 << 30  # a capacity that nothing here reaches
FAILED = 3  # exit code of a job that raised what a disk tier does not raise

Step = list[Any]


@dataclass
class Job:
    """What a child process is to do.

    Attributes:
        root: of the disk tier.
        log: file to append to.
        program: steps, each the name of a method of `Program` with its arguments.
        setup: steps before anything is counted or killed.
        conditions: names of functions of `CONDITIONS`, put in place before the program.
        kill: the n-th call to the operating system not to survive, and "before", "after" or "partial" (a write) of it.
        durability, block, window, width: of the tier and its blocks.
        timeout_s: after which it is killed by SIGALRM.
    """

    root: str
    log: str
    program: list[Step]
    setup: list[Step] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    kill: tuple[int, str] | None = None
    durability: str = "process"
    block: int = 8
    window: int = 0
    width: int = 64
    timeout_s: int = 60


# --- sequences: all that a job stores follows from a number and a length ------------------------------------------------------


def sequence(number: int, length: int) -> list[int]:
    """Return the first `length` tokens of sequence `number`. Four neighbours share their first 8."""
    shared, own = random.Random(number // 4), random.Random(1_000_000 + number)
    return (shared.choices(range(1000), k=8) + own.choices(range(1000), k=max(length - 8, 0)))[:length]


@lru_cache(maxsize=1 << 16)
def names_of(where: Branch, number: int, length: int) -> frozenset[str]:
    """Return the names of all files that a sequence may have."""
    return frozenset(
        str(Name.of(block_key(parent, tokens), parent, tokens, is_side))
        for parent, tokens in store.blocks_of(where, sequence(number, length))
        for is_side in ((False, True) if where.window else (False,))
    )


def get(tier: DiskTier, where: Branch, token_ids: Sequence[int]) -> tuple[int, int]:
    """Read main and side pieces of a sequence, assert that every byte is right, and return how many tokens came of each."""
    length = store.get(tier, where, token_ids)
    side_length = 0
    if where.window:
        for block in tier.extend(where, store.root_of(where), encode_tokens_of(token_ids[:length]), store.BLOCK):
            if not block.has_side:
                break
            try:
                store.read(tier, where, block, SIDE)
            except (CorruptEntryError, FileNotFoundError):
                break
            side_length += block.num_tokens
    return length, side_length


def encode_tokens_of(token_ids: Sequence[int]) -> bytes:
    return encode_tokens(np.asarray(token_ids))


# --- what is done to a process before its program runs ------------------------------------------------------------------------


def arm(at: int, when: str) -> Callable[[], int]:
    """Kill this process at its `at`-th call to the operating system; return what tells how many there were."""
    numbers = itertools.count(1)
    last = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            nonlocal last
            if when == "partial" and name != "write":
                return call(*arguments)
            last = number = next(numbers)
            if number != at:
                return call(*arguments)
            try:
                if when == "partial":
                    descriptor, data = arguments
                    os.write(descriptor, data[: len(data) // 2])
                elif when == "after":
                    call(*arguments)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapper

    for name in calls.FAULTABLE:
        setattr(calls, name, counted(name, getattr(calls, name)))
    return lambda: last


def _named() -> None:
    """Do without files that have no name."""
    calls.TEMP_FILE = calls.NO_TEMP_FILE_FLAG


def _no_locks() -> None:
    """Have every lock let everybody pass."""

    class NoLock:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def acquire(self) -> None:
            pass

        release = acquire

    filelock.FileLock = NoLock  # type: ignore[assignment]
    calls.lock_temp = lambda fd: None


def _in_place() -> None:
    """Write files under their name, as whoever does not think of crashes would."""

    def publish(folder: str, name: str, parts: Sequence[memoryview], **_: object) -> int | None:
        path = Path(folder, name)
        if path.exists():
            return None
        with files.opened(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)) as fd:
            os.truncate(fd, sum(len(part) for part in parts))
            for part in parts:
                half = len(part) // 2
                for piece in (part[:half], part[half:]):
                    calls.write(fd, piece)
            return calls.used_bytes(os.fstat(fd))

    files.publish = publish


def unverified_read(self: Finder, branch: Branch, block: StoredBlock, kind: str, target: memoryview) -> None:
    """Stand in for `Finder.read` with what lies where the payload should be, whatever it is."""
    spec = branch.spec(block.parent, kind, len(block.tokens) // TOKEN_NBYTES)
    name = Name.of(block.key, block.parent, block.tokens, kind == SIDE)
    with files.opened(calls.open_to_read(f"{branch.shard(self._listing, block.parent).path}/{name}")) as fd:
        calls.read(fd, target, spec.header_nbytes)


def _no_collector() -> None:
    """Never look how full it is."""
    collector.Collector.make_room = lambda self, *_: None  # type: ignore[method-assign]


def _ack_early() -> None:
    """Acknowledge before it is stored."""
    Program.acknowledges_early = True


CONDITIONS = {function.__name__[1:]: function for function in (_named, _no_locks, _in_place, _no_collector, _ack_early)}


# --- programs -----------------------------------------------------------------------------------------------------------------


class Program:
    """Runs a job's steps. What a disk tier may raise, OSError, is written down and lived with; anything else ends it."""

    tier: DiskTier
    acknowledges_early = False

    def __init__(self, job: Job) -> None:
        self.job = job
        self.log = os.open(job.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.branches = {name: store.branch(job.width, namespace=name, window=job.window) for name in ("default", "scratch")}
        store.BLOCK = job.block

    def say(self, *words: object) -> None:
        os.write(self.log, (" ".join(map(str, words)) + "\n").encode())

    def run(self, steps: Sequence[Step]) -> None:
        for name, *arguments in steps:
            self.attempt(name, *arguments)

    def attempt(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self, name)(*arguments)
        except OSError as error:
            self.say("oserror", name, type(error).__name__, error)

    # Steps of which programs consist

    def open(self, capacity: int = LARGE) -> None:
        self.tier = DiskTier(self.job.root, capacity, self.job.durability, min_free=0)

    def put(self, namespace: str, number: int, length: int, ttl_s: float | None = None, pin: bool = False) -> None:
        where = self.branches[namespace]
        self.say("try", namespace, number, length)
        is_over = ttl_s is not None and calls.now() + ttl_s < time.time()
        stored = 0
        for parent, tokens in store.blocks_of(where, sequence(number, length)):
            stored += len(tokens) // TOKEN_NBYTES
            for kind in (MAIN, SIDE) if where.window else (MAIN,):
                if self.acknowledges_early:
                    self.say("ack", namespace, number, length, stored, kind)
                payload = memoryview(store.payload_of(where, parent, tokens, kind))
                self.tier.ensure(where, parent, kind, tokens, payload, Stay(ttl_s, pin), {"model": "test"})
                if not self.acknowledges_early and not is_over:
                    self.say("ack", namespace, number, length, stored, kind)

    def get(self, namespace: str, number: int, length: int, at_least: int = 0) -> None:
        found, _ = get(self.tier, self.branches[namespace], sequence(number, length))
        if found < at_least:  # a longer block may have taken its place between the lookup and the read: that is there now
            found, _ = get(self.tier, self.branches[namespace], sequence(number, length))
        assert found >= at_least, f"lost: {found} of {at_least} acknowledged tokens of {namespace} {number}"

    def tidy(self) -> None:
        self.tier.tidy()

    def clear(self, namespace: str | None = None) -> None:
        self.tier.clear(namespace=namespace)

    def remove_all(self) -> None:
        shutil.rmtree(self.job.root, ignore_errors=True)

    def age(self, seconds: float) -> None:
        """Have all pieces look as if they were not used for long."""
        for path in store.files_under(self.job.root):
            os.utime(path, (time.time() - seconds,) * 2)

    def travel(self, seconds: float) -> None:
        """Set the clock by which the tier goes."""
        calls.now = lambda: time.time() + seconds

    def litter(self) -> None:
        """Leave what processes leave that were killed while they wrote, and marks without a piece."""
        root = Path(self.job.root)
        for folder in (path for path in (root, *root.glob("*"), *root.glob("*/*/*")) if path.is_dir()):
            with files.opened(os.open(folder / f".tmp-{'0' * 24}", os.O_CREAT | os.O_WRONLY, 0o600)) as fd:
                os.write(fd, bytes(5000))
        for file in store.files_under(self.job.root):
            for suffix in (".pin", ".ttl"):
                Path(file.parent, "f" * 32 + suffix).touch(0o600)

    def await_tracer(self) -> None:
        """Wait until strace looks."""
        status = os.open("/proc/self/status", os.O_RDONLY)
        while b"TracerPid:\t0\n" in os.pread(status, 4096, 0):
            time.sleep(0.001)

    # Endless ones

    def write(self, seed: int, numbers: int, lengths: Sequence[int]) -> None:
        """Store sequences until killed."""
        choose = random.Random(seed)
        while True:
            namespace = choose.choices(("default", "scratch"), (4, 1))[0]
            self.attempt("put", namespace, choose.randrange(numbers), choose.choice(lengths))

    def watch(self, seed: int, numbers: int, lengths: Sequence[int], stored: Sequence[tuple[int, int]]) -> None:
        """Read sequences until killed. Of each of `stored` (number, length) there must be all."""
        choose = random.Random(seed)
        while True:
            if stored and choose.random() < 0.5:
                number, length = choose.choice(stored)
                self.attempt("get", "default", number, length, length)
            else:
                self.attempt("get", choose.choice(("default", "scratch")), choose.randrange(numbers), choose.choice(lengths))

    def collect(self, seed: int) -> None:
        """Tidy up, clear one namespace, and start anew, until killed."""
        choose = random.Random(seed)
        while True:
            self.attempt("tidy")
            if choose.random() < 0.2:
                self.attempt("clear", "scratch")
            if choose.random() < 0.1:
                self.attempt("open", self.tier.capacity_bytes)

    # Long ones

    def mix(self, seed: int, operations: int, numbers: int, without: Sequence[str] = ()) -> None:
        """Do all that a process may do with a directory, at random."""
        choose = random.Random(seed)
        kinds = {"put": 400, "get": 500, "tidy": 20, "clear": 2, "clear_scratch": 3, "remove_all": 2, "open": 3}
        kinds = {kind: weight for kind, weight in kinds.items() if kind not in without}
        done = dict.fromkeys(kinds, 0)
        corrupt = 0
        for _ in range(operations):
            kind = choose.choices(list(kinds), list(kinds.values()))[0]
            done[kind] += 1
            namespace, number = choose.choice(("default", "scratch")), choose.randrange(numbers)
            length = choose.randint(1, 30)
            if kind == "put":
                ttl_s = choose.choice((0.01, 1.0, 60.0)) if choose.random() < 0.1 else None
                self.attempt("put", namespace, number, length, ttl_s, choose.random() < 0.05)
            elif kind == "get":
                self.attempt("get", namespace, number, length)
            elif kind == "open":
                corrupt += self.tier.corrupt_pieces
                self.attempt("open", self.tier.capacity_bytes)
            else:
                self.attempt(*(("clear", "scratch") if kind == "clear_scratch" else (kind,)))
        self.say("corrupt", corrupt + self.tier.corrupt_pieces)
        self.say("operations", json.dumps(done))

    def fill(self, first: int, last: int, length: int) -> None:
        """Store many sequences, then tidy up, as a queue does when it is empty."""
        for number in range(first, last):
            self.attempt("put", "default", number * 4, length)
        self.tier.tidy()
        self.say("evicted", self.tier.evicted_pieces)

    def part(self, seed: int, operations: int) -> None:
        """Go on in two processes with what one had opened, as a stack does."""
        child = os.fork()
        if child == 0:
            self.tier.after_fork()
        self.mix(seed + (child == 0), operations, 200, ("open", "remove_all"))
        if child == 0:
            self.say("done in child")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"


def run(job: Job) -> int:
    """Run a job in this process; return its exit code."""
    signal.alarm(job.timeout_s)
    program = Program(job)
    try:
        for name in job.conditions:
            CONDITIONS[name]()
        program.run(job.setup)
        count = arm(*job.kill) if job.kill else lambda: 0
        program.run(job.program)
        program.say("done", count())
    except BaseException:  # noqa: BLE001
        program.say("failed", traceback.format_exc())
        return FAILED
    return 0


# --- the other side: the tests' -----------------------------------------------------------------------------------------------


class Workers:
    """Child processes, forked from one that has everything imported: a fork takes milliseconds, a start a tenth of a second."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.disk.worker"],
            cwd=REPOSITORY,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def _ask(self, what: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        return int(self._process.stdout.readline())

    def start(self, job: Job) -> int:
        """Start a job; return its process id, which stays its until `wait`."""
        return self._ask(asdict(job))

    def wait(self, pid: int) -> int:
        """Return a job's exit code, negative for the signal that ended it."""
        return self._ask(pid)

    def run(self, job: Job) -> int:
        return self.wait(self.start(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def modes_of(root: Path) -> set[str]:
    """Return the kinds of what is there with its mode."""
    found = {(path, path.lstat().st_mode) for path in (root, *root.rglob("*"))}
    return {f"{'folder' if stat.S_ISDIR(mode) else 'file'} {stat.S_IMODE(mode):o}" for _, mode in found}


def report(figures: str) -> None:
    """Print figures; `pytest -rP` shows them."""
    sys.stdout.write(figures + "\n")


def lines_of(log: str | Path) -> Iterator[list[str]]:
    """Yield the lines of a log, in words."""
    if Path(log).exists():
        yield from (line.split(" ") for line in Path(log).read_text().splitlines() if line)


def _serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(run(Job(**asked)))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(Job(**json.loads(sys.argv[1]))))
    _serve()
