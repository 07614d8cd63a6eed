"""Layers whose K/V live in host memory, commits behind the caller's back, restores that arrive during a forward: on a device
for tests whose lanes do their work late, or in an odd order."""

import copy
import gc
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tests.hf.harness import RECURRENT_TOLERANCE, TOLERANCE, assert_consistent, assert_same, check, new_stack, run, settle
from tests.hf.models import fresh, prompt, tiny
from tiered_cache import CapacityError, ConfigError, DeviceTier, DiskTier, HostTier, TieredCache, TierStack, arrival, movement
from tiered_cache.devices import arena, ring
from tiered_cache.devices.base import Lane
from tiered_cache.hf import compat, homes
from tiered_cache.hf.offload import hosted_by_budget, hosted_by_share
from tiered_cache.hf.shapes import full_layers, is_stateful
from tiered_cache.port import SequencePort
from tiered_cache.testing import ManualDevice, pretend_accelerator
from tiered_cache.testing.manual_device import ManualEvent

LAYERS = 5
LENGTH = 40
_MODELS: dict[str, PreTrainedModel] = {}
KINDS = {
    "Llama": {"num_hidden_layers": LAYERS},
    "GPT2": {"n_layer": LAYERS},
    "DeepseekV3": {"num_hidden_layers": LAYERS},  # K and V differ in width
    "Gemma3Text": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "Qwen3Next": {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3},
    "FalconH1": {"num_hidden_layers": LAYERS},  # a state besides full attention, in each layer
}
if not compat.KEEPS_STATES:  # before that transformers release recurrent layers are without reuse
    KINDS = {name: config for name, config in KINDS.items() if name not in ("Qwen3Next", "FalconH1")}


def deep(name: str = "Llama") -> PreTrainedModel:
    """Return a model with more layers than a ring has slots. Shared."""
    if name not in _MODELS:
        _MODELS[name] = fresh(name, **KINDS[name])
    return _MODELS[name]


@contextmanager
def accelerator(seed: int | None = None, **options: Any) -> Iterator[ManualDevice]:
    """Let the CPU pass for an accelerator: lanes work as late as allowed, or in the order of a seed."""
    order = None if seed is None else random.Random(seed)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("tiered_cache").addHandler(handler)
    try:
        with pretend_accelerator(ManualDevice(automatic=True, order=order, **options)) as device:
            yield device
    finally:
        logging.getLogger("tiered_cache").removeHandler(handler)
    assert not said, said[0].getMessage()  # what generate() survives is a failure here


def hosted(cache: TieredCache) -> int:
    return sum(layer.home is not None for layer in full_layers(cache.layers))


def same(model: PreTrainedModel, ids: torch.Tensor, cache: TieredCache, cold: Any = None, **options: Any) -> Any:
    out = run(model, ids, past_key_values=cache, **options)
    tolerance = RECURRENT_TOLERANCE if is_stateful(cache.layers) else TOLERANCE
    assert_same(out, run(model, ids, **options) if cold is None else cold, tolerance)
    return out


# --- tokens ---------------------------------------------------------------------------------------------------------


def batch_of(name: str) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = prompt(LENGTH, rows=3)
    ids[:, :20] = ids[0, :20]
    ids[1] = torch.cat([torch.zeros(4, dtype=torch.long), ids[1, :-4]])
    return ids, {"attention_mask": (ids != 0).long()}


WAYS: dict[str, Callable[[str], tuple[torch.Tensor, dict[str, Any]]]] = {
    "greedy": lambda name: (prompt(LENGTH), {"new_tokens": 12}),
    "beams": lambda name: (prompt(LENGTH), {"num_beams": 3, "new_tokens": 12}),
    "sampled beams": lambda name: (prompt(LENGTH), {"num_beams": 3, "do_sample": True, "new_tokens": 8}),
    "samples": lambda name: (prompt(LENGTH), {"num_return_sequences": 3, "do_sample": True}),
    "batch": batch_of,
}


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_a_cold_run(name: str, way: str, share: float) -> None:
    """Cold and warm, lanes late and in two odd orders."""
    ids, options = WAYS[way](name)
    model = deep(name)
    if name in ("Qwen3Next", "FalconH1") and way == "batch":
        ids, options = ids[:1], {}
    cold = run(model, ids, **options)
    for seed in (None, 1, 2):
        with accelerator(seed):
            stack = new_stack()
            settle(model)
            for _ in range(2):
                cache = TieredCache(stack, offload=share)
                same(model, ids, cache, cold, **options)
                assert 0 < hosted(cache) < LAYERS + (share == 0)
            assert cache.usage.cached_tokens > 0
            assert "are in host memory" in cache.explain()
            assert_consistent(stack)


