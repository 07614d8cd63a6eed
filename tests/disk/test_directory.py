"""The directory of a disk tier: who may see it, what it takes, what leaves it and in which order, and what a lookup opens."""

import ast
import base64
import errno
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_cache
from tests.disk.store import BLOCK, blocks_of, branch, du, files_under, get, payload_of, put, read, root_of
from tiered_cache.errors import ConfigError, CorruptEntryError
from tiered_cache.format import Name
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES, block_key, common_tokens, encode_tokens
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, StoredBlock, calls
from tiered_cache.tiers.disk.finder import MAX_CANDIDATES

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(tiered_cache.__file__).parent
WIDE = branch(width=512)  # a block is a file of 8 KiB
WINDOWED = branch(width=512, window=BLOCK)
IS_ROOT = os.geteuid() == 0


def make(path: str | os.PathLike[str], capacity: int | str = "1GiB") -> DiskTier:
    return DiskTier(path, capacity, min_free=0)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return make(tmp_path / "kv")


def sequence(number: int, num_blocks: int = 1) -> range:
    """Return token ids that no other number has."""
    return range(number * 10_000, number * 10_000 + num_blocks * BLOCK)


def present(tier: DiskTier, where: Branch, ids: Iterable[int], is_side: bool = False) -> list[bool]:
    """Say of each block of a sequence whether its file is there."""
    names = {path.name for path in files_under(tier.path)}
    return [str(Name.of(block_key(*block), *block, is_side)) in names for block in blocks_of(where, list(ids))]


def age(tier: DiskTier, where: Branch, ids: Iterable[int], used_at: float) -> None:
    """Set when the blocks of a sequence were used last."""
    for block in blocks_of(where, list(ids)):
        [path] = files_under(tier.path, str(Name.of(block_key(*block), *block, is_side=False)))
        os.utime(path, (used_at, used_at))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves the clock of this process forward."""
    real = calls.now

    def move(seconds: float) -> None:
        monkeypatch.setattr(calls, "now", lambda: real() + seconds)

    return move


# --- modes --------------------------------------------------------------------------------------------------------------

FILL = """
import os, sys
os.umask(int(sys.argv[2], 8))
from tests.disk.store import branch, put
from tiered_cache.tiers.disk import DiskTier, Stay, calls
if sys.argv[3] == "named":
    calls.TEMP_FILE = calls.NO_TEMP_FILE_FLAG
tier = DiskTier(sys.argv[1], 300_000, min_free=0)
where = branch(width=512, window=8)
for number in range(30):
    put(tier, where, range(number * 1000, number * 1000 + 16), Stay(ttl_s=1000 if number % 2 else None, pin=number > 27))
assert tier.evicted_pieces
"""


def run(code: str, *arguments: str) -> str:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=REPOSITORY, check=True, timeout=60, capture_output=True, text=True
    ).stdout


def modes(path: Path) -> dict[str, int]:
    return {str(each.relative_to(path)): stat.S_IMODE(each.lstat().st_mode) for each in [path, *path.rglob("*")]}


@pytest.mark.parametrize("way", ["nameless", "named"])
@pytest.mark.parametrize("umask", ["000", "022", "077"])
def test_everything_is_private(tmp_path: Path, umask: str, way: str) -> None:
    """0700 for every directory and 0600 for every file, whatever the umask."""
    path = tmp_path / "kv"
    run(FILL, str(path), umask, way)
    found = modes(path)
    assert {"CACHEDIR.TAG", "lock", f"{WINDOWED.folder.hex()}/model.json"} < found.keys()
    for suffix in (".side.kv", ".kv", ".pin", ".ttl"):
        assert files_under(path, suffix)
    assert {mode for name, mode in found.items() if (path / name).is_dir()} == {0o700}
    assert {mode for name, mode in found.items() if (path / name).is_file()} == {0o600}
    assert not [name for name in found if ".tmp-" in name]


def test_directories_above_that_are_made_are_private_too(tmp_path: Path) -> None:
    """Who may rename what is above can put another directory in its place."""
    path = tmp_path / "one" / "two" / "kv"
    run(FILL, str(path), "000", "nameless")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, path.parent.parent)] == [0o700] * 3


def test_temps_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a file is written, too."""
    seen = []
    real = calls.write

    def write(fd: int, data: memoryview) -> int:
        seen.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return real(fd, data)

    monkeypatch.setattr(calls, "write", write)
    old = os.umask(0)
    try:
        for way in (calls.TEMP_FILE, calls.NO_TEMP_FILE_FLAG):
            monkeypatch.setattr(calls, "TEMP_FILE", way)
            put(make(tmp_path / f"kv{way}"), WIDE, sequence(0))
    finally:
        os.umask(old)
    assert set(seen) == {0o600}
    assert len(seen) == 8


def test_an_empty_directory_of_ours_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir(mode=0o755)
    put(make(path), WIDE, sequence(0))
    assert set(modes(path).values()) == {0o700, 0o600}


# --- which directory ----------------------------------------------------------------------------------------------------


def refused(path: Any, **arguments: Any) -> str:
    """Assert that a tier is not made; return why."""
    with pytest.raises(ConfigError) as caught:
        DiskTier(path, **{"capacity": "1GiB", **arguments})
    return str(caught.value)


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    """And left as it is."""
    path = tmp_path / "home"
    path.mkdir(mode=0o755)
    (path / "thesis.tex").write_text("precious")
    why = refused(path)
    assert f"DiskTier(path={str(path)!r})" in why
    assert "holds other files" in why
    assert modes(path) == {".": 0o755, "thesis.tex": 0o644}


