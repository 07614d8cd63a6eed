"""Every attention architecture x every way a prompt meets what is stored. Run at each supported transformers."""

import pytest
import torch

from tests.hf.harness import assert_same, block_nbytes, check, drop_pieces, new_stack, run
from tests.hf.models import FULL_ATTENTION, SHARING, SLIDING, prompt, tiny
from tiered_cache import TieredCache, TierStack
from tiered_cache.hf import compat

LENGTH = 53  # three blocks of 16 and a tail


@pytest.fixture(params=FULL_ATTENTION + SLIDING + SHARING)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in SHARING and not compat.KEEPS_STATES:
        pytest.skip("transformers has it otherwise before 5.17")
    return request.param


@pytest.fixture
def stack(name: str) -> TierStack:
    """Hold the prompt and five generated tokens, of which the last was never fed: 57 tokens."""
    stack = new_stack()
    out = check(tiny(name), prompt(LENGTH), stack, cached=0)
    stack.turn = out.sequences  # type: ignore[attr-defined]
    return stack


def test_warm(name: str, stack: TierStack) -> None:
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


def test_next_turn(name: str, stack: TierStack) -> None:
    ids = torch.cat([stack.turn, prompt(9, seed=1)], dim=1)  # type: ignore[attr-defined]
    check(tiny(name), ids, stack, cached=LENGTH + 4)


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 40, 50, 52])
def test_branch(name: str, stack: TierStack, shared: int) -> None:
    """The prompts part inside the first block, at its edges, inside a later one, and inside the tail."""
    ids = torch.cat([prompt(shared), prompt(12, seed=2)], dim=1)
    ids[0, shared] = 3 if prompt(LENGTH)[0, shared] != 3 else 4  # no token shared by chance
    check(tiny(name), ids, stack, cached=shared)


def test_stripped_turn(name: str, stack: TierStack) -> None:
    """The next turn keeps only part of the answer, as chat templates that strip thoughts do."""
    turn = stack.turn  # type: ignore[attr-defined]
    ids = torch.cat([turn[:, : LENGTH + 2], prompt(9, seed=3)], dim=1)
    ids[0, LENGTH + 2] = 3 if turn[0, LENGTH + 2] != 3 else 4
    check(tiny(name), ids, stack, cached=LENGTH + 2)


def test_beams(name: str, stack: TierStack) -> None:
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, num_beams=3, num_return_sequences=2)


def test_samples(name: str, stack: TierStack) -> None:
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, num_return_sequences=3, do_sample=True)


def test_batch(name: str, stack: TierStack) -> None:
    """Different questions behind one prefix: all rows reuse what the row that shares least does."""
    ids = torch.cat([prompt(40).repeat(2, 1), prompt(12, seed=4, rows=2)], dim=1)
    ids[:, 40] = 3 if prompt(LENGTH)[0, 40] != 3 else 4
    check(tiny(name), ids, stack, cached=40)


def test_left_padded_batch(name: str, stack: TierStack) -> None:
    """Reuse is by column: pads 5 and 0; row 0 has 40 + 5 columns in common with what is stored, row 1 has 30."""
    ids = torch.cat([prompt(40), prompt(15, seed=5)], dim=1).repeat(2, 1)
    ids[:, 40] = 3 if prompt(LENGTH)[0, 40] != 3 else 4
    ids[0] = torch.cat([torch.zeros(5, dtype=torch.long), ids[0, :-5]])
    ids[1, 30] = 3 if ids[1, 30] != 3 else 4
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    check(tiny(name), ids, stack, cached=30, attention_mask=mask)
    check(tiny(name), ids, stack, cached=ids.shape[1] - 1, attention_mask=mask)


def test_kept_cache(name: str, stack: TierStack) -> None:
    """One cache object through a chat, then for another prompt, then for the first again."""
    cache = TieredCache(stack)
    out = check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, cache=cache)
    ids = torch.cat([out.sequences, prompt(7, seed=6)], dim=1)
    check(tiny(name), ids, stack, cached=LENGTH + 4, cache=cache)
    assert cache.usage.cached_by_tier == {"resident": LENGTH + 4}
    other = prompt(30, seed=7)
    other[0, 0] = 3 if other[0, 0] != 3 else 4
    check(tiny(name), other, stack, cached=int(other[0, 0] == prompt(1)[0, 0]), cache=cache)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1, cache=cache)


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunked_prefill(name: str, stack: TierStack, chunk: int) -> None:
    """Before transformers 5.24 nothing is reused there, but the prompt is stored."""
    reused = compat.CHUNKED_PREFILL_CONTINUES
    for ids in (prompt(LENGTH), torch.cat([prompt(LENGTH), prompt(20, seed=8)], dim=1)):
        cache = TieredCache(stack)
        cold = run(tiny(name), ids)
        assert_same(run(tiny(name), ids, past_key_values=cache, prefill_chunk_size=chunk), cold)
        assert (cache.usage.cached_tokens >= LENGTH - 1) is reused
        check(tiny(name), ids, stack, cached=ids.shape[1] - 1)


@pytest.mark.parametrize("length", [2, 16, 17, 24, 25, 40])
def test_shorter_prefix(name: str, stack: TierStack, length: int) -> None:
    check(tiny(name), prompt(length), stack, cached=length - 1)


@pytest.mark.parametrize(("kind", "kept"), [("main", 32), ("side", 16), ("side", 0)])
def test_after_eviction(name: str, stack: TierStack, kind: str, kept: int) -> None:
    """Of all blocks, or their side pieces, from a token on. Then what was computed again is there again."""
    drop_pieces(stack, kind, lambda start: start < kept)
    expected = kept if kind == "main" or name in SLIDING + SHARING else LENGTH - 1
    check(tiny(name), prompt(LENGTH), stack, cached=expected)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


def test_other_weights_miss(name: str, stack: TierStack) -> None:
    check(tiny(name, seed=1), prompt(LENGTH), stack, cached=0)
    check(tiny(name), prompt(LENGTH), stack, cached=LENGTH - 1)


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_eviction_of_the_tail(name: str) -> None:
    """A budget of two and a half blocks: what is evicted is computed, what is left is reused."""
    roomy = new_stack()
    run(tiny(name), prompt(LENGTH), past_key_values=TieredCache(roomy))
    block = block_nbytes(roomy)
    stack = new_stack(int(2.5 * block))
    check(tiny(name), prompt(LENGTH), stack, cached=0)
    check(tiny(name), prompt(LENGTH), stack, cached=32)