@pytest.mark.parametrize("name", [name for name in KINDS if name in ("Llama", "Gemma3Text", "Qwen3Next")])
def test_a_chat_whose_plan_changes_from_turn_to_turn(name: str) -> None:
    """A kept cache: what is resident is cropped in place, and layers move to where the next plan wants them."""
    model = deep(name)
    for seed in (None, 3):
        with accelerator(seed):
            stack = new_stack()
            settle(model)
            cache = TieredCache(stack)
            ids = prompt(20)
            for turn, share in enumerate((0.0, 1.0, 0.4, 0.0)):
                cache._offload._setting = share
                out = same(model, ids, cache)
                assert hosted(cache) == len(full_layers(cache.layers)) - round(share * len(full_layers(cache.layers)))
                assert turn == 0 or cache.usage.cached_tokens >= ids.shape[1] - 8
                ids = torch.cat([out.sequences, prompt(7, seed=turn)], dim=1)
            same(model, ids[:, :25], cache)
            assert_consistent(stack)


@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_a_loop_by_hand(offload: float) -> None:
    """restore, steps, a commit in between, a crop, other steps over what was cropped, another commit."""
    model, ids = deep(), prompt(LENGTH)
    for seed in (None, 1, 2, 3):
        with accelerator(seed), torch.no_grad():
            stack = new_stack()
            for _ in range(2):
                cache, plain = TieredCache(stack, offload=offload), DynamicCache()
                start = cache.restore(model, ids[:, :30])
                assert torch.allclose(
                    model(ids[:, start:30], past_key_values=cache).logits[:, -1],
                    model(ids[:, :30], past_key_values=plain).logits[:, -1],
                    atol=TOLERANCE,
                )
                cache.commit(ids[:, :30])
                cache.crop(-10)
                plain.crop(-10)
                for place in range(20, 36):
                    one = ids[:, place : place + 1]
                    got, expected = (model(one, past_key_values=each).logits for each in (cache, plain))
                    assert torch.allclose(got, expected, atol=TOLERANCE)
                cache.commit(ids[:, :36])
            assert start == 29
            check(model, ids, stack, cached=36)


def test_rows_moved_by_hand() -> None:
    model, ids = deep(), prompt(LENGTH, rows=2)
    for seed in (None, 1, 2):
        with accelerator(seed), torch.no_grad():
            cache, plain = TieredCache(new_stack(), offload=0.2), DynamicCache()
            cache.restore(model, ids)
            for change in (
                lambda each: each.reorder_cache(torch.tensor([1, 0])),
                lambda each: each.batch_repeat_interleave(2),
                lambda each: each.reorder_cache(torch.tensor([3, 3, 0, 1])),
                lambda each: each.batch_select_indices(torch.tensor([0, 2])),
                lambda each: each.crop(-3),
                lambda each: each.reset(),
            ):
                rows = max(cache.layers[0].keys.shape[0] if cache.layers[0].keys is not None else 2, 1)
                new = prompt(5, seed=rows, rows=rows)
                got, expected = (model(new, past_key_values=each).logits for each in (cache, plain))
                assert torch.allclose(got, expected, atol=TOLERANCE)
                change(cache)
                change(plain)
                if cache.get_seq_length():
                    for layer in full_layers(cache.layers):
                        layer.settle()
                    assert torch.allclose(cache.layers[0].keys, plain.layers[0].keys, atol=1e-5)
            cache.columns = None