def test_a_directory_of_ours_that_got_another_file_is_used(tier: DiskTier) -> None:
    (Path(tier.path) / "notes.txt").write_text("mine")
    put(tier, WIDE, sequence(0))
    again = make(tier.path)
    assert get(again, WIDE, sequence(0)) == BLOCK
    again.clear()
    assert (Path(tier.path) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("left", ["lock", ".tmp-0123456789abcdef01234567"])
def test_a_directory_whose_making_was_interrupted_is_used(tmp_path: Path, left: str) -> None:
    """Killed before the tag was there: what lies there then is all ours."""
    (tmp_path / left).touch()
    assert put(make(tmp_path), WIDE, sequence(0)) == 1


@pytest.mark.skipif(not IS_ROOT, reason="gives a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    os.chown(path, 12345, -1)
    why = refused(path)
    assert f"DiskTier(path={str(path)!r})" in why
    assert "12345" in why
    assert not list(path.iterdir())


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path in (file, tmp_path / "fifo", file / "below", tmp_path / "loop" / "below"):
        assert f"DiskTier(path={str(path)!r})" in refused(path)
    assert file.read_text() == "x"


@pytest.mark.parametrize("call", ["make_folder", "stat", "names"])
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def deny(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(calls, call, deny)
    why = refused(tmp_path / "kv")
    assert f"DiskTier(path={str(tmp_path / 'kv')!r})" in why
    assert "Permission denied" in why


@pytest.mark.parametrize("path", [None, 5, b"/tmp/kv", "", ["kv"], Path, object(), True])
def test_bad_paths(path: Any) -> None:
    assert f"DiskTier(path={path!r})" in refused(path)


class BytesPath(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"/nowhere"


@pytest.mark.parametrize("path", ["kv\0", BytesPath()])
def test_paths_that_no_system_takes(path: Any) -> None:
    assert "DiskTier(path=" in refused(path)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("capacity", ["", "lots", 0, -1, 1.5, None, True, "0GiB", b"1GiB", []]),
        ("min_free", ["", "lots", -1, 1.5, None, True, False, 0.0, b"1GiB", []]),
        ("durability", ["", "none", "PROCESS", None, True, 1, ["process"], b"crash"]),
    ],
)
def test_bad_arguments(tmp_path: Path, argument: str, values: list[Any]) -> None:
    """The message names the argument and the value, and nothing is made."""
    for value in values:
        assert f"DiskTier({argument}={value!r})" in refused(tmp_path / "kv", **{argument: value})
    assert not list(tmp_path.iterdir())


def test_good_arguments(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path / "kv"), "2GiB", durability="crash", min_free="3MB")
    assert (tier.capacity_bytes, tier.min_free_bytes, tier.durability) == (2 << 30, 3_000_000, "crash")
    assert tier.path == os.path.realpath(tmp_path / "kv")
    assert repr(tier) == f"DiskTier({tier.path!r}, 2.0 GiB)"
    assert DiskTier(tmp_path / "kv", 1 << 20).min_free_bytes == 1 << 30


def test_spellings_of_a_path_share_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spellings: list[str | Path] = [
        "~/link/kv",
        tmp_path / "real" / "kv",
        "real/kv/",
        "real/../link//kv",
        tmp_path / "link" / "." / "kv",
    ]
    tiers = [make(path) for path in spellings]
    assert len({tier.path for tier in tiers}) == 1
    for at, tier in enumerate(tiers):
        assert put(tier, WIDE, sequence(at)) == 1
    for tier in tiers:
        assert [get(tier, WIDE, sequence(at)) for at in range(len(tiers))] == [BLOCK] * len(tiers)
    assert not (tmp_path / "~").exists()


def test_a_directory_that_is_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to("real")
    put(make(tmp_path / "kv"), WIDE, sequence(0))
    assert get(make(tmp_path / "real"), WIDE, sequence(0)) == BLOCK


def test_a_directory_that_was_removed_is_made_again(tier: DiskTier) -> None:
    put(tier, WIDE, sequence(0, 3))
    shutil.rmtree(tier.path)
    assert get(tier, WIDE, sequence(0, 3)) == 0
    assert put(tier, WIDE, sequence(0, 3)) == 3
    assert get(tier, WIDE, sequence(0, 3)) == 3 * BLOCK
    assert set(modes(Path(tier.path)).values()) == {0o700, 0o600}
    tier.tidy()
    assert tier.used_bytes == du(tier.path)


def test_a_file_system_that_is_gone_is_not_written_to(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an unmounted disk means that the one below it is filled."""
    monkeypatch.setattr(tier, "_device", -1)
    with pytest.raises(OSError, match="not mounted"):
        put(tier, WIDE, sequence(0))
    assert not files_under(tier.path)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs")  # noqa: S108
def test_tmpfs() -> None:
    path = Path("/dev/shm") / f"tiered_cache-{os.getpid()}"  # noqa: S108
    try:
        tier = make(path, 400_000)
        for number in range(80):
            put(tier, WINDOWED, sequence(number, 2), Stay(pin=number == 3))
            assert du(path) <= tier.capacity_bytes
        assert tier.evicted_pieces
        assert get(make(path), WINDOWED, sequence(79, 2)) == 2 * BLOCK
        assert get(make(path), WINDOWED, sequence(3, 2)) == 2 * BLOCK
        tier.tidy()
        assert tier.used_bytes == du(path)
        assert set(modes(path).values()) == {0o700, 0o600}
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- read-only ----------------------------------------------------------------------------------------------------------

WRITING = (
    "open_nameless", "open_new", "write", "sync", "link_nameless", "link", "rename", "unlink", "remove_folder", "set_mode",
    "set_used", "set_used_open",
)  # fmt: skip


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def make_folder(path: str) -> None:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        refuse()

    for call in WRITING:
        monkeypatch.setattr(calls, call, refuse)
    monkeypatch.setattr(calls, "make_folder", make_folder)


def test_a_read_only_directory_is_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, WINDOWED, sequence(0, 3))
    put(tier, WINDOWED, sequence(1, 3), Stay(ttl_s=1000))
    age(tier, WINDOWED, sequence(0, 3), 1000.0)
    Path(tier.path).chmod(0o755)
    before = modes(Path(tier.path))
    make_read_only(monkeypatch)
    for each in (tier, make(tier.path)):
        assert get(each, WINDOWED, sequence(0, 3)) == 3 * BLOCK
        assert get(each, WINDOWED, sequence(1, 3)) == 3 * BLOCK
        [block] = each.extend(WINDOWED, root_of(WINDOWED), encode_tokens(np.arange(BLOCK)), BLOCK)
        read(each, WINDOWED, block, SIDE)
        each.tidy()
        with pytest.raises(OSError, match="Read-only"):
            put(each, WINDOWED, sequence(2))
        with pytest.raises(OSError, match="Read-only"):
            each.clear()
        assert put(each, WINDOWED, sequence(0, 3)) == 0
        assert get(each, WINDOWED, sequence(0, 3)) == 3 * BLOCK
    assert modes(Path(tier.path)) == before


READ_AND_WRITE = """
import sys
from tests.disk.store import branch, get, put
from tiered_cache.tiers.disk import DiskTier
tier, where = DiskTier(sys.argv[1], "1GiB", min_free=0), branch(width=512, window=8)
assert get(tier, where, range(24)) == 24
try:
    put(tier, where, range(100, 108))
except OSError as error:
    print(error)
tier.tidy()
assert get(tier, where, range(24)) == 24
"""


def test_a_read_only_mount_is_read(tier: DiskTier) -> None:
    """The same with a file system that really is read-only, where this may make one."""
    put(tier, WINDOWED, range(24))
    mount = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"'
    alone = ["unshare", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, mount, "sh", tier.path], capture_output=True).returncode:
        pytest.skip("may not mount")
    command = [*alone, f'{mount} && exec "$2" -c "$3" "$1"', "sh", tier.path, sys.executable, READ_AND_WRITE]
    said = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=60, capture_output=True, text=True).stdout
    assert "Read-only" in said


def test_a_directory_that_cannot_be_made_on_a_read_only_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_read_only(monkeypatch)
    assert "Read-only" in refused(tmp_path / "kv")


def test_a_hint_that_fails_harms_nothing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only makes it faster may fail on any file system."""
    put(tier, WIDE, sequence(0))
    age(tier, WIDE, sequence(0), 1000.0)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    for call in ("will_read", "set_used_open", "set_used"):
        monkeypatch.setattr(calls, call, refuse)
    assert get(tier, WIDE, sequence(0)) == BLOCK


# --- what can be seen from outside --------------------------------------------------------------------------------------

SECRET_IDS = [7_234_567_891_011 + 97 * step for step in range(3 * BLOCK)]
SECRET_SPACE = "very-secret-namespace"  # noqa: S105


def traces_of(token_ids: list[int]) -> list[str]:
    """Return how token ids could be written down."""
    encoded = encode_tokens(np.asarray(token_ids))
    traces = [base64.b64encode(encoded).decode()[:24], str(token_ids)[1:-1]]
    for at, token_id in enumerate(token_ids):
        own = encoded[at * TOKEN_NBYTES : (at + 1) * TOKEN_NBYTES]
        traces += [str(token_id), f"{token_id:x}", own.hex(), own.rstrip(b"\0").hex(), str(own)[2:-1]]
    return traces


def test_nothing_tells_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not names, logs, reprs, errors or model.json; only the inside of the files does."""
    caplog.set_level(logging.DEBUG)
    tier = make(tmp_path / "kv", 300_000)
    where = branch(width=512, namespace=SECRET_SPACE, window=BLOCK)
    put(tier, where, SECRET_IDS, Stay(ttl_s=1000, pin=True))
    said = [repr(tier), str(vars(tier)), *(str(path) for path in Path(tier.path).rglob("*"))]
    blocks = tier.extend(where, root_of(where), encode_tokens(np.asarray(SECRET_IDS)), BLOCK)
    assert len(blocks) == 3

    for path in files_under(tier.path):
        path.write_bytes(b"bad")
    for kind in (MAIN, SIDE):
        with pytest.raises(CorruptEntryError) as caught:
            read(tier, where, blocks[0], kind)
        said += [str(caught.value), repr(caught.value)]
    with pytest.raises(FileNotFoundError) as gone:
        read(tier, where, blocks[0])
    said += [str(gone.value), repr(gone.value)]

    vast = branch(width=1 << 20, namespace=SECRET_SPACE)
    with pytest.raises(OSError, match="does not fit") as full:
        put(tier, vast, SECRET_IDS)
    said += [str(full.value), repr(full.value)]

    for number in range(40):  # eviction
        put(tier, where, [7 * SECRET_IDS[0] + number * 1000 + step for step in range(BLOCK)])
    tier.tidy()
    put(tier, where, SECRET_IDS)
    [model] = files_under(tier.path, "model.json")
    said += [model.read_text(), caplog.text, *(str(path) for path in Path(tier.path).rglob("*"))]
    tier.clear()
    said.append(caplog.text)
    for text in said:
        assert not [trace for trace in traces_of(SECRET_IDS) if trace in text]
        assert SECRET_SPACE not in text


def test_the_search_for_token_ids_finds_them() -> None:
    """The negative control of the test above."""
    traces = traces_of(SECRET_IDS)
    for said in (
        f"tokens {SECRET_IDS}",
        encode_tokens(np.asarray(SECRET_IDS)).hex(),
        base64.b64encode(encode_tokens(np.asarray(SECRET_IDS))).decode(),
    ):
        assert [trace for trace in traces if trace in said]


def test_model_json_says_what_it_was_told(tier: DiskTier) -> None:
    put(tier, WIDE, sequence(0))
    [path] = files_under(tier.path, "model.json")
    assert path.parent.name == WIDE.folder.hex()
    assert json.loads(path.read_text()) == {"model": "test"}


def test_backups_leave_it_out(tier: DiskTier) -> None:
    assert (Path(tier.path) / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_no_torch_is_loaded() -> None:
    loaded = run("import sys, tiered_cache.tiers.disk; print(*sys.modules)").split()
    assert "tiered_cache.tiers.disk.tier" in loaded
    assert not {"torch", "transformers", "accelerate"} & set(loaded)


# --- source -------------------------------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "mmap"}
FORBIDDEN_CALLS = {"eval", "exec", "hash", "compile", "__import__"}
FORBIDDEN_NAMES = {"memmap", "mmap", "open_memmap", "pickle", "unpickle"}


def forbidden(source: str) -> list[str]:
    """Return what of Python source makes bytes from outside into more than bytes, or maps them, or keys by `hash()`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".") if part in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [part for part in (node.module or "").split(".") if part in FORBIDDEN_MODULES]
            names += [alias.name for alias in node.names if alias.name in FORBIDDEN_MODULES | FORBIDDEN_NAMES]
            names += ["torch.load" for alias in node.names if (node.module, alias.name) == ("torch", "load")]
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                names = [node.func.id]
            names += [keyword.arg for keyword in node.keywords if keyword.arg in ("allow_pickle", "mmap", "mmap_mode")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr in FORBIDDEN_NAMES else []
            if isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("torch", "load"):
                names = ["torch.load"]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id in FORBIDDEN_NAMES else []
        elif isinstance(node, ast.Constant) and node.value in FORBIDDEN_MODULES:
            names = [str(node.value)]
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in names]
    return found


def test_bytes_from_disk_stay_bytes() -> None:
    """No pickle, no mmap, no eval, and no `hash()`, which differs from process to process."""
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 30
    assert {str(path): forbidden(path.read_text()) for path in sources if forbidden(path.read_text())} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from torch import load",
        "import torch\ntorch.load(path)",
        "load = torch.load",
        "eval('1')",
        "exec(code)",
        "key = hash(tokens)",
        "key = {hash((a, b)): 1}",
        "import mmap",
        "np.memmap(path)",
        "from numpy import memmap",
        "np.load(path, mmap_mode='r')",
        "np.load(path, allow_pickle=True)",
        "importlib.import_module('pickle')",
        "numpy.lib.format.open_memmap(path)",
    ],
)
def test_the_search_of_sources_finds_it(source: str) -> None:
    assert forbidden(source)


