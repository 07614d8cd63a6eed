"""What a fingerprint is made of and when it is taken, beyond the matrix of changes in test_identity_matrix.py."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.hf.harness import assert_same, check, new_stack, run
from tests.hf.models import fresh, prompt, tiny
from tiered_cache import MissReason, TieredCache, TierStack
from tiered_cache.hf import identity, weights


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def weight(model: Any) -> torch.Tensor:
    return model.model.layers[1].self_attn.k_proj.weight


def edit_one_element(model: Any) -> None:
    with torch.no_grad():
        weight(model)[3, 5] += 0.5


def test_a_kept_cache_is_not_used_after_a_change(stack: TierStack) -> None:
    model, cache = fresh(), TieredCache(stack)
    check(model, prompt(30), stack, cached=0, cache=cache)
    edit_one_element(model)
    check(model, prompt(30), stack, cached=0, cache=cache)


def test_a_change_in_the_middle_of_a_call_is_not_stored(stack: TierStack) -> None:
    """Nobody knows which tokens saw which weights."""
    model = fresh()

    def edit(batch: int, ids: torch.Tensor) -> list[int]:
        edit_one_element(model)
        return list(range(3, 128))

    cache = TieredCache(stack)
    run(model, prompt(30), past_key_values=cache, prefix_allowed_tokens_fn=edit)
    assert cache.usage.created_tokens == 0


def test_weights_changed_and_changed_back_within_a_call(stack: TierStack) -> None:
    model = fresh()
    before = weight(model).detach().clone()
    steps = iter((1.5, 1.0, 1.0, 1.0, 1.0))

    def edit(batch: int, ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            weight(model).copy_(before * next(steps))
        return list(range(3, 128))

    cache = TieredCache(stack)
    run(model, prompt(30), past_key_values=cache, prefix_allowed_tokens_fn=edit)
    assert cache.usage.created_tokens == 0


def test_a_training_loop_pauses_reuse_until_the_weights_hold_still(stack: TierStack, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = fresh(), []
    checksum = weights._checksum
    monkeypatch.setattr(weights, "_checksum", lambda name, tensor: read.append(name) or checksum(name, tensor))
    reasons = []
    for _ in range(8):
        edit_one_element(model)
        cache = TieredCache(stack)
        run(model, prompt(30), past_key_values=cache)
        reasons.append(cache.usage.miss_reason)
    assert reasons[:3] == [MissReason.NOT_STORED] * 3
    assert reasons[-3:] == [MissReason.IDENTITY] * 3
    before = len(read)
    check(model, prompt(30), stack, cached=0)  # holds still
    assert len(read) == before + 1  # only the tensor that had changed
    check(model, prompt(30), stack, cached=29)


def test_autocast_around_the_forward_only(stack: TierStack) -> None:
    """A loop by hand whose K/V are of another dtype than its model says: not stored, since nobody could use them."""
    cache, ids = TieredCache(stack), prompt(30)
    with torch.no_grad():
        cache.restore(tiny(), ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tiny()(ids, past_key_values=cache)
        cache.commit(ids)
    check(tiny(), ids, stack, cached=0)


def test_salt_and_namespace_and_stack(stack: TierStack) -> None:
    check(tiny(), prompt(30), stack, cached=0, cache=TieredCache(stack, salt="a"))
    check(tiny(), prompt(30), stack, cached=0, cache=TieredCache(stack, salt="b"))
    check(tiny(), prompt(30), stack, cached=0)
    check(tiny(), prompt(30), stack, cached=29, cache=TieredCache(stack, salt=b"a"))
    check(tiny(), prompt(30), new_stack(namespace="other"), cached=0)


def test_inference_tensors_have_no_version(stack: TierStack) -> None:
    with torch.inference_mode():
        model = fresh()
        check(model, prompt(30), stack, cached=0)
        check(model, prompt(30), stack, cached=29)
        weight(model)[0, 0] += 0.5
        check(model, prompt(30), stack, cached=0)


def test_weights_that_cannot_be_read(stack: TierStack) -> None:
    class Packed(torch.Tensor):
        pass

    model = fresh()
    model.extra = torch.nn.Parameter(torch.zeros(3).as_subclass(Packed), requires_grad=False)
    cache = TieredCache(stack)
    check(model, prompt(30), stack, cached=0, cache=cache)
    assert cache.usage.miss_reason is MissReason.IDENTITY
    assert not stack._index.blocks


def length_dependent(rope_type: str) -> Any:
    """Return a model whose rotary frequencies change at 48 tokens."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 48}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = fresh(rope_parameters=rope)
    model.config.original_max_position_embeddings = 48
    return model


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_length(stack: TierStack, rope_type: str) -> None:
    """longrope: short and long requests each reuse their own kind. dynamic: long requests reuse nothing."""
    model, long_hits = length_dependent(rope_type), rope_type == "longrope"
    for _ in range(2):  # the second time everything is stored
        for cache in (TieredCache(stack), TieredCache(stack)):
            check(model, prompt(30), stack, cached=known(stack, 30), cache=cache)
            check(model, prompt(60), stack, cached=known(stack, 60, long_hits), cache=cache)
            check(model, prompt(48), stack, cached=known(stack, 48), cache=cache)
            check(model, prompt(49), stack, cached=known(stack, 49, long_hits), cache=cache)
            check(model, prompt(75), stack, cached=known(stack, 75, long_hits), cache=cache)
    assert cache.usage.cached_tokens == (74 if long_hits else 0)