def test_a_copy_goes_its_own_way() -> None:
    model, ids = deep(), prompt(LENGTH)
    with accelerator(1), torch.no_grad():
        cache = TieredCache(new_stack(), offload=0.0)
        cache.restore(model, ids)
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        for each, tokens in ((cache, [5, 6, 7]), (twin, [8, 9, 10]), (cache, [11]), (twin, [12])):
            whole = getattr(each, "fed", ids)
            for token in tokens:
                whole = torch.cat([whole, torch.tensor([[token]])], dim=1)
                got = model(whole[:, -1:], past_key_values=each).logits[:, -1]
                assert torch.allclose(got, model(whole).logits[:, -1], atol=TOLERANCE)
            each.fed = whole
        assert twin.layers[0].home.ring is twin.layers[1].home.ring is not cache.layers[0].home.ring


def test_a_copy_taken_before_new_tokens_came_down() -> None:
    """Also after beams changed places, and while the first one is being stored."""
    model, ids = deep(), prompt(LENGTH, rows=2)
    for share in (0.2, 0.6, 0.8):
        for reorder in (False, True):
            with accelerator(), torch.no_grad():
                stack = new_stack()
                cache = TieredCache(stack, offload=share)
                cache.restore(model, ids)
                model(ids, past_key_values=cache)
                cache.commit(ids)
                rows = [1, 0] if reorder else [0, 1]
                if reorder:
                    cache.reorder_cache(torch.tensor(rows))
                twin = copy.deepcopy(cache)
                whole = torch.cat([ids[rows], torch.tensor([[5], [6]])], dim=1)
                for each in (twin, cache):
                    got = model(whole[:, -1:], past_key_values=each).logits[:, -1]
                    assert torch.allclose(got, model(whole).logits[:, -1], atol=TOLERANCE)
                check(model, torch.cat([ids[:1], ids[:1, :1]], dim=1), stack, cached=LENGTH)


def test_fewer_rows_than_before() -> None:
    model, ids = deep(), prompt(LENGTH, rows=3)
    with accelerator(1), torch.no_grad():
        cache = TieredCache(new_stack(), offload=0.2)
        cache.restore(model, ids)
        model(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([2, 0]))
        whole = torch.cat([ids[[2, 0]], torch.tensor([[5], [6]])], dim=1)
        got = model(whole[:, -1:], past_key_values=cache).logits[:, -1]
        assert torch.allclose(got, model(whole).logits[:, -1], atol=TOLERANCE)


def test_a_stack_closed_during_a_call() -> None:
    model, ids = deep(), prompt(LENGTH)
    with pretend_accelerator():
        stack = new_stack()

        def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stack.close()
            return scores

        cache = TieredCache(stack, offload=0.4)
        cold = run(model, ids)
        assert_same(run(model, ids, past_key_values=cache, logits_processor=[process]), cold)
        assert cache.usage.created_tokens == 0
        assert cache.explain()
        assert_same(run(model, ids, past_key_values=cache), cold)


def test_a_compiled_model() -> None:
    model, ids = fresh("Llama", num_hidden_layers=LAYERS), prompt(LENGTH)
    cold = run(model, ids)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    with accelerator():
        stack = new_stack()
        for share in (0.0, 0.4):
            cache = TieredCache(stack, offload=share)
            assert_same(run(model, ids, past_key_values=cache), cold)
            assert hosted(cache) > 0
    torch._dynamo.reset()


def test_a_length_that_is_never_reached_takes_no_memory() -> None:
    model, ids = deep(), prompt(LENGTH)
    with accelerator() as device:
        cache = TieredCache(new_stack(), offload=0.2)
        run(model, ids, past_key_values=cache, new_tokens=1_000_000, stopping_criteria=[lambda ids, scores: ids.shape[1] > 45])
        assert sum(device.allocated.values()) < 2e6


def test_gradients_bring_layers_home() -> None:
    model, ids = deep(), prompt(LENGTH)
    with accelerator():
        cache = TieredCache(new_stack(), offload=0.0)
        with torch.no_grad():
            cache.restore(model, ids)
            model(ids, past_key_values=cache)
        got = model(ids[:, :3], past_key_values=cache).logits
        assert torch.allclose(got, model(torch.cat([ids, ids[:, :3]], dim=1)).logits[:, -3:], atol=TOLERANCE)
        assert hosted(cache) == 0


