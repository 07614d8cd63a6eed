import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiered_cache
from tests.hf.harness import assert_consistent, block_nbytes, check, new_stack
from tests.hf.models import prompt, tiny
from tiered_cache import ConfigError, DeviceTier, HostTier, TierStack
from tiered_cache.blocks import BlockLayout, SequenceLayout, Strip
from tiered_cache.devices import device_for
from tiered_cache.devices.arena import Arena
from tiered_cache.devices.base import Device, Lane
from tiered_cache.devices.cpu import CPUDevice
from tiered_cache.port import SequencePort
from tiered_cache.testing import DeviceContract, ManualDevice
from tiered_cache.testing.manual_device import ManualEvent, pretend_accelerator


class TestCPUDevice(DeviceContract):
    def make(self) -> Device:
        return CPUDevice()


class TestManualDevice(DeviceContract):
    def make(self) -> Device:
        return ManualDevice(automatic=True)


if torch.accelerator.is_available():  # pragma: no cover

    class TestAccelerator(DeviceContract):
        def make(self) -> Device:
            return device_for(torch.accelerator.current_accelerator())


def test_one_device_object_each() -> None:
    assert device_for(torch.device("cpu")) is device_for(torch.device("cpu"))


def test_out_of_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        CPUDevice().allocate("host", 1 << 62)


# --- the manual device finds what it is there to find ---------------------------------------------------------------


def test_use_before_wait_is_found() -> None:
    device = ManualDevice()
    host, there = device.allocate("host", 16), device.allocate("device", 16)
    came = device.copy(Lane.UP, host, there, [device.mark()])
    with pytest.raises(AssertionError, match="use before wait"):
        device.claim(reads=[there[4:5]])
    with pytest.raises(AssertionError, match="use before wait"):
        device.copy(Lane.DOWN, there, device.allocate("host", 16))
    came.order()
    device.claim(reads=[there])
    device.copy(Lane.DOWN, there, device.allocate("host", 16))


def test_reuse_before_done_is_found() -> None:
    device = ManualDevice()
    source, target = device.allocate("host", 16), device.allocate("device", 16)
    device.copy(Lane.UP, source, target)
    with pytest.raises(AssertionError, match="reuse before done"):
        device.claim(writes=[source])
    with pytest.raises(AssertionError, match="reuse before done"):
        device.copy(Lane.DOWN, device.allocate("device", 16), source)
    device.complete()
    device.claim(writes=[source])


def test_what_follows_an_event_may_touch_what_came_before() -> None:
    device = ManualDevice()
    host, there, back = device.allocate("host", 16), device.allocate("device", 16), device.allocate("host", 16)
    came = device.copy(Lane.UP, host, there)
    down = device.copy(Lane.DOWN, there, back, [came])
    device.copy(Lane.UP, back, there, [down])
    assert device.num_pending == 3


def test_memory_is_not_given_out_again_while_a_lane_uses_it() -> None:
    device = ManualDevice(step=4096)
    source, target = device.allocate("host", 4096), device.allocate("device", 4096)
    address = source.data_ptr()
    device.copy(Lane.UP, source, target)
    del source
    assert device.allocate("host", 4096).data_ptr() != address
    device.complete()
    assert device.allocate("host", 4096).data_ptr() == address


def test_work_before_it_in_the_other_direction_is_found() -> None:
    """The stream itself fills or reads what a lane is given, and the lane is not told to come after that."""
    device = ManualDevice()
    host, there = device.allocate("host", 16), device.allocate("device", 16)
    early = device.mark()
    device.claim(writes=[there])
    with pytest.raises(AssertionError, match="use before wait: the stream"):
        device.copy(Lane.DOWN, there, host, [early])
    down = device.copy(Lane.DOWN, there, host, [device.mark()])
    device.claim(reads=[there])
    with pytest.raises(AssertionError, match="reuse before done: the stream"):
        device.copy(Lane.UP, host, there, [down])
    device.copy(Lane.UP, host, there, [down, device.mark()])


def test_streams_only_in_devices() -> None:
    """An import contract cannot see attributes of torch."""
    package = Path(tiered_cache.__file__).parent
    names = re.compile(r"torch\.(cuda|accelerator|Stream|Event)\b")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if names.search(path.read_text())}
    assert found == {"devices/__init__.py", "devices/accelerator.py", "devices/base.py"} & found
    assert "devices/accelerator.py" in found


