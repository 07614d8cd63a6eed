"""Disks that hang, fill up, turn read-only or disappear; processes that fork, spawn and end meanwhile; what is kept.

Callers get right tokens or fewer of them, in time, and nobody hears more of it than a line a minute.
"""

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.disk import store
from tests.disk.test_faults import (
    BLOCK,
    ID,
    WINDOW,
    WRITES,
    Lines,
    commit,
    from_disk,
    new_stack,
    open_files,
    our_threads,
    restore,
    wait_until,
)
from tiered_cache import archive, stack, writeback
from tiered_cache.errors import ClosedError
from tiered_cache.keys import MAIN, SIDE, encode_tokens, root_key
from tiered_cache.stack import TierStack
from tiered_cache.testing.token_port import TOKEN_NBYTES, TokenPort
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, calls
from tiered_cache.tiers.host import HostTier
from tiered_cache.usage import MissReason

REPOSITORY = Path(__file__).resolve().parents[2]
READER, WRITER = "tiered_cache reader", "tiered_cache writer"
DEADLINE_S = 0.05
SLOW_S = 5.0  # a machine under load may take so long for what takes no time

A, B, C = (tuple(range(start, start + 11)) for start in (0, 100, 200))  # two blocks and a tail of three


class Hang:
    """Lets calls of one kind of thread hang until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over = threading.Event()
        self.num_waiting = 0
        self._monkeypatch = monkeypatch

    def begin(self, *names: str, thread: str = READER) -> None:
        for name in names:
            self._monkeypatch.setattr(calls, name, self._hanging(getattr(calls, name), thread))

    def _hanging(self, real: Callable[..., Any], thread: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if threading.current_thread().name == thread and not self.is_over.is_set():
                self.num_waiting += 1
                try:
                    self.is_over.wait(60)
                finally:
                    self.num_waiting -= 1
            return real(*args)

        return call


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No thread and no file stays open."""
    before = open_files()
    yield
    gc.collect()
    assert wait_until(lambda: not our_threads()), our_threads()
    assert open_files() == before


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang(monkeypatch)
    yield hang
    hang.is_over.set()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LOOKUP_S", DEADLINE_S)


def archive_of(used: TierStack) -> archive.Archive:
    assert used._archive is not None
    return used._archive


class RoomyPort(TokenPort):
    """Saves to buffers that are larger than need be, which real ports are given as well."""

    def save(self, kind: str, start: int, num_tokens: int, buffers: Sequence[np.ndarray]) -> Any:
        return super().save(kind, start, num_tokens, [buffer[:num_tokens] for buffer in buffers])


def stored(path: Path, *sequences: Sequence[int], window: int = 0) -> None:
    """Store sequences with a stack that is gone then."""
    with new_stack(path) as writer:
        for tokens in sequences:
            commit(writer, tokens, window)
        assert writer.flush(10)


def timed(what: Callable[[], Any]) -> tuple[Any, float]:
    start = time.monotonic()
    result = what()
    return result, time.monotonic() - start