# --- orders ---------------------------------------------------------------------------------------------------------

SCENES = (("greedy", 0.0), ("greedy", 0.4), ("beams", 0.4), ("batch", 0.0))
_cold: dict[Any, Any] = {}


def one_order(seed: int, late: bool = False) -> None:
    """A cold call, a warm one and a chat's next turn, with lanes in the order of a seed."""
    way, share = SCENES[seed % len(SCENES)]
    name = "Gemma3Text" if seed % 7 == 0 else "Llama"
    model = deep(name)
    ids, options = WAYS[way](name)
    key = name, way
    if key not in _cold:
        _cold[key] = run(model, ids, **options)
    with accelerator(seed), pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr(movement, "RUN_NBYTES", 1)  # so that slots of the staging ring are used again
        if late:
            patch.setattr(arrival, "LAYER_PIECE_NBYTES", 1)
            patch.setattr(arrival, "HIDDEN_SHARE", 0.0)
        stack = TierStack(*([DeviceTier("60KB")] if seed % 3 == 0 else []), HostTier("256MB"), block_tokens=16)
        cache = TieredCache(stack, offload=share)
        same(model, ids, cache, _cold[key], **options)
        if way == "greedy":
            same(model, ids, cache, _cold[key], **options)
        same(model, ids, TieredCache(stack, offload=1.0 - share), _cold[key], **options)
        assert_consistent(stack)


@hypothesis_settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), late=st.booleans())
def test_any_order_of_completion(seed: int, late: bool) -> None:
    one_order(seed, late)


@pytest.mark.slow
@hypothesis_settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), late=st.booleans())
def test_a_thousand_orders_of_completion(seed: int, late: bool) -> None:
    one_order(seed, late)


def some_orders() -> None:
    for seed in range(24):
        one_order(seed, late=seed % 2 == 0)


