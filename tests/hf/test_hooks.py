"""How generate() comes to use a TieredCache, in whatever way and order things are imported, wrapped and called."""

import functools
import importlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, pipeline
from transformers.generation.streamers import BaseStreamer

import tiered_cache
from tests.hf.harness import assert_same, check, forwarded, new_stack, run
from tests.hf.models import fresh, prompt, tiny
from tiered_cache import MissReason, TieredCache, TieredCacheError, disable, enable, forget, uninstall, warm
from tiered_cache.hf import generation

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    """Leave the hooks as they were found."""
    generation.install()
    before = GenerationMixin.generate, GenerationMixin._prefill
    yield
    disable()
    GenerationMixin.generate, GenerationMixin._prefill = before
    generation.install()


def in_new_process(script: str) -> list[str]:
    """Run a script that prints, with a tiny `model` and `ids` at hand, and return its lines."""
    prelude = """
        import torch
        from tests.hf.models import prompt, tiny
        model, ids = tiny(), prompt(53)
        args = dict(max_new_tokens=4, do_sample=False)
        cold = model.generate(ids, **args).tolist()
    """
    code = textwrap.dedent(prelude) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_the_one_liner_reuses_on_its_second_call() -> None:
    lines = in_new_process("""
        from tiered_cache import TieredCache
        assert model.generate(ids, past_key_values=TieredCache(), **args).tolist() == cold
        c = TieredCache()
        assert model.generate(ids, past_key_values=c, **args).tolist() == cold
        print(c.usage.cached_tokens)
    """)
    assert lines == ["52"]


def test_the_one_liner_where_the_call_itself_imports() -> None:
    """Python fetches model.generate before it evaluates the argument, which then installs the hooks."""
    lines = in_new_process("""
        import tiered_cache
        assert model.generate(ids, past_key_values=tiered_cache.TieredCache(), **args).tolist() == cold
        c = tiered_cache.TieredCache()
        assert model.generate(ids, past_key_values=c, **args).tolist() == cold
        print(c.usage.cached_tokens)
    """)
    assert lines == ["52"]


def test_generate_taken_before_the_import() -> None:
    """Reuses and stores prompts, and never answers from a stale prefix."""
    lines = in_new_process("""
        g = model.generate
        other = prompt(40, seed=1)
        cold_other = g(other, **args).tolist()
        from tiered_cache import TieredCache
        kept = TieredCache()
        for _ in range(2):
            assert g(ids, past_key_values=kept, **args).tolist() == cold
            assert g(other, past_key_values=kept, **args).tolist() == cold_other
            assert g(ids[:, :20], past_key_values=kept, **args).tolist() == g(ids[:, :20], **args).tolist()
        assert model.generate(ids, past_key_values=kept, **args).tolist() == cold
        print(kept.usage.cached_tokens)
    """)
    assert lines == ["52"]


def test_importing_a_tier_loads_no_torch() -> None:
    code = (
        "import sys, tiered_cache.tiers.host, tiered_cache.stack; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_uninstall() -> None:
    stack = new_stack()
    used = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=0, cache=used)
    uninstall()
    assert GenerationMixin.generate.__module__ == "transformers.generation.utils"
    assert GenerationMixin._prefill.__module__ == "transformers.generation.utils"
    with pytest.raises(TieredCacheError, match="uninstall"):
        run(tiny(), prompt(20, seed=1), past_key_values=used)
    check(tiny(), prompt(30), stack, cached=29, cache=TieredCache(stack))  # a new one installs them again


def test_uninstall_leaves_loops_by_hand_alone() -> None:
    stack = new_stack()
    cache = TieredCache(stack)
    uninstall()
    ids = prompt(30)
    with torch.no_grad():
        assert cache.restore(tiny(), ids) == 0
        tiny()(ids, past_key_values=cache)
        cache.commit(ids)
    assert stack.stats().created_tokens == 30


def test_uninstall_under_somebody_elses_wrapper() -> None:
    """Our hooks stay inside their wrapper and do nothing."""
    calls: list[str] = []
    GenerationMixin.generate = wrapper(GenerationMixin.generate, calls)
    uninstall()
    assert run(tiny(), prompt(20)).sequences.shape == (1, 25)
    used = TieredCache.__new__(TieredCache)  # made without its constructor, which would install the hooks
    DynamicCache.__init__(used)
    used.session, used._by_hand, used.columns = None, False, None
    with pytest.raises(TieredCacheError, match="uninstall"):
        run(tiny(), prompt(20), past_key_values=used)
    assert calls == ["before", "after", "before"]
    stack = new_stack()
    check(tiny(), prompt(30), stack, cached=0)
    check(tiny(), prompt(30), stack, cached=29)


