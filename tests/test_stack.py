"""The stack without torch: a token's K/V is the token itself, so whatever is restored can be told right from wrong."""

import signal
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.defaults import default_stack, set_default_stack
from tiered_cache.errors import ClosedError, ConfigError
from tiered_cache.stack import TierStack
from tiered_cache.testing.token_port import NOTHING, TOKEN_NBYTES, TokenPort
from tiered_cache.tiers import device as device_tier
from tiered_cache.tiers.device import DeviceTier
from tiered_cache.tiers.host import HostTier

BLOCK = 4


def new_stack(capacity_tokens: int = 10_000) -> TierStack:
    return TierStack(HostTier(capacity_tokens * TOKEN_NBYTES), block_tokens=BLOCK)


def commit(
    stack: TierStack, tokens: Any, identity: bytes = b"id", salt: bytes = b"", window: int = 0, side_from: int = 0
) -> int:
    tokens = np.asarray(tokens)
    return stack.commit(identity, salt, tokens, TokenPort(tokens, window, side_from))


def restore(
    stack: TierStack, tokens: Any, identity: bytes = b"id", salt: bytes = b"", window: int = 0, limit: int = 1000
) -> int:
    """Match and fetch, and assert that what came is right; return its length."""
    tokens = np.asarray(tokens)
    match = stack.match(identity, salt, tokens)
    length = match.usable(limit)
    port = TokenPort(tokens, window)
    served = stack.fetch(match, length, port).served
    stack.release(match)
    assert port.loaded[:length].tolist() == tokens[:length].tolist()
    assert (port.loaded[length:] == NOTHING).all()
    start = max(length - window, 0) if window else length
    assert port.loaded_side[start:length].tolist() == tokens[start:length].tolist()
    assert (port.loaded_side[length:] == NOTHING).all()
    assert sum(served.values()) == length
    return length


def assert_consistent(stack: TierStack) -> None:
    blocks = stack._index.blocks
    reachable = [block for root in stack._index.roots.values() for block in stack._index.descendants(root)]
    assert len(reachable) == len(blocks)
    assert {id(block) for block in reachable} == {id(block) for block in blocks.values()}
    for block in reachable:
        assert block.holds == 0
        assert "main" in block.pieces
        assert not block.children or block.num_tokens == stack.block_tokens
        assert block.parent.children == sorted(block.parent.children, key=lambda child: child.tokens)
    pieces = [piece for block in reachable for piece in block.pieces.values()]
    assert {piece.key for piece in pieces} == set(stack._inventory.pieces)
    for tier in stack.tiers:
        held = [piece.copies[tier.name].nbytes for piece in pieces if tier.name in piece.copies]
        assert tier.used_bytes == sum(held) <= tier.capacity_bytes
        assert tier.num_pieces == len(held) == len([*tier.policy.victims(), *tier.snapshots.victims()])


# --- matching -----------------------------------------------------------------------------------------------------------


def test_match_is_exact_to_the_token() -> None:
    stack = new_stack()
    assert commit(stack, range(10)) == 10  # two blocks and a tail of two
    for length in range(1, 13):
        assert restore(stack, range(length)) == min(length, 10)
    for branch in range(10):
        tokens = [*range(branch), 99, 98, 97, 96, 95]
        assert restore(stack, tokens) == branch


def test_the_closest_sibling_serves() -> None:
    stack = new_stack()
    for tail in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 9], [2, 2, 2, 2], [1, 5]):
        commit(stack, tail)
    assert restore(stack, [1, 2, 3, 7]) == 3
    assert restore(stack, [1, 2, 8]) == 2
    assert restore(stack, [1, 5, 5, 5]) == 2
    assert restore(stack, [3, 1]) == 0


def test_created_tokens_count_shared_ones_once() -> None:
    stack = new_stack()
    assert commit(stack, range(6)) == 6
    assert commit(stack, range(6)) == 0
    assert commit(stack, range(11)) == 5
    assert commit(stack, [0, 1, 2, 99]) == 1
    assert stack.stats().created_tokens == 12