class TestNegativeControls:
    """Without one of the waits, some order gives a wrong answer, or the device complains."""

    @pytest.fixture(autouse=True)
    def _is_right_as_it_is(self) -> None:
        one_order(1)  # so that it is the missing wait that is found

    def fails(self) -> None:
        with pytest.raises(AssertionError):
            some_orders()

    def test_use_before_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ManualEvent, "order", lambda self: None)
        self.fails()

    def test_commit_that_does_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ManualEvent, "wait", lambda self: None)
        self.fails()

    def test_fetch_before_the_new_tokens_came_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(homes.HostHome, "coming_down", property(lambda self: [], lambda self, events: None), raising=False)
        self.fails()

    def test_slot_overwritten_before_it_was_sent_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(homes._Slot, "busy", property(lambda self: None, lambda self, event: None))
        self.fails()

    def test_staging_overwritten_before_it_was_put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ring.Slot, "busy", property(lambda self: [], lambda self, events: None))
        self.fails()

    def test_layer_that_does_not_wait_for_its_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tiered_cache.hf.layers import GrowableLayer

        monkeypatch.setattr(GrowableLayer, "receive", lambda self: None)
        self.fails()

    def test_storing_that_the_next_call_does_not_wait_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The crop of a kept cache would overwrite what is being stored."""
        model, ids = deep(), prompt(LENGTH)
        with accelerator(), torch.no_grad():
            stack = new_stack()
            monkeypatch.setattr(TierStack, "settle", lambda self: None)
            started = stack._committer.submit(lambda: time.sleep(0.2))
            cache = TieredCache(stack, offload=1.0)
            cache.restore(model, ids)
            model(ids, past_key_values=cache)
            cache.commit(ids)
            cache.crop(-20)
            model(ids[:, :20], past_key_values=cache)  # in place of what was cropped
            started.result()
            stack._behind.result()
            monkeypatch.undo()
            with pytest.raises(AssertionError):
                check(model, torch.cat([ids, ids[:, :1]], dim=1), stack, cached=LENGTH)


# --- bytes ----------------------------------------------------------------------------------------------------------


def moved_a_step(share: float, steps: int = 4) -> tuple[list[dict[Lane, int]], int, int]:
    """Return what each step of a loop moves, the bytes of one token in one layer, and how many layers are hosted."""
    model, ids = deep(), prompt(LENGTH + steps)
    counts = []
    with accelerator() as device, torch.no_grad():
        cache = TieredCache(new_stack(), offload=share)
        cache.restore(model, ids[:, :LENGTH])
        model(ids[:, :LENGTH], past_key_values=cache)
        for place in range(LENGTH, LENGTH + steps):
            before = dict(device.moved)
            model(ids[:, place : place + 1], past_key_values=cache)
            counts.append({lane: device.moved[lane] - before[lane] for lane in Lane})
        layer = cache.layers[0]
        token = 2 * layer.keys.shape[1] * layer.keys.shape[3] * 4
        return counts, token, hosted(cache)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_bytes_moved_per_step_are_those_of_the_plan(share: float) -> None:
    """Down the new token of each hosted layer, up what is hosted and in no slot, nothing else."""
    counts, token, number = moved_a_step(share)
    assert number == LAYERS - round(share * LAYERS)
    for step, count in enumerate(counts):
        length = LENGTH + step
        assert count[Lane.DOWN] == number * token
        if number <= homes.SLOTS:
            assert count[Lane.UP] == 0
        else:  # the next layers, and ahead of the next step the first one, which is longer by a token then
            assert count[Lane.UP] == (number - 1) * length * token + (length + 1) * token


def test_stock_moves_everything_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `DynamicCache(offloading=True)` moves in the same loop: each layer up and down again, whole."""
    model, ids = deep(), prompt(LENGTH + 1)
    moved = {"up": 0, "down": 0}

    def note(direction: str, layer: DynamicLayer) -> None:
        if layer.is_initialized and layer.keys.numel():
            moved[direction] += layer.keys.nbytes + layer.values.nbytes

    class Stream:
        def __enter__(self) -> None: ...
        def __exit__(self, *args: object) -> None: ...
        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(DynamicLayer, "offload", lambda self: note("down", self))
    monkeypatch.setattr(DynamicLayer, "prefetch", lambda self: note("up", self))
    with torch.no_grad():
        cache = DynamicCache(config=model.config, offloading=True)
        model(ids[:, :LENGTH], past_key_values=cache)
        moved.update(up=0, down=0)
        model(ids[:, LENGTH:], past_key_values=cache)
    counts, token, number = moved_a_step(0.0, steps=1)
    assert moved["down"] == number * (LENGTH + 1) * token  # ours: one token a layer
    assert moved["down"] / counts[0][Lane.DOWN] == LENGTH + 1
    assert counts[0][Lane.UP] <= moved["up"] + token


def test_a_restore_moves_no_more_than_is_resident() -> None:
    """Blocks are in host memory, so what a hosted layer takes of them does not pass the link before it is used."""
    model, ids = deep(), prompt(48)
    with accelerator() as device:
        stack = new_stack()
        same(model, ids, TieredCache(stack))
        moved = {}
        for share in (0.0, 0.4, 1.0):
            before = device.moved[Lane.UP]
            cache = TieredCache(stack, offload=share)
            with torch.no_grad():
                assert cache.restore(model, ids) == 47
            moved[share] = device.moved[Lane.UP] - before
        token = 2 * cache.layers[0].keys.shape[1] * cache.layers[0].keys.shape[3] * 4
        assert moved == {0.0: 0, 0.4: 2 * 48 * token, 1.0: 5 * 48 * token}


# --- plans ----------------------------------------------------------------------------------------------------------