def test_the_search_of_sources_finds_nothing_else() -> None:
    assert not forbidden(
        'class A:\n    """No pickle, mmap or hash()."""\n    def __hash__(self): return self.hash\nmodel.eval()\n'
    )
    assert not forbidden("torch.loads\nhashlib.sha256(b'')\nself.load(path)\nre.compile('x')")


# --- time to live -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sees", ["the one who wrote it", "another process"])
def test_what_is_expired_is_a_miss_and_removed(tier: DiskTier, later: Callable[[float], None], sees: str) -> None:
    put(tier, WIDE, sequence(0, 2))
    put(tier, WIDE, sequence(0, 3), Stay(ttl_s=100))
    reader = tier if sees == "the one who wrote it" else make(tier.path)
    later(99)
    assert get(reader, WIDE, sequence(0, 3)) == 3 * BLOCK
    later(101)
    assert get(reader, WIDE, sequence(0, 3)) == 2 * BLOCK
    assert present(tier, WIDE, sequence(0, 3)) == [True, True, False]
    assert reader.corrupt_pieces == 0
    assert put(reader, WIDE, sequence(0, 3), Stay(ttl_s=100)) == 1
    assert get(reader, WIDE, sequence(0, 3)) == 3 * BLOCK


def test_tidy_removes_what_is_expired_with_its_mark(tier: DiskTier, later: Callable[[float], None]) -> None:
    put(tier, WINDOWED, sequence(0, 2), Stay(ttl_s=100))
    put(tier, WINDOWED, sequence(1, 2), Stay(ttl_s=1000, pin=True))
    put(tier, WINDOWED, sequence(2, 2))
    assert len(files_under(tier.path, ".ttl")) == 4
    later(99)
    tier.tidy()
    assert len(files_under(tier.path)) == 12
    later(101)
    for each in (tier, make(tier.path)):
        each.tidy()
        assert each.num_pieces == len(files_under(tier.path)) == 8
        assert len(files_under(tier.path, ".ttl")) == 2
        assert len(files_under(tier.path, ".pin")) == 2
        assert each.used_bytes == du(tier.path)
    later(1001)
    tier.tidy()
    assert len(files_under(tier.path)) == 4
    assert not files_under(tier.path, ".ttl")
    assert not files_under(tier.path, ".pin")
    assert get(tier, WINDOWED, sequence(2, 2)) == 2 * BLOCK


