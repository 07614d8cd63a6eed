"""Quantised weights are part of what a model is: packed elements, scales and what is kept beside them. What cannot be read in
full is refused, with the reason."""

import dataclasses
import enum
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.hf.harness import new_stack, run
from tests.hf.models import fresh, prompt
from tiered_cache import TieredCache, TierStack
from tiered_cache.hf import identity, parts
from tiered_cache.hf.parts import take_apart


class Rounding(enum.Enum):
    NEAREST = 1
    STOCHASTIC = 2


@dataclasses.dataclass(frozen=True)
class Recipe:
    block: int = 32
    rounding: Rounding = Rounding.NEAREST
    target: torch.dtype = torch.int8


class Scaled(torch.Tensor):
    """Int8 elements and a scale: a wrapper subclass as torchao's are, which computes on what the two multiply to."""

    @staticmethod
    def __new__(cls, elements: torch.Tensor, scale: torch.Tensor, context: Any) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, elements.shape, dtype=torch.float32)

    def __init__(self, elements: torch.Tensor, scale: torch.Tensor, context: Any) -> None:
        self.elements, self.scale, self.context = elements, scale, context

    @classmethod
    def of(cls, tensor: torch.Tensor, context: Any = None) -> "Scaled":
        scale = tensor.detach().abs().amax(dim=1, keepdim=True) / 127
        return cls((tensor.detach() / scale).round().to(torch.int8), scale, Recipe() if context is None else context)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["elements", "scale"], self.context

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].elements, args[0].scale, args[0].context)
        args, kwargs = tree_map_only(cls, lambda own: own.scale * own.elements, (args, kwargs or {}))
        return function(*args, **kwargs)


def linears(model: Any) -> Iterator[tuple[Any, str, torch.nn.Linear]]:
    """Yield the linear layers of a model, with the module and the name that each is of."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                yield module, name, child


def projection(model: Any) -> Any:
    return model.model.layers[1].self_attn.k_proj


def scaled(context: Any = None) -> Any:
    model = fresh()
    for _, _, linear in linears(model):
        linear.weight = torch.nn.Parameter(Scaled.of(linear.weight, context), requires_grad=False)
    return model


def with_torchao(config: str, **options: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = fresh()
    quantization.quantize_(model, getattr(quantization, config)(**options))
    return model


def with_bitsandbytes(kind: str, **options: Any) -> Any:
    """Return a model of its linear layers, as transformers makes it; it has computed once."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = fresh(hidden_size=64, intermediate_size=128)
    for module, name, linear in linears(model):
        size = linear.in_features, linear.out_features
        if kind == "4bit":
            layer = bitsandbytes.nn.Linear4bit(*size, bias=False, compute_dtype=torch.float32, **options)
            layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, False, module=layer, **options)
        else:
            layer = bitsandbytes.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False, **options)
            layer.weight = bitsandbytes.nn.Int8Params(linear.weight.data, False)
        setattr(module, name, layer.to("cpu").eval())
    return model


MAKERS: dict[str, Callable[[], Any]] = {
    "a wrapper subclass": scaled,
    "torchao int8": lambda: with_torchao("Int8WeightOnlyConfig"),
    "torchao int8, activations too": lambda: with_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao intx": lambda: with_torchao("IntxWeightOnlyConfig"),
    "torchao float8": lambda: with_torchao("Float8WeightOnlyConfig"),
    "bitsandbytes nf4": lambda: with_bitsandbytes("4bit", quant_type="nf4"),
    "bitsandbytes fp4": lambda: with_bitsandbytes("4bit", quant_type="fp4"),
    "bitsandbytes nf4, plain scales": lambda: with_bitsandbytes("4bit", quant_type="nf4", compress_statistics=False),
    "bitsandbytes int8": lambda: with_bitsandbytes("8bit"),
}


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def reused(model: Any, stack: TierStack) -> int:
    cache = TieredCache(stack)
    run(model, prompt(30), past_key_values=cache)
    return cache.usage.cached_tokens


def digest(model: Any) -> bytes:
    found = identity.identify(model)
    assert found is not None, identity.why_not(model)
    assert found.is_portable
    return found.digest


@pytest.mark.parametrize("kind", list(MAKERS))
def test_reuse(kind: str, stack: TierStack) -> None:
    model = MAKERS[kind]()
    before = digest(model)
    assert identity.describe(model)["device"] == "cpu"
    assert reused(model, stack) == 0
    if digest(model) != before:  # bitsandbytes on a CPU packs 4-bit weights anew in the first forward
        assert kind.startswith(("bitsandbytes nf4", "bitsandbytes fp4"))
        assert reused(model, stack) == 0
    for _ in range(2):
        assert reused(model, stack) == 29
    other = MAKERS[kind]()
    assert digest(other) == before
    run(other, prompt(30))
    assert reused(other, stack) == 29


def test_every_quantisation_is_another_model() -> None:
    made = []
    for make in MAKERS.values():
        try:
            made.append(digest(make()))
        except pytest.skip.Exception:
            continue
    assert len(set(made)) == len(made)
    assert digest(fresh()) not in made