def test_hosted_layers_are_spread_and_as_few_as_needed() -> None:
    assert hosted_by_share(8, 1.0) == frozenset()
    assert hosted_by_share(8, 0.0) == frozenset(range(8))
    assert hosted_by_share(8, 0.5) == {1, 3, 5, 7}
    assert hosted_by_share(32, 0.9) == {5, 16, 26}
    assert hosted_by_budget([10] * 8, 80) == frozenset()
    assert hosted_by_budget([10] * 8, 79) == {1, 4, 6}  # five resident ones and two slots
    assert hosted_by_budget([10] * 8, 20) == frozenset(range(8))
    assert hosted_by_budget([10] * 8, 1) == frozenset(range(8))  # no less is possible


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("GPT2", "Gemma3Text")])
@pytest.mark.parametrize("share", [0.42, 0.8, 0.95, 100.0])
def test_a_budget_is_kept(name: str, share: float) -> None:
    model, ids = deep(name), prompt(LENGTH)
    with accelerator():
        settle(model)
        cache = TieredCache(new_stack())
        same(model, ids, cache)
        assert hosted(cache) == 0
        whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in full_layers(cache.layers)) * 45 / 44
        nbytes = int(share * whole) if len(full_layers(cache.layers)) > 3 or share > 1 else int(0.7 * whole)
        budget: int | str = nbytes if share != 0.8 else f"{nbytes}B"
        cache = TieredCache(new_stack(), offload=budget)
        same(model, ids, cache)
        layers = full_layers(cache.layers)
        resident = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.home is None)
        rings = {layer.home.ring for layer in layers if layer.home is not None}
        slots = sum(slot.buffer.nbytes for ring_ in rings for slot in ring_._slots)
        assert resident + slots <= nbytes
        assert (hosted(cache) == 0) == (share > 1)


def test_auto_offloads_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_cache.hf.offload.RESERVE_NBYTES", 0)
    model, ids = deep(), prompt(LENGTH)
    token = 2 * 2 * 8 * 4
    activations = 40 * (6 * 32 + 3 * 48) * 4
    found = []
    for layers_that_fit in (5, 4, 3, 2, 0):
        with accelerator(device_bytes=activations + layers_that_fit * 45 * token):
            cache = TieredCache(new_stack())
            same(model, ids, cache)
            found.append(hosted(cache))
    assert found == [0, 3, 4, 5, 5]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("offload", [0.0, 1.0, 0.5, 1, "2GiB", 1 << 30])
def test_without_an_accelerator(offload: Any) -> None:
    with pytest.raises(ConfigError, match="needs an accelerator"):
        TieredCache(new_stack(), offload=offload)
    check(tiny(), prompt(10), new_stack(), cached=0, cache=TieredCache(new_stack(), offload="auto"))


@pytest.mark.parametrize("offload", [True, None, -0.1, 1.5, -5, "much", "", [], float("nan")])
def test_bad_values(offload: Any) -> None:
    with accelerator(), pytest.raises(ConfigError, match="offload"):
        TieredCache(new_stack(), offload=offload)


# --- trouble --------------------------------------------------------------------------------------------------------


class FailsAt(ManualDevice):
    """Fails at the n-th call of what it is told to."""

    def __init__(self, what: str, number: int, error: type[Exception]) -> None:
        super().__init__(automatic=True)
        self.what, self.left, self.error, self.failed = what, number, error, False

    def _fail(self, what: str) -> None:
        if what == self.what:
            self.left -= 1
            if self.left == 0:
                self.failed = True
                raise self.error("on purpose")

    def allocate(self, memory: str, nbytes: int) -> torch.Tensor:
        self._fail(memory)
        return super().allocate(memory, nbytes)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._fail("run")
        return super().run(*args, **kwargs)


