"""The way to and from the disk tier: nobody waits for it longer than a deadline, and nothing it does wrong reaches a caller.

Owns its threads, deadlines, staging buffers and what is said about failures. Refuses to own what is on disk (tiers/disk) and
what is worth keeping there (stack).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TypeVar

from tiered_cache import progress
from tiered_cache.errors import CorruptEntryError, StoreError
from tiered_cache.tiers.base import BlockPort, Buffer
from tiered_cache.tiers.disk import Branch, DiskTier, StoredBlock
from tiered_cache.tiers.disk.finder import ExpiredEntryError
from tiered_cache.usage import MissReason, TierStats
from tiered_cache.workers import Workers
from tiered_cache.writeback import WriteQueue

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOOKUP_S = 2.0  # that a lookup may take, and the first byte of a fetch
MIN_BYTES_PER_S = 100e6  # that a fetch must bring on top of that
EXPLICIT_S = 600.0  # that clear() and forget() may take
SHUN_S = 30.0  # for which a disk that missed a deadline is not asked
LOG_EVERY_S = 60.0

SPILL_NBYTES = 256 << 20  # of pieces on their way to disk that are in no tier of memory

_BAR_STEP_S = 0.1
_READERS = min(4, os.cpu_count() or 1)
_MAX_STAGED = _READERS + 2  # buffers under way, or kept for the next fetch


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup found in `branch`.

    Attributes:
        stored: the blocks behind the parent.
        endings: (place of the first token, block) where snapshots are stored.
        sides: those of the halves that have a side piece.
        trouble: what kept more from being known.
    """

    branch: Branch
    stored: Sequence[StoredBlock] = ()
    endings: Sequence[tuple[int, StoredBlock]] = ()
    sides: Sequence[StoredBlock] = ()
    trouble: MissReason | None = None


