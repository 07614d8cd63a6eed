"""What every implementation of a protocol must do, as test classes: derive, say how to make one, and let pytest collect it."""

import functools
from abc import ABC, abstractmethod

import pytest
import torch

from tiered_cache.devices.base import Device, Lane
from tiered_cache.policies.eviction import EvictionPolicy


class EvictionPolicyContract(ABC):
    """An eviction policy offers every key it knows, once, and nothing else."""

    @abstractmethod
    def make(self) -> EvictionPolicy:
        """Return a new policy."""

    def test_offers_what_it_was_told_of(self) -> None:
        policy = self.make()
        for key in (b"a", b"b", b"a", b"c"):
            policy.touch(key)
        assert sorted(policy.victims()) == [b"a", b"b", b"c"]

    def test_forgets_what_is_removed(self) -> None:
        policy = self.make()
        policy.touch(b"a")
        policy.touch(b"b")
        policy.remove(b"a")
        policy.remove(b"never seen")
        assert list(policy.victims()) == [b"b"]

    def test_does_not_offer_the_one_just_used_first(self) -> None:
        policy = self.make()
        for key in (b"a", b"b", b"a"):
            policy.touch(key)
        assert next(iter(policy.victims())) == b"b"

    def test_is_empty_at_first(self) -> None:
        assert list(self.make().victims()) == []


class DeviceContract(ABC):
    """A device brings bytes from buffer to buffer unchanged, and complete when waited for."""

    @abstractmethod
    def make(self) -> Device:
        """Return a new device."""

    def test_allocates_what_was_asked_for(self) -> None:
        device = self.make()
        for memory in ("host", "device"):
            buffer = device.allocate(memory, 1000)
            assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (1000,))
            assert buffer.untyped_storage().nbytes() == 1000  # an allocation of its own
            assert not buffer.is_inference()

    def test_brings_bytes_to_every_memory_and_back(self) -> None:
        device = self.make()
        host, there, back = device.allocate("host", 256), device.allocate("device", 256), device.allocate("host", 256)
        host.copy_(torch.arange(256, dtype=torch.uint8))
        came = device.copy(Lane.UP, host, there, [device.mark()])
        device.copy(Lane.DOWN, there, back, [came]).wait()
        assert back.tolist() == list(range(256))
        assert device.moved == {Lane.UP: 256, Lane.DOWN: 256}

    def test_what_is_local(self) -> None:
        device = self.make()
        assert device.is_local(device.allocate("device", 64))
        assert device.is_local(device.allocate("host", 64)) != device.is_apart
        assert device.free_bytes() > 0

    def test_the_target_may_be_used_without_waiting(self) -> None:
        device = self.make()
        source, target = device.allocate("host", 64), device.allocate("device", 64)
        source.copy_(torch.arange(64, dtype=torch.uint8))
        device.copy(Lane.UP, source, target, [device.mark()]).order()
        assert target.sum().item() == sum(range(64))

    def test_a_lane_keeps_its_order(self) -> None:
        device = self.make()
        target = device.allocate("device", 64)
        for value in range(20):
            done = device.run(
                Lane.UP, functools.partial(_fill, target, value), reads=(), writes=[target], after=[device.mark()]
            )
        done.wait()
        assert target.tolist() == [19] * 64

    def test_one_lane_after_the_other(self) -> None:
        device = self.make()
        host, there, back = device.allocate("host", 64), device.allocate("device", 64), device.allocate("host", 64)
        for value in range(20):
            host.fill_(value)
            came = device.copy(Lane.UP, host, there, [device.mark()])
            device.copy(Lane.DOWN, there, back, [came]).wait()
            assert back.tolist() == [value] * 64

    def test_work_that_raises_leaves_the_lane_in_order(self) -> None:
        device = self.make()
        source, target = device.allocate("host", 64), device.allocate("device", 32)
        source.fill_(7)
        with pytest.raises(RuntimeError):
            device.copy(Lane.UP, source, target, [device.mark()]).wait()
        device.copy(Lane.UP, source[:32], target, [device.mark()]).wait()
        assert target.tolist() == [7] * 32


def _fill(target: torch.Tensor, value: int) -> None:
    target.fill_(value)
