import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.hf.harness import assert_consistent, block_nbytes, check, new_stack
from tests.hf.models import prompt, tiny
from tiered_cache import ConfigError, DeviceTier, HostTier, TierStack
from tiered_cache.blocks import BlockLayout, SequenceLayout, Strip
from tiered_cache.devices import device_for
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
