"""Whatever the disk does, callers get right tokens or fewer of them, and nothing else.

Every call to the operating system fails in every way, at every place, under a stack that is driven without torch; then the same
under generate(). Disks that hang, fill up, turn read-only or disappear; processes that fork, spawn and end meanwhile.
"""

import contextlib
import errno
import functools
import gc
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.disk import store
from tiered_cache import archive
from tiered_cache.errors import ConfigError, StoreError
from tiered_cache.stack import TierStack
from tiered_cache.testing.token_port import TOKEN_NBYTES, TokenLayout, TokenPort
from tiered_cache.tiers.disk import DiskTier, Stay, calls
from tiered_cache.tiers.host import HostTier
from tiered_cache.usage import MissReason
from tiered_cache.workers import Workers
from tiered_cache.writeback import WriteQueue

BLOCK = 4
WINDOW = 6
ID = b"identity" * 4
LARGE = 1 << 30
ABOUT = {"model": "test"}
REPOSITORY = Path(__file__).resolve().parents[2]

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.EINTR, errno.ESTALE, errno.EROFS)
HALF, NONE = "half", "none"  # of the bytes asked for are read or written

READER = "tiered_cache reader"  # name of the threads that lookups and reads run on
READS = (
    "open_to_read", "read", "stat", "stat_open", "names", "entries", "stat_entry",
)  # fmt: skip  # calls without which a lookup or a read cannot be complete
WRITES = (
    "open_nameless", "open_new", "write", "link_nameless", "link", "rename", "unlink", "make_folder", "remove_folder",
    "set_mode", "set_used", "set_used_open",
)  # fmt: skip  # what a read-only file system refuses

TREE = tuple(range(10))  # stored before anything fails: two blocks and a tail of two
BRANCH = (*range(8), *range(100, 107))  # shares two blocks with it
OTHER = tuple(range(500, 511))


# --- a stack without torch ----------------------------------------------------------------------------------------------------


def new_stack(path: Path | str, host_tokens: int = 10_000, capacity: int = LARGE, **options: Any) -> TierStack:
    """Return a stack on a directory. It does all that a disk tier can be asked to do for each piece."""
    tier = DiskTier(path, capacity, durability="crash", min_free=1)
    return TierStack(HostTier(host_tokens * TOKEN_NBYTES), tier, block_tokens=BLOCK, **options)


def commit(stack: TierStack, tokens: Sequence[int], window: int = 0, stay: Stay | None = None, identity: bytes = ID) -> int:
    port = TokenPort(np.asarray(tokens), window)
    return stack.commit(identity, b"", port.tokens, port, stay=stay or Stay(), about=ABOUT)


@dataclass
class Got:
    """What came back: how many tokens, from where, and what kept more from coming."""

    length: int
    served: dict[str, int]
    trouble: MissReason | None


def restore(
    stack: TierStack, tokens: Sequence[int], window: int = 0, identity: bytes = ID, port_class: type[TokenPort] = TokenPort
) -> Got:
    """Match and fetch as `Binding.load` does, and assert that every token that comes is right."""
    ids = np.asarray(tokens)
    held = match = stack.match(identity, b"", ids, [(TokenLayout(), window)])
    served: dict[str, int] = {}
    port = TokenPort(ids, window)
    try:
        while length := match.usable(len(ids)):
            port = port_class(ids, window)
            fetched = stack.fetch(match, length, port)
            match = fetched.match
            if fetched.is_complete or not window:
                length, served = fetched.num_tokens, fetched.served
                break
    finally:
        stack.release(held)
    assert port.loaded[:length].tolist() == ids[:length].tolist()
    start = max(length - window, 0) if window else length
    assert port.loaded_side[start:length].tolist() == ids[start:length].tolist()
    assert length == 0 or sum(served.values()) >= length
    return Got(length, served, match.trouble)


def from_disk(path: Path | str, tokens: Sequence[int], window: int = 0, identity: bytes = ID, **options: Any) -> int:
    """Return how much of a sequence a stack that knows nothing finds in a directory."""
    with new_stack(path, **options) as stack:
        return restore(stack, tokens, window, identity).length