# --- a disk that hangs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["stat", "open_to_read", "read", "stat_open", "entries"])
def test_a_hanging_disk_is_waited_for_once(
    tmp_path: Path, hang: Hang, hasty: None, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits longer than the deadline, later calls not at all, and it is used again when it answers again."""
    stored(tmp_path, A, B)
    with new_stack(tmp_path) as used, Lines() as log:
        hang.begin(call)
        got, took = timed(lambda: restore(used, A))
        assert hang.num_waiting > 0
        assert got.trouble is MissReason.DEADLINE
        assert got.length == 0
        assert took < 2 * DEADLINE_S + SLOW_S
        waiting = hang.num_waiting
        for _ in range(20):
            got, took = timed(lambda: restore(used, B))
            assert (got.length, got.trouble) == (0, MissReason.DEADLINE)
            assert took < DEADLINE_S, "it was waited for"
        assert hang.num_waiting == waiting, "it was asked"
        commit(used, C)
        assert restore(used, C).served == {"host": len(C)}
        assert len(log.lines) == 1
        monkeypatch.setattr(archive, "LOOKUP_S", 30.0)
        hang.is_over.set()
        assert restore(used, A).trouble is MissReason.DEADLINE, "it is left alone for a while"
        archive_of(used)._shunned_until = 0.0  # the while is over
        assert restore(used, A).served == {"disk": len(A)}
        assert restore(used, B).served == {"disk": len(B)}


def test_a_disk_that_goes_on_hanging_is_tried_again_and_again(
    tmp_path: Path, hang: Hang, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many threads hang, there are no more of them than there may be, and nobody waits longer for that."""
    monkeypatch.setattr(archive, "SHUN_S", 0.0)
    stored(tmp_path, A)
    with new_stack(tmp_path) as used:
        hang.begin("stat")
        for _ in range(10):
            got, took = timed(lambda: restore(used, A))
            assert got.trouble is MissReason.DEADLINE
            assert took < 2 * DEADLINE_S + SLOW_S
        assert sum(thread.name == READER for thread in our_threads()) <= archive._READERS
        monkeypatch.setattr(archive, "LOOKUP_S", 30.0)
        hang.is_over.set()
        assert restore(used, A).length == len(A)


def late_garbage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a read of one fetch complete with garbage while the next fetch has its bytes in a buffer, not yet in its layers."""
    stored(path, A, B)
    monkeypatch.setattr(archive, "SHUN_S", 0.0)
    monkeypatch.setattr(archive, "LOOKUP_S", 60.0)
    go, gone = threading.Event(), threading.Event()
    payload_reads: list[int] = []
    real = calls.read

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        if offset > 0:
            payload_reads.append(offset)
            if len(payload_reads) == 1:
                go.wait(60)
                buffer[:] = b"\x55" * len(buffer)
                gone.set()
                return len(buffer)
        return real(fd, buffer, offset)

    monkeypatch.setattr(calls, "read", read)

    class Patient(TokenPort):
        def load(self, *args: Any, **kwargs: Any) -> Any:
            go.set()
            assert gone.wait(60)
            return super().load(*args, **kwargs)

    with new_stack(path) as used:
        ids = np.asarray(A)
        match = used.match(ID, b"", ids, [(TokenPort.layout, 0)])
        assert match.num_tokens == len(A)
        monkeypatch.setattr(archive, "LOOKUP_S", DEADLINE_S)
        fetched = used.fetch(match, len(A), TokenPort(ids))
        used.release(match)
        assert fetched.match.trouble is MissReason.DEADLINE
        monkeypatch.setattr(archive, "LOOKUP_S", 60.0)
        try:
            assert restore(used, B, port_class=Patient).served == {"disk": len(B)}
        finally:
            go.set()


def test_a_read_that_is_late_writes_to_nobody_elses_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_READERS", 2)
    late_garbage(tmp_path, monkeypatch)


def test_control_a_buffer_that_is_used_again_too_early_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_READERS", 2)

    def too_early(self: archive.ReadAhead) -> Any:
        future, buffer = self._under_way.pop(0)
        try:
            self._archive.result(future, self._deadline - time.monotonic())
        except Exception:
            self._archive.give_back(self._port, buffer)
            raise
        self._start_next()
        return buffer

    monkeypatch.setattr(archive.ReadAhead, "next", too_early)
    with pytest.raises(AssertionError):
        late_garbage(tmp_path, monkeypatch)


def test_a_hanging_writer_holds_up_nobody(tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() does not wait for it, flush() as long as it is told, close() as long as it may."""
    monkeypatch.setattr(stack, "EXIT_FLUSH_S", 0.3)
    hang.begin("open_nameless", thread=WRITER)
    used = new_stack(tmp_path)
    _, took = timed(lambda: commit(used, A))
    assert took < SLOW_S
    assert wait_until(lambda: hang.num_waiting == 1)
    assert restore(used, A).served == {"host": len(A)}
    is_flushed, took = timed(lambda: used.flush(0.2))
    assert not is_flushed
    assert 0.2 <= took < 0.2 + SLOW_S
    _, took = timed(used.close)
    assert 0.3 <= took < 0.3 + SLOW_S
    with pytest.raises(ClosedError):
        used.flush()
    hang.is_over.set()


# --- a disk that is full, read-only, or not there -----------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: int, *names: str) -> Callable[[], None]:
    """Let calls fail; return what makes them work again."""
    on = [True]

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if on:
                raise OSError(error, os.strerror(error))
            return real(*args)

        return call

    for name in names:
        monkeypatch.setattr(calls, name, wrap(getattr(calls, name)))
    return on.clear


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not take is dropped and counted; memory serves; what is stored serves; later it takes things again."""
    monkeypatch.setattr(writeback, "MAX_PAUSE_S", 0.05)
    stored(tmp_path, A)
    with new_stack(tmp_path) as used, Lines() as log:
        heal = failing(monkeypatch, errno.ENOSPC, "write")
        for number in range(5):
            commit(used, [1000 * number + token for token in B])
            assert not used.flush(10), "what was dropped is said once"
            assert used.flush(10)
        stats = used.stats()
        assert stats.dropped_blocks >= 5
        assert stats.tiers["disk"].failures >= 2
        assert restore(used, B).served == {"host": len(B)}
        assert restore(used, A).served == {"disk": len(A)}
        assert len(log.lines) == 1
        heal()
        time.sleep(0.06)
        commit(used, B)
        assert used.flush(10)
    assert from_disk(tmp_path, B) == len(B)
    assert from_disk(tmp_path, A) == len(A)


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_disk_that_turns_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """What is there is reused, in this stack and in one that is made then."""
    stored(tmp_path, A, B, window=window)
    with new_stack(tmp_path) as before:
        failing(monkeypatch, errno.EROFS, *WRITES)
        with new_stack(tmp_path) as after:
            for used in (before, after):
                assert restore(used, A, window).served.get("disk") == len(A)
                commit(used, C, window)
                assert not used.flush(10)
                assert used.flush(10)
                assert restore(used, B, window).served.get("disk") == len(B)
                assert restore(used, C, window).served.get("host") == len(C)
    assert from_disk(tmp_path, C, window) == 0


def test_a_directory_that_disappears_and_comes_back(tmp_path: Path) -> None:
    path, away = tmp_path / "kv", tmp_path / "away"
    stored(path, A)
    with new_stack(path) as used:
        assert restore(used, A).length == len(A)
        path.rename(away)
        assert restore(used, A).length == 0
        commit(used, B)
        assert used.flush(10)  # it is made again
        assert from_disk(path, B) == len(B)
        path.rename(tmp_path / "other")
        away.rename(path)
        assert restore(used, A).served == {"disk": len(A)}
        commit(used, [*A, *C])
        assert used.flush(10)
    assert from_disk(path, [*A, *C]) == len(A) + len(C)


def test_a_directory_whose_parent_disappears_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "MAX_PAUSE_S", 0.05)
    path, away = tmp_path / "above" / "kv", tmp_path / "away"
    stored(path, A)
    with new_stack(path) as used:
        (tmp_path / "above").rename(away)
        assert restore(used, A).length == 0
        commit(used, B)
        assert not used.flush(10)
        assert not (tmp_path / "above").exists()
        away.rename(tmp_path / "above")
        time.sleep(0.06)
        assert restore(used, A).length == len(A)
        commit(used, B)
        assert used.flush(10)
    assert from_disk(path, B) == len(B)


def test_at_most_a_line_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(writeback, "MAX_PAUSE_S", 0.0)
    stored(tmp_path, A)
    with new_stack(tmp_path) as used:
        assert wait_until(lambda: archive_of(used).writes._is_tidy)
        failing(monkeypatch, errno.EIO, "stat", "write")
        for number in range(100):
            assert restore(used, A).trouble is MissReason.TIER_ERROR
            commit(used, [10_000 + 100 * number + token for token in A])
        used.flush(10)
        assert used.stats().tiers["disk"].failures > 150
        assert len(caplog.records) == 1
        archive_of(used)._logged_at -= archive.LOG_EVERY_S  # a minute later
        for _ in range(100):
            restore(used, A)
        assert len(caplog.records) == 2
        monkeypatch.undo()
    assert not any(str(token) in record.getMessage() for record in caplog.records for token in (10_000, 10_100))


# --- a queue that is full -----------------------------------------------------------------------------------------------------


def test_a_full_queue_drops_and_counts(tmp_path: Path, hang: Hang) -> None:
    """What hangs on what was dropped is not stored either; a later commit stores it."""
    hang.begin("open_nameless", thread=WRITER)
    host_tokens = 16 * BLOCK
    queued = int(16 * stack.QUEUED_SHARE)  # blocks
    with new_stack(tmp_path, host_tokens) as used:
        commit(used, range(4 * BLOCK))
        commit(used, range(1000, 1000 + 9 * BLOCK))  # fills it but for what is dropped
        assert archive_of(used).writes.nbytes <= queued * BLOCK * TOKEN_NBYTES
        dropped = used.stats().dropped_blocks
        assert dropped > 0
        _, took = timed(lambda: commit(used, range(2000, 2000 + 2 * BLOCK)))
        assert took < SLOW_S, "it waited for the disk"
        assert used.stats().dropped_blocks > dropped
        hang.is_over.set()
        assert not used.flush(10)
        assert used.flush(10)
        assert from_disk(tmp_path, range(4 * BLOCK)) == 4 * BLOCK
        assert from_disk(tmp_path, range(1000, 1000 + 9 * BLOCK)) == 8 * BLOCK
        assert from_disk(tmp_path, range(2000, 2000 + 2 * BLOCK)) == 0
        commit(used, range(1000, 1000 + 9 * BLOCK))
        commit(used, range(2000, 2000 + 2 * BLOCK))
        assert used.flush(10)
    assert from_disk(tmp_path, range(1000, 1000 + 9 * BLOCK)) == 9 * BLOCK
    assert from_disk(tmp_path, range(2000, 2000 + 2 * BLOCK)) == 2 * BLOCK


def test_what_hangs_on_a_piece_that_failed_is_dropped_too(tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a queued sequence whose second block fails, only the first is found; another sequence in the queue is stored."""
    hang.begin("open_nameless", thread=WRITER)
    real, number = calls.write, [0]

    def write(fd: int, data: memoryview) -> int:
        if len(data) > 1 and threading.current_thread().name == WRITER and payload_of(data):
            number[0] += 1
            if number[0] == 2:
                raise OSError(errno.EIO, "once")
        return real(fd, data)

    def payload_of(data: memoryview) -> bool:
        return len(data) == BLOCK * TOKEN_NBYTES

    monkeypatch.setattr(calls, "write", write)
    with new_stack(tmp_path) as used:
        commit(used, range(5 * BLOCK))
        commit(used, range(1000, 1000 + 2 * BLOCK))
        hang.is_over.set()
        assert not used.flush(10)
        assert used.flush(10)
        assert used.stats().dropped_blocks == 4
        assert len(store.files_under(tmp_path)) == 3
    assert from_disk(tmp_path, range(5 * BLOCK)) == BLOCK
    assert from_disk(tmp_path, range(1000, 1000 + 2 * BLOCK)) == 2 * BLOCK


# --- processes that end, fork and spawn ---------------------------------------------------------------------------------------

PREAMBLE = """
import os, sys, threading, time
sys.path.insert(0, {repository!r})
from tiered_cache import archive, stack as stack_module, writeback
from tiered_cache.tiers.disk import calls
from tests.disk.test_faults import commit, from_disk, new_stack, restore
from tests.disk.test_living import A, B, C
path = sys.argv[1]
"""


def run_program(tmp_path: Path, text: str, *, timeout: float = 60, **environment: str) -> str:
    """Run a program that must end well and say nothing on stderr; return what it prints."""
    program = tmp_path / "program.py"
    program.write_text(PREAMBLE.format(repository=str(REPOSITORY)) + text)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "kv")],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_the_end_of_a_process_writes_what_is_queued(tmp_path: Path) -> None:
    run_program(
        tmp_path,
        """
real = calls.open_nameless
calls.open_nameless = lambda folder: (time.sleep(0.05), real(folder))[1]
used = new_stack(path)
for tokens in (A, B, C):
    commit(used, tokens)
""",
    )
    for tokens in (A, B, C):
        assert from_disk(tmp_path / "kv", tokens) == len(tokens)
    found = run_program(tmp_path, "print([from_disk(path, tokens) for tokens in (A, B, C)])")
    assert found.strip() == str([len(tokens) for tokens in (A, B, C)])