@pytest.fixture
def silent() -> Iterator[None]:
    """Log nothing: pytest would keep it, and with it the frames and all that is in them."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


FAILURES = [("device", MemoryError), ("host", MemoryError), ("run", RuntimeError)]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("what", "error"), FAILURES)
def test_failures(what: str, error: type[Exception], share: float) -> None:
    """At some allocations and copies of a cold and a warm call: the cold answer or that error, and nothing is left behind."""
    fail_at([*range(1, 8), *range(8, 400, 9)], what, error, share)


@pytest.mark.slow
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 1.0])
@pytest.mark.parametrize(("what", "error"), FAILURES)
def test_every_failure(what: str, error: type[Exception], share: float) -> None:
    """At all of them."""
    fail_at(range(1, 400), what, error, share)


def fail_at(numbers: Iterable[int], what: str, error: type[Exception], share: float) -> None:
    model, ids = deep(), prompt(LENGTH)
    cold = run(model, ids)
    for number in numbers:
        device = FailsAt(what, number, error)
        with pretend_accelerator(device):
            stack = TierStack(DeviceTier("20KB"), HostTier("256MB"), block_tokens=16)
            for _ in range(2):
                cache = TieredCache(stack, offload=share)
                try:
                    same(model, ids, cache, cold)
                except error:
                    assert device.failed
                    assert share < 1
                stack.settle()
                assert_consistent(stack)
            device.what = ""
            same(model, ids, cache, cold)
            same(model, ids, TieredCache(stack, offload=share), cold)
            assert_consistent(stack)
            stack.close()
            del stack, cache
            gc.collect()
            device.complete()
            assert device.pinned.used_bytes == 0
        if not device.failed:
            break
    assert 3 < number < 399


def test_no_room_for_one_layer_is_a_capacity_error() -> None:
    model, ids = deep(), prompt(LENGTH)
    device = ManualDevice(automatic=True)
    allocate = device.allocate
    refuse = [True]

    def full(memory: str, nbytes: int) -> torch.Tensor:
        if refuse and memory == "device":
            raise MemoryError
        return allocate(memory, nbytes)

    device.allocate = full  # type: ignore[method-assign]
    with pretend_accelerator(device):
        cache = TieredCache(new_stack(), offload=0.0)
        with pytest.raises(CapacityError, match="one layer"):
            run(model, ids, past_key_values=cache)
        refuse.clear()
        same(model, ids, cache)


def test_an_exception_in_mid_flight() -> None:
    """Where it comes from a step: what is complete is kept, and the next call is right."""
    model, ids = deep(), prompt(LENGTH)

    class StopError(Exception):
        pass

    for seed in (None, 1, 2):
        for at in (1, 2, 4):

            def process(tokens: torch.Tensor, scores: torch.Tensor, at: int = at) -> torch.Tensor:
                if tokens.shape[1] == LENGTH + at:
                    raise StopError
                return scores

            with accelerator(seed):
                stack = new_stack()
                cache = TieredCache(stack, offload=0.4)
                with pytest.raises(StopError):
                    run(model, ids, past_key_values=cache, logits_processor=[process])
                same(model, ids, cache)
                same(model, ids, TieredCache(stack, offload=0.0))
                assert_consistent(stack)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_layer_that_fails_while_a_restore_arrives(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was restored is kept, whole, though the layers behind that one never asked for it."""
    monkeypatch.setattr(arrival, "LAYER_PIECE_NBYTES", 1)
    monkeypatch.setattr(arrival, "HIDDEN_SHARE", 0.0)
    model, ids = deep(), prompt(LENGTH)

    def fail(module: torch.nn.Module, args: Any) -> None:
        if module is model.model.layers[3]:
            raise RuntimeError("on purpose")

    for seed in (None, 1, 2, 3):
        with accelerator(seed):
            stack = new_stack()
            same(model, ids, TieredCache(stack))
            cache = TieredCache(stack, offload=share)
            longer = torch.cat([ids, prompt(6, seed=1)], dim=1)
            handle = torch.nn.modules.module.register_module_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                run(model, longer, past_key_values=cache)
            handle.remove()
            stack.clear()
            same(model, longer, cache)
            assert cache.usage.cached_by_tier == {"resident": LENGTH}
            assert_consistent(stack)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("what", ["run", "device"])
