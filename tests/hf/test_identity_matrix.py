"""Whatever K/V depend on is changed, one thing at a time: a miss; the unchanged control hits; undone, it hits again."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.hf.harness import check, new_stack, run
from tests.hf.models import fresh, prompt
from tiered_cache import TieredCache, TierStack

Change = Callable[[Any], AbstractContextManager[None]]


def layer(model: Any) -> Any:
    return model.model.layers[1]


def weight(model: Any) -> torch.Tensor:
    return layer(model).self_attn.k_proj.weight


def assigned(find: Callable[[Any], Any], name: str, value: Any) -> Change:
    """Return the change that sets an attribute to a value, or to what a function makes of the old one."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        owner, own = find(model), name in vars(find(model))
        before = getattr(owner, name)
        setattr(owner, name, value(before) if callable(value) and not isinstance(value, type | torch.nn.Module) else value)
        yield
        if own or isinstance(before, torch.nn.Module):
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return change


def written(edit: Callable[[torch.Tensor], Any], find: Callable[[Any], torch.Tensor] = weight) -> Change:
    """Return the change that writes into a tensor; undone, its old elements are written back."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        tensor = find(model)
        before = tensor.detach().clone()
        with torch.no_grad():
            edit(tensor)
        yield
        with torch.no_grad():
            tensor.copy_(before)

    return change


def handled(register: Callable[[Any], Any]) -> Change:
    """Return the change that registers something; undone, its handle is removed."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        handle = register(model)
        yield
        handle.remove()

    return change


class GatedLess(LlamaMLP):
    """An MLP of the same weights that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


@contextmanager
def another_class(model: Any) -> Iterator[None]:
    layer(model).mlp.__class__ = GatedLess
    yield
    layer(model).mlp.__class__ = LlamaMLP


@contextmanager
def another_tensor(model: Any) -> Iterator[None]:
    before = weight(model).data
    weight(model).data = before + 0.5
    yield
    weight(model).data = before


@contextmanager
def wider_dtype(model: Any) -> Iterator[None]:
    model.to(torch.float64)
    yield
    model.to(torch.float32)
    model.model.rotary_emb = fresh().model.rotary_emb  # its buffers were rounded on the way


@contextmanager
def rounded(model: Any) -> Iterator[None]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(torch.bfloat16).to(torch.float32)
    yield
    model.load_state_dict(state)
    model.model.rotary_emb = fresh().model.rotary_emb


@contextmanager
def other_frequencies(model: Any) -> Iterator[None]:
    parameters, embedding = model.config.rope_parameters, model.model.rotary_emb
    model.config.rope_parameters = {**parameters, "rope_theta": 5e5}
    model.model.rotary_emb = type(embedding)(model.config).eval()
    yield
    model.config.rope_parameters, model.model.rotary_emb = parameters, embedding


@contextmanager
def other_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(before)


@contextmanager
def other_registered_attention(model: Any) -> Iterator[None]:
    def scaled(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 0.5, *args, **kwargs)

    AttentionInterface.register("sdpa", scaled)
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


@contextmanager
def under_autocast(model: Any) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def swapped_layers(model: Any) -> Iterator[None]:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 0, 1
    yield
    layers[0], layers[1] = layers[1], layers[0]
    layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 0, 1


CHANGES: dict[str, Change] = {
    "one element": written(lambda tensor: tensor[3, 5].add_(0.5)),
    "one element through .data": written(lambda tensor: tensor.data.view(-1)[0].add_(0.5)),
    "all elements through .data": written(lambda tensor: tensor.data.mul_(1.01)),
    "one element through numpy": written(lambda tensor: tensor.detach().numpy().__setitem__((0, 0), 9.0)),
    "an embedding": written(lambda tensor: tensor[7].mul_(2), lambda model: model.model.embed_tokens.weight),
    "a norm": written(lambda tensor: tensor.mul_(2), lambda model: layer(model).input_layernorm.weight),
    "a buffer that is not saved": written(lambda tensor: tensor.mul_(0.5), lambda model: model.model.rotary_emb.inv_freq),
    "another tensor": another_tensor,
    "layers in another order": swapped_layers,
    "dtype": wider_dtype,
    "rounded to bfloat16 and back": rounded,
    "autocast": under_autocast,
    "rope": other_frequencies,
    "attention implementation": other_attention,
    "a registered attention function": other_registered_attention,
    "a hook": handled(lambda model: layer(model).register_forward_hook(lambda module, args, output: output)),
    "a pre-hook": handled(lambda model: layer(model).register_forward_pre_hook(lambda module, args: None)),
    "a forward": assigned(lambda model: layer(model).mlp, "forward", lambda inner: lambda x: inner(x) * 1.1),
    "the model's forward": assigned(
        lambda model: model, "forward", lambda inner: functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))
    ),
    "how inputs are prepared": assigned(
        lambda model: model,
        "prepare_inputs_for_generation",
        lambda inner: lambda *args, **kwargs: inner(*args, **kwargs),
    ),
    "another class": another_class,
    "another module": assigned(lambda model: layer(model).mlp, "act_fn", torch.nn.ReLU().eval()),
    "a plain attribute": assigned(lambda model: layer(model).self_attn, "scaling", 0.1),
    "an epsilon": assigned(lambda model: model.model.norm, "variance_epsilon", 1e-2),
    "a setting of the config": assigned(lambda model: model.config, "hidden_act", "relu"),
    "a method of a class": assigned(lambda model: LlamaMLP, "forward", lambda inner: GatedLess.forward),
    "a function that code calls": assigned(
        lambda model: modeling_llama, "apply_rotary_pos_emb", lambda rotate: lambda q, k, *rest: (q, rotate(q, k, *rest)[1])
    ),
}


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


@pytest.mark.parametrize("change", list(CHANGES))
def test_miss_and_hit_again(stack: TierStack, change: str) -> None:
    model, kept = fresh(), TieredCache(stack)
    seen(model, stack, 0, kept)
    seen(fresh(), stack, 29)  # the control: another object, same weights
    with CHANGES[change](model):
        seen(model, stack, 0, kept)
        seen(model, stack, 29)
    seen(model, stack, 29, kept)
    seen(fresh(), stack, 29)


def seen(model: Any, stack: TierStack, cached: int, cache: TieredCache | None = None) -> None:
    """Assert that a prompt of 30 tokens answers as cold with `cached` tokens reused."""
    if torch.is_autocast_enabled("cpu"):  # rounding differs with how a prompt is split: only what is reused is asserted
        cache = TieredCache(stack) if cache is None else cache
        run(model, prompt(30), past_key_values=cache)
        assert cache.usage.cached_tokens == cached
    else:
        check(model, prompt(30), stack, cached=cached, cache=cache)
