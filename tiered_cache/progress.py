"""A bar for what takes long. Silent unless `show` is replaced: hf/ puts transformers' bars in, which can be switched off."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Bar(Protocol):
    """A progress bar."""

    def update(self, n: float) -> object:
        """Note that `n` more units are done."""


class Silence:
    """No bar."""

    def update(self, n: float) -> None:
        return


def no_bar(total: int, what: str, unit: str) -> AbstractContextManager[Bar]:
    """Return a bar that shows nothing, for `total` of `unit`."""
    return nullcontext(Silence())


show: Callable[[int, str, str], AbstractContextManager[Bar]] = no_bar
