"""Where bytes rest: each tier is a budget and the buffers that count against it. Bytes only: no torch, no tokens."""