def test_what_is_stored_again_for_good_outlives_the_mark_of_before(tier: DiskTier, later: Callable[[float], None]) -> None:
    """A lookup removed the expired file and left its mark, which must not take the new one with it."""
    put(tier, WIDE, sequence(0), Stay(ttl_s=100))
    later(101)
    assert get(tier, WIDE, sequence(0)) == 0
    assert put(tier, WIDE, sequence(0)) == 1
    for each in (tier, make(tier.path)):
        each.tidy()
        assert get(each, WIDE, sequence(0)) == BLOCK


def test_what_is_stored_again_for_longer_stays_as_long(tier: DiskTier, later: Callable[[float], None]) -> None:
    put(tier, WIDE, sequence(0), Stay(ttl_s=100))
    later(101)
    assert get(tier, WIDE, sequence(0)) == 0
    assert put(tier, WIDE, sequence(0), Stay(ttl_s=500)) == 1
    later(300)
    tier.tidy()
    assert get(tier, WIDE, sequence(0)) == BLOCK
    later(602)
    tier.tidy()
    assert not files_under(tier.path)


@pytest.mark.parametrize("ttl_s", [1e-9, 1e10, 1e12, 1e30])
def test_any_time_to_live_can_be_written_down(tier: DiskTier, ttl_s: float, later: Callable[[float], None]) -> None:
    put(tier, WIDE, sequence(0), Stay(ttl_s=ttl_s))
    if ttl_s > 1:
        later(1e6)
        tier.tidy()
        assert get(tier, WIDE, sequence(0)) == BLOCK
    else:
        later(1)
        assert get(tier, WIDE, sequence(0)) == 0
    assert tier.corrupt_pieces == 0


@pytest.mark.parametrize("ttl_s", [None, 1000.0])
def test_what_is_wanted_for_longer_is_stored_again(tier: DiskTier, later: Callable[[float], None], ttl_s: float | None) -> None:
    """Its side piece as well; but not if it stays long enough as it is."""
    put(tier, WINDOWED, sequence(0, 2), Stay(ttl_s=100))
    assert put(tier, WINDOWED, sequence(0, 2), Stay(ttl_s=90)) == 0
    assert put(tier, WINDOWED, sequence(0, 2), Stay(ttl_s=ttl_s)) == 4
    assert put(tier, WINDOWED, sequence(0, 2), Stay(ttl_s=ttl_s)) == 0
    later(200)
    for each in (tier, make(tier.path)):
        each.tidy()
        for block in extend(each, sequence(0, 2), WINDOWED, BLOCK):
            assert block.has_side
            read(each, WINDOWED, block, SIDE)
        assert get(each, WINDOWED, sequence(0, 2)) == 2 * BLOCK


def test_what_is_expired_goes_before_what_is_old(tmp_path: Path, later: Callable[[float], None]) -> None:
    tier = make(tmp_path / "kv", 300_000)
    put(tier, WIDE, sequence(0))
    age(tier, WIDE, sequence(0), 1000.0)
    number = 1
    while tier.used_bytes < 260_000:
        put(tier, WIDE, sequence(number), Stay(ttl_s=100))
        number += 1
    later(101)
    for number in range(100, 110):
        put(tier, WIDE, sequence(number))
    assert get(tier, WIDE, sequence(0)) == BLOCK
    assert tier.evicted_pieces == 0


def test_an_expired_tail_is_no_candidate(tier: DiskTier, later: Callable[[float], None]) -> None:
    store(tier, range(40), Stay(ttl_s=100))
    assert find(tier, range(20)).num_tokens == 20
    later(101)
    fresh = make(tier.path)
    assert not extend(fresh, range(20))
    assert not files_under(tier.path)


# --- pins ---------------------------------------------------------------------------------------------------------------


def press(tier: DiskTier, where: Branch = WIDE, first: int = 1000, number: int = 60) -> None:
    """Write until much was evicted."""
    before = tier.evicted_pieces
    for at in range(first, first + number):
        put(tier, where, sequence(at))
    assert tier.evicted_pieces > before