@pytest.mark.parametrize("thread", [READER, WRITER])
@pytest.mark.parametrize("ending", ["", "used.close()", "del used", "sys.exit(0)"])
def test_a_process_ends_though_the_disk_hangs(tmp_path: Path, thread: str, ending: str) -> None:
    stored(tmp_path / "kv", A)
    printed = run_program(
        tmp_path,
        f"""
writeback.EXIT_FLUSH_S = stack_module.EXIT_FLUSH_S = 0.3
archive.LOOKUP_S = 0.05
import logging
logging.getLogger("tiered_cache").setLevel(logging.ERROR)
used = new_stack(path)
def hang(name):
    real = getattr(calls, name)
    def call(*args):
        if threading.current_thread().name == {thread!r}:
            time.sleep(1000)
        return real(*args)
    setattr(calls, name, call)
hang("open_to_read")
hang("open_nameless")
restore(used, A)
commit(used, B)
print(time.time(), flush=True)
{ending}
""",
        timeout=20,
    )
    assert time.time() - float(printed) < 0.3 + SLOW_S


@pytest.mark.parametrize("when", ["idle", "queued", "reading"])
def test_a_fork_with_a_stack_in_use(tmp_path: Path, when: str) -> None:
    """Parent and child both go on and end; what was queued is there, and what the child stores as well."""
    printed = run_program(
        tmp_path,
        f"""
import warnings
warnings.simplefilter("ignore")
when = {when!r}
used = new_stack(path)
commit(used, A)
used.flush()
if when == "queued":
    real = calls.open_nameless
    calls.open_nameless = lambda folder: (time.sleep(0.1), real(folder))[1]
    commit(used, B)
stop = threading.Event()
def keep_reading():
    while not stop.is_set():
        with new_stack(path) as other:
            assert restore(other, A).length == len(A)
if when == "reading":
    threads = [threading.Thread(target=keep_reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
child = os.fork()
if child == 0:
    try:
        assert restore(used, A).length == len(A)
        commit(used, C)
        assert used.flush(20)
        assert restore(used, C).length == len(C)
        assert from_disk(path, C) == len(C)
        used.close()
    except BaseException as error:
        print("child", repr(error), flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
commit(used, [*A, *B])
stop.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert used.flush(20)
used.close()
found = [from_disk(path, tokens) for tokens in ([*A, *B], C, B)]
print(found[0] == len([*A, *B]), found[1] == len(C), when != "queued" or found[2] == len(B))
""",
    )
    assert printed.split() == ["True"] * 3, printed