def known(stack: TierStack, length: int, hits: bool | None = None) -> int:
    """Return how many of a prompt's tokens are stored under the kind of request it is, at most all but one."""
    if hits is False:
        return 0
    salt = b"long rope|" if length > 48 else b""
    (identity_,) = {root.identity for root in stack._index.roots.values()} or {b""}
    match = stack.match(identity_, salt, prompt(length)[0].numpy())
    stack.release(match)
    return min(match.num_tokens, length - 1)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_request_that_crosses_the_switch(stack: TierStack, rope_type: str) -> None:
    """What it makes after the crossing is neither stored nor kept."""
    model, cache = length_dependent(rope_type), TieredCache(stack)
    out = run(model, prompt(44), new_tokens=12)
    for used in (cache, TieredCache(stack), cache):
        assert run(model, prompt(44), new_tokens=12, past_key_values=used).sequences.tolist() == out.sequences.tolist()
    assert max(depth(block) for block in stack._index.blocks.values()) <= 48
    check(model, out.sequences, stack, cached=0, cache=cache)
    check(model, out.sequences[:, :48], stack, cached=47, cache=cache)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_long_prompt_in_chunks_is_not_stored(stack: TierStack, rope_type: str) -> None:
    """Its first chunks are computed as short requests."""
    model = length_dependent(rope_type)
    for _ in range(2):
        cold = run(model, prompt(60), prefill_chunk_size=20)
        cache = TieredCache(stack)
        assert_same(run(model, prompt(60), prefill_chunk_size=20, past_key_values=cache), cold)
        assert cache.usage.cached_tokens == cache.usage.created_tokens == 0
    check(model, prompt(60), stack, cached=0)


def test_phi3_which_replaces_the_cache_at_the_switch(stack: TierStack) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = fresh("Phi3", rope_parameters=rope, original_max_position_embeddings=48)
    for _ in range(2):
        for length, new_tokens in ((44, 12), (60, 5), (48, 5), (30, 5)):
            cold = run(model, prompt(length), new_tokens=new_tokens)
            cache = TieredCache(stack)
            out = run(model, prompt(length), new_tokens=new_tokens, past_key_values=cache)
            assert out.sequences.tolist() == cold.sequences.tolist()
    assert cache.usage.cached_tokens == 29
    assert max(depth(block) for block in stack._index.blocks.values()) <= 48


def depth(block: Any) -> int:
    tokens = 0
    while hasattr(block, "tokens"):
        tokens += block.num_tokens
        block = block.parent
    return tokens


def test_checksum_covers_every_element() -> None:
    """On the CPU by xxh3; the sums that stand in for it on a device see every single bit too."""
    torch.manual_seed(0)
    data = torch.randn(1000)
    reference = weights._device_sum(data)
    for place in range(0, 1000, 7):
        for bit in (0, 13, 31):
            flipped = data.clone()
            flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert weights._device_sum(flipped) != reference
    swapped = data.clone()
    swapped[[0, 2]] = swapped[[2, 0]]
    assert weights._device_sum(swapped) != reference


def test_identity_is_the_same_in_another_process() -> None:
    """Nothing in it depends on object addresses or on hash()."""
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "from tests.hf.models import tiny; from tiered_cache.hf.identity import identify; print(identify(tiny()).digest.hex())"
    )
    root = Path(__file__).parents[2]
    found = {
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    }
    assert found == {identity.identify(fresh()).digest.hex()}


OWN_CODE = """
import torch

FACTOR = {factor}


def inner(states):
    return states * {deep}


def outer(states):
    return inner(states)


class Block(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, states):
        return outer(self.block(states)) * FACTOR
"""


def identity_with_own_code(folder: Path, **values: float) -> identity.Fingerprint:
    """Return the fingerprint of a model with a module of the user's own, whose file may be edited between two processes."""
    file = folder / f"own_block_{len(list(folder.iterdir()))}.py"  # of one second and size: Python would not compile it again
    file.write_text(OWN_CODE.format(**{"factor": 1.0, "deep": 1.0, **values}))
    spec = importlib.util.spec_from_file_location("own_block", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = fresh()
    model.model.layers[0].mlp = module.Block(model.model.layers[0].mlp).eval()
    found = identity.identify(model)
    assert found is not None
    return found


def test_code_of_ones_own_is_followed(tmp_path: Path) -> None:
    """Nobody numbers its versions: constants and helpers it uses count, in every process alike."""
    base = identity_with_own_code(tmp_path)
    assert base.is_portable
    assert identity_with_own_code(tmp_path).digest == base.digest
    assert identity_with_own_code(tmp_path, factor=2.0).digest != base.digest
    assert identity_with_own_code(tmp_path, deep=2.0).digest != base.digest


@pytest.mark.parametrize(
    "bind", [functools.partial, lambda function, **bound: lambda *args, **kw: function(*args, **kw, **bound)]
)
def test_an_attention_function_registered_again(bind: Any, monkeypatch: pytest.MonkeyPatch, stack: TierStack) -> None:
    """The same code with another value bound to it is another function."""

    def attention(*args: Any, strength: float, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * strength, weights

    model = fresh()
    model.set_attn_implementation("sdpa")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", bind(attention, strength=1.0))
    check(model, prompt(40), stack, cached=0)
    check(model, prompt(40), stack, cached=39)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", bind(attention, strength=0.5))
    check(model, prompt(40), stack, cached=0)
