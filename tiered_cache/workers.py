"""Threads for what may wait for a disk.

Owns that nobody else ever does: a caller waits for a result until its deadline, and goes on without. Daemon threads, so that a
disk that hangs does not keep the interpreter from ending; a fork starts without them.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_all: "weakref.WeakSet[Workers]" = weakref.WeakSet()


class Workers:
    """Up to `count` threads that run what is submitted, in order. They are started when there is something to do."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._closed = False
        self._start_anew()
        _all.add(self)

    def _start_anew(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may close a stack anywhere
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[..., Result], *args: Any) -> "Future[Result]":
        """Have a thread call `function(*args)`."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(OSError("closed"))
                return future
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                thread = threading.Thread(target=_work, args=(self._queue, self._idle), name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put((future, function, args))  # before a `close` ends the threads
        return future

    def close(self) -> None:
        """Let the threads end when they have done what was submitted."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)


def _work(jobs: "queue.SimpleQueue[Any]", idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        future, function, args = job
        result, failure = None, None
        if future.set_running_or_notify_cancel():
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001  it is the caller's
                failure = error
        # What it was done with goes before anybody is told: a thread that frees a tensor while the interpreter ends aborts it.
        del job, function, args
        if failure is not None:
            future.set_exception(failure)
        elif not future.cancelled():
            future.set_result(result)
        del future, result, failure
        idle.release()


def _after_fork() -> None:
    for workers in list(_all):
        workers._start_anew()


os.register_at_fork(after_in_child=_after_fork)