def test_a_child_that_ends_as_python_does(tmp_path: Path) -> None:
    """A forked child's exit handlers write what the child stored, and wait for nothing of the parent's."""
    run_program(
        tmp_path,
        """
import warnings
warnings.simplefilter("ignore")
used = new_stack(path)
commit(used, A)
child = os.fork()
commit(used, C if child == 0 else B)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    )
    for tokens in (A, B, C):
        assert from_disk(tmp_path / "kv", tokens) == len(tokens)


def test_spawned_processes_share_the_default_stack_s_directory(tmp_path: Path) -> None:
    printed = run_program(
        tmp_path,
        """
import multiprocessing
from tiered_cache.defaults import default_stack

def work(tokens, other):
    used = default_stack()
    used_by_disk = used.disk.path
    commit(used, tokens)
    found = restore(used, other).served
    assert used.flush(20)
    return used_by_disk, found

if __name__ == "__main__":
    stack = default_stack()
    commit(stack, A)
    stack.flush()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        place, found = pool.apply(work, (B, A))
        pool.close()
        pool.join()
    print(place == os.path.realpath(path), found, restore(stack, B).served)
""",
        TIERED_CACHE_DIR=str(tmp_path / "kv"),
        TIERED_CACHE_DISK_SIZE="1GiB",
    )
    assert printed.strip() == f"True {{'disk': {len(A)}}} {{'disk': {len(B)}}}"


# --- two stacks, clearing, staying --------------------------------------------------------------------------------------------


def test_two_stacks_on_one_directory(tmp_path: Path) -> None:
    """Each sees at once what the other stored and cleared."""
    with new_stack(tmp_path) as one, new_stack(tmp_path) as two:
        for number in range(5):
            tokens = [100 * number + token for token in range(11)]
            commit(one, tokens)
            assert one.flush(10)
            assert restore(two, tokens).served == {"disk": 11}
            commit(two, [*tokens, 7, 7, 7])
            assert two.flush(10)
            assert restore(one, [*tokens, 7, 7, 7]).length == 14
        two.clear()
        assert restore(two, tokens).length == 0
        assert restore(one, tokens).served == {"host": 11}, "memory of others is theirs"
        commit(one, tokens)
        one.flush(10)
    assert not [file for file in store.files_under(tmp_path) if file.suffix != ".kv"]


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("of", ["all", "namespace", "identity"])
def test_clear_while_it_is_written(tmp_path: Path, hang: Hang, window: int, of: str) -> None:
    """What is queued, and what is being written at that moment, is cleared as well."""
    used = new_stack(tmp_path)
    with used:
        hang.begin("link_nameless", thread=WRITER)
        for tokens in (A, B, C):
            commit(used, tokens, window)
        assert wait_until(lambda: hang.num_waiting == 1)
        clearing = {"all": used.clear, "namespace": lambda: used.clear("default"), "identity": lambda: used.forget(ID)}[of]
        thread = threading.Thread(target=clearing)
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive(), "it does not wait for what is being written"
        hang.is_over.set()
        thread.join(20)
        assert not thread.is_alive()
        assert not store.files_under(tmp_path)
        assert used.flush(10), "what was cleared was not dropped"
        assert used.stats().dropped_blocks == 0
        assert not store.files_under(tmp_path)
        for tokens in (A, B, C):
            assert restore(used, tokens, window).length == 0
            commit(used, tokens, window)
        assert used.flush(10)
    assert [from_disk(tmp_path, tokens, window) for tokens in (A, B, C)] == [11, 11, 11]


def test_clear_of_another_namespace_keeps_what_is_queued(tmp_path: Path) -> None:
    with new_stack(tmp_path) as used, new_stack(tmp_path, namespace="other") as other:
        commit(other, A)
        assert other.flush(10)
        commit(used, A)
        commit(used, B)
        used.clear("other")
        assert used.flush(10)
        assert restore(used, A).served == {"host": len(A)}
    assert from_disk(tmp_path, A) == len(A)
    assert from_disk(tmp_path, B) == len(B)
    assert from_disk(tmp_path, A, namespace="other") == 0


def test_clear_while_others_commit(tmp_path: Path) -> None:
    """Two stacks commit and clear at the same time: what is found is right, and clear() at the end clears."""
    problems: list[BaseException] = []
    stop = threading.Event()

    def work(used: TierStack, start: int) -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                tokens = [start + number % 7 * 50 + token for token in range(11)]
                used.commit(ID, b"", np.asarray(tokens), RoomyPort(np.asarray(tokens)), about={})
                restore(used, tokens)
                time.sleep(0.01)  # one interpreter runs all of these threads
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    with new_stack(tmp_path) as one, new_stack(tmp_path) as two:
        threads = [threading.Thread(target=work, args=(used, start)) for used, start in ((one, 0), (two, 0), (one, 1000))]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                one.clear()
                two.clear()
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not problems
        for used in (one, two):
            used.flush(10)
        for used in (one, two):
            used.clear()
        assert not store.files_under(tmp_path)
        assert one.stats().tiers["host"].used_bytes == two.stats().tiers["host"].used_bytes == 0


def test_what_goes_on_behind_what_was_cleared_is_not_stored(tmp_path: Path) -> None:
    """A clear() in the middle of a commit: on disk there is nothing then that hangs on what is gone."""
    with new_stack(tmp_path) as used:

        class ClearingPort(RoomyPort):
            def save(self, kind: str, start: int, num_tokens: int, buffers: Sequence[np.ndarray]) -> Any:
                if start == BLOCK and store.files_under(tmp_path):
                    used.clear()
                return super().save(kind, start, num_tokens, buffers)

        commit(used, A[:BLOCK])
        assert used.flush(10)
        ids = np.asarray(A)
        used.commit(ID, b"", ids, ClearingPort(ids), about={})
        used.flush(10)
        assert not store.files_under(tmp_path)
        commit(used, A)
        assert used.flush(10)
    assert from_disk(tmp_path, A) == len(A)


def test_what_is_covered_serves_where_the_longer_block_lacks_its_side_piece(tmp_path: Path) -> None:
    """Whoever wrote the longer block was killed before its side piece: the shorter one, which it was to cover, is used."""
    ids = np.arange(30)
    tier = DiskTier(tmp_path, 1 << 30, min_free=1)
    where = Branch(ID, "default", TokenPort.layout, WINDOW)
    root = root_key(ID, "default", b"", 24)
    for length, kinds in ((16, (MAIN, SIDE)), (24, (MAIN,))):
        for kind in kinds:
            payload = memoryview((ids[:length] * (1 if kind == MAIN else -1)).tobytes())
            tier.ensure(where, root, kind, encode_tokens(ids[:length]), payload, Stay(), {})
    for length in (20, 24, 30):
        with TierStack(HostTier(1 << 20), DiskTier(tmp_path, 1 << 30, min_free=1), block_tokens=24) as used:
            assert restore(used, range(length), WINDOW).length == 16


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves the clock."""
    offset, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])

    def move(seconds: float) -> None:
        offset[0] += seconds

    return move


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_time_to_live(tmp_path: Path, later: Callable[[float], None], window: int) -> None:
    """In memory and on disk it ends at the same time; what is wanted for longer stays longer, in both."""
    with new_stack(tmp_path) as used:
        commit(used, A, window, Stay(ttl_s=100.0))
        commit(used, B, window, Stay(ttl_s=100.0))
        commit(used, C, window, Stay(ttl_s=100.0))
        assert used.flush(10)
        commit(used, B, window, Stay(ttl_s=1000.0))
        commit(used, C, window)
        assert used.flush(10)
        later(90)
        for tokens in (A, B, C):
            assert restore(used, tokens, window).served.get("host") == len(tokens)
            assert from_disk(tmp_path, tokens, window) == len(tokens)
        later(20)
        for tokens, is_there in ((A, False), (B, True), (C, True)):
            assert restore(used, tokens, window).length == is_there * len(tokens)
            assert from_disk(tmp_path, tokens, window) == is_there * len(tokens)
        later(1000)
        for tokens, is_there in ((A, False), (B, False), (C, True)):
            assert restore(used, tokens, window).length == is_there * len(tokens)
            assert from_disk(tmp_path, tokens, window) == is_there * len(tokens)
        commit(used, A, window, Stay(ttl_s=100.0))
        assert used.flush(10)
        assert restore(used, A, window).length == len(A)
        assert from_disk(tmp_path, A, window) == len(A)


def test_what_is_expired_hangs_no_children(tmp_path: Path, later: Callable[[float], None]) -> None:
    """A sequence that goes on behind blocks which ended is stored whole again."""
    with new_stack(tmp_path) as used:
        commit(used, A[: 2 * BLOCK], stay=Stay(ttl_s=100.0))
        assert used.flush(10)
        later(200)
        commit(used, A)
        assert used.flush(10)
        assert restore(used, A).length == len(A)
    assert from_disk(tmp_path, A) == len(A)


def test_a_pin_in_memory_and_on_disk(tmp_path: Path) -> None:
    """Under pressure what is pinned stays on disk; in memory what is not there."""
    capacity = 60 * 4096
    with new_stack(tmp_path, 10 * BLOCK, capacity) as used:
        commit(used, A, stay=Stay(pin=True))
        assert used.flush(10)
        for number in range(1, 60):
            commit(used, [1000 * number + token for token in range(2 * BLOCK)])
            assert used.flush(10)
        assert used.stats().tiers["disk"].evicted_pieces > 0
        assert used.stats().tiers["host"].evicted_pieces > 0
        assert restore(used, A).length == len(A)
        assert store.du(tmp_path) <= capacity
    assert from_disk(tmp_path, A, capacity=capacity) == len(A)
