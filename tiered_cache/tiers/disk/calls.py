"""Every call to the operating system that the disk tier makes, and nothing else: tests put faults in here, at the n-th call.

POSIX only. All of them raise OSError.
"""

import fcntl
import os
import stat as stat_module
import time
from pathlib import Path

NO_TEMP_FILE_FLAG = 0
TEMP_FILE = getattr(os, "O_TMPFILE", NO_TEMP_FILE_FLAG)  # Linux: a file without a name, gone with its process
_CREATE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_to_read(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def open_nameless(folder: str) -> int:
    return os.open(folder, TEMP_FILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)


def open_new(path: str) -> int:
    return os.open(path, _CREATE | os.O_CREAT | os.O_EXCL, 0o600)


def close(fd: int) -> None:
    os.close(fd)


def read(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


def write(fd: int, data: memoryview) -> int:
    return os.write(fd, data)


def sync(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)


def will_read(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def stat(path: str) -> os.stat_result:
    return os.stat(path, follow_symlinks=False)  # noqa: PTH116


def stat_open(fd: int) -> os.stat_result:
    return os.fstat(fd)


def names(folder: str) -> list[str]:
    return os.listdir(folder)  # noqa: PTH208


def entries(folder: str) -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as found:
        return list(found)


def stat_entry(entry: "os.DirEntry[str]") -> os.stat_result:
    return entry.stat(follow_symlinks=False)


def link_nameless(fd: int, path: str) -> None:
    # With a folder's descriptor Python calls linkat(), which follows the link in /proc to the file itself.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def link(source: str, path: str) -> None:
    os.link(source, path)


def rename(source: str, path: str) -> None:
    Path(source).rename(path)


def unlink(path: str) -> None:
    os.unlink(path)  # noqa: PTH108  a str, as everywhere here


def make_folder(path: str) -> None:
    os.mkdir(path, 0o700)  # noqa: PTH102


def remove_folder(path: str) -> None:
    os.rmdir(path)  # noqa: PTH106


def set_mode(path: str, mode: int) -> None:
    os.chmod(path, mode)  # noqa: PTH101


def set_used(path: str, seconds: float) -> None:
    os.utime(path, (seconds, seconds), follow_symlinks=False)


def set_used_open(fd: int, seconds: float) -> None:
    os.utime(fd, (seconds, seconds))


def free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def lock_temp(fd: int) -> None:
    """Mark a temp file as in use for as long as it is open. Raises BlockingIOError where another process does."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def now() -> float:
    return time.time()


def is_folder(found: os.stat_result) -> bool:
    return stat_module.S_ISDIR(found.st_mode)


def is_file(found: os.stat_result) -> bool:
    return stat_module.S_ISREG(found.st_mode)


def used_bytes(found: os.stat_result) -> int:
    """Return what a file or folder takes on disk, as `du` counts it."""
    return found.st_blocks * 512


FAULTABLE = (
    "open_to_read", "open_nameless", "open_new", "close", "read", "write", "sync", "will_read", "stat", "stat_open", "names",
    "entries", "stat_entry", "link_nameless", "link", "rename", "unlink", "make_folder", "remove_folder", "set_mode",
    "set_used", "set_used_open", "free_bytes", "lock_temp",
)  # fmt: skip  # those of the functions above that ask something of the operating system
