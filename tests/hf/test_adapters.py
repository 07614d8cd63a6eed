"""LoRA switched, merged, reloaded: each state of a model finds its own entries, and only those."""

from typing import Any

import pytest
import torch

from tests.hf.harness import check, new_stack
from tests.hf.models import fresh, prompt
from tiered_cache import TieredCache, TierStack

peft = pytest.importorskip("peft")


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def adapter(seed: int) -> Any:
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)


def wrapped() -> Any:
    return peft.get_peft_model(fresh(), adapter(1), adapter_name="one").eval()


def hits(model: Any, stack: TierStack, expected: bool, cache: TieredCache | None = None) -> None:
    check(model, prompt(30), stack, cached=29 if expected else 0, cache=cache)


def test_several_adapters_side_by_side(stack: TierStack) -> None:
    """Going back to the first hits its old entries; a kept cache follows."""
    model, kept = wrapped(), TieredCache(stack)
    hits(model, stack, False, kept)
    model.add_adapter("two", adapter(2))
    model.set_adapter("two")
    model.eval()
    hits(model, stack, False, kept)
    for _ in range(2):
        for name in ("one", "two"):
            model.set_adapter(name)
            hits(model, stack, True, kept)
            hits(model, stack, True)
    model.delete_adapter("two")
    model.set_adapter("one")
    hits(model, stack, True)
    with model.disable_adapter():
        hits(model, stack, False)
    hits(fresh(), stack, False)  # other modules, though the same function


def test_on_and_off(stack: TierStack) -> None:
    model = wrapped()
    hits(model, stack, False)
    for round_ in range(2):
        with model.disable_adapter():
            hits(model, stack, round_ > 0)
        hits(model, stack, True)


def test_merged_and_unmerged(stack: TierStack) -> None:
    model = wrapped()
    hits(model, stack, False)
    model.merge_adapter()
    hits(model, stack, False)
    hits(model, stack, True)
    model.unmerge_adapter()
    check(model, prompt(30), stack, cached=0 if changed_by_merging(model) else 29)


def changed_by_merging(model: Any) -> bool:
    """Say whether merging and unmerging left the weights other than they were: rounding does that."""
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    return not torch.equal(weight, fresh().model.layers[0].self_attn.q_proj.weight)


def test_the_same_name_with_other_weights(stack: TierStack) -> None:
    model = wrapped()
    hits(model, stack, False)
    model.delete_adapter("one")
    model.add_adapter("one", adapter(3))
    model.set_adapter("one")
    hits(model.eval(), stack, False)
    hits(model, stack, True)


def test_strength(stack: TierStack) -> None:
    model = wrapped()
    hits(model, stack, False)
    layers = [module for module in model.modules() if hasattr(type(module), "merged_adapters")]
    for layer in layers:
        layer.set_scale("one", 0.5)
    hits(model, stack, False)
    for layer in layers:
        layer.set_scale("one", 1.0)
    hits(model, stack, True)


def test_several_at_once(stack: TierStack) -> None:
    model = wrapped()
    model.add_adapter("two", adapter(2))
    hits(model.eval(), stack, False)
    for round_ in range(2):
        model.base_model.set_adapter(["one", "two"])
        hits(model.eval(), stack, round_ > 0)
        model.set_adapter("one")
        hits(model.eval(), stack, True)


def test_rows_with_adapters_of_their_own(stack: TierStack) -> None:
    """adapter_names= chooses one for each row, through hooks: never mistaken for anything else."""
    model = wrapped()
    model.add_adapter("two", adapter(2))
    model.eval()
    hits(model, stack, False)
    ids = prompt(30).repeat(3, 1)
    options = {"adapter_names": ["two", "one", "__base__"], "max_new_tokens": 4, "do_sample": False}
    cold = model.generate(input_ids=ids, **options).tolist()
    for _ in range(2):
        assert model.generate(input_ids=ids, past_key_values=TieredCache(stack), **options).tolist() == cold
    hits(model, stack, True)
