"""Ctrl-C, put off while something must not be left half done.

Owns the signal handler for that time. Refuses to own locks: what other threads may see is theirs.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class PutOff:
    """Says whether Ctrl-C was pressed meanwhile; a long loop looks at it and ends early."""

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self.requested = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        self.frame, self.requested = frame, True


@contextmanager
def uninterrupted() -> Iterator[PutOff]:
    """Put Ctrl-C off until the end of the block, where it has its usual effect.

    Only the main thread is ever interrupted; on others, and where SIGINT is not handled in Python, nothing is done.
    """
    put_off = PutOff()
    usual = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(usual):
        yield put_off
        return
    signal.signal(signal.SIGINT, put_off.note)
    try:
        yield put_off
    finally:
        signal.signal(signal.SIGINT, usual)
        if put_off.requested:
            usual(signal.SIGINT, put_off.frame)
