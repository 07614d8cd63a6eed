"""Who decides: policies see keys and byte counts only, never bytes, tokens or devices."""
