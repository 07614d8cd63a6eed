from tiered_cache.policies.eviction import LRU, EvictionPolicy
from tiered_cache.testing import EvictionPolicyContract


class TestLRU(EvictionPolicyContract):
    def make(self) -> EvictionPolicy:
        return LRU()

    def test_oldest_first(self) -> None:
        policy = LRU()
        for key in (b"root", b"tail", b"tail", b"root"):
            policy.touch(key)
        assert list(policy.victims()) == [b"tail", b"root"]
