"""Files that are not what they were when they were written: whatever happened to them, no wrong byte comes out of the tier.

Every harness here has a negative control: the same attack with a guard taken out, which must then be noticed.
"""

import errno
import hashlib
import os
import random
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.disk.store import BLOCK, Flat, blocks_of, branch, files_under, get, payload_of, put, root_of
from tiered_cache import format as file_format
from tiered_cache.errors import CorruptEntryError
from tiered_cache.format import CHUNK_NBYTES, HEAD_TOKENS, SHORT_KEY_NBYTES, Header, Name, Spec, encode_header, head_of
from tiered_cache.keys import MAIN, SIDE, block_key, encode_tokens
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, calls
from tiered_cache.tiers.disk import finder as finder_module

WIDE = branch(width=7168)  # one block: a header of 4 KiB and 56 KiB of payload
IDS = range(BLOCK)
TOLD = range(2 * HEAD_TOKENS)  # tokens of a block that is found by its first ones


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Return an empty tier, and assert afterwards that no file was left open."""
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208
    yield DiskTier(tmp_path / "kv", "1GiB", min_free=0)
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


def lookup(tier: DiskTier, where: Branch, ids: Iterable[int]) -> int:
    """Return how many tokens a lookup finds by reading headers alone, for prompts that end inside a stored block."""
    tokens = encode_tokens(np.asarray(list(ids)))
    return sum(block.num_tokens for block in tier.extend(where, root_of(where), tokens, 4 * BLOCK))


@dataclass
class Damaged:
    """One stored file, damaged again and again. `wrong` and `unnoticed` are what must stay 0.

    A second name outside of the tier keeps the file, which the tier unlinks each time that it finds it bad.
    """

    tier: DiskTier
    path: Path
    seek: Callable[[], int]
    tried: int = 0
    wrong: int = 0  # wrong bytes came back
    unnoticed: int = 0  # it was served, or not counted, or not removed
    spare: Path = field(init=False)

    def __post_init__(self) -> None:
        self.spare = Path(self.tier.path).parent / "spare"
        os.link(self.path, self.spare)
        self.good = self.path.read_bytes()
        self.fd = os.open(self.spare, os.O_RDWR)

    def close(self) -> None:
        os.close(self.fd)

    def attempt(self) -> None:
        """Look the block up as the file is now, note what came of it, and put its name back."""
        self.tried += 1
        before = self.tier.corrupt_pieces
        try:
            found = self.seek()
        except AssertionError:
            self.wrong += 1
            found = 0
        if found or self.tier.corrupt_pieces != before + 1 or self.path.exists():
            self.unnoticed += 1
        if not self.path.exists():
            os.link(self.spare, self.path)

    def write(self, at: int, data: bytes) -> None:
        os.pwrite(self.fd, data, at)

    def with_bytes(self, at: int, data: bytes) -> None:
        """Attempt with some bytes replaced; restores them."""
        self.write(at, data)
        self.attempt()
        self.write(at, self.good[at : at + len(data)])
        if at + len(data) > len(self.good):
            os.ftruncate(self.fd, len(self.good))

    def is_well(self) -> bool:
        """Say whether the undamaged file is served, so that misses are due to the damage and not to the harness."""
        return self.seek() > 0


@pytest.fixture
def damaged(tier: DiskTier) -> Iterator[Damaged]:
    put(tier, WIDE, IDS)
    [path] = files_under(tier.path)
    assert path.stat().st_size == 60 << 10
    found = Damaged(tier, path, lambda: get(tier, WIDE, IDS))
    yield found
    found.close()


def flip_bits(damaged: Damaged, bits: Iterable[int]) -> None:
    for bit in bits:
        at = bit // 8
        damaged.with_bytes(at, bytes([damaged.good[at] ^ 1 << bit % 8]))


def scatter(damaged: Damaged, number: int) -> None:
    """Make errors of several bytes, near each other or far, such as devices and memory make."""
    generator = random.Random(0)
    for _ in range(number):
        size = generator.choice([2, 3, 8, 64, 512, 4096])
        at = generator.randrange(len(damaged.good) - size)
        data = generator.choice([generator.randbytes(size), bytes(size), b"\xff" * size, damaged.good[:size]])
        second = generator.randrange(len(damaged.good))
        if damaged.good[at : at + size] == data:
            continue
        if generator.random() < 0.5:
            damaged.write(second, bytes([damaged.good[second] ^ generator.randint(1, 255)]))
        damaged.with_bytes(at, data)
        damaged.write(second, damaged.good[second : second + 1])


def trust_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the check of the payload out."""

    class Anything:
        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(finder_module, "checksums", lambda payload: Anything())