@pytest.mark.usefixtures("silent")
def test_failures_while_a_restore_arrives(what: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every copy and allocation: what did not come is not kept, nor stored."""
    monkeypatch.setattr(arrival, "LAYER_PIECE_NBYTES", 1)
    monkeypatch.setattr(arrival, "HIDDEN_SHARE", 0.0)
    model, ids = deep(), prompt(LENGTH)
    longer = torch.cat([ids, prompt(6, seed=1)], dim=1)
    cold = run(model, longer)
    for number in [*range(1, 14), *range(14, 200, 11)]:
        device = FailsAt("", number, RuntimeError if what == "run" else MemoryError)
        with pretend_accelerator(device):
            stack = new_stack()
            same(model, ids, TieredCache(stack))
            stack.settle()
            device.what = what
            cache = TieredCache(stack, offload=share)
            try:
                same(model, longer, cache, cold)
            except device.error:
                assert device.failed
            stack.settle()
            device.what = ""
            same(model, longer, cache, cold)
            same(model, longer, TieredCache(stack, offload=share), cold)
            assert_consistent(stack)
        if not device.failed:
            break
    assert 1 < number < 189


def test_device_tier_shrinks_for_a_restore_that_finds_no_room() -> None:
    """Somebody else took the device's memory: promoted copies go, and the restore is tried again."""
    model, ids = deep(), prompt(LENGTH)
    device = ManualDevice(automatic=True)
    allocate = device.allocate
    with pretend_accelerator(device):
        stack = TierStack(DeviceTier("1MB"), HostTier("256MB"), block_tokens=16)
        same(model, prompt(LENGTH, seed=1), TieredCache(stack))
        same(model, ids, TieredCache(stack))
        for block in list(stack._index.blocks.values()):  # of the prompt, only the host copies are left
            if block.pieces["main"].copies.get("device") is not None and block.tokens[:8] == ids[0, :1].numpy().tobytes():
                stack._inventory._remove_copy(block.pieces["main"], stack.tiers[0])
        used = stack.stats().tiers["device"].used_bytes
        assert used > 0

        def full(memory: str, nbytes: int) -> torch.Tensor:
            if memory == "device" and stack.tiers[0].used_bytes > used // 2:
                raise MemoryError
            return allocate(memory, nbytes)

        device.allocate = full  # type: ignore[method-assign]
        cache = TieredCache(stack)
        same(model, ids, cache)
        assert cache.usage.cached_tokens == LENGTH - 1
        assert stack.stats().tiers["device"].evicted_pieces > 0


def test_pinning_that_fails_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    from tiered_cache.devices.accelerator import AcceleratorDevice

    device = AcceleratorDevice.__new__(AcceleratorDevice)
    device.device, device._pins, device._warned = torch.device("cuda"), True, False
    device._locks, device._under_way = {lane: threading.RLock() for lane in Lane}, {lane: deque() for lane in Lane}

    def fail(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    device._arena = arena.Arena(fail)
    assert device.allocate("host", 100).nbytes == 100
    assert device.allocate("host", 100).nbytes == 100
    assert caplog.text.count("cannot be pinned") == 1


def test_layers_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are one piece in host memory; each device brings its own layers' part, and takes it, on lanes of its own."""
    model, ids = deep(), prompt(LENGTH)
    for seed in (None, 1, 2):
        for tiers in ([], [DeviceTier]):
            other = ManualDevice(automatic=True, order=None if seed is None else random.Random(seed))
            with accelerator(seed) as device, monkeypatch.context() as patch:
                patch.setattr(
                    SequencePort,
                    "_device_of",
                    lambda self, place, tensor, own=device, other=other: (own, other)[place // 2 % 2],
                )
                stack = TierStack(*(tier("1MB") for tier in tiers), HostTier("256MB"), block_tokens=16)
                for share in (1.0, 1.0, 0.4):
                    cache = TieredCache(stack, offload=share)
                    same(model, ids, cache)
                    assert share == 1.0 or cache.usage.cached_tokens == LENGTH - 1
                assert_consistent(stack)
            assert min(other.moved.values()) > 0


def test_from_disk_through_the_lanes(tmp_path: Path) -> None:
    model, ids = deep(), prompt(LENGTH)
    for seed in (None, 1, 2):
        for share in (0.0, 0.4, 1.0):
            folder = tmp_path / f"{seed}-{share}"
            with accelerator(seed):
                for cached in ({}, {"disk": 32}):
                    with TierStack(HostTier("256MB"), DiskTier(folder, "256MB"), block_tokens=16) as stack:
                        cache = TieredCache(stack, offload=share)
                        same(model, ids, cache)
                        assert cache.usage.cached_by_tier == cached
                        assert stack.flush(30)