def wrapper(inner: Callable[..., Any], calls: list[str], wraps: bool = True) -> Callable[..., Any]:
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("before")
        result = inner(self, *args, **kwargs)
        calls.append("after")
        return result

    return functools.wraps(inner)(outer) if wraps else outer


@pytest.mark.parametrize("wraps", [True, False])
def test_somebody_elses_wrapper_around_ours(wraps: bool) -> None:
    calls: list[str] = []
    GenerationMixin.generate = wrapper(GenerationMixin.generate, calls, wraps)
    GenerationMixin._prefill = wrapper(GenerationMixin._prefill, [], wraps)
    stack = new_stack()
    for cached in (0, 29, 29):
        check(tiny(), prompt(30), stack, cached=cached)
    assert calls
    assert not wraps or GenerationMixin.generate.__wrapped__ is not None


def test_somebody_elses_wrapper_inside_ours() -> None:
    calls: list[str] = []
    uninstall()
    GenerationMixin.generate = wrapper(GenerationMixin.generate, calls)
    stack = new_stack()
    for cached in (0, 29):
        check(tiny(), prompt(30), stack, cached=cached)
    assert calls


def test_install_is_idempotent() -> None:
    before = GenerationMixin.generate
    for _ in range(3):
        generation.install()
        TieredCache(new_stack())
    assert GenerationMixin.generate is before


def test_reload() -> None:
    stack = new_stack()
    check(tiny(), prompt(30), stack, cached=0)
    importlib.reload(generation)
    generation.install()
    check(tiny(), prompt(30), stack, cached=29)
    importlib.reload(tiered_cache)
    check(tiny(), prompt(30), stack, cached=29, cache=tiered_cache.TieredCache(stack))


def test_a_second_import_after_the_modules_were_dropped() -> None:
    lines = in_new_process("""
        import sys
        from tiered_cache import TieredCache
        old = TieredCache()
        assert model.generate(ids, past_key_values=old, **args).tolist() == cold
        for name in [name for name in sys.modules if name.startswith("tiered_cache")]:
            del sys.modules[name]
        from tiered_cache import TieredCache
        for _ in range(2):
            new = TieredCache()
            assert model.generate(ids, past_key_values=new, **args).tolist() == cold
        print(new.usage.cached_tokens)
        other = prompt(30, seed=1)
        cold_other = model.generate(other, **args).tolist()
        assert model.generate(other, past_key_values=old, **args).tolist() == cold_other
    """)
    assert lines == ["52"]