def test_a_tail_is_dropped_when_a_longer_block_covers_it() -> None:
    stack = new_stack()
    commit(stack, range(6))
    commit(stack, range(7))
    assert len(stack._index.blocks) == 2
    commit(stack, range(12))
    assert len(stack._index.blocks) == 3
    commit(stack, range(6))  # a longer block serves
    assert len(stack._index.blocks) == 3
    assert_consistent(stack)


def test_a_tail_in_use_is_not_dropped() -> None:
    stack = new_stack()
    commit(stack, range(6))
    match = stack.match(b"id", b"", np.arange(6))
    commit(stack, range(12))
    port = TokenPort(np.arange(6))
    stack.fetch(match, 6, port)
    assert port.loaded.tolist() == list(range(6))
    stack.release(match)
    assert restore(stack, range(12)) == 12
    assert_consistent(stack)


def test_identity_and_salt_keep_apart() -> None:
    stack = new_stack()
    commit(stack, range(8))
    assert restore(stack, range(8), identity=b"other") == 0
    assert restore(stack, range(8), salt=b"salt") == 0
    assert restore(stack, range(8)) == 8


# --- budget -------------------------------------------------------------------------------------------------------------


def test_leaves_go_first_and_prefixes_stay_usable() -> None:
    stack = new_stack(capacity_tokens=12)
    commit(stack, range(12))
    commit(stack, range(100, 104))
    assert restore(stack, range(12)) == 8
    assert stack.stats().tiers["host"].evicted_pieces == 1
    assert_consistent(stack)


def test_what_was_used_last_stays() -> None:
    stack = new_stack(capacity_tokens=12)
    for start in (0, 100, 200):
        commit(stack, range(start, start + 4))
    restore(stack, range(4))
    commit(stack, range(300, 304))
    assert [restore(stack, range(start, start + 4)) for start in (0, 100, 200, 300)] == [4, 0, 4, 4]


def test_a_sequence_larger_than_the_budget_keeps_its_front() -> None:
    stack = new_stack(capacity_tokens=10)
    assert commit(stack, range(40)) == 8
    assert stack.stats().dropped_blocks == 1
    assert restore(stack, range(40)) == 8
    assert not stack.flush()
    assert stack.flush()
    assert_consistent(stack)


def test_a_block_larger_than_the_budget_evicts_nothing() -> None:
    stack = new_stack(capacity_tokens=3)
    commit(stack, [1, 2])
    assert commit(stack, range(10, 14)) == 0
    assert restore(stack, [1, 2]) == 2


def test_a_held_block_is_never_evicted() -> None:
    stack = new_stack(capacity_tokens=8)
    commit(stack, range(8))
    match = stack.match(b"id", b"", np.arange(8))
    assert commit(stack, range(100, 108)) == 0
    port = TokenPort(np.arange(8))
    stack.fetch(match, 8, port)
    assert port.loaded.tolist() == list(range(8))
    stack.release(match)
    assert commit(stack, range(100, 108)) == 8
    assert_consistent(stack)


def test_without_holds_it_would_be_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    stack = new_stack(capacity_tokens=8)
    commit(stack, range(8))
    monkeypatch.setattr(stack._inventory, "hold", lambda blocks: None)
    match = stack.match(b"id", b"", np.arange(8))
    assert commit(stack, range(100, 108)) == 8
    with pytest.raises((AssertionError, KeyError)):
        stack.fetch(match, 8, TokenPort(np.arange(8)))


def test_no_room_in_memory_is_a_dropped_block() -> None:
    stack = new_stack()

    class NoMemory(TokenPort):
        def allocate(self, memory: str, nbytes: int) -> Any:
            raise MemoryError

    assert stack.commit(b"id", b"", np.arange(8), NoMemory(np.arange(8))) == 0
    assert stack.stats().dropped_blocks == 1
    assert_consistent(stack)


# --- clear, forget, close -------------------------------------------------------------------------------------------------


def test_clear_and_forget() -> None:
    stack = new_stack()
    commit(stack, range(10))
    commit(stack, range(10), identity=b"other")
    stack.forget(b"other")
    assert restore(stack, range(10), identity=b"other") == 0
    assert restore(stack, range(10)) == 10
    stack.clear("another namespace")
    assert restore(stack, range(10)) == 10
    stack.clear("default")
    assert restore(stack, range(10)) == 0
    assert stack.stats().tiers["host"].used_bytes == 0
    commit(stack, range(10))
    stack.clear()
    assert not stack._index.blocks
    assert_consistent(stack)


