import itertools

import numpy as np

from tiered_cache.keys import block_key, encode_tokens, root_key


def test_keys_are_fixed() -> None:
    """What is on somebody's disk must be found by the next release, or KEY_FORMAT must change."""
    root = root_key(b"identity", "default", b"", 256)
    assert root.hex() == "244667f682d9d93b1475136029a42540b3e6edcd92fb40aad66800d967a5c631"
    assert (
        block_key(root, encode_tokens(np.arange(3))).hex() == "61cf6c6e6b95a3ae5fe191e42bffe3de82ef2254055f59f4f5d490a2b1e84ca4"
    )


def test_every_field_counts_and_none_runs_into_the_next() -> None:
    fields = [(b"ab", "c", b"", 1), (b"a", "bc", b"", 1), (b"a", "b", b"c", 1), (b"", "abc", b"", 1), (b"ab", "c", b"", 11)]
    keys = [root_key(*values) for values in fields]
    for one, other in itertools.combinations(keys, 2):
        assert one != other


def test_tokens_are_int64_little_endian() -> None:
    assert encode_tokens(np.array([1, -1, 1 << 40], dtype=np.int64)) == (
        b"\x01" + bytes(7) + b"\xff" * 8 + (1 << 40).to_bytes(8, "little")
    )
    assert encode_tokens(np.array([1, 2], dtype=np.int32)) == encode_tokens(np.array([1, 2], dtype=np.int64))


def test_chains_differ_by_parent() -> None:
    tokens = encode_tokens(np.arange(4))
    assert block_key(b"a" * 32, tokens) != block_key(b"b" * 32, tokens)
