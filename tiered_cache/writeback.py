"""Writing behind: a bounded queue of pieces on their way to disk, and the one thread that writes them.

Owns the order (parents first; what hangs on a piece that was dropped is dropped too) and the end (flush, exit). Refuses to own
what is worth writing (stack) and how (tiers/disk). A full queue drops: generate() never waits for a disk.
"""

import atexit
import contextlib
import enum
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiered_cache.keys import MAIN
from tiered_cache.tiers.disk import Branch, DiskTier, Stay

EXIT_FLUSH_S = 10.0  # that the end of the interpreter, or of a stack, waits for what is queued
MAX_PAUSE_S = 60.0  # between tries while the disk takes nothing

_NICENESS = 10  # of the thread: the model's arithmetic goes first
_all: "weakref.WeakSet[WriteQueue]" = weakref.WeakSet()


class Outcome(enum.Enum):
    """What became of a piece that was to be written."""

    STORED = enum.auto()
    DROPPED = enum.auto()  # the disk did not take it, or not what it hangs on
    CLEARED = enum.auto()  # it is not wanted any more


@dataclass(frozen=True, slots=True)
class Write:
    """A piece to be stored.

    Attributes:
        branch, parent, kind, tokens, payload, stay, about: as for `DiskTier.ensure`.
        key: of its block.
        nbytes: what it counts in the queue; 0 if somebody else bounds that.
        done: told what became of it, on the writing thread or who clears. May take locks.
    """

    branch: Branch
    parent: bytes
    key: bytes
    kind: str
    tokens: bytes
    payload: memoryview
    nbytes: int
    stay: Stay
    about: Mapping[str, object]
    done: Callable[[Outcome], None]


class WriteQueue:
    """What is to be written to `tier`, up to `capacity_bytes` at a time.

    Args:
        note: told of every error of the disk.
    """

    def __init__(self, tier: DiskTier, capacity_bytes: int, note: Callable[[Exception], None]) -> None:
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._note = note
        self._closed = False
        self._start_anew()
        _all.add(self)

    def _start_anew(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # the garbage collector may close a stack anywhere
        self._writes: deque[Write] = deque()
        self._current: Write | None = None
        self._nbytes = 0
        self._thread: threading.Thread | None = None
        self._errors_in_row = 0
        self._paused_until = 0.0
        self._is_tidy = False

    @property
    def nbytes(self) -> int:
        """Bytes queued and in work."""
        return self._nbytes

    def put(self, write: Write) -> bool:
        """Queue a piece; False, and nothing is done, if the queue is full, closed, or the disk takes nothing these days."""
        with self._changed:
            is_full = self._nbytes > 0 and self._nbytes + write.nbytes > self._capacity_bytes
            if self._closed or is_full or time.monotonic() < self._paused_until:
                return False
            self._writes.append(write)
            self._nbytes += write.nbytes
            self._changed.notify_all()
        self.start()
        return True

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds until nothing is queued nor in work; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writes and self._current is None, timeout)

    def wait_for_current(self, timeout: float) -> bool:
        """Wait until what is in work now is done; say whether it is."""
        with self._changed:
            current = self._current
            return self._changed.wait_for(lambda: current is None or self._current is not current, timeout)

    def drop(self, chosen: Callable[[Write], bool]) -> None:
        """Drop what is queued and `chosen`. What is in work is written."""
        for write in self._take(chosen):
            write.done(Outcome.CLEARED)

    def start(self) -> None:
        """Have the directory looked over, now that somebody uses it."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="tiered_cache writer", daemon=True)
                self._thread.start()

    def give_up(self) -> None:
        """Drop what is queued; the end of the interpreter does not wait for what is in work either."""
        _all.discard(self)
        self.drop(lambda write: True)

    def close(self) -> None:
        """Take nothing more. What is queued is still written, while the process lives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while self._step():
            pass

    def _step(self) -> bool:
        """Write one piece, or tidy up when there is none, or wait; False at the end."""
        with self._changed:
            if not self._writes and self._is_tidy:
                if self._closed:
                    return False
                self._changed.wait()
                return True
            self._current = write = self._writes.popleft() if self._writes else None
        if write is None:
            self._tidy()
            return True
        is_stored = self._write(write)
        dropped = [] if is_stored else self._take_descendants(write)
        for each in (write, *dropped):
            each.done(Outcome.STORED if is_stored else Outcome.DROPPED)
        nbytes = write.nbytes
        # The bytes go before anybody is told: a thread that frees a tensor while the interpreter ends aborts the process.
        del write, each, dropped
        with self._changed:
            self._nbytes -= nbytes
            self._current = None
            self._is_tidy = False
            self._changed.notify_all()
        return True

    def _write(self, write: Write) -> bool:
        if time.monotonic() < self._paused_until:
            return False
        try:
            self._tier.ensure(write.branch, write.parent, write.kind, write.tokens, write.payload, write.stay, write.about)
        except Exception as error:  # noqa: BLE001  whatever it is, this thread goes on
            self._errors_in_row += 1
            if self._errors_in_row > 1:
                self._paused_until = time.monotonic() + min(2.0 ** (self._errors_in_row - 2), MAX_PAUSE_S)
            self._note(error)
            return False
        self._errors_in_row = 0
        return True

    def _tidy(self) -> None:
        self._is_tidy = True
        try:
            self._tier.tidy()
        except Exception as error:  # noqa: BLE001  whatever it is, this thread goes on
            self._note(error)

    def _take_descendants(self, failed: Write) -> list[Write]:
        """Take out of the queue what hangs on a piece that is not on disk: it could not be found there."""
        gone = {failed.key} if failed.kind == MAIN else set()

        def hangs_on_it(write: Write) -> bool:
            if write.parent in gone or write.key in gone:
                gone.add(write.key)
                return True
            return False

        return self._take(hangs_on_it)

    def _take(self, chosen: Callable[[Write], bool]) -> list[Write]:
        """Take what is `chosen` out of the queue; asked of each in order."""
        with self._changed:
            taken, kept = list[Write](), deque[Write]()
            for write in self._writes:
                (taken if chosen(write) else kept).append(write)
            self._writes = kept
            self._nbytes -= sum(write.nbytes for write in taken)
            self._changed.notify_all()
        return taken


def _after_fork() -> None:
    for queue in list(_all):
        queue._start_anew()  # what was queued is written by the parent, whose it is


def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_FLUSH_S
    for queue in list(_all):
        queue.close()
        queue.wait(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