# --- the arena ------------------------------------------------------------------------------------------------------


def new_arena(step: int = 1 << 16) -> tuple[Arena, list[int]]:
    slabs: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        slabs.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    return Arena(allocate, step), slabs


def test_spans_come_back_when_nobody_sees_them() -> None:
    pool, slabs = new_arena()
    span = pool.take(5000)
    assert span is not None
    address, view, part = span.data_ptr(), span.numpy().data, span[10:20]
    assert (address % 4096, span.nbytes, pool.used_bytes) == (pool._slabs[0].ctypes.data % 4096, 5000, 8192)
    del span
    assert pool.used_bytes == 8192
    del part
    assert pool.used_bytes == 8192
    del view
    assert pool.used_bytes == 0
    again = pool.take(8192)
    assert again is not None
    assert again.data_ptr() == address
    assert slabs == [1 << 16]


def test_free_spans_grow_together() -> None:
    pool, slabs = new_arena()
    spans = [pool.take(4096) for _ in range(16)]
    for place in (3, 5, 4, 0, 1, 2, 15):
        spans[place] = None
    assert pool.used_bytes == 9 * 4096
    assert pool._free == [(0, 0, 6 * 4096), (0, 15 * 4096, 16 * 4096)]
    whole = pool.take(6 * 4096)
    assert whole is not None
    assert slabs == [1 << 16]


def test_large_spans_get_slabs_with_room_for_a_few() -> None:
    pool, slabs = new_arena()
    layers = [pool.take((1 << 16) + 1) for _ in range(7)]
    assert None not in layers
    assert slabs == [4 << 17]


def test_an_arena_that_is_mostly_free_does_not_grow_but_lets_go() -> None:
    pool, _ = new_arena()
    spans = [pool.take(4096) for _ in range(33)]  # two slabs and a little of a third
    assert pool.reserved_bytes == 3 << 16
    del spans[1:]
    assert pool.take(1 << 17) is None  # the first slab is in use a little: no more is pinned for this
    assert pool.reserved_bytes == 1 << 16  # and what was free as a whole is let go
    spans.clear()
    assert pool.take(1 << 17) is not None
    assert pool.reserved_bytes == 4 << 17