def test_the_same_in_another_process() -> None:
    code = (
        "import sys; from tests.hf.test_quantized import MAKERS, digest\n"
        "for kind in sys.argv[1:]: print(digest(MAKERS[kind]()).hex())"
    )
    expected = {}
    for kind, make in MAKERS.items():
        try:
            expected[kind] = digest(make()).hex()
        except pytest.skip.Exception:
            continue
    command = [sys.executable, "-c", code, *expected]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(expected.values())


def within(path: str) -> Callable[[Any], Any]:
    """Return what finds an attribute of an attribute of one projection."""
    return lambda model: functools.reduce(getattr, path.split("."), projection(model))


def first_element(path: str) -> Callable[[Any], AbstractContextManager[None]]:
    @contextmanager
    def change(model: Any) -> Iterator[None]:
        tensor = within(path)(model)
        flat = tensor.detach().as_subclass(torch.Tensor).view(-1)
        before = flat[0].clone()
        flat[0] = before + 1 if not before.is_floating_point() else before * 1.5 + 0.25
        yield
        flat[0] = before

    return change


def element_through_data(path: str) -> Callable[[Any], AbstractContextManager[None]]:
    """No version counter notices: the sample does."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        flat = within(path)(model).data.as_subclass(torch.Tensor).view(-1)
        before = flat[0].clone()
        flat[0] = before + 1 if not before.is_floating_point() else before * 1.5
        yield
        flat[0] = before

    return change


def another(path: str, value: Any) -> Callable[[Any], AbstractContextManager[None]]:
    @contextmanager
    def change(model: Any) -> Iterator[None]:
        owner, _, name = path.rpartition(".")
        holder = within(owner)(model) if owner else projection(model)
        before = getattr(holder, name)
        setattr(holder, name, value(before))
        yield
        setattr(holder, name, before)

    return change


CHANGES: dict[tuple[str, str], Callable[[Any], AbstractContextManager[None]]] = {
    ("a wrapper subclass", "an element"): first_element("weight.elements"),
    ("a wrapper subclass", "an element through .data"): element_through_data("weight.elements"),
    ("a wrapper subclass", "a scale"): first_element("weight.scale"),
    ("a wrapper subclass", "another scale"): another("weight.scale", lambda scale: scale * 1.5),
    ("a wrapper subclass", "another recipe"): another("weight.context", lambda recipe: Recipe(block=64)),
    ("a wrapper subclass", "a value of an enum"): another(
        "weight.context", lambda recipe: Recipe(rounding=Rounding.STOCHASTIC)
    ),
    ("torchao int8", "an element"): first_element("weight.qdata"),
    ("torchao int8", "an element through .data"): element_through_data("weight.qdata"),
    ("torchao int8", "a scale"): first_element("weight.scale"),
    ("torchao int8", "another scale"): another("weight.scale", lambda scale: scale * 1.5),
    ("torchao intx", "a zero point"): first_element("weight.zero_point"),
    ("torchao float8", "a scale"): first_element("weight.scale"),
    ("bitsandbytes nf4", "an element"): first_element("weight"),
    ("bitsandbytes nf4, plain scales", "a scale"): first_element("weight.quant_state.absmax"),
    ("bitsandbytes nf4, plain scales", "a level"): first_element("weight.quant_state.code"),
    ("bitsandbytes nf4, plain scales", "the size of blocks"): another("weight.quant_state.blocksize", lambda size: size * 2),
    ("bitsandbytes int8", "an element"): first_element("state.CB"),
    ("bitsandbytes int8", "a scale"): first_element("state.SCB"),
    ("bitsandbytes int8", "the threshold"): another("state.threshold", lambda threshold: 6.0),
}


@pytest.mark.parametrize(("kind", "change"), list(CHANGES))
def test_changed(kind: str, change: str, stack: TierStack) -> None:
    model = MAKERS[kind]()
    run(model, prompt(30))
    assert reused(model, stack) == 0
    assert reused(model, stack) == 29
    with CHANGES[kind, change](model):
        assert reused(model, stack) == 0
        assert reused(model, stack) == 29
    assert reused(model, stack) == 29


@pytest.mark.parametrize("path", ["absmax", "code", "offset", "state2.absmax", "state2.code", "state2.blocksize"])
def test_scales_that_are_quantised_themselves(path: str) -> None:
    """As they come before the first forward, which on a CPU may spread them out."""
    model = MAKERS["bitsandbytes nf4"]()
    before = digest(model)
    path = f"weight.quant_state.{path}"
    change = another(path, lambda size: size * 2) if path.endswith("size") else first_element(path)
    with change(model):
        assert digest(model) != before
    assert digest(model) == before


def test_written_there_and_back_within_a_call() -> None:
    model = scaled()
    found = identity.identify(model)
    assert found is not None
    assert identity.is_unchanged(model, found)
    with first_element("weight.scale")(model):
        pass
    assert not identity.is_unchanged(model, found)
    found = identity.identify(model)
    assert found is not None
    with another("weight.context", lambda recipe: Recipe(block=64))(model):
        assert not identity.is_unchanged(model, found)
    projection(model).weight.context = threading.Lock()
    assert not identity.is_unchanged(model, found)


class Packed(torch.nn.Module):
    """A linear layer as GPTQ and AWQ pack it: integers in buffers."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.detach().abs().amax(dim=1) / 7
        codes = (linear.weight.detach() / scales[:, None]).round().to(torch.int32) + 8
        self.register_buffer("qweight", sum(codes[:, place::8] << 4 * place for place in range(8)))
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", torch.arange(linear.in_features, dtype=torch.int32) % 8, persistent=False)
        self.bits = 4

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.qweight >> 4 * place & 15 for place in range(8)], dim=2).flatten(1)
        return states @ ((codes - 8) * self.scales[:, None]).T


