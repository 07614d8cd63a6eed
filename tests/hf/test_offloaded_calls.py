"""generate() with models whose weights accelerate keeps elsewhere: reused as with any other, and by the same model unspread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.harness import check, new_stack, run
from tests.hf.models import fresh, prompt
from tests.hf.test_disk import Disk
from tests.hf.test_offloaded import KINDS, file_of, in_map, projection, to_disk, to_host
from tiered_cache import TieredCache, warm


@pytest.mark.parametrize("offload", KINDS)
def test_reuse(offload: Callable[[Path], Any], tmp_path: Path) -> None:
    model, stack, kept = offload(tmp_path), new_stack(), None
    kept = TieredCache(stack)
    check(model, prompt(30), stack, cached=0, cache=kept)
    check(model, prompt(30), stack, cached=29, cache=kept)
    check(model, prompt(30), stack, cached=29)
    check(fresh(), prompt(30), stack, cached=29)


def test_edited(tmp_path: Path) -> None:
    model, stack = to_host(tmp_path), new_stack()
    check(model, prompt(30), stack, cached=0)
    before = in_map(model).clone()
    in_map(model)[3, 5] += 0.5
    check(model, prompt(30), stack, cached=0)
    in_map(model).copy_(before)
    check(model, prompt(30), stack, cached=29)


def test_a_file_written_anew(tmp_path: Path) -> None:
    model, stack = to_disk(tmp_path), new_stack()
    check(model, prompt(30), stack, cached=0)
    file = file_of(model, tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(4) + content[104:])
    check(model, prompt(30), stack, cached=0)
    file.write_bytes(content)
    check(model, prompt(30), stack, cached=29)


def test_a_disk_tier_and_warm(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    warm(to_host(tmp_path), prompt(33), stack=disk.open())
    cache = TieredCache(disk.restart())
    run(to_host(tmp_path), prompt(33), past_key_values=cache)
    assert cache.usage.cached_by_tier == {"disk": 32}
    disk.close()


def test_the_reason_is_said(tmp_path: Path) -> None:
    model = fresh()
    model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(
        projection(model).weight.detach().as_subclass(type("Unknown", (torch.Tensor,), {})), requires_grad=False
    )
    cache = TieredCache(new_stack())
    run(model, prompt(30), past_key_values=cache)
    assert "k_proj.weight is of a kind that cannot be read" in cache.explain()
