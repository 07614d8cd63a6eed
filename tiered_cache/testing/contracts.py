"""What every implementation of a protocol must do, as test classes: derive, say how to make one, and let pytest collect it."""

from abc import ABC, abstractmethod

import torch

from tiered_cache.devices.base import Device
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
        for memories in (["host"], ["device"], ["device", "host"], ["host", "device"]):
            buffers = [device.allocate(memory, 256) for memory in memories]
            staged = device.stage(buffers)
            staged.copy_(torch.arange(256, dtype=torch.uint8))
            device.store(staged, buffers).wait()
            for buffer in buffers:
                transfer = device.fetch(buffer)
                transfer.wait()
                assert transfer.target().cpu().tolist() == list(range(256))

    def test_copies_between_memories(self) -> None:
        device = self.make()
        source, target = device.allocate("host", 64), device.allocate("device", 64)
        source.copy_(torch.arange(64, dtype=torch.uint8))
        device.copy(source, target).wait()
        assert target.cpu().tolist() == list(range(64))

    def test_the_target_may_be_used_without_waiting(self) -> None:
        device = self.make()
        source = device.allocate("host", 64)
        source.copy_(torch.arange(64, dtype=torch.uint8))
        assert device.fetch(source).target().sum().item() == sum(range(64))
