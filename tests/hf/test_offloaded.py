"""Models whose weights accelerate keeps in host memory or on disk: as recognisable as those that rest where they compute."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import OffloadedWeightsLoader

from tests.hf.harness import run
from tests.hf.models import fresh, prompt
from tiered_cache.hf import identity
from tiered_cache.hf.offloaded import device_of, execution_devices

CPU = torch.device("cpu")


def to_host(tmp_path: Path, **options: Any) -> Any:
    return cpu_offload(fresh(), execution_device=CPU, **options)


def to_host_with_buffers(tmp_path: Path) -> Any:
    return to_host(tmp_path, offload_buffers=True)


def whole_layers_to_host(tmp_path: Path) -> Any:
    """Each layer's weights come together, by one hook above them."""
    return to_host(tmp_path, preload_module_classes=["LlamaMLP"])


def to_disk(tmp_path: Path) -> Any:
    return disk_offload(fresh(), str(tmp_path / "offloaded"), execution_device=CPU)


def partly_to_disk(tmp_path: Path) -> Any:
    where = {
        "model.embed_tokens": "cpu",
        "model.layers": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    return dispatch_model(fresh(), where, offload_dir=str(tmp_path / "offloaded"), force_hooks=True)


KINDS = [to_host, to_host_with_buffers, whole_layers_to_host, to_disk, partly_to_disk]


def projection(model: Any) -> Any:
    return model.model.layers[1].self_attn.k_proj


def in_map(model: Any) -> torch.Tensor:
    return projection(model)._hf_hook.weights_map["weight"]


def file_of(model: Any, tmp_path: Path) -> Path:
    return tmp_path / "offloaded" / "model.layers.1.self_attn.k_proj.weight.dat"


def digest(model: Any) -> bytes:
    found = identity.identify(model)
    assert found is not None, identity.why_not(model)
    assert found.is_portable
    return found.digest


@pytest.mark.parametrize("offload", KINDS)
def test_the_same_model(offload: Callable[[Path], Any], tmp_path: Path) -> None:
    """It computes on the same device, so it is the model that it was; computing changes nothing."""
    model = offload(tmp_path)
    assert digest(model) == digest(fresh())
    assert any(parameter.is_meta for parameter in model.parameters())
    assert device_of(model) == CPU
    assert execution_devices(model) == {CPU}
    before = identity.identify(model)
    assert before is not None
    run(model, prompt(10))
    assert identity.is_unchanged(model, before)
    assert digest(model) == before.digest
    assert identity.describe(model)["device"] == "cpu"


@pytest.mark.parametrize("offload", [to_host, to_host_with_buffers])
@pytest.mark.parametrize("through", ["the tensor", "data"])
def test_edited_in_the_map(offload: Callable[[Path], Any], through: str, tmp_path: Path) -> None:
    model = offload(tmp_path)
    before = identity.identify(model)
    assert before is not None
    tensor = in_map(model) if through == "the tensor" else in_map(model).data
    tensor[0, 0] += 1
    assert digest(model) != before.digest
    if through == "the tensor":
        assert not identity.is_unchanged(model, before)
    tensor[0, 0] -= 1
    assert not identity.is_unchanged(model, before) or through == "data"


def test_edited_where_a_hook_above_loads_it(tmp_path: Path) -> None:
    model = whole_layers_to_host(tmp_path)
    before = digest(model)
    model.model.layers[1].mlp._hf_hook.weights_map["up_proj.weight"][0, 0] += 1
    assert digest(model) != before


def test_what_a_forward_left_behind_does_not_count(tmp_path: Path) -> None:
    """After an error the loaded weights stay; the next forward loads them again from the map."""
    model = to_host(tmp_path)
    before = digest(model)
    layer = projection(model)
    layer._hf_hook.pre_forward(layer)
    assert not layer.weight.is_meta
    assert digest(model) == before
    weights = layer._hf_hook.weights_map
    weights.dataset[f"{weights.prefix}weight"] = in_map(model) + 1
    assert digest(model) != before


@pytest.mark.parametrize("offload", [to_disk, partly_to_disk])
def test_a_file_written_anew(offload: Callable[[Path], Any], tmp_path: Path) -> None:
    model = offload(tmp_path)
    before = identity.identify(model)
    assert before is not None
    assert identity.is_unchanged(model, before)
    file = file_of(model, tmp_path)
    content, times = file.read_bytes(), file.stat()
    file.write_bytes(content[:-4] + b"\0\0\0\0")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not identity.is_unchanged(model, before)
    assert digest(model) != before.digest
    file.write_bytes(content)
    assert digest(model) == before.digest
    file.unlink()
    assert not identity.is_unchanged(model, before)
    assert identity.identify(model) is None
    assert "k_proj.weight.dat cannot be read (No such file" in identity.why_not(model)


def test_files_are_read_once_and_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded, alive = to_disk(tmp_path), [], weakref.WeakSet()
    inner = OffloadedWeightsLoader.__getitem__

    def load(self: Any, key: str) -> torch.Tensor:
        assert not alive
        tensor = inner(self, key)
        loaded.append(key)
        alive.add(tensor)
        return tensor

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", load)
    digest(model)
    once = len(loaded)
    assert once == len(set(loaded))
    digest(model)
    assert len(loaded) == once
    file_of(model, tmp_path).touch()
    digest(model)
    assert len(loaded) == once + 1


def test_a_map_of_another_kind(tmp_path: Path) -> None:
    model = to_host(tmp_path)
    projection(model)._hf_hook.weights_map = [projection(model)._hf_hook.weights_map]
    assert identity.identify(model) is None
    assert "k_proj.weight is offloaded to where it cannot be read, list" in identity.why_not(model)


def test_quantised_and_offloaded(tmp_path: Path) -> None:
    """The map has the packed elements, and not what they mean."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = fresh(hidden_size=64)
    layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.float32)
    model.model.layers[1].self_attn.k_proj = layer.to("cpu").eval()
    assert digest(model)
    cpu_offload(model, execution_device=CPU)
    assert identity.identify(model) is None
    assert "k_proj.weight is quantised and offloaded" in identity.why_not(model)


def test_hooks_that_do_more_than_move() -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 2

    model = fresh()
    before = digest(model)
    add_hook_to_module(projection(model), Doubling())
    found = identity.identify(model)
    assert found is not None
    assert found.digest != before
    assert not found.is_portable


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_replaced_beside_a_hook(when: str) -> None:
    model = fresh()
    layer = projection(model)
    before = digest(model)
    if when == "before":
        layer.forward = lambda states: states * 2
    cpu_offload(model, execution_device=CPU)
    if when == "after":
        inner = layer.forward
        layer.forward = lambda states: inner(states) * 2
    found = identity.identify(model)
    assert found is not None
    assert found.digest != before
    assert not found.is_portable