@pytest.mark.parametrize("is_another", [False, True])
def test_pins_stay_with_all_before_them(tmp_path: Path, is_another: bool) -> None:
    """Another process that knows nothing of the pin keeps it as well."""
    tier = make(tmp_path / "kv", 400_000)
    for number in (0, 1):
        put(tier, WIDE, sequence(number, 4))
    parent, tokens = blocks_of(WIDE, sequence(0, 5))[-1]
    payload = memoryview(payload_of(WIDE, parent, tokens))
    assert tier.ensure(WIDE, parent, MAIN, tokens, payload, Stay(pin=True), {})
    assert len(files_under(tier.path, ".pin")) == 1
    age(tier, WIDE, sequence(0, 5), 1000.0)
    age(tier, WIDE, sequence(1, 4), 2000.0)
    press(make(tmp_path / "kv", 400_000) if is_another else tier)
    assert present(tier, WIDE, sequence(0, 5)) == [True] * 5
    assert present(tier, WIDE, sequence(1, 4)) == [False] * 4
    assert get(tier, WIDE, sequence(0, 5)) == 5 * BLOCK


def test_what_is_there_already_can_be_pinned(tmp_path: Path) -> None:
    tier = make(tmp_path / "kv", 400_000)
    put(tier, WIDE, sequence(0, 2))
    assert put(tier, WIDE, sequence(0, 2), Stay(pin=True)) == 0
    age(tier, WIDE, sequence(0, 2), 1000.0)
    press(tier)
    assert get(tier, WIDE, sequence(0, 2)) == 2 * BLOCK


@pytest.mark.parametrize("where", [WIDE, WINDOWED], ids=["main", "with side pieces"])
def test_at_most_half_can_be_pinned(tmp_path: Path, where: Branch) -> None:
    """What is pinned beyond that goes as if it were not, so that there is always room to write."""
    tier = make(tmp_path / "kv", 400_000)
    pinned = range(60)
    for number in pinned:
        put(tier, where, sequence(number), Stay(pin=True))
        assert get(tier, where, sequence(number)) == BLOCK
    press(tier, where)
    left = [number for number in pinned if any(present(tier, where, sequence(number)))]
    assert left
    nbytes = 8192 * sum(sum(present(tier, where, sequence(number), is_side)) for number in pinned for is_side in (False, True))
    assert nbytes <= tier.capacity_bytes / 2
    assert tier.capacity_bytes / 4 < nbytes
    assert du(tier.path) <= tier.capacity_bytes


def test_a_pin_with_more_before_it_than_may_be_pinned_blocks_nothing(tmp_path: Path) -> None:
    tier = make(tmp_path / "kv", 400_000)
    put(tier, WIDE, sequence(0, 20))
    parent, tokens = blocks_of(WIDE, sequence(0, 21))[-1]
    tier.ensure(WIDE, parent, MAIN, tokens, memoryview(payload_of(WIDE, parent, tokens)), Stay(pin=True), {})
    age(tier, WIDE, sequence(0, 21), 1000.0)
    press(tier)
    assert get(tier, WIDE, sequence(1059)) == BLOCK


# --- clearing -----------------------------------------------------------------------------------------------------------

OTHER_SPACE, OTHER_MODEL = branch(width=512, namespace="other"), branch(width=512, identity=b"M" * 32)


def fill_all(tier: DiskTier) -> None:
    for where in (WINDOWED, OTHER_SPACE, OTHER_MODEL):
        put(tier, where, sequence(0, 3), Stay(ttl_s=1000, pin=True))
        put(tier, where, sequence(1, 3))


