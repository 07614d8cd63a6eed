"""Files that are there whole or not at all, and reads that fail rather than fall short.

Owns the commit protocol: temp without a name, write, link without replacing. Refuses to own what is in a file (format) and
where it lies (tier).
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence

from tiered_cache.errors import CorruptEntryError
from tiered_cache.tiers.disk import calls

TEMP_PREFIX = ".tmp-"
TRANSFER_NBYTES = 4 << 20  # of one positioned read or one write; whole chunks

# What a file system says to a way of creating files that it does not know.
_UNSUPPORTED = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.EINVAL, errno.EPERM, errno.ENOENT, errno.EXDEV, errno.ENOSYS,
     errno.EMLINK, errno.ELOOP}
)  # fmt: skip


def publish(
    folder: str,
    name: str,
    parts: Sequence[memoryview],
    *,
    durable: bool = False,
    used_at: float | None = None,
    replace: bool = False,
) -> int | None:
    """Create the file `name` of `parts`, all of it at once for everybody else; return the bytes it takes on disk.

    Args:
        durable: have the device hold the bytes before the name appears.
        used_at: what its time of last use is to be, seconds since 1970; now if None.
        replace: take the place of a file of this name.

    Returns:
        None where a file of this name is there already: it is left as it is.

    Raises:
        OSError: nothing was created.
    """
    if calls.TEMP_FILE != calls.NO_TEMP_FILE_FLAG and not replace:  # a file without a name can take no other's place
        try:
            return _publish_nameless(folder, name, parts, durable, used_at)
        except _NamelessUnsupportedError:
            pass
    return _publish_named(folder, name, parts, durable, used_at, replace)


class _NamelessUnsupportedError(Exception):
    """This file system makes no files without a name, or cannot give them one."""


def _publish_nameless(folder: str, name: str, parts: Sequence[memoryview], durable: bool, used_at: float | None) -> int | None:
    try:
        fd = calls.open_nameless(folder)
    except OSError as error:
        raise _or_unsupported(error) from error
    with opened(fd):
        nbytes = _fill(fd, parts, durable, used_at)
        try:
            calls.link_nameless(fd, f"{folder}/{name}")
        except FileExistsError:
            return None
        except OSError as error:
            raise _or_unsupported(error) from error
        return nbytes


def _publish_named(
    folder: str, name: str, parts: Sequence[memoryview], durable: bool, used_at: float | None, replace: bool
) -> int | None:
    temp, path = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(12)}", f"{folder}/{name}"
    with opened(calls.open_new(temp)) as fd:
        try:
            calls.lock_temp(fd)  # until it is closed: whoever finds it unlocked may remove it
            nbytes = _fill(fd, parts, durable, used_at)
            try:
                if replace:
                    calls.rename(temp, path)
                else:
                    calls.link(temp, path)
            except FileExistsError:
                return None
            except OSError as error:
                if error.errno not in _UNSUPPORTED or exists(path):
                    raise
                calls.rename(temp, path)
            return nbytes
        finally:
            with contextlib.suppress(OSError):
                calls.unlink(temp)


def _or_unsupported(error: OSError) -> Exception:
    return _NamelessUnsupportedError() if error.errno in _UNSUPPORTED else error


def _fill(fd: int, parts: Sequence[memoryview], durable: bool, used_at: float | None) -> int:
    for part in parts:
        done = 0
        while done < len(part):
            written = calls.write(fd, part[done : done + TRANSFER_NBYTES])
            if written <= 0:
                raise OSError(errno.EIO, "nothing could be written")
            done += written
    if durable:
        calls.sync(fd)
    if used_at is not None:
        calls.set_used_open(fd, used_at)
    return calls.used_bytes(calls.stat_open(fd))


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close `fd` at the end, whatever closing says: what was read is verified, and what was written will be."""
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            calls.close(fd)


def read_exactly(fd: int, target: memoryview, offset: int) -> None:
    """Fill `target` from byte `offset` of a file on.

    Raises:
        CorruptEntryError: the file ends before that.
        OSError: it cannot be read.
    """
    done = 0
    while done < len(target):
        count = calls.read(fd, target[done : done + TRANSFER_NBYTES], offset + done)
        if count <= 0:
            raise CorruptEntryError("the file is cut short")
        done += count


def exists(path: str) -> bool:
    """Say whether there is something at `path`. Raises OSError where that cannot be told."""
    try:
        calls.stat(path)
    except FileNotFoundError:
        return False
    return True


def unlink_if_there(path: str) -> bool:
    """Remove a file; say whether it was there."""
    try:
        calls.unlink(path)
    except FileNotFoundError:
        return False
    return True


def unlink_if_same(path: str, seen: os.stat_result) -> bool:
    """Remove a file if it is still the one that was `seen`, and not another that took its name since."""
    found = calls.stat(path)
    return (found.st_dev, found.st_ino) == (seen.st_dev, seen.st_ino) and unlink_if_there(path)


def is_unfit(path: str) -> bool:
    """Say whether there is something at `path` that is no file its owner could read. Raises nothing."""
    try:
        found = calls.stat(path)
    except OSError:
        return False
    return not calls.is_file(found) or not found.st_mode & 0o400


def remove_unfit(path: str) -> None:
    """Remove what is at `path` and is no file its owner could read. Raises OSError."""
    if is_unfit(path):
        if calls.is_folder(calls.stat(path)):
            calls.remove_folder(path)
        else:
            calls.unlink(path)


def make_folders(root: str, *below: str) -> str:
    """Create private folders one below the other under `root`, where they are not there yet; return the last."""
    path = root
    for name in below:
        path = f"{path}/{name}"
        with contextlib.suppress(FileExistsError):
            calls.make_folder(path)
    return path


def is_abandoned(path: str) -> bool:
    """Say whether a temp file belongs to no process that still runs."""
    with opened(calls.open_to_read(path)) as fd:
        try:
            calls.lock_temp(fd)
        except BlockingIOError:
            return False
        return True