def test_clear_while_a_block_is_read() -> None:
    """Nobody finds it any more; its reader goes on; its bytes count until the reader is done."""
    stack = new_stack()
    commit(stack, range(8))
    match = stack.match(b"id", b"", np.arange(8))
    stack.clear()
    assert restore(stack, range(8)) == 0
    assert stack.stats().tiers["host"].used_bytes == 8 * TOKEN_NBYTES
    port = TokenPort(np.arange(8))
    stack.fetch(match, 8, port)
    assert port.loaded.tolist() == list(range(8))
    stack.release(match)
    assert stack.stats().tiers["host"].used_bytes == 0
    commit(stack, range(8))
    assert restore(stack, range(8)) == 8
    assert_consistent(stack)


def test_what_was_cleared_while_it_was_read_and_stored_again_can_be_evicted() -> None:
    """Two blocks of one key for a while: the end of the first must not touch what is noted of the second."""
    stack = new_stack(capacity_tokens=16)
    commit(stack, range(8))
    match = stack.match(b"id", b"", np.arange(8))
    stack.clear()
    commit(stack, range(8))
    stack.release(match)
    assert_consistent(stack)
    assert commit(stack, range(100, 116)) == 16
    assert_consistent(stack)


def test_nothing_cleared_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tier, "accelerator_present", lambda: True)
    stack = TierStack(DeviceTier(4 * TOKEN_NBYTES), HostTier(1000), block_tokens=BLOCK)
    commit(stack, range(8))
    match = stack.match(b"id", b"", np.arange(8))
    stack.clear()
    stack.fetch(match, 8, TokenPort(np.arange(8)))
    commit(stack, range(50, 58))
    stack.release(match)
    assert_consistent(stack)


def test_clear_while_a_commit_is_under_way_wins() -> None:
    stack = new_stack()

    class Clears(TokenPort):
        def save(self, kind: str, start: int, num_tokens: int, buffers: Any) -> Any:
            if start == BLOCK:
                stack.clear()
            return super().save(kind, start, num_tokens, buffers)

    stack.commit(b"id", b"", np.arange(12), Clears(np.arange(12)))
    assert not stack._index.blocks
    assert_consistent(stack)


def test_empty_roots_are_forgotten() -> None:
    """A training loop makes a new identity at every step: what is left of the old ones must not pile up."""
    stack = new_stack(capacity_tokens=12)
    for step in range(100):
        commit(stack, range(8), identity=b"%d" % step)
    assert len(stack._index.roots) <= 2
    assert commit(stack, range(40), identity=b"too large") == 12
    stack.clear()
    assert not stack._index.roots
    tiny_stack = new_stack(capacity_tokens=1)
    commit(tiny_stack, range(8))
    assert not tiny_stack._index.roots