def lengths(tier: DiskTier) -> list[int]:
    return [get(tier, where, sequence(0, 3)) // BLOCK for where in (WINDOWED, OTHER_SPACE, OTHER_MODEL)]


@pytest.mark.parametrize("is_another", [False, True])
def test_clear_removes_everything(tier: DiskTier, is_another: bool) -> None:
    """Marks, folders and model.json as well."""
    fill_all(tier)
    assert lengths(tier) == [3, 3, 3]
    (make(tier.path) if is_another else tier).clear()
    assert {path.name for path in Path(tier.path).iterdir()} <= {"CACHEDIR.TAG", "lock"}
    assert lengths(tier) == [0, 0, 0]
    tier.tidy()
    assert tier.num_pieces == 0
    assert tier.used_bytes == du(tier.path)
    fill_all(tier)
    assert lengths(tier) == [3, 3, 3]


def test_clear_removes_the_folders_of_what_was_evicted(tmp_path: Path) -> None:
    tier = make(tmp_path / "kv", 300_000)
    put(tier, OTHER_MODEL, sequence(0))
    age(tier, OTHER_MODEL, sequence(0), 1000.0)
    press(tier)
    assert not any(present(tier, OTHER_MODEL, sequence(0)))
    tier.clear()
    assert {path.name for path in tmp_path.joinpath("kv").iterdir()} <= {"CACHEDIR.TAG", "lock"}


def test_clear_of_a_namespace(tier: DiskTier) -> None:
    fill_all(tier)
    tier.clear(namespace="other")
    assert lengths(tier) == [3, 0, 3]
    assert not files_under(Path(tier.path) / OTHER_SPACE.folder.hex() / OTHER_SPACE.namespace_digest.hex(), "")
    assert lengths(make(tier.path)) == [3, 0, 3]
    tier.clear(namespace="no such namespace")
    assert lengths(tier) == [3, 0, 3]
    assert tier.used_bytes == du(tier.path)


def test_clear_of_a_model(tier: DiskTier) -> None:
    fill_all(tier)
    tier.clear(identity=OTHER_MODEL.identity)
    assert lengths(tier) == [3, 3, 0]
    assert not (Path(tier.path) / OTHER_MODEL.folder.hex()).exists()
    assert (Path(tier.path) / WINDOWED.folder.hex()).exists()
    tier.clear(identity=b"no such model")
    tier.clear(identity=WIDE.identity, namespace="other")
    assert lengths(tier) == [3, 0, 0]


def test_clear_says_what_stays(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_all(tier)
    make_read_only(monkeypatch)
    with pytest.raises(OSError, match="Read-only"):
        tier.clear()


# --- eviction -----------------------------------------------------------------------------------------------------------


def fill_to(tier: DiskTier, where: Branch, first: int) -> None:
    """Write single blocks until the first eviction."""
    before = tier.evicted_pieces
    for number in range(first, first + 1000):
        put(tier, where, sequence(number))
        if tier.evicted_pieces > before:
            return
    raise AssertionError("nothing was evicted")


def test_the_least_recently_used_go_first_and_children_before_parents(tmp_path: Path) -> None:
    tier = make(tmp_path / "kv", 500_000)
    used = {2: 1000.0, 0: 2000.0, 1: 3000.0}  # by sequence
    for number in used:
        put(tier, WIDE, sequence(number, 6))
    for number, at in used.items():
        age(tier, WIDE, sequence(number, 6), at)
    order = [(number, block) for number in used for block in reversed(range(6))]
    counts = []
    for first in range(10_000, 20_000, 1000):
        fill_to(tier, WIDE, first)
        there = {number: present(tier, WIDE, sequence(number, 6)) for number in used}
        gone = [place for place in order if not there[place[0]][place[1]]]
        assert gone == order[: len(gone)]
        counts.append(len(gone))
        if len(gone) == len(order):
            break
    assert 0 < counts[0] < len(order)
    assert counts[-1] == len(order)


def test_a_parent_was_used_when_its_children_were(tmp_path: Path) -> None:
    """Of a tree whose trunk was written long before its branches, the branches go first, the older one before the other."""
    tier = make(tmp_path / "kv", 400_000)
    trunk = list(sequence(0, 3))
    young, old = trunk + list(sequence(1, 3)), trunk + list(sequence(2, 3))
    put(tier, WIDE, young)
    put(tier, WIDE, old)
    age(tier, WIDE, young, 5000.0)
    age(tier, WIDE, old, 3000.0)
    age(tier, WIDE, trunk, 1000.0)
    put(tier, WIDE, sequence(3, 2))
    age(tier, WIDE, sequence(3, 2), 4000.0)
    order = [(old, 5), (old, 4), (old, 3), (sequence(3, 2), 1), (sequence(3, 2), 0)] + [
        (young, at) for at in (5, 4, 3, 2, 1, 0)
    ]
    seen = set()
    for first in range(10_000, 30_000, 1000):
        fill_to(tier, WIDE, first)
        gone = [not present(tier, WIDE, ids)[at] for ids, at in order]
        assert gone == sorted(gone, reverse=True)
        seen.add(sum(gone))
    assert 0 < min(seen) < max(seen) == len(order)


def test_side_pieces_that_no_hit_used_go_first(tmp_path: Path) -> None:
    tier = make(tmp_path / "kv", 600_000)
    hit, other = sequence(0, 10), sequence(1, 10)
    put(tier, WINDOWED, hit)
    put(tier, WINDOWED, other)
    for block in tier.extend(WINDOWED, root_of(WINDOWED), encode_tokens(np.asarray(hit)), BLOCK):
        read(tier, WINDOWED, block, SIDE)
        read(tier, WINDOWED, block, MAIN)
    age(tier, WINDOWED, other, 1000.0)
    counts = []
    for first in range(10_000, 20_000, 1000):
        fill_to(tier, WIDE, first)
        assert present(tier, WINDOWED, hit) == present(tier, WINDOWED, hit, is_side=True) == [True] * 10
        mains, sides = sum(present(tier, WINDOWED, other)), sum(present(tier, WINDOWED, other, is_side=True))
        assert mains == 10 or sides == 0
        counts.append((mains, sides))
        if mains < 10:
            break
    assert 0 < counts[0][1] < 10
    assert counts[-1][1] == 0


def test_reading_counts_as_use(tmp_path: Path) -> None:
    tier = make(tmp_path / "kv", 400_000)
    for number, num_blocks in enumerate((8, 4, 4)):
        put(tier, WIDE, sequence(number, num_blocks))
        age(tier, WIDE, sequence(number, num_blocks), 1000.0)
    assert get(tier, WIDE, sequence(1, 4)) == 4 * BLOCK
    assert put(tier, WIDE, sequence(2, 4)) == 0  # so does having it stored
    fill_to(tier, WIDE, 100)
    assert not all(present(tier, WIDE, sequence(0, 8)))
    assert present(tier, WIDE, sequence(1, 4)) == [True] * 4
    assert present(tier, WIDE, sequence(2, 4)) == [True] * 4


def test_use_is_noted_at_most_once_a_minute(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, later: Callable[[float], None]
) -> None:
    put(tier, WIDE, sequence(0))
    noted: list[float] = []
    real = calls.set_used_open

    def set_used_open(fd: int, seconds: float) -> None:
        noted.append(seconds)
        real(fd, seconds)

    monkeypatch.setattr(calls, "set_used_open", set_used_open)
    for _ in range(5):
        get(tier, WIDE, sequence(0))
    assert not noted
    later(61)
    for _ in range(5):
        get(tier, WIDE, sequence(0))
    assert len(noted) == 1


@pytest.mark.parametrize("width", [1, 10, 512, 513, 3000])
@pytest.mark.parametrize("capacity", [150_000, 300_001, 1_000_000])
def test_capacity_is_never_exceeded(tmp_path: Path, width: int, capacity: int) -> None:
    """As `du` counts it: with folders, and with what is left over of each file's last disk block."""
    tier = make(tmp_path / "kv", capacity)
    where = branch(width=width, window=BLOCK)
    for number in range(60):
        put(tier, where, sequence(number, 1 + number % 3), Stay(ttl_s=1000 if number % 5 == 0 else None))
        assert du(tier.path) <= capacity
    assert tier.evicted_pieces
    if 12 * width * BLOCK < capacity:
        assert get(tier, where, sequence(59, 3)) == 3 * BLOCK
    tier.tidy()
    assert tier.used_bytes == du(tier.path)


def test_a_side_piece_does_not_replace_what_it_belongs_to(tmp_path: Path) -> None:
    """Room for it is made by other side pieces of its sequence, or it is not stored."""
    where = branch(width=3000, window=BLOCK)
    tier = make(tmp_path / "kv", 200_000)
    for number in range(5):
        put(tier, where, sequence(number, 4))
        assert present(tier, where, sequence(number, 4)) == [True] * 4
        assert present(tier, where, sequence(number, 4), is_side=True)[-1]
        assert get(tier, where, sequence(number, 4)) == 4 * BLOCK
    small = make(tmp_path / "small", 70_000)
    with pytest.raises(OSError, match="no room"):
        put(small, where, sequence(0))
    assert get(small, where, sequence(0)) == BLOCK


def test_of_a_sequence_that_is_larger_than_the_capacity_the_beginning_stays(tmp_path: Path) -> None:
    """What is before a block that is being written does not make room for it: without it, it would never be found."""
    tier = make(tmp_path / "kv", 400_000)
    put(tier, WIDE, sequence(0, 5))
    with pytest.raises(OSError, match="no room"):
        put(tier, WIDE, sequence(1, 60))
    num_blocks = get(tier, WIDE, sequence(1, 60)) // BLOCK
    assert num_blocks * 8192 > tier.capacity_bytes / 2
    assert num_blocks == tier.num_pieces == len(files_under(tier.path))
    put(tier, WIDE, sequence(2, 5))
    assert get(tier, WIDE, sequence(2, 5)) == 5 * BLOCK
    assert get(tier, WIDE, sequence(1, 60)) < num_blocks * BLOCK


def test_what_never_fits_is_refused(tier: DiskTier, tmp_path: Path) -> None:
    small = make(tmp_path / "small", 50_000)
    with pytest.raises(OSError, match="does not fit"):
        put(small, branch(width=10_000), sequence(0))
    assert not files_under(small.path)
    assert put(small, WIDE, sequence(0)) == 1


def test_two_tiers_on_one_directory_keep_its_capacity(tmp_path: Path) -> None:
    """Each sees what the other wrote after at most 1/64 of the capacity."""
    tiers = [make(tmp_path / "kv", 1_000_000) for _ in range(2)]
    for number in range(200):
        put(tiers[number % 2], WIDE, sequence(number))
        assert du(tmp_path / "kv") <= 1_000_000 * (1 + 1 / 64) + 20_000
    for tier in tiers:
        tier.tidy()
        assert tier.used_bytes == du(tmp_path / "kv")
        assert get(tier, WIDE, sequence(199)) == BLOCK


def test_a_smaller_capacity_is_reached_by_tidy(tmp_path: Path) -> None:
    large = make(tmp_path / "kv", 1_000_000)
    for number in range(50):
        put(large, WIDE, sequence(number))
    small = make(tmp_path / "kv", 300_000)
    small.tidy()
    assert du(small.path) <= 300_000
    assert small.used_bytes == du(small.path)
    large.tidy()
    assert large.used_bytes == du(large.path)
    assert large.num_pieces == small.num_pieces


def test_used_bytes_are_those_of_du(tmp_path: Path) -> None:
    """After anything that can happen to a directory, done here or by somebody else."""
    generator = np.random.default_rng(0)
    tier, other = make(tmp_path / "kv", 700_000), make(tmp_path / "kv", 700_000)
    wheres = [WINDOWED, OTHER_SPACE, branch(width=100, identity=b"S" * 32)]
    for step in range(150):
        where = wheres[generator.integers(3)]
        ids = sequence(int(generator.integers(20)), int(generator.integers(1, 5)))
        stay = Stay(ttl_s=1000 if generator.random() < 0.2 else None, pin=bool(generator.random() < 0.1))
        match generator.integers(8):
            case 0 | 1 | 2:
                put(tier, where, ids, stay)
            case 3 | 4:
                put(other, where, ids, stay)
            case 5:
                get(tier, where, ids)
            case 6:
                files = files_under(tier.path)
                if files:
                    files[generator.integers(len(files))].unlink()
            case 7 if step % 5 == 0:
                other.clear(namespace="other")
        if step % 10 == 9:
            tier.tidy()
            assert tier.used_bytes == du(tier.path)
            assert tier.num_pieces == len(files_under(tier.path))
    other.tidy()
    assert other.used_bytes == du(tier.path)


def test_min_free_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces go so that so much stays free on the file system; if it is full of other things, nothing is written."""
    tier = DiskTier(tmp_path / "kv", "1GiB", min_free=1_000_000)
    size = 1_300_000
    monkeypatch.setattr(calls, "free_bytes", lambda folder: size - du(tier.path))
    for number in range(60):
        put(tier, WIDE, sequence(number))
        assert calls.free_bytes(tier.path) >= 1_000_000
    assert tier.evicted_pieces
    assert get(tier, WIDE, sequence(59)) == BLOCK
    size = 900_000
    with pytest.raises(OSError, match="no room"):
        put(tier, WIDE, sequence(100))


@pytest.mark.parametrize("kind", ["directory", "temp directory", "temp symlink"])
def test_eviction_passes_by_what_it_cannot_remove(tmp_path: Path, kind: str) -> None:
    """One strange thing in the directory does not stop all writing."""
    tier = make(tmp_path / "kv", 300_000)
    put(tier, WIDE, sequence(0))
    [path] = files_under(tier.path)
    if kind == "directory":
        path.unlink()
        path.mkdir()
        (path / "mine").touch()
        os.utime(path, (1000.0, 1000.0))
    elif kind == "temp directory":
        (path.parent / ".tmp-mine").mkdir()
    else:
        (path.parent / ".tmp-mine").symlink_to("nowhere")
    for each in (tier, make(tmp_path / "kv", 300_000)):
        press(each)
        assert get(each, WIDE, sequence(1059)) == BLOCK
        each.tidy()
        assert each.used_bytes <= each.capacity_bytes


@pytest.mark.parametrize("above", [0, 2, 3], ids=["pieces", "model", "root"])
def test_temps_of_the_dead_are_removed_and_those_of_the_living_are_not(tier: DiskTier, above: int) -> None:
    """Wherever something is published: pieces, model.json, and the tag."""
    put(tier, WIDE, sequence(0))
    folder = files_under(tier.path)[0].parents[above]
    temp = folder / ".tmp-0123"
    fd = calls.open_new(str(temp))
    calls.lock_temp(fd)
    os.write(fd, bytes(5000))
    os.utime(folder, (2000.0, 2000.0))  # long ago: what was seen once is not looked at again
    tier.tidy()
    assert temp.exists()
    assert tier.used_bytes == du(tier.path)
    os.close(fd)
    tier.tidy()
    assert not temp.exists()
    assert tier.used_bytes == du(tier.path)


# --- blocks that are used in part ---------------------------------------------------------------------------------------

LONG = 64  # tokens a block here


def store(tier: DiskTier, ids: Iterable[int], stay: Stay | None = None, where: Branch = WIDE) -> bytes:
    """Store one first block of all of `ids`; return its key."""
    parent, tokens = root_of(where), encode_tokens(np.asarray(list(ids)))
    tier.ensure(where, parent, MAIN, tokens, memoryview(payload_of(where, parent, tokens)), stay or Stay(), {})
    return block_key(parent, tokens)


def extend(tier: DiskTier, ids: Iterable[int], where: Branch = WIDE, block_tokens: int = LONG) -> list[StoredBlock]:
    """Look a prompt up; assert that what was found holds what it says, and that its bytes are right."""
    prompt = encode_tokens(np.asarray(list(ids)))
    found = tier.extend(where, root_of(where), prompt, block_tokens)
    done = 0
    for block in found:
        assert block.key == block_key(block.parent, block.tokens)
        assert common_tokens(block.tokens, prompt[done:]) >= block.num_tokens > 0
        read(tier, where, block)
        done += block.num_tokens * TOKEN_NBYTES
    return found


def find(tier: DiskTier, ids: Iterable[int]) -> StoredBlock:
    [block] = extend(tier, ids)
    return block


@pytest.mark.parametrize("is_another", [False, True])
def test_a_prompt_that_ends_or_leaves_inside_a_block_finds_it(tier: DiskTier, is_another: bool) -> None:
    """Exact to the token from 16 shared ones on; fewer may be missed, but are never wrong."""
    key = store(tier, range(LONG))
    for shared in range(1, LONG + 1):
        for ids in ([*range(shared)], [*range(shared), *range(9000, 9040)]):
            seeker = make(tier.path) if is_another else tier
            found = extend(seeker, ids)
            if shared >= 16:
                assert [(block.key, block.num_tokens) for block in found] == [(key, shared)]
            else:
                assert sum(block.num_tokens for block in found) in (0, shared)


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 63])
def test_a_tail_is_found_by_what_continues_it(tier: DiskTier, length: int) -> None:
    key = store(tier, range(length))
    for seeker in (tier, make(tier.path)):
        found = find(seeker, range(LONG))
        assert (found.key, found.num_tokens) == (key, length)
        assert not extend(seeker, [9999, *range(1, LONG)])


def test_the_block_that_shares_most_is_found(tier: DiskTier) -> None:
    for leaves_at in (16, 20, 31, 50, 40):
        store(tier, [*range(leaves_at), *range(leaves_at * 1000, leaves_at * 1000 + LONG - leaves_at)])
    for leaves_at in (16, 20, 31, 50, 40):
        ids = [*range(leaves_at), *range(leaves_at * 1000, leaves_at * 1000 + 3), *range(7000, 7020)]
        assert find(make(tier.path), ids).num_tokens == leaves_at + 3
    assert find(tier, range(45)).num_tokens == 45


def test_a_full_block_is_found_before_others(tier: DiskTier) -> None:
    whole = store(tier, range(LONG))
    parent = whole
    tokens = encode_tokens(np.arange(LONG, LONG + 30))
    tier.ensure(WIDE, parent, MAIN, tokens, memoryview(payload_of(WIDE, parent, tokens)), Stay(), {})
    found = extend(make(tier.path), range(2 * LONG))
    assert [block.num_tokens for block in found] == [LONG, 30]
    assert [block.num_tokens for block in extend(tier, range(LONG + 20))] == [LONG, 20]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the paths that are opened to be read."""
    paths: list[str] = []
    real = calls.open_to_read

    def open_to_read(path: str) -> int:
        paths.append(path)
        return real(path)

    monkeypatch.setattr(calls, "open_to_read", open_to_read)
    return paths


def seek(tier: DiskTier, ids: Iterable[int]) -> int:
    prompt = encode_tokens(np.asarray(list(ids)))
    return sum(block.num_tokens for block in tier.extend(WIDE, root_of(WIDE), prompt, LONG))


def test_few_files_are_opened_in_a_lookup(tier: DiskTier, opened: list[str]) -> None:
    """However many siblings there are; those that begin otherwise are not opened at all."""
    for number in range(3 * MAX_CANDIDATES):
        store(tier, [*range(16), *range(number * 1000, number * 1000 + 30)])
    for number in range(10):
        store(tier, range(number * 1000 + 500, number * 1000 + 540))
    fresh = make(tier.path)
    assert seek(fresh, range(9_000_000, 9_000_040)) == 0
    assert len(opened) == 0
    assert seek(fresh, [*range(16), *range(8_000_000, 8_000_010)]) == 16
    assert len(opened) == MAX_CANDIDATES == 16
    opened.clear()
    assert seek(fresh, [*range(16), *range(8_000_000, 8_000_010)]) == 16
    assert len(opened) == 0  # what they hold is remembered
    assert seek(fresh, range(3500, 3530)) == 30
    assert len(opened) == 1


def test_a_full_block_is_found_without_opening_it(tier: DiskTier, opened: list[str]) -> None:
    store(tier, range(LONG))
    assert seek(make(tier.path), range(LONG)) == LONG
    assert not opened


def test_bad_candidates_count_as_opened(tier: DiskTier, opened: list[str]) -> None:
    for number in range(2 * MAX_CANDIDATES):
        store(tier, [*range(16), *range(number * 1000, number * 1000 + 30)])
    for path in files_under(tier.path):
        path.write_bytes(b"bad")
    fresh = make(tier.path)
    for left in (MAX_CANDIDATES, 0):
        opened.clear()
        assert seek(fresh, range(40)) == 0
        assert len(opened) == MAX_CANDIDATES
        assert len(files_under(tier.path)) == left
    assert fresh.corrupt_pieces == 2 * MAX_CANDIDATES


def test_what_is_remembered_of_a_block_dies_with_it(tier: DiskTier) -> None:
    store(tier, range(40))
    assert find(tier, range(20)).num_tokens == 20
    files_under(tier.path)[0].unlink()
    assert seek(tier, range(20)) == 0
    store(tier, range(30))
    assert find(tier, range(20)).num_tokens == 20


def sizes(tier: DiskTier) -> list[int]:
    """Return how many tokens the stored pieces have."""
    names = [Name.parse(path.name) for path in files_under(tier.path)]
    return sorted(name.num_tokens for name in names if name)


def test_a_tail_that_a_longer_block_covers_is_removed(tier: DiskTier) -> None:
    """After the longer one is there, in whose place it is found; not one that is too short to be found so."""
    for length in (5, 15, 16, 20):
        store(tier, range(length))
    other = store(tier, [*range(18), 9999])
    assert sizes(tier) == [5, 15, 19, 20]
    store(tier, range(40))
    assert sizes(tier) == [5, 15, 19, 40]
    assert find(tier, [*range(18), 9999, 1, 2]).key == other
    for shared in (16, 20, 39, 40):
        assert find(tier, range(shared)).num_tokens == shared


def test_a_covered_tail_stays_where_the_longer_block_may_go_before_it(tier: DiskTier) -> None:
    store(tier, range(20))
    store(tier, range(30), Stay(pin=True))
    store(tier, range(40), Stay(ttl_s=100))
    store(tier, range(50))
    assert sizes(tier) == [30, 50]


def test_a_tail_is_covered_by_what_lives_shorter(tier: DiskTier, later: Callable[[float], None]) -> None:
    store(tier, range(20))
    store(tier, range(40), Stay(ttl_s=100))
    later(101)
    assert find(tier, range(40)).num_tokens == 20


def test_a_covered_tail_goes_with_its_side_piece(tier: DiskTier) -> None:
    parent = root_of(WINDOWED)
    for length in (20, 40):
        tokens = encode_tokens(np.arange(length))
        for kind in (MAIN, SIDE):
            payload = memoryview(payload_of(WINDOWED, parent, tokens, kind))
            tier.ensure(WINDOWED, parent, kind, tokens, payload, Stay(), {})
    assert sizes(tier) == [40, 40]
    [block] = extend(tier, range(20), WINDOWED)
    assert block.has_side
