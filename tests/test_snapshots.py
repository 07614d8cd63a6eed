"""Snapshots: side pieces that serve a hit which ends after their block, and no other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_stack import assert_consistent
from tiered_cache import DiskTier, HostTier, TierStack
from tiered_cache.keys import MAIN, SIDE, SNAPSHOT
from tiered_cache.testing import TokenPort
from tiered_cache.testing.token_port import NOTHING, SNAPSHOT_LAYOUT, TOKEN_NBYTES

BLOCK = 4
SHAPES = [(SNAPSHOT_LAYOUT, SNAPSHOT)]
ABOUT = {"what": "a test"}


def new_stack(capacity_tokens: int = 10_000, disk: Path | None = None) -> TierStack:
    tiers = [HostTier(capacity_tokens * TOKEN_NBYTES)]
    return TierStack(*tiers, *([DiskTier(disk, "1GiB", min_free=0)] if disk else []), block_tokens=BLOCK)


def commit(stack: TierStack, tokens: Sequence[int], ends: Sequence[int]) -> int:
    port = TokenPort(np.asarray(tokens), SNAPSHOT, ends=ends)
    return stack.commit(b"id", b"", np.asarray(tokens), port, about=ABOUT)


def restore(stack: TierStack, tokens: Sequence[int], limit: int = 1000) -> tuple[int, dict[str, int]]:
    """Match and fetch, and assert that what came is right; return its length, and tokens by tier."""
    ids = np.asarray(tokens)
    match = stack.match(b"id", b"", ids, SHAPES)
    length = match.usable(min(limit, len(ids) - 1))
    port = TokenPort(ids, SNAPSHOT)
    fetched = stack.fetch(match, length, port)
    stack.release(match)
    assert fetched.is_complete
    assert port.loaded[:length].tolist() == ids[:length].tolist()
    assert (port.loaded[length:] == NOTHING).all()
    if length:
        assert port.loaded_side[length - 1] == ids[length - 1]
    assert (port.loaded_side[length:] == NOTHING).all()
    assert sum(fetched.served.values()) == length
    return length, fetched.served


def kinds(stack: TierStack) -> list[tuple[int, list[str]]]:
    return sorted((block.num_tokens, sorted(block.pieces)) for block in stack._index.blocks.values())


def test_a_hit_ends_at_a_snapshot() -> None:
    stack = new_stack()
    tokens = list(range(11))
    assert commit(stack, tokens, [6, 11]) == 11
    assert restore(stack, [*tokens, 50])[0] == 11
    assert restore(stack, tokens)[0] == 6
    assert restore(stack, tokens[:7])[0] == 6
    assert restore(stack, tokens[:6])[0] == 0
    assert restore(stack, [*tokens[:9], 50])[0] == 6
    assert restore(stack, [*tokens, 50], limit=10)[0] == 6
    assert_consistent(stack)


def test_a_snapshot_at_a_blocks_end() -> None:
    stack = new_stack()
    commit(stack, range(10), [4, 8])
    assert kinds(stack) == [(4, [MAIN, SIDE]), (4, [MAIN, SIDE])]  # the last two tokens are of no use
    assert restore(stack, range(10))[0] == 8
    assert restore(stack, range(8))[0] == 4


def test_several_in_one_block() -> None:
    stack = new_stack()
    commit(stack, range(7), [5, 6, 7])
    commit(stack, [0, 1, 2, 3, 4, 9, 9, 9], [8])
    assert [restore(stack, range(length))[0] for length in (5, 6, 7, 8)] == [0, 5, 6, 7]
    assert restore(stack, [0, 1, 2, 3, 4, 9, 9, 9, 9])[0] == 8
    assert restore(stack, [0, 1, 2, 3, 4, 9, 9])[0] == 5
    assert_consistent(stack)


def test_a_tail_that_has_no_snapshot_goes() -> None:
    """One whose snapshot found no room is dropped when a longer block covers it."""
    stack = new_stack(capacity_tokens=30)
    commit(stack, range(2), [2])
    (tail,) = stack._index.blocks.values()
    stack._inventory._remove_copy(tail.pieces[SIDE], stack.tiers[0])
    commit(stack, range(4), [4])
    assert kinds(stack) == [(4, [MAIN, SIDE])]
    assert_consistent(stack)


def test_value_per_byte() -> None:
    """The only snapshot of a long sequence outlives newer ones that save little."""
    stack = new_stack(capacity_tokens=160)
    long = list(range(20))
    commit(stack, long, [20])
    for start in range(100, 120):
        commit(stack, [start, start, start, start], [4])
    assert restore(stack, [*long, 50])[0] == 20
    assert restore(stack, [119] * 4 + [50])[0] == 4  # what was stored last is there
    assert_consistent(stack)


def test_snapshots_are_first_to_go_beyond_their_share() -> None:
    stack = new_stack(capacity_tokens=200)
    for start in range(100, 140):
        commit(stack, [start, start, start, start], [1, 2, 3, 4])
        tier = stack.tiers[0]
        assert tier.snapshot_bytes == sum(piece.nbytes for piece in stack._inventory.pieces.values() if piece.gain)
    assert restore(stack, [139] * 4 + [1])[0] == 4
    assert_consistent(stack)


def test_what_no_snapshot_makes_use_of_goes_with_it() -> None:
    stack = new_stack()
    commit(stack, range(14), [4, 14])
    tier = stack.tiers[0]
    (first,) = (block for block in stack._index.blocks.values() if not hasattr(block.parent, "tokens"))
    (tail,) = (block for block in stack._index.blocks.values() if block.num_tokens == 2)
    chain = [tail, tail.parent, tail.parent.parent]  # type: ignore[attr-defined]
    assert chain[-1].parent is first
    gone = stack._inventory._evictable(tail.pieces[SIDE], tier, {})
    assert gone == [tail.pieces[SIDE], *(block.pieces[MAIN] for block in chain)]
    chain[1].holds = 1
    assert stack._inventory._evictable(tail.pieces[SIDE], tier, {}) == [tail.pieces[SIDE], tail.pieces[MAIN]]
    chain[1].holds = 0
    commit(stack, [*range(12), 20], [13])  # the chain is of use to another one
    assert stack._inventory._evictable(tail.pieces[SIDE], tier, {}) == [tail.pieces[SIDE], tail.pieces[MAIN]]


def test_from_disk(tmp_path: Path) -> None:
    tokens = list(range(11))
    with new_stack(disk=tmp_path) as stack:
        commit(stack, tokens, [2, 6, 8, 11])
        commit(stack, [*tokens[:7], 77, 78], [9])
        assert stack.flush(10)
    for asked, length in (([*tokens, 50], 11), (tokens, 8), (tokens[:8], 6), (tokens[:6], 2), ([*tokens[:7], 77, 78, 5], 9)):
        with new_stack(disk=tmp_path) as stack:
            assert restore(stack, asked) == (length, {"disk": length})
    with new_stack(disk=tmp_path) as stack:  # memory has the shorter one
        commit(stack, tokens[:7], [6])
        assert restore(stack, tokens[:8]) == (6, {"host": 6})
        assert restore(stack, [*tokens, 50]) == (11, {"host": 4, "disk": 7})
        assert stack.flush(10)
        assert_consistent(stack)


def test_a_snapshot_that_is_on_disk_only(tmp_path: Path) -> None:
    with new_stack(disk=tmp_path) as stack:
        commit(stack, range(9), [6, 8])
        assert stack.flush(10)
        for block in list(stack._index.blocks.values()):
            if SIDE in block.pieces:
                stack._inventory._remove_copy(block.pieces[SIDE], stack.tiers[0])
        assert restore(stack, range(9)) == (8, {"host": 4, "disk": 4})


@pytest.mark.parametrize("which", ["6-8", "8-8", "4-8"])
def test_a_damaged_file(tmp_path: Path, which: str) -> None:
    """Of a tail, of the last block, or of one on the way: the hit ends at what is left."""
    with new_stack(disk=tmp_path) as stack:
        commit(stack, range(13), [2, 6, 8, 12])
        assert stack.flush(10)
        stop = int(which[0])
        block = next(
            block
            for block in stack._index.blocks.values()
            if block.num_tokens == (stop % BLOCK or BLOCK) and stop - 1 in np.frombuffer(block.tokens, "<i8")
        )
        name = block.key.hex()[:32]
    damaged = [path for path in tmp_path.rglob(f"{name}*.kv") if "side" not in path.name]
    assert damaged
    for path in damaged:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    with new_stack(disk=tmp_path) as stack:
        ids = np.arange(13)
        match = stack.match(b"id", b"", ids, SHAPES)
        tried = []
        while length := match.usable(12):
            tried.append(length)
            port = TokenPort(ids, SNAPSHOT)
            fetched = stack.fetch(match, length, port)
            if fetched.is_complete:
                assert port.loaded[:length].tolist() == ids[:length].tolist()
                break
            match = fetched.match
        stack.release(match)
    assert tried == {"6-8": [12], "8-8": [12, 6], "4-8": [12, 2]}[which]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.booleans(), TOKENS, st.lists(st.integers(1, 14), max_size=3)), max_size=12),
    st.sampled_from([30, 100, 10_000]),
)
def test_any_sequence_of_operations(operations: list[tuple[bool, list[int], list[int]]], capacity: int) -> None:
    """Of commits and lookups, in a large and in small tiers: a hit ends at the longest snapshot there is."""
    stack = new_stack(capacity)
    known: set[tuple[int, ...]] = set()
    for is_commit, tokens, ends in operations:
        ends = [end for end in ends if end <= len(tokens)]
        if is_commit:
            commit(stack, tokens, ends)
            known |= {tuple(tokens[:end]) for end in ends}
        else:
            expected = max((len(prefix) for prefix in known if tuple(tokens[:-1])[: len(prefix)] == prefix), default=0)
            length, _ = restore(stack, tokens)
            assert length == expected if capacity == 10_000 else length <= expected
        assert_consistent(stack)
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in stack.tiers)