def trust_headers(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Take the comparison of the header out; `changed` is what it is then made to say."""

    def parse(spec: Spec, raw: bytes) -> Header:
        try:
            return replace(file_format._slice_header(spec, raw), **changed)
        except ValueError as error:
            raise CorruptEntryError from error

    monkeypatch.setattr(finder_module, "parse_header", parse)


# --- bits and bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [pytest.param(97), pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_counts(damaged: Damaged, stride: int) -> None:
    """A file of 60 KiB, one bit wrong: every one of them is noticed."""
    flip_bits(damaged, range(0, len(damaged.good) * 8, stride))
    assert damaged.tried == -(-len(damaged.good) * 8 // stride)
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    assert damaged.is_well()


def test_without_checksums_wrong_bytes_are_noticed_here(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_checksums(monkeypatch)
    payload_bits = range(8 * 4096, 8 * len(damaged.good), 9973)
    flip_bits(damaged, payload_bits)
    assert damaged.wrong == damaged.unnoticed == damaged.tried == len(payload_bits)


def test_without_the_comparison_wrong_headers_are_noticed_here(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_headers(monkeypatch)
    flip_bits(damaged, range(0, 8 * 4096, 97))
    assert damaged.wrong == 0  # the checksums hold, even where what is said of the block is wrong
    assert damaged.unnoticed > damaged.tried / 2


@pytest.fixture
def told(tier: DiskTier) -> Iterator[Damaged]:
    """Return a block that is told by its first tokens, so that a lookup reads its header and nothing else."""
    where = branch(width=8)
    store_one(tier, where, TOLD)
    [path] = files_under(tier.path)

    def seek() -> int:
        tier._finder.forget_tokens()
        return lookup(tier, where, TOLD[:20])

    found = Damaged(tier, path, seek)
    yield found
    found.close()


@pytest.mark.parametrize("stride", [pytest.param(97), pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_a_header_counts_in_a_lookup(told: Damaged, stride: int) -> None:
    flip_bits(told, range(0, 8 * 4096, stride))
    assert told.tried == -(-8 * 4096 // stride)
    assert (told.wrong, told.unnoticed) == (0, 0)
    assert told.seek() == 20


def test_without_the_comparison_wrong_headers_are_noticed_in_a_lookup(told: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_headers(monkeypatch)
    flip_bits(told, range(0, 8 * 4096, 97))
    assert told.unnoticed > told.tried / 2


def store_one(tier: DiskTier, where: Branch, ids: Iterable[int], stay: Stay | None = None) -> tuple[bytes, bytes]:
    """Store one block of all of `ids`, however many; return its key and its tokens."""
    parent, tokens = root_of(where), encode_tokens(np.asarray(list(ids)))
    tier.ensure(where, parent, MAIN, tokens, memoryview(payload_of(where, parent, tokens)), stay or Stay(), {})
    return block_key(parent, tokens), tokens


@pytest.mark.parametrize("number", [pytest.param(300), pytest.param(10_000, marks=pytest.mark.slow)])
def test_errors_of_several_bytes(damaged: Damaged, number: int) -> None:
    scatter(damaged, number)
    assert damaged.tried > 0.9 * number
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    assert damaged.is_well()


def test_without_guards_errors_of_several_bytes_are_noticed_here(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_checksums(monkeypatch)
    scatter(damaged, 50)
    assert damaged.wrong > damaged.tried / 2


# --- sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [pytest.param(331), pytest.param(1, marks=pytest.mark.slow)])
def test_every_length_but_the_right_one(damaged: Damaged, stride: int) -> None:
    lengths = sorted({*range(0, len(damaged.good), stride), 0, 1, 7, 8, 4095, 4096, len(damaged.good) - 1})
    for length in reversed(lengths):
        os.ftruncate(damaged.fd, length)
        damaged.attempt()
    assert damaged.tried == len(lengths)
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    damaged.write(0, damaged.good)
    assert damaged.is_well()


def test_appended_bytes(damaged: Damaged) -> None:
    for data in (b"\0", b"x", bytes(4096), random.Random(1).randbytes(100_000), damaged.good):
        damaged.with_bytes(len(damaged.good), data)
    assert damaged.tried == 5
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    assert damaged.is_well()


def test_a_length_that_changes_under_the_reader(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size was right when the file was opened; what can be read then falls short."""
    size = len(damaged.good)
    for length in (*range(0, size, 4099), 4095, 4096, 4097, size - 1):
        monkeypatch.setattr(calls, "will_read", lambda fd, length=length: os.ftruncate(damaged.fd, length))
        damaged.attempt()
        damaged.write(0, damaged.good)
    monkeypatch.undo()
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    assert damaged.is_well()


def test_without_the_size_check_a_length_is_noticed_here(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was appended is never read: without the guard the file would be served as if nothing had happened."""
    real = calls.stat_open
    whole = real(damaged.fd)
    monkeypatch.setattr(calls, "stat_open", lambda fd: whole)
    damaged.with_bytes(len(damaged.good), b"x")
    assert (damaged.tried, damaged.wrong, damaged.unnoticed) == (1, 0, 1)


def zero_ranges(damaged: Damaged) -> None:
    """Zero pages, as a file system does with what never reached the disk."""
    size = len(damaged.good)
    for start, stop in ((0, 4096), (0, size), (4096, size), (8192, 12288), (size - 4096, size), (size - 1, size), (4096, 4097)):
        if damaged.good[start:stop] != bytes(stop - start):
            damaged.with_bytes(start, bytes(stop - start))


def test_zeroed_ranges(damaged: Damaged) -> None:
    zero_ranges(damaged)
    assert damaged.tried >= 6
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    assert damaged.is_well()


def test_without_checksums_zeroed_ranges_are_noticed_here(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_checksums(monkeypatch)
    zero_ranges(damaged)
    assert damaged.wrong >= 3


def test_sparse_ranges(damaged: Damaged) -> None:
    """A file of the right size with holes: cut, and made long again."""
    size = len(damaged.good)
    for length in (0, 8, 4096, 8192, size - 4096, size - 1):
        if damaged.good[length:] != bytes(size - length):
            os.ftruncate(damaged.fd, length)
            os.ftruncate(damaged.fd, size)
            damaged.attempt()
            damaged.write(0, damaged.good)
    assert (damaged.wrong, damaged.unnoticed) == (0, 0)
    assert damaged.is_well()


def swap_chunks(tier: DiskTier) -> Damaged:
    where = branch(width=3 * CHUNK_NBYTES // BLOCK)
    put(tier, where, IDS)
    [path] = files_under(tier.path)
    damaged = Damaged(tier, path, lambda: get(tier, where, IDS))
    assert damaged.is_well()
    for one, other in ((0, 1), (1, 2), (0, 2)):
        first, second = (4096 + chunk * CHUNK_NBYTES for chunk in (one, other))
        damaged.write(first, damaged.good[second : second + CHUNK_NBYTES])
        damaged.with_bytes(second, damaged.good[first : first + CHUNK_NBYTES])
        damaged.write(first, damaged.good[first : first + CHUNK_NBYTES])
    damaged.close()
    return damaged


def test_swapped_chunks(tier: DiskTier) -> None:
    """Every chunk has a checksum that is right for another place."""
    damaged = swap_chunks(tier)
    assert (damaged.tried, damaged.wrong, damaged.unnoticed) == (3, 0, 0)
    assert damaged.is_well()


def test_without_checksums_swapped_chunks_are_noticed_here(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_checksums(monkeypatch)
    assert swap_chunks(tier).wrong == 3


# --- whole files in the wrong place -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signed(Flat):
    """A layout of the same size whose bytes mean something else."""

    def tensors(self, kind: str, num_tokens: int) -> list[file_format.TensorSpec]:
        return [replace(tensor, dtype="I8") for tensor in super().tensors(kind, num_tokens)]


def reseal(raw: bytes) -> bytes:
    """Return a file with the SHA-256 that its header should have, at the size its header says."""
    size = 8 + int.from_bytes(raw[:8], "little")
    at = slice(file_format._SHA_AT, file_format._SHA_AT + 64)
    digest = hashlib.sha256(raw[: at.start] + b"0" * 64 + raw[at.stop : size]).hexdigest().encode()
    return raw[: at.start] + digest + raw[at.stop :]


def file_at(place: Branch, parent: bytes, tokens: bytes, kind: str = MAIN, now: float = 0.0) -> bytes:
    """Return the file of a block as this package writes it."""
    payload = payload_of(place, parent, tokens, kind)
    spec = place.spec(parent, kind, len(tokens) // 8)
    header = Header(tokens, int((now or calls.now()) * 1000), 0, file_format.checksums(memoryview(payload)))
    return encode_header(spec, header) + payload


HERE = branch(window=BLOCK)
THREE = range(3 * BLOCK)


def foreign_files() -> dict[str, bytes]:
    """Return intact files that are right somewhere else, for the place of the second of three blocks."""
    (first, _), (parent, tokens), (later, _) = blocks_of(HERE, THREE)
    other_tokens = encode_tokens(np.arange(500, 500 + BLOCK))
    other_root = root_of(branch(identity=b"M" * 32))
    own = file_at(HERE, parent, tokens)
    swapped = own.replace(b'"kind":"main","parent"', b'"parent"', 1)
    return {
        "another block's": file_at(HERE, parent, other_tokens),
        "another parent's": file_at(HERE, later, tokens),
        "the parent's": file_at(HERE, first, blocks_of(HERE, THREE)[0][1]),
        "another model's": file_at(branch(identity=b"M" * 32), parent, tokens),
        "another model's, under its root": file_at(branch(identity=b"M" * 32), other_root, tokens),
        "another namespace's": file_at(branch(namespace="other"), parent, tokens),
        "another version's": reseal(own.replace(b"tiered_cache/1", b"tiered_cache/2", 1)),
        "a later version's": reseal(own.replace(b'tiered_cache/1"', b'tiered_cache/10"', 1)),
        "of narrower blocks": file_at(branch(width=32), parent, tokens),
        "of wider blocks": file_at(branch(width=128), parent, tokens),
        "of another dtype": file_at(Branch(HERE.identity, HERE.namespace, Signed(64), 0), parent, tokens),
        "of fewer tokens": file_at(HERE, parent, tokens[:-8]),
        "the side piece": file_at(HERE, parent, tokens, SIDE),
        "of no kind": reseal(swapped),
        "empty": b"",
        "one byte": b"x",
        "text": b"no such thing\n" * 400,
        "JSON without end": (1 << 40).to_bytes(8, "little") + b'{"a":' * 2000,
    }


def replace_middle(tier: DiskTier, data: bytes) -> tuple[int, bool]:
    """Store three blocks and put `data` at the place of the second; return the tokens found and if the file is gone."""
    put(tier, HERE, THREE)
    (parent, tokens) = blocks_of(HERE, THREE)[1]
    path = path_of(tier, HERE, parent, tokens)
    path.unlink()
    path.write_bytes(data)
    return get(tier, HERE, THREE), not path.exists()


def path_of(tier: DiskTier, where: Branch, parent: bytes, tokens: bytes) -> Path:
    [path] = files_under(tier.path, f"{Name.of(block_key(parent, tokens), parent, tokens, is_side=False)}")
    return path


@pytest.mark.parametrize("which", foreign_files())
def test_a_file_that_is_right_elsewhere(tier: DiskTier, which: str) -> None:
    """It is not served, what comes before it is, and it makes room for the right one."""
    assert replace_middle(tier, foreign_files()[which]) == (BLOCK, True)
    assert tier.corrupt_pieces == 1
    assert put(tier, HERE, THREE) == 1
    assert get(tier, HERE, THREE) == 3 * BLOCK
    assert tier.corrupt_pieces == 1


def test_the_right_file_is_served(tier: DiskTier) -> None:
    """The harness above finds fault with the files, not with its own writing."""
    parent, tokens = blocks_of(HERE, THREE)[1]
    assert replace_middle(tier, file_at(HERE, parent, tokens)) == (3 * BLOCK, False)


@pytest.mark.parametrize("which", ["another parent's", "another model's, under its root", "the side piece"])
def test_without_the_comparison_a_file_of_elsewhere_is_noticed_here(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    trust_headers(monkeypatch)
    with pytest.raises(AssertionError):
        replace_middle(tier, foreign_files()[which])


def test_without_the_comparison_another_block_is_noticed_here(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids are compared twice more behind the header, so they must be made to fit."""
    trust_headers(monkeypatch)
    assert replace_middle(tier, foreign_files()["another block's"]) == (BLOCK, True)
    tier.clear()
    real = file_format.parse_header
    files = {spec.parent: tokens for spec, tokens in ((HERE.spec(at, MAIN, BLOCK), of) for at, of in blocks_of(HERE, THREE))}
    monkeypatch.setattr(finder_module, "parse_header", lambda spec, raw: replace(real(spec, raw), tokens=files[spec.parent]))
    with pytest.raises(AssertionError):
        replace_middle(tier, foreign_files()["another block's"])


def test_files_exchanged_between_two_models(tier: DiskTier) -> None:
    """All files of two models change places, as they do when directories are renamed."""
    one, other = branch(), branch(identity=b"M" * 32)
    put(tier, one, THREE)
    put(tier, other, THREE)
    root, spare = Path(tier.path), Path(tier.path).parent / "spare"
    for source, target in (
        (root / one.folder.hex(), spare),
        (root / other.folder.hex(), root / one.folder.hex()),
        (spare, root / other.folder.hex()),
    ):
        source.rename(target)
    for where in (one, other):
        assert get(tier, where, THREE) == 0
        assert put(tier, where, THREE) == 3
        assert get(tier, where, THREE) == 3 * BLOCK


# --- what is no file ----------------------------------------------------------------------------------------------------


def make_symlink(path: Path, good: bytes) -> None:
    (path.parent / "target").write_bytes(good)  # even to the right bytes: what it points to may be anybody's
    path.symlink_to("target")


def make_socket(path: Path, good: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # its address is shorter than this path
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


NO_FILES: dict[str, Callable[[Path, bytes], object]] = {
    "directory": lambda path, good: path.mkdir(),
    "symlink": make_symlink,
    "dangling symlink": lambda path, good: path.symlink_to("nowhere"),
    "symlink to itself": lambda path, good: path.symlink_to(path.name),
    "FIFO": lambda path, good: os.mkfifo(path),
    "socket": make_socket,
}


@pytest.fixture
def deadline() -> Iterator[None]:
    """Interrupt what hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("is_told", [False, True], ids=["by name", "by first tokens"])
@pytest.mark.parametrize("which", NO_FILES)
def test_what_is_no_file_is_removed(tier: DiskTier, which: str, is_told: bool) -> None:
    where = branch()
    if is_told:
        store_one(tier, where, TOLD)
        [path] = files_under(tier.path)
    else:
        put(tier, where, THREE)
        path = path_of(tier, where, *blocks_of(where, THREE)[1])
    good = path.read_bytes()
    path.unlink()
    NO_FILES[which](path, good)

    fresh = DiskTier(tier.path, "1GiB", min_free=0)
    assert (lookup(fresh, where, TOLD[:20]) if is_told else get(fresh, where, THREE)) == (0 if is_told else BLOCK)
    assert fresh.corrupt_pieces == 1
    assert not os.path.lexists(path)
    if is_told:
        store_one(fresh, where, TOLD)
        assert lookup(fresh, where, TOLD[:20]) == 20
    else:
        assert put(fresh, where, THREE) == 1
        assert get(fresh, where, THREE) == 3 * BLOCK


def test_without_the_check_of_links_a_symlink_is_noticed_here(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "open_to_read", lambda path: os.open(path, os.O_RDONLY))
    with pytest.raises(AssertionError):
        test_what_is_no_file_is_removed(tier, "symlink", is_told=False)


def test_a_directory_that_is_not_empty_is_a_miss(tier: DiskTier) -> None:
    """It is not the tier's to delete: nothing else suffers."""
    put(tier, HERE, THREE)
    path = path_of(tier, HERE, *blocks_of(HERE, THREE)[1])
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("precious")
    assert get(tier, HERE, THREE) == BLOCK
    assert get(tier, HERE, THREE) == BLOCK
    put(tier, HERE, range(100, 100 + BLOCK))
    assert get(tier, HERE, range(100, 100 + BLOCK)) == BLOCK
    assert (path / "mine").read_text() == "precious"


def test_a_file_that_may_not_be_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode 000, by whatever means: it is a bad file like others. root may read it all the same, so root is made to see it."""
    put(tier, HERE, THREE)
    path = path_of(tier, HERE, *blocks_of(HERE, THREE)[1])
    path.chmod(0)
    if os.geteuid() == 0:
        assert get(tier, HERE, THREE) == 3 * BLOCK
        real = calls.open_to_read

        def open_as_others(name: str) -> int:
            if not os.lstat(name).st_mode & 0o400:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            return real(name)

        monkeypatch.setattr(calls, "open_to_read", open_as_others)
    assert get(tier, HERE, THREE) == BLOCK
    assert tier.corrupt_pieces == 1
    assert not path.exists()
    assert put(tier, HERE, THREE) == 1
    assert get(tier, HERE, THREE) == 3 * BLOCK


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_file_of_somebody_else(tier: DiskTier) -> None:
    put(tier, HERE, THREE)
    path = path_of(tier, HERE, *blocks_of(HERE, THREE)[1])
    os.chown(path, 12345, -1)
    assert get(tier, HERE, THREE) == BLOCK
    assert tier.corrupt_pieces == 1
    assert put(tier, HERE, THREE) == 1
    assert get(tier, HERE, THREE) == 3 * BLOCK


# --- what is counted, removed and kept ----------------------------------------------------------------------------------


def flip_payload(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000 if path.stat().st_size > 5000 else 4200)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("bad", range(4))
def test_what_comes_before_stays_usable(tier: DiskTier, bad: int) -> None:
    ids = range(4 * BLOCK)
    put(tier, HERE, ids)
    flip_payload(path_of(tier, HERE, *blocks_of(HERE, ids)[bad]))
    assert get(tier, HERE, ids) == bad * BLOCK
    assert tier.corrupt_pieces == 1
    assert tier.num_pieces == 7
    assert len(files_under(tier.path)) == 7
    assert put(tier, HERE, ids) == 1
    assert get(tier, HERE, ids) == 4 * BLOCK
    assert tier.corrupt_pieces == 1


def test_a_bad_side_piece_leaves_the_main_piece(tier: DiskTier) -> None:
    put(tier, HERE, IDS)
    [side] = files_under(tier.path, ".side.kv")
    flip_payload(side)
    [block] = tier.extend(HERE, root_of(HERE), encode_tokens(np.arange(BLOCK)), BLOCK)
    assert block.has_side
    with pytest.raises(CorruptEntryError):
        tier.read(HERE, block, SIDE, memoryview(bytearray(HERE.layout.nbytes(SIDE, BLOCK))))
    assert tier.corrupt_pieces == 1
    assert not side.exists()
    [block] = tier.extend(HERE, root_of(HERE), encode_tokens(np.arange(BLOCK)), BLOCK)
    assert not block.has_side
    assert get(tier, HERE, IDS) == BLOCK
    assert put(tier, HERE, IDS) == 1
    assert get(tier, HERE, IDS) == BLOCK


def test_a_bad_file_that_was_replaced_meanwhile_stays(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has healed it between the read and the removal."""
    put(tier, WIDE, IDS)
    [path] = files_under(tier.path)
    good = path.read_bytes()
    flip_payload(path)
    real = file_format.checksums

    def heal(payload: memoryview) -> tuple[bytes, ...]:
        path.unlink()
        path.write_bytes(good)
        return real(payload)

    monkeypatch.setattr(finder_module, "checksums", heal)
    assert get(tier, WIDE, IDS) == 0
    monkeypatch.undo()
    assert path.exists()
    assert get(tier, WIDE, IDS) == BLOCK


def test_a_bad_file_that_cannot_be_removed_is_a_miss(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, WIDE, IDS)
    flip_payload(files_under(tier.path)[0])

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(calls, "unlink", refuse)
    assert get(tier, WIDE, IDS) == 0
    assert get(tier, WIDE, IDS) == 0
    assert tier.corrupt_pieces == 2


@pytest.mark.parametrize("num_tokens", [4 * BLOCK + 1, 10**6, 10**15, 10**150])
def test_a_name_that_claims_many_tokens(tier: DiskTier, num_tokens: int) -> None:
    """A name says how long a block is before anything proves it: nothing is allocated for more than a block can have."""
    where = branch()
    parent = root_of(where)
    tokens = encode_tokens(np.arange(4 * BLOCK))
    key, _ = store_one(tier, where, range(20))
    name = Name(b"k" * SHORT_KEY_NBYTES, parent[:SHORT_KEY_NBYTES], num_tokens, head_of(parent, tokens), is_side=False)
    (files_under(tier.path)[0].parent / str(name)).write_bytes(b"x" * 5000)
    fresh = DiskTier(tier.path, "1GiB", min_free=0)
    tracemalloc.start()
    try:
        [block] = fresh.extend(where, parent, tokens, 4 * BLOCK)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (block.key, block.num_tokens) == (key, 20)


def test_a_block_that_is_longer_than_a_block_is_not_continued(tier: DiskTier) -> None:
    """It can only be there by mistake. What lies behind its end is at other positions than the prompt's next tokens."""
    where = branch()
    key, _ = store_one(tier, where, range(4 * BLOCK))
    behind = encode_tokens(np.arange(2 * BLOCK, 4 * BLOCK))
    tier.ensure(where, key, MAIN, behind, memoryview(payload_of(where, key, behind)), Stay(), {})
    found = tier.extend(where, root_of(where), encode_tokens(np.arange(4 * BLOCK)), 2 * BLOCK)
    assert sum(block.num_tokens for block in found) <= 2 * BLOCK
    assert len(found) <= 1


def test_names_that_claim_to_be_their_own_ancestors(tmp_path: Path) -> None:
    """Eviction ends, whatever the names say."""
    tier = DiskTier(tmp_path / "kv", 400_000, min_free=0)
    put(tier, HERE, THREE)
    folder = files_under(tier.path)[0].parent
    for key, parent in ((b"a", b"a"), (b"b", b"c"), (b"c", b"b"), (b"d", b"b")):
        (folder / str(Name(key * 16, parent * 16, BLOCK, b"head", is_side=False))).write_bytes(bytes(4096))
    for start in range(1000, 40_000, 1000):
        put(tier, HERE, range(start, start + BLOCK))
    assert get(tier, HERE, range(39_000, 39_000 + BLOCK)) == BLOCK
    tier.tidy()
    assert tier.used_bytes <= tier.capacity_bytes
