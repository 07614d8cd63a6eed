"""Contract tests and doubles for those who write tiers, policies or devices of their own."""