class CallsGenerate(LogitsProcessor):
    """Generates something else in the middle of a generation."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.options = options
        self.caches: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = run(self.model, prompt(20, seed=9), new_tokens=2, **self.options)
        self.caches.append(out.past_key_values)
        return scores


def test_nested_generate_without_a_cache() -> None:
    stack = new_stack()
    for cached in (0, 29):
        check(tiny(), prompt(30), stack, cached=0 if cached == 0 else 29, logits_processor=LogitsProcessorList())
    cold = run(tiny(), prompt(30))
    nested = LogitsProcessorList([CallsGenerate(tiny())])
    assert_same(run(tiny(), prompt(30), past_key_values=TieredCache(stack), logits_processor=nested), cold)


def test_nested_generate_with_a_cache_of_its_own() -> None:
    stack = new_stack()
    cold, inner = run(tiny(), prompt(30)), TieredCache(stack)
    nested = LogitsProcessorList([CallsGenerate(tiny(), past_key_values=inner)])
    assert_same(run(tiny(), prompt(30), past_key_values=TieredCache(stack), logits_processor=nested), cold)
    assert inner.usage.cached_tokens == 19


def test_enable_steps_aside_in_nested_calls() -> None:
    enable(new_stack())
    processor = CallsGenerate(tiny())
    outer = run(tiny(), prompt(30), logits_processor=LogitsProcessorList([processor]))
    assert isinstance(outer.past_key_values, TieredCache)
    assert processor.caches
    assert not any(isinstance(cache, TieredCache) for cache in processor.caches)


def test_nested_generate_with_the_same_cache_passes_through() -> None:
    """As decoding methods from the hub do: an outer generate() hands its cache to an inner one."""

    def decode(model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        return model.generate(input_ids, past_key_values=cache, do_sample=False, max_new_tokens=5)

    stack = new_stack()
    cold = run(tiny(), prompt(30)).sequences
    cache = TieredCache(stack)
    for _ in range(2):
        out = tiny().generate(prompt(30), custom_generate=decode, past_key_values=cache, max_new_tokens=5)
        assert out.tolist() == cold.tolist()
        assert cache.usage.miss_reason is MissReason.DISABLED_CALL


def ways_to_call(ids: torch.Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    options = {"max_new_tokens": 5, "do_sample": False}
    return {
        "positional": ((ids,), options),
        "inputs=": ((), {"inputs": ids, **options}),
        "input_ids=": ((), {"input_ids": ids, **options}),
        "with mask": ((ids,), {"attention_mask": torch.ones_like(ids), **options}),
        "config object": ((ids,), {"generation_config": config}),
        "config by position": ((ids, config), {}),
    }


@pytest.mark.parametrize("way", list(ways_to_call(prompt(1))))
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_ways_to_call(way: str, argument: str) -> None:
    ids = prompt(30)
    args, kwargs = ways_to_call(ids)[way]
    cold = tiny().generate(*args, **kwargs)
    stack = new_stack()
    for cached in (0, 29):
        cache = TieredCache(stack)
        with forwarded(tiny()) as columns:
            out = tiny().generate(*args, **kwargs, **{argument: cache})
        assert isinstance(out, torch.Tensor)
        assert out.tolist() == cold.tolist()
        assert columns[0] == 30 - cached
        assert cache.usage.cached_tokens == cached


def test_both_argument_names_with_one_cache() -> None:
    cache = TieredCache(new_stack())
    out = run(tiny(), prompt(30), past_key_values=cache, cache=cache)
    assert_same(out, run(tiny(), prompt(30)))


def test_no_mask_given_and_pads_in_the_prompt() -> None:
    """generate() infers the mask from pad tokens."""
    ids = prompt(30, rows=2)
    ids[0, :6] = 0
    stack = new_stack()
    cold = run(tiny(), ids)
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(tiny(), ids, past_key_values=cache), cold)
    assert cache.usage.prompt_tokens == 54
    assert cache.usage.cached_tokens == 52


def test_no_prompt_at_all() -> None:
    """generate() starts from BOS: a prompt of one token."""
    stack = new_stack()
    cold = tiny().generate(max_new_tokens=4, do_sample=False)
    for _ in range(2):
        cache = TieredCache(stack)
        assert tiny().generate(max_new_tokens=4, do_sample=False, past_key_values=cache).tolist() == cold.tolist()
        assert (cache.usage.prompt_tokens, cache.usage.cached_tokens, cache.usage.miss_reason) == (1, 0, None)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
        {"num_beams": 2, "do_sample": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(3, 60))},
    ],
    ids=str,
)
def test_modes_with_a_seed(options: dict[str, Any]) -> None:
    stack = new_stack()
    for cached in (0, 29, 29):
        check(tiny(), prompt(30), stack, cached=cached, seed=7, **options)


class Collects(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


def test_streamer() -> None:
    stack, cold = new_stack(), Collects()
    run(tiny(), prompt(30), streamer=cold)
    for _ in range(2):
        warm = Collects()
        run(tiny(), prompt(30), streamer=warm, past_key_values=TieredCache(stack))
        assert warm.tokens == cold.tokens


def test_in_a_thread() -> None:
    stack, outs = new_stack(), []
    run(tiny(), prompt(30), past_key_values=TieredCache(stack))
    thread = threading.Thread(target=lambda: outs.append(check(tiny(), prompt(30), stack, cached=29)))
    thread.start()
    thread.join()
    assert len(outs) == 1


def test_the_returned_cache_is_ours() -> None:
    cache = TieredCache(new_stack())
    assert run(tiny(), prompt(30), past_key_values=cache).past_key_values is cache


def test_pipeline_after_enable(tokenizer: Any) -> None:
    stack, model = new_stack(), fresh()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = " ".join(f"w{number}" for number in range(3, 40))
    options = {"max_new_tokens": 5, "do_sample": False}
    cold = generator(text, **options)
    enable(stack)
    assert generator(text, **options) == cold
    assert generator(text, **options) == cold
    stats = stack.stats()
    assert stats.requests == 2
    assert stats.cached_tokens == stats.prompt_tokens // 2 - 1
    disable()
    assert generator(text, **options) == cold
    assert stack.stats().requests == 2


def test_enable_steps_aside() -> None:
    stack, ids = new_stack(), prompt(30)
    enable(stack)
    training = fresh().train()
    torch.manual_seed(0)
    training.generate(ids, max_new_tokens=2)
    run(tiny(), ids, use_cache=False)
    run(tiny(), ids, cache_implementation="static")
    run(tiny(), ids, generation_config=GenerationConfig(use_cache=False, max_new_tokens=5, pad_token_id=0), max_new_tokens=5)
    run(tiny(), ids, past_key_values=DynamicCache())
    assert stack.stats().requests == 0
    assert_same(run(tiny(), ids), run(tiny(), ids, past_key_values=DynamicCache()))
    assert stack.stats().requests == 1


def test_enable_leaves_a_mask_that_does_not_fit_to_stock() -> None:
    ids, mask = prompt(5), torch.ones(1, 9, dtype=torch.long)
    for name in ("Llama", "Mistral"):
        outcomes = []
        for automatic in (False, True):
            if automatic:
                enable(new_stack())
            try:
                outcomes.append(str(tiny(name).generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)))
            except Exception as error:  # noqa: BLE001  whatever stock does
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]
        disable()


def test_enable_steps_aside_where_forward_takes_no_cache() -> None:
    model = fresh("OpenAIGPT")
    cold = run(model, prompt(20)).sequences.tolist()
    enable(new_stack())
    assert run(model, prompt(20)).sequences.tolist() == cold


def test_enable_goes_on_when_its_stack_is_closed() -> None:
    stack = new_stack()
    enable(stack)
    stack.close()
    assert_same(run(tiny(), prompt(30)), run(tiny(), prompt(30), past_key_values=DynamicCache()))


def test_enable_with_stock_assisted_decoding() -> None:
    enable(new_stack())
    cold = run(tiny(), prompt(30), past_key_values=DynamicCache())
    for _ in range(2):
        assert_same(run(tiny(), prompt(30), assistant_model=tiny(seed=1)), cold)


def test_peft_wrapped_model() -> None:
    peft = pytest.importorskip("peft")
    base, stack = fresh(), new_stack()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    check(model, prompt(30), stack, cached=0)
    check(model, prompt(30), stack, cached=29)
    with model.disable_adapter():
        check(model, prompt(30), stack, cached=0)
        check(model, prompt(30), stack, cached=29)
    check(model, prompt(30), stack, cached=29)


def test_warm_and_forget_a_peft_model() -> None:
    """generate() runs on the model inside; so do they."""
    peft = pytest.importorskip("peft")
    stack = new_stack()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(fresh(), config).eval()
    warm(model, prompt(30), stack=stack)
    check(model, prompt(30), stack, cached=29)
    forget(model, stack=stack)
    check(model, prompt(30), stack, cached=0)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_peft_prompt_learning(kind: str) -> None:
    """Virtual tokens come in front of the prompt: more columns than tokens. As stock, and nothing of it is ever reused
    without them."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(0)
    model = peft.get_peft_model(fresh(), config).eval()
    ids, stack = prompt(30), new_stack()
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 5, "do_sample": False}
    cold = model.generate(input_ids=ids, attention_mask=mask, **options).tolist()
    enable(stack)
    for _ in range(2):
        assert model.generate(input_ids=ids, attention_mask=mask, **options).tolist() == cold
    disable()
    base = fresh()
    assert_same(run(base, ids, past_key_values=TieredCache(stack)), run(base, ids))


def test_a_class_that_overrides_generate() -> None:
    class Own(type(tiny())):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    model, stack = fresh(), new_stack()
    model.__class__ = Own
    for _ in range(2):
        cache = TieredCache(stack)
        check(model, prompt(30), stack, cached=0, cache=cache)
        assert cache.usage.miss_reason is MissReason.DISABLED_CALL
        assert "generate() of its own" in cache.explain()