def wait_until(what: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Wait until something is so; say whether it is."""
    deadline = time.monotonic() + timeout
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tiered_cache")]


def open_files() -> list[str]:
    """Return what this process has open, without what only looking has."""
    found = []
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(name.readlink()))
    return sorted(path for path in found if not path.startswith("/proc/"))


# --- a disk that fails --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """How a call fails: with an errno, or with `HALF` or `NONE` of its bytes; at the n-th time, once or from then on."""

    call: str
    error: int | str
    nth: int = 1
    forever: bool = False

    def __str__(self) -> str:
        how = errno.errorcode[self.error] if isinstance(self.error, int) else self.error
        return f"{self.call}-{how}-{self.nth}{'-forever' if self.forever else ''}"


class Disk:
    """Stands between the disk tier and the operating system, counts calls, and lets those fail that `fault` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.seen = self.counts  # before the last `fail`
        self.failed: list[tuple[str, str]] = []  # (call, thread) of what did fail
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        self.tidying = 0
        monkeypatch.setattr(calls, "sync", lambda fd: None)  # takes milliseconds each
        for name in calls.FAULTABLE:
            monkeypatch.setattr(calls, name, functools.partial(self._call, name, getattr(calls, name)))
        tidy = WriteQueue._tidy

        def counted(queue: WriteQueue) -> None:
            self.tidying += 1
            try:
                tidy(queue)
            finally:
                self.tidying -= 1

        monkeypatch.setattr(WriteQueue, "_tidy", counted)
        self.submitted: list[Future[Any]] = []
        submit = Workers.submit

        def noted(workers: Workers, function: Callable[..., Any], *args: Any) -> "Future[Any]":
            self.submitted.append(submit(workers, function, *args))
            return self.submitted[-1]

        monkeypatch.setattr(Workers, "submit", noted)

    def settle(self, *stacks: TierStack) -> None:
        """Wait until no thread of ours has anything to do: so that the n-th call is the same one at every run."""
        for stack in stacks:
            assert stack._archive is not None
            queue = stack._archive.writes
            assert wait_until(lambda queue=queue: queue._is_tidy and not self.tidying and queue.wait(0))  # type: ignore[misc]
        assert wait_until(lambda: all(future.done() for future in self.submitted))  # a fetch that gave up leaves some
        self.submitted.clear()

    def fail(self, fault: Fault | None) -> None:
        """Begin or end to let calls fail, and to count them."""
        self._fault = fault
        self.counts, self.seen = Counter(), self.counts
        self.failed.clear()

    @property
    def cuts_short(self) -> bool:
        """Whether reads come short: a file that ends too soon is a candidate less, and half is made up for by a second read."""
        return self._fault is not None and self._fault.error in (NONE, HALF)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let nothing fail, nor count, for a while."""
        fault, counts = self._fault, self.counts
        self._fault, self.counts = None, Counter()
        try:
            yield
        finally:
            self._fault, self.counts = fault, counts

    def _call(self, name: str, real: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            self.counts[name] += 1
            fault = self._fault
            fails = fault is not None and fault.call == name
            fails = fails and (self.counts[name] >= fault.nth if fault.forever else self.counts[name] == fault.nth)
            if fails:
                self.failed.append((name, threading.current_thread().name))
        if not fails:
            return real(*args)
        if isinstance(fault.error, int):
            if name == "close":  # Linux closes, whatever it says
                real(*args)
            raise OSError(fault.error, os.strerror(fault.error))
        if fault.error == NONE:
            return 0
        fd, data, *offset = args
        return real(fd, data[: max(1, len(data) // 2)], *offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(archive, "_READERS", 1)  # the order of reads is the same at every run
    return Disk(monkeypatch)


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory, if there is such a file system: thousands of times something is stored here."""
    memory = Path("/dev/shm")  # noqa: S108
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="kv", dir=memory) as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def no_threads_stay() -> Iterator[None]:
    yield
    gc.collect()  # stacks that a test left open
    assert wait_until(lambda: not our_threads())