def test_ctrl_c_ends_a_commit_between_blocks() -> None:
    stack = new_stack()

    class Pressed(TokenPort):
        def save(self, kind: str, start: int, num_tokens: int, buffers: Any) -> Any:
            if start == BLOCK:
                signal.raise_signal(signal.SIGINT)
            return super().save(kind, start, num_tokens, buffers)

    with pytest.raises(KeyboardInterrupt):
        stack.commit(b"id", b"", np.arange(40), Pressed(np.arange(40)))
    assert restore(stack, range(40)) == 2 * BLOCK
    assert_consistent(stack)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closed() -> None:
    with new_stack() as stack:
        commit(stack, range(8))
    assert stack.stats().tiers["host"].used_bytes == 0
    stack.close()
    for call in (
        lambda: stack.match(b"id", b"", np.arange(3)),
        lambda: commit(stack, [1]),
        lambda: stack.flush(),
        lambda: stack.clear(),
        lambda: stack.forget(b"id"),
        lambda: set_default_stack(stack),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert "closed" in repr(stack)


def test_default_stack() -> None:
    first = default_stack()
    assert default_stack() is first
    own = new_stack()
    set_default_stack(own)
    assert default_stack() is own
    own.close()
    assert default_stack() is not own
    set_default_stack(first)


@pytest.mark.parametrize(
    ("tiers", "options", "message"),
    [
        ((), {}, "HostTier"),
        (("8GiB",), {}, "HostTier"),
        ((HostTier,), {}, "HostTier"),
        ((HostTier(1000), HostTier(1000)), {}, "twice"),
        ((HostTier(1000),), {"block_tokens": 0}, "block_tokens"),
        ((HostTier(1000),), {"block_tokens": 2.5}, "block_tokens"),
        ((HostTier(1000),), {"block_tokens": True}, "block_tokens"),
        ((HostTier(1000),), {"namespace": ""}, "namespace"),
        ((HostTier(1000),), {"namespace": 3}, "namespace"),
    ],
)
def test_bad_arguments(tiers: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierStack(*tiers, **options)


def test_a_tier_belongs_to_one_stack() -> None:
    tier = HostTier(1000)
    with pytest.raises(ConfigError, match="twice"):
        TierStack(tier, tier)
    TierStack(tier)
    with pytest.raises(ConfigError, match="another TierStack"):
        TierStack(tier)


def test_device_tier_needs_a_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tier, "accelerator_present", lambda: True)
    with pytest.raises(ConfigError, match="HostTier"):
        TierStack(DeviceTier(1000))


# --- many operations --------------------------------------------------------------------------------------------------

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few tokens: prefixes are shared all the time
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), SEQUENCES),
        st.tuples(st.just("restore"), SEQUENCES),
        st.tuples(st.just("hold"), SEQUENCES),
        st.tuples(st.just("release"), st.just([])),
        st.tuples(st.just("clear"), st.just([])),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(OPERATIONS, st.sampled_from([6, 20, 10_000]), st.booleans(), st.sampled_from([0, 3, 6]), st.integers(0, 5))
def test_any_sequence_of_operations(operations: Any, capacity: int, with_device: bool, window: int, side_from: int) -> None:
    """Right tokens, budgets kept, and with room enough exactly the longest prefix that was ever stored."""
    present = device_tier.accelerator_present
    device_tier.accelerator_present = lambda: True
    tiers = [HostTier(capacity * TOKEN_NBYTES)] + ([DeviceTier(9 * TOKEN_NBYTES)] if with_device else [])
    device_tier.accelerator_present = present
    stack = TierStack(*tiers, block_tokens=BLOCK)
    known: list[list[int]] = []
    held: list[tuple[Any, list[int]]] = []
    for name, tokens in operations:
        longest = max((shared(tokens, other) for other in known), default=0)
        if name == "commit":
            created = commit(stack, tokens, window=window, side_from=side_from)
            if capacity == 10_000:
                assert created == len(tokens) - longest
            known.append(tokens)
        elif name == "restore":
            length = restore(stack, tokens, window=window)
            exact = capacity == 10_000 and (not window or not side_from)
            assert length == longest if exact else length <= longest
        elif name == "hold":
            held.append((stack.match(b"id", b"", np.asarray(tokens)), tokens))
        elif name == "clear":
            stack.clear()
            known.clear()
        elif held:
            match, tokens = held.pop(0)
            port, length = TokenPort(np.asarray(tokens), window), match.usable(1000)
            stack.fetch(match, length, port)
            assert port.loaded[:length].tolist() == tokens[:length]
            stack.release(match)
        for tier in stack.tiers:
            assert tier.used_bytes <= tier.capacity_bytes
    for match, _ in held:
        stack.release(match)
    assert_consistent(stack)
    stack.clear()
    assert all(tier.used_bytes == 0 for tier in stack.tiers)


def shared(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


def test_many_threads() -> None:
    """Commits, restores and clears at once: right tokens, budget kept, nothing leaked."""
    stack = new_stack(capacity_tokens=60)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for step in range(300):
                tokens = random.integers(0, 3, random.integers(1, 20))
                commit(stack, tokens) if step % 2 else restore(stack, tokens)
                if step % 97 == 0:
                    stack.clear()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert_consistent(stack)