class Archive:
    """The disk tier of one stack, as the stack sees it.

    Args:
        tier: the directory.
        queue_bytes: of pieces that may wait to be written.
    """

    def __init__(self, tier: DiskTier, queue_bytes: int) -> None:
        self.tier = tier
        self.failures = 0
        self.writes = WriteQueue(tier, queue_bytes, self.note)
        self._workers = Workers(_READERS, "tiered_cache reader")
        self._shunned_until = 0.0
        self._logged_at = -LOG_EVERY_S
        self._staging: list[tuple[str, Buffer]] = []
        self._lock = threading.RLock()  # the garbage collector may close a stack anywhere
        self._spilled = 0

    def extend(
        self,
        branches: Sequence[Branch],
        parent: bytes,
        tokens: bytes,
        block_tokens: int,
        halves: Sequence[tuple[bytes, bytes]] = (),
    ) -> Found:
        """Look for what is stored in the first of `branches` there is. See `DiskTier.extend`.

        Args:
            halves: (parent, tokens) of blocks of which only the side piece is wanted.
        """

        def look(branch: Branch) -> Found:
            sides = [side for half in halves if (side := self.tier.find_side(branch, *half)) is not None]
            return Found(branch, self.tier.extend(branch, parent, tokens, block_tokens), sides=sides)

        return self._look(branches, look)

    def find_endings(self, branches: Sequence[Branch], parent: bytes, tokens: bytes, block_tokens: int) -> Found:
        """Look for snapshots in the first of `branches` there is. See `DiskTier.find_endings`."""
        return self._look(branches, lambda branch: Found(branch, *self.tier.find_endings(branch, parent, tokens, block_tokens)))

    def _look(self, branches: Sequence[Branch], look: Callable[[Branch], Found]) -> Found:
        if time.monotonic() < self._shunned_until:
            return Found(branches[0], trouble=MissReason.DEADLINE)

        def in_first() -> Found:
            return look(next((branch for branch in branches if self.tier.has(branch)), branches[0]))

        try:
            return self.result(self._workers.submit(in_first), LOOKUP_S)
        except (OSError, FutureTimeoutError) as error:
            return Found(branches[0], trouble=self.reason_of(error))

    def read(self, branch: Branch, block: StoredBlock, kind: str, target: memoryview) -> "Future[None]":
        """Start to read a piece into `target`, verified. See `DiskTier.read`."""
        return self._workers.submit(self.tier.read, branch, block, kind, target)

    def result(self, future: "Future[Result]", timeout: float) -> Result:
        """Return what a thread found. Raises OSError, or FutureTimeoutError: then the disk is left alone for a while."""
        try:
            return future.result(max(timeout, 0.0))
        except FutureTimeoutError:
            if future.done():  # it was the disk that timed out
                raise OSError("the disk timed out") from None
            self._shunned_until = time.monotonic() + SHUN_S
            self.note(OSError(f"no answer within {timeout:.1f} s; it is not asked for {SHUN_S:.0f} s"))
            raise

    def reason_of(self, error: Exception) -> MissReason:
        """Note an error and return the reason for a miss that it is."""
        if isinstance(error, FutureTimeoutError):
            return MissReason.DEADLINE
        if isinstance(error, FileNotFoundError | ExpiredEntryError):  # evicted, cleared or expired meanwhile
            return MissReason.NOT_STORED
        if isinstance(error, CorruptEntryError):
            self._log("a stored block was damaged and is removed (%s); it is computed again", error)
            return MissReason.CORRUPT
        if isinstance(error, OSError):
            self.note(error)
        return MissReason.TIER_ERROR

    def flush(self, timeout: float | None) -> bool:
        """Wait until what is queued is written, with a progress bar; say whether it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        total = left = self.writes.nbytes
        if self.writes.wait(0):
            return True
        with progress.show(total, "Saving", "B") as bar:
            while deadline is None or time.monotonic() < deadline:
                left_s = _BAR_STEP_S if deadline is None else min(_BAR_STEP_S, deadline - time.monotonic())
                if self.writes.wait(max(0.0, left_s)):
                    return True
                bar.update(max(0, left - self.writes.nbytes))
                left = min(left, self.writes.nbytes)
        return False

    def clear(self, *, namespace: str | None = None, identity: bytes | None = None) -> None:
        """Remove what is on disk, or a part of it, after what is being written. Raises StoreError."""
        self.writes.wait_for_current(EXPLICIT_S)
        future = self._workers.submit(lambda: self.tier.clear(namespace=namespace, identity=identity))
        try:
            self.result(future, EXPLICIT_S)
        except (OSError, FutureTimeoutError) as error:
            raise StoreError(f"{self.tier!r}: {error or 'no answer'}") from error

    def stats(self) -> TierStats:
        """Return what is known of the directory."""
        tier = self.tier
        return TierStats(
            tier.num_pieces, tier.used_bytes, tier.capacity_bytes, tier.evicted_pieces, tier.corrupt_pieces, self.failures
        )

    def note(self, error: Exception) -> None:
        """Count a failure and say so, at most once a minute."""
        self.failures += 1
        self._log("it failed (%s); generate() goes on without it", error)

    def close(self) -> None:
        """End the threads, when what is queued is written."""
        self.writes.close()
        self._workers.close()
        with self._lock:
            self._staging.clear()

    def after_fork(self) -> None:
        """Begin again in a child process, which has none of the threads; what waits to be written is the parent's to write."""
        self._lock = threading.RLock()  # the garbage collector may close a stack anywhere
        self._staging, self._spilled = [], 0
        self.tier.after_fork()

    def _log(self, text: str, error: Exception) -> None:
        now = time.monotonic()
        with self._lock:  # several threads may fail at once
            is_due = now - self._logged_at >= LOG_EVERY_S
            if is_due:
                self._logged_at = now
        if is_due:
            logger.warning(f"Disk tier {self.tier!r}: {text}", error)

    # --- staging buffers ---------------------------------------------------------------------------------------------

    def borrow(self, port: BlockPort, nbytes: int) -> Buffer:
        """Return a host buffer of at least `nbytes`, one that was used before if possible: fresh pages are slow."""
        with self._lock:
            for place, (kind, buffer) in enumerate(self._staging):
                if kind == port.staging and nbytes <= len(port.view(buffer)) <= 2 * nbytes:
                    del self._staging[place]
                    return buffer
        return port.allocate("host", nbytes)

    def give_back(self, port: BlockPort, buffer: Buffer) -> None:
        """Return what was borrowed, when nobody reads or writes it any more."""
        with self._lock:
            self._staging.append((port.staging, buffer))
            del self._staging[:-_MAX_STAGED]

    # --- pieces that memory has no room for --------------------------------------------------------------------------

    def take_spill(self, nbytes: int) -> bool:
        """Count `nbytes` as on their way to disk from buffers of their own; False if that would be too many."""
        with self._lock:
            if self._spilled and self._spilled + nbytes > SPILL_NBYTES:
                return False
            self._spilled += nbytes
            return True

    def end_spill(self, port: BlockPort, buffer: Buffer | None, nbytes: int) -> None:
        """Undo `take_spill`, and take the buffer back."""
        if buffer is not None:
            self.give_back(port, buffer)
        with self._lock:
            self._spilled -= nbytes


class ReadAhead:
    """Pieces of stored blocks, read in the order in which they will be used, a few at a time.

    Args:
        archive: where from.
        branch: of all of them.
        port: allocates the buffers they are read into.
        pieces: (block, kind) in order.
    """

    def __init__(self, archive: Archive, branch: Branch, port: BlockPort, pieces: Sequence[tuple[StoredBlock, str]]) -> None:
        self._archive = archive
        self._branch = branch
        self._port = port
        self._waiting = list(reversed(pieces))
        self._under_way: list[tuple[Future[None], Buffer]] = []
        nbytes = sum(port.nbytes(kind, block.block_tokens) for block, kind in pieces)
        self._deadline = time.monotonic() + LOOKUP_S + nbytes / MIN_BYTES_PER_S
        for _ in range(_READERS + 1):
            self._start_next()

    def next(self) -> Buffer:
        """Return the next piece's buffer, verified; to be given back to the archive.

        Raises:
            OSError, FutureTimeoutError: it cannot be had. The buffers under way are their threads' own from then on.
        """
        future, buffer = self._under_way.pop(0)
        self._archive.result(future, self._deadline - time.monotonic())
        self._start_next()
        return buffer

    def _start_next(self) -> None:
        if self._waiting:
            block, kind = self._waiting.pop()
            num_tokens = block.block_tokens
            buffer = self._archive.borrow(self._port, self._port.nbytes(kind, num_tokens))
            target = self._port.view(buffer)[: self._branch.layout.nbytes(kind, num_tokens)]
            self._under_way.append((self._archive.read(self._branch, block, kind, target), buffer))
