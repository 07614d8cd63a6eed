"""Whatever K/V depend on is changed, one thing at a time: a miss; the unchanged control hits; undone, it hits again."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.hf.harness import check, new_stack, run
from tests.hf.models import fresh, prompt
from tests.hf.test_disk import Disk
from tests.hf.test_quantized import Scaled
from tiered_cache import TieredCache, TierStack, keys

TYPES = ["full_attention", "sliding_attention"]
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
def other_seed(model: Any) -> Iterator[None]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(fresh(seed=1).state_dict())
    yield
    model.load_state_dict(state)


def other_frequencies(**rope: Any) -> Change:
    """Return the change of the rotary embedding's parameters."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        parameters, embedding = model.config.rope_parameters, model.model.rotary_emb
        model.config.rope_parameters = {**parameters, **rope}
        model.model.rotary_emb = type(embedding)(model.config).eval()
        yield
        model.config.rope_parameters, model.model.rotary_emb = parameters, embedding

    return change


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


@contextmanager
def quantised(model: Any) -> Iterator[None]:
    owner = layer(model).self_attn.k_proj
    before = owner.weight
    owner.weight = torch.nn.Parameter(Scaled.of(before), requires_grad=False)
    yield
    owner.weight = before


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@contextmanager
def doubled_by_a_parametrization(model: Any) -> Iterator[None]:
    owner = layer(model).self_attn.k_proj
    parametrize.register_parametrization(owner, "weight", Doubled())
    model.eval()
    yield
    parametrize.remove_parametrizations(owner, "weight", leave_parametrized=False)


@contextmanager
def one_more_buffer(model: Any) -> Iterator[None]:
    layer(model).register_buffer("bias", torch.zeros(3))
    yield
    del layer(model).bias


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
    "rope theta": other_frequencies(rope_theta=5e5),
    "rope scaling": other_frequencies(rope_type="linear", factor=2.0),
    "weights of another seed": other_seed,
    "quantised": quantised,
    "a parametrization": doubled_by_a_parametrization,
    "one more buffer": one_more_buffer,
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


@pytest.mark.parametrize(
    ("stack_options", "cache_options", "key_format"),
    [
        ({}, {"salt": "b"}, keys.KEY_FORMAT),
        ({}, {"salt": None}, keys.KEY_FORMAT),
        ({"namespace": "other"}, {}, keys.KEY_FORMAT),
        ({"block_tokens": 8}, {}, keys.KEY_FORMAT),
        ({}, {}, keys.KEY_FORMAT + 1),
    ],
)
def test_what_the_stack_and_the_cache_say(
    stack_options: dict[str, Any],
    cache_options: dict[str, Any],
    key_format: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is asked of a stack that starts anew on a directory where all is."""
    model, disk = fresh(), Disk(tmp_path)
    assert reused(model, disk.open(), salt="a") == 0
    assert reused(model, disk.restart(), salt="a") == 32
    stack = disk.restart(**stack_options)  # 32 tokens are whole blocks: of a tail, disks find long matches only
    with monkeypatch.context() as patched:
        patched.setattr(keys, "KEY_FORMAT", key_format)
        for cached in (0, 32):
            assert reused(model, stack, **{"salt": "a", **cache_options}) == cached
    assert reused(model, disk.restart(), salt="a") == 32
    disk.close()


def reused(model: Any, stack: TierStack, **options: Any) -> int:
    cache = TieredCache(stack, **options)
    run(model, prompt(33), past_key_values=cache)
    return cache.usage.cached_tokens


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "layers of another type": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "layer_types": TYPES}),
    "a longer window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "layer_types": TYPES}),
    "another epsilon": ("Qwen2", {"rms_norm_eps": 1e-3}),
    "another class": ("Qwen2Own", {}),
}


@pytest.mark.parametrize("other", list(ARCHITECTURES))
def test_the_same_weights_in_another_architecture(other: str, stack: TierStack) -> None:
    name, options = ARCHITECTURES[other]
    model = fresh("Qwen2")
    changed = fresh("Qwen2", **options)
    if name == "Qwen2Own":
        changed.__class__ = type(name, (type(model),), {})
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in changed.state_dict().items()
    }
    seen(model, stack, 0)
    seen(changed, stack, 0)
    seen(changed, stack, 29)
    seen(model, stack, 29)


class Steering:
    """A hook that is an object, as people steer models."""

    def __init__(self) -> None:
        self.strength, self.direction = 1.0, torch.ones(32)

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.strength * self.direction


def steered(by: str) -> tuple[Steering, Any]:
    """Return what steers, and the same as a hook of one kind."""
    steering = Steering()
    hooks = {
        "an object": steering,
        "a method": steering.__call__,
        "a partial": functools.partial(steer, direction=steering.direction),
        "a closure over the tensor": closure_over(steering.direction),
    }
    return steering, hooks[by]


def steer(module: Any, args: Any, output: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return output + direction


def closure_over(direction: torch.Tensor) -> Any:
    return lambda module, args, output: output + direction


@pytest.mark.parametrize("by", ["an object", "a method", "a partial", "a closure over the tensor"])
def test_what_a_hook_holds(by: str, stack: TierStack) -> None:
    steering, hook = steered(by)
    model = fresh()
    layer(model).mlp.register_forward_hook(hook)
    seen(model, stack, 0)
    seen(model, stack, 29)
    steering.direction.mul_(2)
    seen(model, stack, 0)
    seen(model, stack, 29)
    if by in ("an object", "a method"):
        steering.direction = steering.direction.clone()
        seen(model, stack, 0)
        steering.strength = 0.5
        seen(model, stack, 0)
        seen(model, stack, 29)


def seen(model: Any, stack: TierStack, cached: int, cache: TieredCache | None = None) -> None:
    """Assert that a prompt of 30 tokens answers as cold with `cached` tokens reused."""
    if torch.is_autocast_enabled("cpu"):  # rounding differs with how a prompt is split: only what is reused is asserted
        cache = TieredCache(stack) if cache is None else cache
        run(model, prompt(30), past_key_values=cache)
        assert cache.usage.cached_tokens == cached
    else:
        check(model, prompt(30), stack, cached=cached, cache=cache)
