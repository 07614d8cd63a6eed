"""Every call to the operating system fails under generate(): it answers as it does without a cache, whatever the disk does."""

import errno
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.disk.test_faults import HALF, NONE, Disk, Fault, Lines, open_files, our_threads, wait_until
from tests.hf.harness import assert_consistent, assert_same, run
from tests.hf.models import prompt, tiny
from tiered_cache import DiskTier, HostTier, MissReason, TieredCache, TierStack, archive
from tiered_cache.tiers.disk import calls, finder

LENGTH = 41  # two blocks of 16 and a tail
REASONS = {None, MissReason.NOT_STORED, MissReason.CORRUPT, MissReason.TIER_ERROR, MissReason.DEADLINE}
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.ESTALE, errno.EROFS)
MODELS = ("Llama", "Mistral")  # without side pieces, and with


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_READERS", 1)  # the n-th call is the same one at every run
    monkeypatch.setattr(archive, "LOOKUP_S", 60.0)  # a busy machine is not a slow disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def new_stack(path: Path) -> TierStack:
    return TierStack(HostTier("64MB"), DiskTier(path, "1GB", min_free=1), block_tokens=16)


@dataclass
class Session:
    """A model, a prompt that is stored, one that goes on behind it, and what both answer without a cache."""

    model: PreTrainedModel
    stored: torch.Tensor
    longer: torch.Tensor
    cold_stored: Any
    cold_longer: Any
    path: Path

    @classmethod
    def prepare(cls, name: str, path: Path) -> "Session":
        model, ids = tiny(name), prompt(LENGTH)
        longer = torch.cat([ids[:, :-3], prompt(30, seed=1)], dim=1)
        with new_stack(path) as stack:
            run(model, ids, past_key_values=TieredCache(stack))
            assert stack.flush(60)
        assert wait_until(lambda: not our_threads())
        return cls(model, ids, longer, run(model, ids), run(model, longer), path)

    def play(self, disk: Disk, path: Path, fault: Fault | None) -> Counter[str]:
        """Restore and commit on a copy of the directory while a fault is on; return how often each call was made."""
        shutil.copytree(self.path, path)
        path.chmod(0o700)
        before = open_files()
        with Lines() as log, new_stack(path) as stack:
            disk.settle(stack)
            disk.fail(fault)
            for ids, cold in ((self.stored, self.cold_stored), (self.longer, self.cold_longer)):
                cache = TieredCache(stack)
                assert_same(run(self.model, ids, past_key_values=cache), cold)
                self._check_usage(disk, cache, ids, fault)
            is_flushed = stack.flush(60)
            disk.settle(stack)
            assert_consistent(stack)
            again = TieredCache(stack)
            assert_same(run(self.model, self.longer, past_key_values=again), self.cold_longer)
            assert again.usage.computed_tokens == 1, "memory has it"
        counts = disk.counts
        disk.fail(None)
        assert len(log.lines) <= 1, log.lines
        assert wait_until(lambda: not our_threads()), our_threads()
        assert open_files() == before
        with new_stack(path) as stack:
            cache = TieredCache(stack)
            assert_same(run(self.model, self.longer, past_key_values=cache), self.cold_longer)
            if is_flushed:
                assert cache.usage.cached_tokens >= self.longer.numel() // 16 * 16, "it was acknowledged"
        assert wait_until(lambda: not our_threads())  # which may still tidy up
        shutil.rmtree(path)
        return counts

    def _check_usage(self, disk: Disk, cache: TieredCache, ids: torch.Tensor, fault: Fault | None) -> None:
        usage = cache.usage
        assert usage.prompt_tokens == ids.numel() == usage.cached_tokens + usage.computed_tokens
        assert usage.miss_reason in REASONS
        assert (usage.miss_reason is None) == (usage.computed_tokens == 1)
        if not disk.failed and usage.computed_tokens > 1:
            assert usage.miss_reason is MissReason.NOT_STORED
        if ids is self.stored and fault is None:
            assert usage.cached_by_tier == {"disk": LENGTH // 16 * 16}  # its tail goes on with what was generated


def faults_of(counts: Counter[str], errors: Sequence[int]) -> Iterator[Fault]:
    """Yield all faults there can be with these errors."""
    for call in calls.FAULTABLE:
        for nth in range(1, counts[call] + 1):
            for error in (*errors, *((HALF, NONE) if call in ("read", "write") else ())):
                yield from (Fault(call, error, nth, forever) for forever in (False, True))


def some_of(faults: Sequence[Fault], count: int) -> list[Fault]:
    """Return a few: of each call the first, and others spread over all of them."""
    first = {fault.call: fault for fault in reversed(faults)}
    rest = faults[7 :: max(1, len(faults) // (count - len(first)))]
    return [*first.values(), *rest][:count]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_generate_with_every_fault(disk: Disk, tmp_path: Path, name: str, is_full: bool) -> None:
    session = Session.prepare(name, tmp_path / "stored")
    faults = list(faults_of(session.play(disk, tmp_path / "right", None), ERRORS))
    problems = []
    for number, fault in enumerate(faults if is_full else some_of(faults, 18)):
        try:
            session.play(disk, tmp_path / str(number), fault)
        except Exception as error:  # noqa: BLE001
            problems.append(f"{fault}: {type(error).__name__} {str(error).splitlines()[:2]}")
            disk.fail(None)
            wait_until(lambda: not our_threads(), 1)
    assert not problems, f"{len(problems)} of {len(faults)}:\n" + "\n".join(problems[:40])


def test_control_bytes_that_nobody_verifies_are_noticed(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksums a damaged block changes what is answered, and the comparison with cold runs says so."""
    session = Session.prepare("Llama", tmp_path / "stored")
    for file in session.path.rglob("*.kv"):
        content = bytearray(file.read_bytes())
        for at in range(4096 + 3, len(content), 4):  # the signs of its payload
            content[at] ^= 0x80
        file.write_bytes(content)

    class Anything(tuple[bytes, ...]):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = tuple.__hash__

    monkeypatch.setattr(finder, "checksums", lambda payload: Anything())
    with new_stack(session.path) as stack:
        cache = TieredCache(stack)
        out = run(session.model, session.stored, past_key_values=cache)
        assert cache.usage.cached_by_tier == {"disk": LENGTH // 16 * 16}
        with pytest.raises(AssertionError):
            assert_same(out, session.cold_stored)