class Lines(logging.Handler):
    """Counts what the disk tiers log, by tier: the text before the first colon."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.logger = logging.getLogger("tiered_cache")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Lines":
        self.logger.addHandler(self)
        self.logger.propagate = False
        return self

    def __exit__(self, *args: object) -> None:
        self.logger.propagate = True
        self.logger.removeHandler(self)


# --- every call, every error, every place -----------------------------------------------------------------------------------


@dataclass
class Scene:
    """What a stack does while the disk fails.

    Attributes:
        window, stay: of what is stored while it fails.
        named: the file system makes no files without a name; "no links": nor links.
        capacity: of the directory.
        is_kept: nothing is evicted and nothing expires.
        program: what is run.
    """

    program: Callable[["Scene", Disk, Path, Fault | None], None]
    window: int = WINDOW
    stay: Stay = field(default_factory=Stay)
    named: str = ""
    capacity: int = LARGE
    is_kept: bool = True

    def prepare(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.named:
            monkeypatch.setattr(calls, "TEMP_FILE", calls.NO_TEMP_FILE_FLAG)
        if self.named == "no links":

            def refuse(source: str, target: str) -> None:
                raise PermissionError(errno.EPERM, "no links here")

            real = calls.link
            assert isinstance(real, functools.partial)
            monkeypatch.setattr(calls, "link", functools.partial(real.func, "link", refuse))

    def stack(self, path: Path) -> TierStack:
        return new_stack(path, capacity=self.capacity)


def using(scene: Scene, disk: Disk, path: Path, fault: Fault | None) -> None:
    """Look up, store and look up again, in this process's stack and in another."""
    window = scene.window
    with scene.stack(path) as writer:
        commit(writer, TREE, window)
        for number in range(0 if scene.is_kept else 40):
            commit(writer, range(1000 * number, 1000 * number + 3), window)
        assert writer.flush(10)
    for file in store.files_under(path):
        os.utime(file, (0, 0))  # so that its use is noted
    with scene.stack(path) as stack, scene.stack(path) as reader:
        disk.settle(stack, reader)
        disk.fail(fault)
        got = restore(stack, TREE, window)
        assert got.length == len(TREE) or fault or not scene.is_kept
        assert_reason(disk, got, len(TREE))
        disk.settle(stack)
        commit(stack, BRANCH, window, scene.stay)
        commit(stack, OTHER, window, scene.stay)
        is_flushed = stack.flush(10)
        disk.settle(stack)
        assert is_flushed or fault
        assert restore(stack, BRANCH, window).length == len(BRANCH)  # memory has it
        if is_flushed and scene.is_kept:
            with disk.suspended():
                assert from_disk(path, BRANCH, window) == len(BRANCH), "acknowledged, and not there"
                assert from_disk(path, OTHER, window) == len(OTHER), "acknowledged, and not there"
        for tokens in (BRANCH, TREE, OTHER):
            restore(reader, tokens, window)
        repr(stack.stats())
    if fault is not None and fault.error == HALF:
        assert is_flushed or not scene.is_kept
        assert not stack.stats().tiers["disk"].failures
    disk.fail(None)
    with scene.stack(path) as healed:
        for tokens in (TREE, BRANCH, OTHER):
            restore(healed, tokens, window)
            commit(healed, tokens, window)
        assert healed.flush(10)
    if scene.is_kept:
        for tokens in (TREE, BRANCH, OTHER):
            assert from_disk(path, tokens, window) == len(tokens)


def assert_reason(disk: Disk, got: Got, asked: int) -> None:
    """Assert that what kept a lookup from being complete is said."""
    failed = {call for call, thread in disk.failed if thread == READER and call in READS}
    if got.length < asked and failed and not disk.cuts_short:
        assert got.trouble is MissReason.TIER_ERROR
    elif not failed:
        assert got.trouble is None or got.trouble is MissReason.NOT_STORED


