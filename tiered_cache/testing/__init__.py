"""Contract tests and doubles, for our own tests and for those who write tiers, policies or devices of their own."""

from tiered_cache.testing.contracts import DeviceContract, EvictionPolicyContract
from tiered_cache.testing.manual_device import ManualDevice, pretend_accelerator
from tiered_cache.testing.token_port import TokenPort

__all__ = ["DeviceContract", "EvictionPolicyContract", "ManualDevice", "TokenPort", "pretend_accelerator"]