def test_an_arena_is_bounded() -> None:
    """Whatever the traffic: at most 4/3 of the largest use, and one slab."""
    rng = random.Random(0)
    pool, _ = new_arena()
    held: list[torch.Tensor] = []
    most = largest = 0
    for _ in range(5000):
        if rng.random() < 0.52:
            size = rng.choice([4096, 20_000, 65_536, 200_000])
            span = pool.take(size)
            if span is not None:
                held.append(span)
            del span
        elif held:
            held.pop(rng.randrange(len(held)))
        most = max(most, pool.used_bytes)
        largest = max(slab.nbytes for slab in pool._slabs.values()) if pool._slabs else 0
        assert pool.used_bytes == sum(-(-each.nbytes // 4096) * 4096 for each in held)
        assert pool.reserved_bytes <= most / 0.75 + largest
    held.clear()
    assert pool.used_bytes == 0


def test_threads_take_and_give_back() -> None:
    pool, _ = new_arena()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held = []
        for _ in range(500):
            span = pool.take(rng.choice([4096, 9000]))
            if span is not None:
                span.fill_(seed)
                held.append(span)
            if len(held) > 8:
                assert held.pop(0).eq(seed).all()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.used_bytes == 0


def port_on(device: Device, tokens: int = 32) -> SequencePort:
    tensors = tuple(torch.randn(1, 2, tokens, 4) for _ in range(4))
    layout = SequenceLayout(BlockLayout.of(tensors, tensors[0].device), BlockLayout((), tensors[0].device), 0)
    return SequencePort(layout, {"main": Strip(tensors)}, slice(0, 1), 0, device)


def test_a_block_is_not_found_before_its_copy_is_complete() -> None:
    device, stack, tokens = ManualDevice(), new_stack(), np.arange(32)
    thread = threading.Thread(target=stack.commit, args=(b"id", b"", tokens, port_on(device)))
    thread.start()
    for expected in (0, 16):
        while not device.num_pending:
            pass
        match = stack.match(b"id", b"", tokens)
        assert match.num_tokens == expected
        stack.release(match)
        device.complete()
    thread.join()
    match = stack.match(b"id", b"", tokens)
    assert match.num_tokens == 32
    stack.release(match)
    assert_consistent(stack)


def test_without_the_wait_the_manual_device_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(ManualEvent, "wait", lambda self: None)
    device, stack, tokens = ManualDevice(), new_stack(), np.arange(32)
    stack.commit(b"id", b"", tokens, port_on(device))
    with pytest.raises(AssertionError, match="use before wait"):
        stack.fetch(stack.match(b"id", b"", tokens), 32, port_on(device))


# --- device memory above host memory, as on an accelerator -----------------------------------------------------------


@pytest.fixture
def manual() -> Iterator[ManualDevice]:
    """Let the whole package believe that the CPU is an accelerator with memory of its own."""
    with pretend_accelerator() as device:
        yield device


def test_generate_through_a_device_with_copies_of_its_own(manual: ManualDevice) -> None:
    stack = new_stack()
    for cached in (0, 29, 29):
        check(tiny(), prompt(30), stack, cached=cached)
    check(tiny(), prompt(30), stack, cached=29, num_beams=2)
    assert manual.allocated["host"] > 0


def test_rows_that_share_a_prefix_read_it_once(manual: ManualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, reads = new_stack(), []
    copy = ManualDevice.copy_all
    monkeypatch.setattr(
        ManualDevice,
        "copy_all",
        lambda self, lane, pairs, *args: reads.extend([lane] * len(pairs)) or copy(self, lane, pairs, *args),
    )
    check(tiny(), prompt(40), stack, cached=0)
    stack.stats()
    reads.clear()
    ids = torch.cat([prompt(40).repeat(5, 1), prompt(6, seed=1, rows=5)], dim=1)
    ids[:, 40] = torch.arange(3, 8)
    ids[:2] = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids[:2, :-4]], dim=1)  # two of them behind left pads
    mask = (ids != 0).long()
    check(tiny(), ids, stack, cached=40, attention_mask=mask)
    assert reads.count(Lane.UP) == 4  # of three blocks; the rows without pads take four tokens more of the last one


def test_device_tier_serves_first(manual: ManualDevice) -> None:
    stack = TierStack(DeviceTier("1MB"), HostTier("1MB"), block_tokens=16)
    check(tiny(), prompt(30), stack, cached=0)
    stats = stack.stats()
    assert stats.tiers["device"].pieces == stats.tiers["host"].pieces == 3
    cache = check_tiers(stack, {"device": 29})
    assert "device memory" in cache.explain()


def test_device_tier_that_is_full_gives_up_first(manual: ManualDevice) -> None:
    """What it gave up is served from the host, and promoted again."""
    one = new_stack()
    check(tiny(), prompt(30), one, cached=0)
    block = block_nbytes(one)
    stack = TierStack(HostTier("1MB"), DeviceTier(3 * block), block_tokens=16)
    assert [tier.name for tier in stack.tiers] == ["device", "host"]
    check(tiny(), prompt(30), stack, cached=0)
    check(tiny(), prompt(60, seed=1), stack, cached=int(prompt(1)[0, 0] == prompt(1, seed=1)[0, 0]))
    assert stack.stats().tiers["device"].evicted_pieces > 0
    assert stack.stats().tiers["host"].evicted_pieces == 0
    check(tiny(), prompt(30), stack, cached=29)
    check_tiers(stack, {"device": 29})
    assert_consistent(stack)


def test_host_tier_smaller_than_the_device_tier(manual: ManualDevice) -> None:
    one = new_stack()
    check(tiny(), prompt(30), one, cached=0)
    block = block_nbytes(one)
    stack = TierStack(DeviceTier("1MB"), HostTier(block), block_tokens=16)
    check(tiny(), prompt(60), stack, cached=0)
    check(tiny(), prompt(60), stack, cached=59)
    assert_consistent(stack)


def check_tiers(stack: TierStack, tiers: dict[str, int]) -> Any:
    from tiered_cache import TieredCache

    cache = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=sum(tiers.values()), cache=cache)
    assert cache.usage.cached_by_tier == tiers
    return cache


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_device_tier_needs_an_accelerator() -> None:
    with pytest.raises(ConfigError, match="HostTier"):
        DeviceTier("1GiB")
