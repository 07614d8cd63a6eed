"""The directory of a disk tier: made private, and refused where it is not ours to fill and empty.

Owns what must hold of it before anything is written. Refuses to own what lies in it.
"""

import contextlib
import errno
import os
from pathlib import Path

from tiered_cache.errors import ConfigError
from tiered_cache.tiers.disk import calls, files

TAG, LOCK, MODEL = "CACHEDIR.TAG", "lock", "model.json"
_TAG_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"  # of bford.info/cachedir: backups leave such directories out
    b"# K/V blocks of tiered_cache. May be deleted at any time; what is in it is computed again.\n"
)


def open_root(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the real path of a disk tier's directory, created if need be (only for its owner), and its device.

    Raises:
        ConfigError: it is not a directory, not ours, holds something else, or cannot be made.
    """
    argument = f"DiskTier(path={os.fspath(path)!r})"
    try:
        root = os.path.realpath(os.path.expanduser(path))  # noqa: PTH111  a str from here on
        _make_all(root)
        found = calls.stat(root)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{argument} cannot be made: {error}. Choose a directory that you may write to.") from error
    if not calls.is_folder(found):
        raise ConfigError(f"{argument} is not a directory. Choose another path.")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{argument} belongs to user {found.st_uid}, not to you ({os.geteuid()}). What others can write to is not trusted: "
            "choose a directory of your own."
        )
    try:
        inside = calls.names(root)
    except OSError as error:
        raise ConfigError(f"{argument} cannot be read: {error}. Choose another path.") from error
    if TAG not in inside and not all(map(_is_ours, inside)):
        raise ConfigError(
            f"{argument} holds other files. Choose an empty or a new directory: tiered_cache deletes what is old in it."
        )
    with contextlib.suppress(OSError):  # read-only: what is there can be used
        if found.st_mode & 0o077:
            calls.set_mode(root, 0o700)
        make_root(root)
    return root, found.st_dev


def _is_ours(name: str) -> bool:
    """Say whether a name in a directory without a tag is one that we make: somebody may be removing all of it right now."""
    is_model = len(name) >= 16 and len(name) % 2 == 0 and not set(name) - set("0123456789abcdef")
    return is_model or name == LOCK or name.startswith(files.TEMP_PREFIX)


def _make_all(root: str) -> None:
    """Make a directory and those above it, as far as they are missing, for their owner only."""
    missing = [folder for folder in (Path(root), *Path(root).parents) if not files.exists(str(folder))]
    for folder in reversed(missing):
        files.make_folders(str(folder.parent), folder.name)


def make_root(root: str) -> None:
    """Make the directory, in case it was removed, and tag it. Raises OSError."""
    files.make_folders(str(Path(root).parent), Path(root).name)
    if not files.exists(f"{root}/{TAG}"):
        files.publish(root, TAG, [memoryview(_TAG_TEXT)])


def check_still_there(root: str, device: int) -> None:
    """Make the directory anew if it was removed.

    Raises:
        OSError: it cannot be made, or the file system it was on (`device`) is not mounted any more: what is at its path now
            is not to be filled.
    """
    try:
        found = calls.stat(root)
        if found.st_dev == device:
            if found.st_mode & 0o077:  # it was removed, and made again by filelock, which looks after neither mode nor tag
                with contextlib.suppress(OSError):
                    calls.set_mode(root, 0o700)
                    make_root(root)
            return
    except FileNotFoundError:
        if calls.stat(str(Path(root).parent)).st_dev == device:
            make_root(root)
            return
    raise OSError(errno.ENODEV, "the disk tier's file system is not mounted any more", root)
