"""Blocks on disk: the directory is the index, a piece is a file, and any number of processes share both."""

from tiered_cache.tiers.disk.finder import Branch, StoredBlock
from tiered_cache.tiers.disk.tier import DiskTier, Stay

__all__ = ["Branch", "DiskTier", "Stay", "StoredBlock"]
