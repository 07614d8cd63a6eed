from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tiered_cache.errors import CapacityError, ConfigError, TieredCacheError
from tiered_cache.tiers import host
from tiered_cache.tiers.base import parse_capacity
from tiered_cache.tiers.host import HostTier


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5 TiB", 3 << 39),
        ("64kB", 64_000),
        ("12B", 12),
        ("12", 12),
        (4096, 4096),
    ],
)
def test_capacity(text: Any, nbytes: int) -> None:
    assert parse_capacity(text, "capacity") == nbytes


@pytest.mark.parametrize(
    "capacity", ["", "8 gigs", "GiB", "-1GiB", "8iB", "1e9", "0", "0GiB", 0, -5, 1.5, True, None, b"8GiB", "8GiB 2", "٨x"]
)
def test_bad_capacity(capacity: Any) -> None:
    """The message names the argument, the value and the way out."""
    with pytest.raises(ConfigError) as caught:
        HostTier(capacity)
    message = str(caught.value)
    assert f"HostTier(capacity={capacity!r})" in message
    assert '"8GiB"' in message
    assert isinstance(caught.value, ValueError)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(CapacityError, match="this machine has") as caught:
        HostTier("900TiB")
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, TieredCacheError)


def memory(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))


def container(monkeypatch: pytest.MonkeyPatch, folder: Path, limit: str, used: int, cached: int) -> None:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    monkeypatch.setattr(host, "_CGROUPS", folder)
    monkeypatch.setattr(host, "_OWN_CGROUP", folder / "none")


def test_default_budget_is_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory(monkeypatch, total=1000, available=800)
    container(monkeypatch, tmp_path, "max", 0, 0)
    assert host.default_capacity() == 200
    assert host.total_memory() == 1000


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory(monkeypatch, total=1000, available=800)
    container(monkeypatch, tmp_path, "500", used=300, cached=0)
    assert host.default_capacity() == 50
    assert host.total_memory() == 500
    with pytest.raises(CapacityError):
        HostTier(501)


def test_cached_file_pages_are_not_used_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory(monkeypatch, total=1000, available=800)
    container(monkeypatch, tmp_path, "500", used=490, cached=390)
    assert host.available_memory() == 400


def test_an_overfull_container_still_gives_a_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory(monkeypatch, total=1000, available=800)
    container(monkeypatch, tmp_path, "500", used=600, cached=0)
    assert host.default_capacity() == 1


def test_the_limit_of_any_group_above_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As batch systems set them: the process is some levels below the group with the limit."""
    memory(monkeypatch, total=1000, available=800)
    (tmp_path / "job" / "step").mkdir(parents=True)
    container(monkeypatch, tmp_path / "job", "300", used=100, cached=0)
    (tmp_path / "own").write_text("0::/job/step\n")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "own")
    assert host.total_memory() == 300
    assert host.available_memory() == 200


def test_repr() -> None:
    assert repr(HostTier("2GiB")) == "HostTier(0 B of 2.0 GiB used)"