def opening(scene: Scene, disk: Disk, path: Path, fault: Fault | None) -> None:
    """Make the directory and the tier."""
    path.mkdir(mode=0o755)
    disk.fail(fault)
    try:
        stack = scene.stack(path)
    except ConfigError:
        assert fault is not None
    else:
        with stack:
            commit(stack, TREE)
            if stack.flush(10):
                with disk.suspended():
                    assert from_disk(path, TREE) == len(TREE)
    disk.fail(None)
    with scene.stack(path) as stack:
        commit(stack, TREE)
        assert stack.flush(10)
    assert from_disk(path, TREE) == len(TREE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def clearing(scene: Scene, disk: Disk, path: Path, fault: Fault | None) -> None:
    """Clear and forget, which are the only ones that may say what failed."""
    with scene.stack(path) as stack, scene.stack(path) as reader:
        for identity in (ID, ID[::-1]):
            commit(stack, TREE, scene.window, scene.stay, identity)
        assert stack.flush(10)
        assert from_disk(path, TREE, scene.window) == len(TREE)
        disk.settle(stack, reader)
        disk.fail(fault)
        if is_done(lambda: stack.forget(ID)):
            with disk.suspended():
                assert from_disk(path, TREE, scene.window) == 0
        restore(reader, TREE, scene.window, ID[::-1])
        if is_done(stack.clear):
            assert not store.files_under(path)
        restore(reader, TREE, scene.window)
        commit(stack, TREE, scene.window)
        stack.flush(10)
        is_done(lambda: stack.clear("default"))
        disk.settle(stack)
    disk.fail(None)
    with scene.stack(path) as stack:
        stack.clear()
        assert {file.name for file in path.rglob("*") if file.is_file()} <= {"CACHEDIR.TAG", "lock"}
        commit(stack, TREE)
        assert stack.flush(10)
    assert from_disk(path, TREE) == len(TREE)


def is_done(what: Callable[[], object]) -> bool:
    try:
        what()
    except StoreError:
        return False
    return True


SCENES = {
    "using": Scene(using),
    "no side pieces": Scene(using, window=0),
    "pinned for a time": Scene(using, stay=Stay(ttl_s=1000.0, pin=True)),
    "named": Scene(using, named="named"),
    "renamed": Scene(using, named="no links"),
    "evicting": Scene(using, capacity=400_000, is_kept=False),
    "opening": Scene(opening, window=0),
    "clearing": Scene(clearing, stay=Stay(ttl_s=1000.0, pin=True)),
}


def run_scene(disk: Disk, scene: Scene, path: Path, fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run a scene with a fault; return how often each call was made while it was on."""
    before = open_files()
    with monkeypatch.context() as patched, Lines() as log:
        scene.prepare(path, patched)
        scene.program(scene, disk, path, fault)
    assert wait_until(lambda: not our_threads()), our_threads()
    assert open_files() == before
    assert len(log.lines) <= 4, log.lines  # stacks that may meet the fault, two of them as their last thread ends
    shutil.rmtree(path)
    return disk.seen


def all_faults(counts: Counter[str]) -> Iterator[Fault]:
    """Yield all that can go wrong in a scene that makes so many calls."""
    for call in calls.FAULTABLE:
        for nth in range(1, counts[call] + 1):
            for error in (*ERRORS, *((HALF, NONE) if call in ("read", "write") else ())):
                yield Fault(call, error, nth)
                yield Fault(call, error, nth, forever=True)


def some_faults(counts: Counter[str], seed: int) -> Iterator[Fault]:
    """Yield a few for each call, with other errors in each scene."""
    cycle = itertools.cycle((*ERRORS[seed:], *ERRORS[:seed]))
    for call in calls.FAULTABLE:
        if counts[call]:
            yield Fault(call, next(cycle), forever=True)
            yield from (Fault(call, next(cycle), nth) for nth in sorted({1, seed + 1, counts[call]}) if nth <= counts[call])
            if call in ("read", "write"):
                yield from (Fault(call, error, 1 + seed, forever) for error in (HALF, NONE) for forever in (False, True))


def try_all(disk: Disk, scene: Scene, path: Path, faults: Sequence[Fault], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a scene with each fault; return what went wrong."""
    problems = []
    for number, fault in enumerate(faults):
        try:
            run_scene(disk, scene, path / str(number), fault, monkeypatch)
        except Exception as error:  # noqa: BLE001
            problems.append(f"{fault}: {str(error).splitlines()[:1]} {type(error).__name__}")
            disk.fail(None)
            wait_until(lambda: not our_threads(), 1)
    return problems


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_fault(disk: Disk, fast_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_full: bool) -> None:
    counts = run_scene(disk, SCENES[name], fast_path / "right", None, monkeypatch)
    faults = list(all_faults(counts) if is_full else some_faults(counts, list(SCENES).index(name) % len(ERRORS)))
    problems = try_all(disk, SCENES[name], fast_path, faults, monkeypatch)
    print(f"{name}: {len(faults)} faults")  # noqa: T201
    assert not problems, f"{len(problems)} of {len(faults)}:\n" + "\n".join(problems[:40])


def test_every_call_is_met(disk: Disk, fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenes above make every call there is, so that each did fail."""
    met: Counter[str] = Counter()
    for name, scene in SCENES.items():
        met += run_scene(disk, scene, fast_path / name, None, monkeypatch)
    assert set(met) == set(calls.FAULTABLE)
