"""Any sequence of operations, accidents and crashes on one directory: what is read is right, what was acknowledged is there.

The model knows of each block whether it must be found; it says nothing of those that an accident may have hit.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.disk import store
from tiered_cache.errors import CorruptEntryError
from tiered_cache.format import HEAD_TOKENS, Name
from tiered_cache.keys import SIDE, TOKEN_NBYTES, block_key, common_tokens, encode_tokens
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, calls, files, finder

CAPACITY = 1 << 30
HOUR = 3600.0
TTLS = (None, None, HOUR, 10 * HOUR)
MARGIN_S = 60.0
MEMORY = "/dev/shm"  # noqa: S108
MAX_CANDIDATES = finder.MAX_CANDIDATES

BRANCHES = (
    store.branch(width=16),
    store.branch(width=16, namespace="other"),
    store.branch(width=16, identity=b"other" * 6 + b"__", window=8),
    store.branch(width=16, window=8),
)

# Sequences of few segments share prefixes of all lengths.
tokens_of = st.lists(st.sampled_from([(1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 1)]), min_size=1, max_size=13).map(
    lambda segments: tuple(token for segment in segments for token in segment)
)
branches = st.sampled_from(BRANCHES)
handles = st.integers(0, 1)


NO_SHRINKING = (Phase.explicit, Phase.generate)


class Crash(BaseException):
    """The end of a process in the middle of something."""


@dataclass
class Known:
    """What is known of a block that was stored.

    Attributes:
        must_be_there: it was acknowledged, and nothing happened to it since.
        ends: when its time is over at the earliest, by the clock; None if it stays.
        damaged: the number of its file that is not right: as long as that is there, it may be taken for good.
    """

    where: Branch
    parent: bytes
    tokens: bytes
    must_be_there: bool
    ends: float | None
    damaged: set[int]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_NBYTES


class Machine(RuleBasedStateMachine):
    """Two handles on one directory."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="kv", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.path = Path(self._folder.name) / "kv"
        self._patched = pytest.MonkeyPatch()
        self.offset = 0.0
        self.left: int | None = None  # calls until the crash
        self.blocks: dict[tuple[Branch, bytes], Known] = {}
        real_now = calls.now
        self._patched.setattr(calls, "now", lambda: real_now() + self.offset)
        for name in calls.FAULTABLE:
            self._patched.setattr(calls, name, self._crashing(name, getattr(calls, name)))
        self._patched.setattr(calls, "sync", lambda fd: None)
        self.tiers = [self._open() for _ in range(2)]

    def _crashing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    if name == "close":  # as the end of a process does
                        real(*args)
                    raise Crash
            return real(*args)

        return call

    def _open(self) -> DiskTier:
        return DiskTier(self.path, CAPACITY, min_free=0)

    def teardown(self) -> None:
        self.left = None
        try:
            self.check_all()
        finally:
            self._patched.undo()
            self._folder.cleanup()

    @initialize(block=st.sampled_from([8, 20]), named=st.booleans())
    def choose(self, block: int, named: bool) -> None:
        self._patched.setattr(store, "BLOCK", block)  # in the longer ones tails can be covered
        if named:
            self._patched.setattr(calls, "TEMP_FILE", calls.NO_TEMP_FILE_FLAG)

    # --- what is done -----------------------------------------------------------------------------------------------------

    @rule(handle=handles, where=branches, tokens=tokens_of, ttl=st.sampled_from(TTLS), pin=st.booleans())
    def put(self, handle: int, where: Branch, tokens: Sequence[int], ttl: float | None, pin: bool) -> None:
        self._put(handle, where, tokens, ttl, pin)

    def _put(self, handle: int, where: Branch, tokens: Sequence[int], ttl: float | None, pin: bool) -> None:
        self._settle()
        damaged = self._damaged_there(where, tokens)
        store.put(self.tiers[handle], where, tokens, Stay(ttl, pin))
        self._acknowledge(where, tokens, ttl, damaged)

    @rule(handle=handles, where=branches, tokens=tokens_of)
    def get(self, handle: int, where: Branch, tokens: Sequence[int]) -> None:
        """Look up what may be stored or not."""
        self._get_expected(handle, where, tokens)

    @precondition(lambda self: self.blocks)
    @rule(handle=handles, data=st.data(), more=tokens_of | st.just(()))
    def get_known(self, handle: int, data: st.DataObject, more: Sequence[int]) -> None:
        """Look up what was stored, and what goes on behind it."""
        known = data.draw(st.sampled_from(list(self.blocks.values())))
        for tokens in self._sequences_to(known):
            self._get_expected(handle, known.where, [*tokens, *more])

    @precondition(lambda self: self.blocks)
    @rule(handle=handles, data=st.data(), more=tokens_of | st.just(()), ttl=st.sampled_from(TTLS), pin=st.booleans())
    def put_known(self, handle: int, data: st.DataObject, more: Sequence[int], ttl: float | None, pin: bool) -> None:
        """Store what was stored, and what goes on behind it."""
        known = data.draw(st.sampled_from(list(self.blocks.values())))
        for tokens in self._sequences_to(known):
            self._put(handle, known.where, [*tokens, *more], ttl, pin)

    def _get_expected(self, handle: int, where: Branch, tokens: Sequence[int]) -> None:
        self._expire()
        expected = self._expected(where, tokens)
        tier = self.tiers[handle]
        tries = 1 + sum(not known.must_be_there for known in self.blocks.values())
        while (length := self._get(tier, where, tokens)) < expected and tries:
            tries -= 1  # what is bad stands in the way until it was looked at
        assert length >= expected, f"{length} of {expected}"

    @rule(handle=handles)
    def tidy(self, handle: int) -> None:
        self._expire()
        self.tiers[handle].tidy()

    @rule(handle=handles, where=branches, what=st.sampled_from(["all", "namespace", "identity"]))
    def clear(self, handle: int, where: Branch, what: str) -> None:
        self.tiers[handle].clear(**self._scope(where, what))
        for known in self._in_scope(where, what):
            known.must_be_there = False
            known.damaged.clear()
            assert not [path for path in self._files(known) if path.exists()], "it was cleared"
        if what == "all":
            assert not store.files_under(self.path)

    @rule(handle=handles)
    def reopen(self, handle: int) -> None:
        self.tiers[handle] = self._open()

    # --- crashes ----------------------------------------------------------------------------------------------------------

    @rule(
        handle=handles, where=branches, tokens=tokens_of, ttl=st.sampled_from(TTLS), pin=st.booleans(), nth=st.integers(0, 60)
    )
    def crash_in_put(self, handle: int, where: Branch, tokens: Sequence[int], ttl: float | None, pin: bool, nth: int) -> None:
        self._settle()
        damaged = self._damaged_there(where, tokens)
        if self._crash(handle, nth, lambda tier: store.put(tier, where, tokens, Stay(ttl, pin))):
            self._acknowledge(where, tokens, ttl, damaged)
            return
        for parent, encoded in store.blocks_of(where, tokens):
            known = self._know(where, parent, encoded)
            for other in self._covered_by(known):
                if other.must_be_there and not self._files(other)[0].exists():
                    other.must_be_there = False
                    known.must_be_there, known.ends = True, None  # only what is whole takes another's place
            if known.must_be_there and known.ends is not None and ttl is not None:
                known.ends = min(known.ends, calls.now() + ttl)

    @rule(
        handle=handles,
        where=branches,
        tokens=tokens_of,
        what=st.sampled_from(["get", "tidy", "all", "namespace", "identity"]),
        nth=st.integers(0, 40),
    )
    def crash(self, handle: int, where: Branch, tokens: Sequence[int], what: str, nth: int) -> None:
        self._expire()
        if what == "get":
            self._crash(handle, nth, lambda tier: self._get(tier, where, tokens))
        elif what == "tidy":
            self._crash(handle, nth, lambda tier: tier.tidy())
        else:
            is_complete = self._crash(handle, nth, lambda tier: tier.clear(**self._scope(where, what)))
            assert not is_complete or what != "all" or not store.files_under(self.path)
            for known in self._in_scope(where, what):
                known.must_be_there = False

    def _crash(self, handle: int, nth: int, what: Callable[[DiskTier], object]) -> bool:
        """Do something that ends at the n-th call, with its process; say whether it was complete before."""
        self.left = nth
        try:
            what(self.tiers[handle])
        except Crash:
            return False
        finally:
            self.left = None
            self.tiers[handle] = self._open()
        return True

    # --- accidents --------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), how=st.sampled_from(["flip", "flip", "truncate", "delete"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        path = self._some_file(data)
        size = path.stat().st_size
        if how == "delete":
            self._note_damage(path)
            path.unlink()
            return
        assume(size > 0)
        at = data.draw(st.integers(0, size - 1) | st.integers(max(0, size - 100), size - 1))
        if how == "truncate":
            os.truncate(path, at)
        else:
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << data.draw(st.integers(0, 7))]))
        self._note_damage(path)

    @rule(hours=st.sampled_from([-30, -2, -1, 1, 2, 12]))
    def move_clock(self, hours: int) -> None:
        self.offset += hours * HOUR
        if hours < 0:  # what says when it was made says so of the future
            for known in self.blocks.values():
                if known.ends is not None:
                    known.must_be_there = False
                    known.damaged |= self._numbers(known)
        self._expire()

    @rule(handle=handles, where=branches, tokens=tokens_of, ttl=st.sampled_from(TTLS))
    def fork(self, handle: int, where: Branch, tokens: Sequence[int], ttl: float | None) -> None:
        self._settle()
        damaged = self._damaged_there(where, tokens)
        expected = self._expected(where, tokens)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                tier = self.tiers[handle]
                tier.after_fork()
                for _ in range(1 + len(self.blocks)):
                    length = self._get(tier, where, tokens)
                    if length >= expected:
                        break
                status = 2 if length < expected else 3
                store.put(tier, where, tokens, Stay(ttl))
                status = 0 if status == 3 else status
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        self._acknowledge(where, tokens, ttl, damaged)

    @precondition(lambda self: self.blocks)
    @rule()
    def check_all(self) -> None:
        """What must be there is there, by a handle that knows nothing."""
        self._expire()
        tier = self._open()
        for known in list(self.blocks.values()):
            for tokens in self._sequences_to(known):
                expected = self._expected(known.where, tokens)
                for _ in range(1 + len(self.blocks)):
                    length = self._get(tier, known.where, tokens)
                    if length >= expected:
                        break
                assert length >= expected, f"{length} of {expected}"

    # --- the model --------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._expire()
        if self.offset:
            time.sleep(0.006)  # the file system's clock does not jump: two changes of a folder are to have two times

    def _know(self, where: Branch, parent: bytes, tokens: bytes) -> Known:
        place = where, block_key(parent, tokens)
        if place not in self.blocks:
            self.blocks[place] = Known(where, parent, tokens, False, None, set())
        return self.blocks[place]

    def _damaged_there(self, where: Branch, tokens: Sequence[int]) -> set[tuple[bytes, bytes]]:
        """Return the blocks of which a file is there that is not right: it is not looked at when it is stored again."""
        found = set()
        for parent, encoded in store.blocks_of(where, tokens):
            known = self._know(where, parent, encoded)
            if known.damaged & self._numbers(known):
                found.add((parent, encoded))
        return found

    def _acknowledge(self, where: Branch, tokens: Sequence[int], ttl: float | None, damaged: set[tuple[bytes, bytes]]) -> None:
        now = calls.now()
        for parent, encoded in store.blocks_of(where, tokens):
            known = self._know(where, parent, encoded)
            if known.damaged & self._numbers(known):
                continue  # it may have been taken for what was to be stored
            known.damaged.clear()
            if ttl is None or (known.must_be_there and known.ends is None):
                known.ends = None
            else:
                is_longer = known.must_be_there and known.ends is not None and known.ends > now + ttl / 2
                # One that is there, though it need not be, is replaced if it ends before half of the time is over.
                known.ends = known.ends if is_longer else now + (ttl if known.must_be_there else ttl / 2)
            known.must_be_there = True
            if ttl is None:
                for other in self._covered_by(known):
                    other.must_be_there = False

    def _covered_by(self, longer: Known) -> list[Known]:
        return [
            known
            for known in self.blocks.values()
            if (known.where, known.parent) == (longer.where, longer.parent)
            and HEAD_TOKENS <= known.num_tokens < longer.num_tokens
            and longer.tokens.startswith(known.tokens)
        ]

    def _expire(self) -> None:
        """What may have been over once may be gone."""
        for known in self.blocks.values():
            if known.ends is not None and known.ends <= calls.now() + MARGIN_S:
                known.must_be_there = False

    def _expected(self, where: Branch, tokens: Sequence[int]) -> int:
        """Return how many tokens must be found."""
        encoded, parent, length = encode_tokens(np.asarray(tokens)), store.root_of(where), 0
        step = store.BLOCK * TOKEN_NBYTES
        for start in range(0, len(encoded), step):
            chunk = encoded[start : start + step]
            known = self.blocks.get((where, block_key(parent, chunk)))
            if len(chunk) == step and known is not None and known.must_be_there:
                length += store.BLOCK
                parent = block_key(parent, chunk)
                continue
            siblings = [known for known in self.blocks.values() if known.where == where and known.parent == parent]
            heads = [
                known
                for known in siblings
                if known.tokens[: HEAD_TOKENS * TOKEN_NBYTES] == chunk[: min(known.num_tokens, HEAD_TOKENS) * TOKEN_NBYTES]
            ]
            if len(heads) > MAX_CANDIDATES:
                return length
            return length + max((common_tokens(known.tokens, chunk) for known in heads if known.must_be_there), default=0)
        return length

    def _sequences_to(self, known: Known) -> list[list[int]]:
        """Return the sequence that ends with a block, if all before it is known."""
        encoded = known.tokens
        parent = known.parent
        while parent != store.root_of(known.where):
            above = self.blocks.get((known.where, parent))
            if above is None:
                return []
            encoded, parent = above.tokens + encoded, above.parent
        return [memoryview(encoded).cast("q").tolist()]

    def _get(self, tier: DiskTier, where: Branch, tokens: Sequence[int]) -> int:
        """Read what is found, side pieces too, assert that every byte is right, and return how many tokens came."""
        encoded, length = encode_tokens(np.asarray(tokens)), 0
        for block in tier.extend(where, store.root_of(where), encoded, store.BLOCK):
            start = length * TOKEN_NBYTES
            assert encoded[start:].startswith(block.tokens[: block.num_tokens * TOKEN_NBYTES])
            try:
                store.read(tier, where, block)
            except (CorruptEntryError, FileNotFoundError):
                break
            if block.has_side:
                with contextlib.suppress(CorruptEntryError, FileNotFoundError):
                    store.read(tier, where, block, SIDE)
            length += block.num_tokens
        return length

    # --- files ------------------------------------------------------------------------------------------------------------

    def _files(self, known: Known) -> list[Path]:
        """Return where the main piece, the side piece and the marks of a block are, if they are there."""
        key = block_key(known.parent, known.tokens)
        shard = self.path / known.where.folder.hex() / known.where.namespace_digest.hex() / known.parent[:1].hex()
        main, side = (Name.of(key, known.parent, known.tokens, is_side) for is_side in (False, True))
        return [shard / str(main), shard / str(side), shard / f"{main.key.hex()}.ttl", shard / f"{main.key.hex()}.pin"]

    def _numbers(self, known: Known) -> set[int]:
        return {path.stat().st_ino for path in self._files(known)[:1] if path.exists()}

    def _some_file(self, data: st.DataObject) -> Path:
        found = list(store.files_under(self.path, data.draw(st.sampled_from([".kv", ".kv", ""]))))
        assume(found)
        return data.draw(st.sampled_from(found))

    def _note_damage(self, path: Path) -> None:
        for known in self.blocks.values():
            main, side, *marks = self._files(known)
            if path in (main, side, *marks):
                known.must_be_there = False
                known.damaged |= self._numbers(known)

    def _scope(self, where: Branch, what: str) -> dict[str, Any]:
        scopes: dict[str, dict[str, Any]] = {
            "all": {},
            "namespace": {"namespace": where.namespace},
            "identity": {"identity": where.identity},
        }
        return scopes[what]

    def _in_scope(self, where: Branch, what: str) -> list[Known]:
        scope = self._scope(where, what)
        return [
            known for known in self.blocks.values() if all(getattr(known.where, name) == value for name, value in scope.items())
        ]


def run_machine(examples: int, steps: int, **options: Any) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        **options,
    )
    run_state_machine_as_test(Machine, settings=chosen)


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_anything_on_one_directory(examples: int) -> None:
    run_machine(examples, 30)


def test_control_bytes_that_nobody_verifies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksums the machine reads a wrong byte."""

    class Anything(tuple[bytes, ...]):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = tuple.__hash__

    monkeypatch.setattr(finder, "checksums", lambda payload: Anything())
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_machine(200, 30, phases=NO_SHRINKING)


def test_control_what_is_acknowledged_and_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every seventh piece the file is forgotten."""
    real, count = files.publish, [0]

    def publish(folder: str, name: str, *args: Any, **kwargs: Any) -> int | None:
        count[0] += name.endswith(".kv")
        return 4096 if name.endswith(".kv") and count[0] % 7 == 0 else real(folder, name, *args, **kwargs)

    monkeypatch.setattr(files, "publish", publish)
    with pytest.raises((AssertionError, BaseExceptionGroup, hypothesis.errors.Flaky)):  # it does not fail at the same steps
        run_machine(100, 30, phases=NO_SHRINKING)