class WithMeta(torch.nn.Module):
    """A linear layer as HQQ keeps it: the scale in a plain dictionary beside the packed parameter."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        packed = Scaled.of(linear.weight)
        self.packed = torch.nn.Parameter(packed.elements, requires_grad=False)
        self.meta = {"scale": packed.scale, "nbits": 8}
        self.rows_cache = torch.zeros(1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.rows_cache = torch.zeros(states.shape[1])  # of the last request: no weight
        return states @ (self.packed * self.meta["scale"]).T * (self.meta["nbits"] / 8)


def test_integrations_of_transformers_keep_tensors_in_attributes() -> None:
    """Experts in MXFP4 come as objects of a kernel's package."""

    class Experts(WithMeta):
        __module__ = "transformers.integrations.mxfp4"

    model = fresh()
    model.model.layers[1].self_attn.k_proj = layer = Experts(projection(model)).eval()
    layer.meta = Recipe(block=layer.meta["scale"])
    before = digest(model)
    layer.meta.block[0] *= 2
    assert digest(model) != before


def test_a_vocabulary_is_not_looked_through() -> None:
    assert take_apart("words", {str(place): place for place in range(5000)}, {}, strict=False) == "builtins.dict"
    assert "4999" in take_apart("words", {str(place): place for place in range(5000)}, {})


def test_configs_are_not_looked_through() -> None:
    """Every module of a model of one's own holds one."""
    text = take_apart("held", [fresh().config], {}, strict=False)
    assert text == "builtins.list(0=transformers.models.llama.configuration_llama.LlamaConfig)"


def test_another_version_of_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MAKERS["torchao int8"]()
    before = digest(model)
    monkeypatch.setattr(parts, "_version", lambda kind: "another")
    identity.forget(model)
    assert digest(model) != before


@pytest.mark.parametrize("name", ["qweight", "scales", "g_idx"])
def test_integers_in_buffers(name: str, stack: TierStack) -> None:
    model = fresh()
    model.model.layers[1].self_attn.k_proj = Packed(projection(model)).eval()
    assert reused(model, stack) == 0
    assert reused(model, stack) == 29
    with first_element(name)(model):
        assert reused(model, stack) == 0
    assert reused(model, stack) == 29


def test_scales_in_plain_attributes(stack: TierStack) -> None:
    model = fresh()
    model.model.layers[1].self_attn.k_proj = layer = WithMeta(projection(model)).eval()
    assert reused(model, stack) == 0
    assert reused(model, stack) == 29
    layer.meta["scale"][0] *= 2
    assert reused(model, stack) == 0
    layer.meta["nbits"] = 4
    assert reused(model, stack) == 0
    assert reused(model, stack) == 29


class Unknown(torch.Tensor):
    pass


def on_meta(model: Any) -> None:
    projection(model).to("meta")


def of_unknown_kind(model: Any) -> None:
    projection(model).weight = torch.nn.Parameter(torch.zeros(16, 32).as_subclass(Unknown), requires_grad=False)


def sparse(model: Any) -> None:
    projection(model).weight = torch.nn.Parameter(projection(model).weight.detach().to_sparse_csr(), requires_grad=False)


def of_two_numbers(model: Any) -> None:
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


def with_a_lock(model: Any) -> None:
    projection(model).weight = torch.nn.Parameter(Scaled.of(projection(model).weight, {"lock": threading.Lock()}), False)


def packed_by_torch(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(model.model.layers[1], {torch.nn.Linear}, dtype=torch.qint8, inplace=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (on_meta, "k_proj.weight is on the meta device"),
        (of_unknown_kind, "k_proj.weight is of a kind that cannot be read, tests.hf.test_quantized.Unknown"),
        (sparse, "k_proj.weight is of a kind that cannot be read, .*sparse_csr"),
        (of_two_numbers, "codes is of a kind that cannot be read, torch.Tensor"),
        (with_a_lock, r"k_proj.weight.context.lock is of a kind that cannot be read, _thread.lock"),
        (packed_by_torch, "_packed_params is packed where it cannot be read; quantise with torchao"),
    ],
)
def test_what_cannot_be_read(change: Callable[[Any], None], words: str) -> None:
    model = fresh()
    assert identity.identify(model)
    change(model)
    assert identity.identify(model) is None
    with pytest.raises(AssertionError, match=words):
        digest(model)
