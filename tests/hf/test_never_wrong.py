"""Where stock transformers silently answers from a wrong prefix, or could be led to: the cold answer, or a clear error."""

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    DynamicCache,
    EncoderDecoderCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
)

from tests.hf.harness import assert_consistent, assert_same, check, forwarded, new_stack, run, stored_bytes
from tests.hf.models import fresh, prompt, tiny
from tiered_cache import (
    CacheInUseError,
    ConfigError,
    MissReason,
    TieredCache,
    TierStack,
    UnsupportedModelError,
    disable,
    enable,
)
from tiered_cache.hf import compat


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


# --- prompts ------------------------------------------------------------------------------------------------------------


def test_the_same_prompt_twice(stack: TierStack) -> None:
    for cached in (0, 29, 29):
        check(tiny(), prompt(30), stack, cached=cached)


def test_a_prompt_of_one_token(stack: TierStack) -> None:
    for _ in range(3):
        check(tiny(), prompt(1), stack, cached=0)


def test_a_used_cache(stack: TierStack) -> None:
    cache = TieredCache(stack)
    check(tiny(), prompt(40), stack, cached=0, cache=cache)
    unrelated = prompt(35, seed=1)
    unrelated[0, 0] = 3 if prompt(1)[0, 0] != 3 else 4
    check(tiny(), unrelated, stack, cached=0, cache=cache)
    check(tiny(), prompt(20), stack, cached=19, cache=cache)  # shorter than what is held or stored
    check(tiny(), prompt(40), stack, cached=39, cache=cache)  # the original again
    check(tiny(), prompt(40), stack, cached=39, cache=cache)


def test_a_used_cache_with_another_number_of_rows(stack: TierStack) -> None:
    cache = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=0, cache=cache)
    check(tiny(), prompt(30).repeat(3, 1), stack, cached=29, cache=cache)
    check(tiny(), prompt(30), stack, cached=29, cache=cache, num_beams=2)
    check(tiny(), prompt(30), stack, cached=29, cache=cache)


def test_a_used_cache_with_another_model(stack: TierStack) -> None:
    cache = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=0, cache=cache)
    check(tiny(seed=1), prompt(30), stack, cached=0, cache=cache)
    check(tiny("GPT2"), prompt(30), stack, cached=0, cache=cache)
    check(tiny(), prompt(30), stack, cached=29, cache=cache)


def test_only_the_new_tokens_with_a_whole_mask(stack: TierStack) -> None:
    cache = TieredCache(stack)
    out = check(tiny(), prompt(30), stack, cached=0, cache=cache)
    held = cache.get_seq_length()
    new = torch.cat([out.sequences[:, held:], prompt(6, seed=1)], dim=1)
    ids = torch.cat([out.sequences[:, :held], new], dim=1)
    check(tiny(), ids, stack, cached=held, cache=cache, passed=new, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("columns", [5, 6, 8, 33, 34, 36, 40, 42])
def test_only_the_new_tokens_with_a_wrong_mask(stack: TierStack, columns: int) -> None:
    cache = TieredCache(stack)
    out = check(tiny(), prompt(30), stack, cached=0, cache=cache)
    new = prompt(7, seed=1)
    before = stored_bytes(stack)
    with pytest.raises(ConfigError, match="attention_mask"):
        run(tiny(), new, past_key_values=cache, attention_mask=torch.ones(1, columns, dtype=torch.long))
    assert stored_bytes(stack) == before
    # The cache is as it was.
    ids = torch.cat([out.sequences[:, :34], new], dim=1)
    check(tiny(), ids, stack, cached=34, cache=cache, passed=new, attention_mask=torch.ones_like(ids))


SUFFIX_OPTIONS: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 2, "eos_token_id": 127},
    "assistant": {"assistant_model": "draft"},
    "token types": {"token_type_ids": torch.zeros(1, 7, dtype=torch.long)},
    "shifted positions": {"position_ids": torch.arange(40, 47)[None]},
}


@pytest.mark.parametrize("case", list(SUFFIX_OPTIONS))
def test_only_the_new_tokens_where_they_cannot_be_continued(case: str) -> None:
    """The cache is emptied for such calls, so what is not passed would be lost: an error, and the cache as it was."""
    options = dict(SUFFIX_OPTIONS[case])
    if "assistant_model" in options:
        options["assistant_model"] = tiny("GPT2", seed=1)
    model, stack = tiny("GPT2"), new_stack()
    cache = TieredCache(stack)
    out = run(model, prompt(30), past_key_values=cache)
    new = torch.cat([out.sequences[:, 34:], prompt(6, seed=1)], dim=1)
    mask = torch.ones(1, 41, dtype=torch.long)
    with pytest.raises(ConfigError, match="whole conversation"):
        model.generate(new, attention_mask=mask, past_key_values=cache, max_new_tokens=5, **options)
    ids = torch.cat([out.sequences[:, :34], new], dim=1)
    check(model, ids, stack, cached=34)
    check(model, ids, stack, cached=40, cache=cache)


def test_only_the_new_tokens_and_their_positions(stack: TierStack) -> None:
    cache = TieredCache(stack)
    out = run(tiny(), prompt(30), past_key_values=cache)
    new = torch.cat([out.sequences[:, 34:], prompt(6, seed=1)], dim=1)
    ids = torch.cat([out.sequences[:, :34], new], dim=1)
    options = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(34, 41)[None]}
    got = tiny().generate(new, past_key_values=cache, max_new_tokens=5, do_sample=False, **options)
    assert got[:, 7:].tolist() == run(tiny(), ids).sequences[:, 41:].tolist()


def test_a_custom_method_that_returns_other_tokens_than_it_fed(stack: TierStack) -> None:
    """What a decoding method of one's own returns says nothing about what the cache holds."""

    def decode(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        model._prefill(input_ids, generation_config, kwargs)
        for token in (7, 8, 9):
            model(torch.tensor([[token]]), past_key_values=cache)
        return torch.cat([input_ids, torch.tensor([[17, 18, 19, 20]])], dim=1)

    cache = TieredCache(stack)
    out = tiny().generate(prompt(30), custom_generate=decode, past_key_values=cache, max_new_tokens=4)
    ids = torch.cat([out, prompt(4, seed=1)], dim=1)
    check(tiny(), ids, stack, cached=0, cache=cache)


def test_a_custom_method_that_generates_twice(stack: TierStack) -> None:
    """Each time from scratch: stock would continue from the first prompt."""
    other = prompt(25, seed=1)
    cold = run(tiny(), other).sequences

    def decode(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        model.generate(input_ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        return model.generate(other, past_key_values=cache, max_new_tokens=5, do_sample=False)

    cache = TieredCache(stack)
    assert tiny().generate(prompt(30), custom_generate=decode, past_key_values=cache).tolist() == cold.tolist()
    check(tiny(), other, stack, cached=0, cache=cache)


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_forward_that_names_no_mask(stack: TierStack, with_mask: bool) -> None:
    """generate() then makes none, and without one stock feeds the whole prompt on top of what a cache holds."""
    model = fresh()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    kept = TieredCache(stack)
    for length in (30, 30, 40, 20):
        options = {"attention_mask": torch.ones(1, length, dtype=torch.long)} if with_mask else {}
        for cache in (TieredCache(stack), kept):
            cold = run(model, prompt(length), **options)
            assert_same(run(model, prompt(length), past_key_values=cache, **options), cold)
    assert (kept.usage.cached_tokens == 19) is with_mask


def test_left_pads_where_forward_names_no_positions(stack: TierStack) -> None:
    """generate() then makes none, and pads count as positions."""
    model = fresh()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    ids = prompt(20)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    for _ in range(2):
        for given, given_mask in ((ids, torch.ones_like(ids)), (padded, mask)):
            cold = run(model, given, attention_mask=given_mask)
            assert_same(run(model, given, attention_mask=given_mask, past_key_values=TieredCache(stack)), cold)


def test_a_mask_longer_than_the_prompt_on_an_empty_cache(stack: TierStack) -> None:
    with pytest.raises(ConfigError, match="attention_mask"):
        run(tiny(), prompt(5), past_key_values=TieredCache(stack), attention_mask=torch.ones(1, 9, dtype=torch.long))


def test_a_cache_filled_by_hand(stack: TierStack) -> None:
    """Its tokens are unknown: dropped and computed; only the new tokens on top of it are refused."""
    for by_hand in (prompt(20), prompt(20, seed=1)):
        cache = TieredCache(stack)
        with torch.no_grad():
            tiny()(by_hand, past_key_values=cache)
        check(tiny(), prompt(30), stack, cached=min(stack.stats().created_tokens, 29), cache=cache)
    cache = TieredCache(stack)
    with torch.no_grad():
        tiny()(prompt(20), past_key_values=cache)
    with pytest.raises(ConfigError, match="whole conversation"):
        run(tiny(), prompt(4), past_key_values=cache, attention_mask=torch.ones(1, 24, dtype=torch.long))


def test_a_cache_fed_by_hand_after_generate(stack: TierStack) -> None:
    cache = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=0, cache=cache)
    with torch.no_grad():
        tiny()(prompt(3, seed=1), past_key_values=cache)
    with pytest.raises(ConfigError, match="whole conversation"):
        run(tiny(), prompt(4), past_key_values=cache, attention_mask=torch.ones(1, 41, dtype=torch.long))
    check(tiny(), prompt(30), stack, cached=29, cache=cache)


def test_a_right_padded_batch(stack: TierStack) -> None:
    ids = prompt(30, rows=2)
    ids[0, -7:] = 0
    mask = (ids != 0).long()
    cold = run(tiny(), ids, attention_mask=mask)
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(tiny(), ids, attention_mask=mask, past_key_values=cache), cold)
        assert cache.usage.cached_tokens == cache.usage.created_tokens == 0
        assert cache.usage.miss_reason is MissReason.UNKNOWN_CONTENT


def test_a_mask_with_a_hole(stack: TierStack) -> None:
    ids = prompt(30)
    check(tiny(), ids, stack, cached=0)
    mask = torch.ones_like(ids)
    mask[0, 10:12] = 0
    cache = TieredCache(stack)
    assert_same(run(tiny(), ids, attention_mask=mask, past_key_values=cache), run(tiny(), ids, attention_mask=mask))
    assert cache.usage.cached_tokens == cache.usage.created_tokens == 0


def test_rows_that_end_early(stack: TierStack) -> None:
    """What follows a row's end is padding, and is not stored as if the row went on."""
    ids = prompt(30, rows=3)
    plain = run(tiny(), ids, new_tokens=8).sequences
    ends = int(plain[0, 32])  # row 0 ends after three tokens
    options = {"eos_token_id": ends, "pad_token_id": 0, "new_tokens": 8}
    cold = run(tiny(), ids, **options)
    assert cold.sequences[0, 33:].tolist() == [0] * (cold.sequences.shape[1] - 33)
    cache = TieredCache(stack)
    assert_same(run(tiny(), ids, past_key_values=cache, **options), cold)
    assert len(stack._index.roots) == 1
    lengths = sorted(30 + len(row) for row in generated_rows(cold.sequences, ends))
    assert cache.usage.created_tokens == sum(min(length, cold.sequences.shape[1] - 1) for length in lengths)
    for row in range(3):  # the next turn of each row
        turn = cold.sequences[row : row + 1]
        turn = turn[:, : 30 + len(generated_rows(turn, ends)[0])]
        check(
            tiny(), torch.cat([turn, prompt(5, seed=1)], dim=1), stack, cached=min(turn.shape[1], cold.sequences.shape[1] - 1)
        )


def generated_rows(sequences: torch.Tensor, ends: int) -> list[list[int]]:
    """Return each row's generated tokens up to its end."""
    rows = [row[30:].tolist() for row in sequences]
    return [row[: row.index(ends) + 1] if ends in row else row for row in rows]


def test_rows_that_end_early_where_the_pad_is_the_end(stack: TierStack) -> None:
    ids = prompt(30, rows=2)
    ends = int(run(tiny(), ids, new_tokens=8).sequences[0, 32])
    options = {"eos_token_id": ends, "pad_token_id": ends, "new_tokens": 8, "attention_mask": torch.ones_like(ids)}
    cold = run(tiny(), ids, **options)
    assert_same(run(tiny(), ids, past_key_values=TieredCache(stack), **options), cold)
    turn = torch.cat([cold.sequences[:1, :33], prompt(5, seed=1)], dim=1)
    check(tiny(), turn, stack, cached=33)


def test_left_pads_that_differ_from_those_stored(stack: TierStack) -> None:
    ids = prompt(30)
    check(tiny(), ids, stack, cached=0)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(37) >= 7).long()[None]
    check(tiny(), padded, stack, cached=36, attention_mask=mask)


# --- arguments ----------------------------------------------------------------------------------------------------------


def test_use_cache_false(stack: TierStack) -> None:
    cache = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=0, cache=cache)
    with pytest.raises(ConfigError, match="use_cache"):
        run(tiny(), prompt(30), past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 34  # nothing was lost
    check(tiny(), prompt(30), stack, cached=29, cache=cache)


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": "draft"},
        {"prompt_lookup_num_tokens": 2, "eos_token_id": 127},  # 5.10 needs one
        {"assistant_early_exit": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_assisted_decoding_with_a_warm_cache(stack: TierStack, options: dict[str, Any]) -> None:
    if options.get("assistant_model"):
        options = {"assistant_model": tiny(seed=1)}
    model, cache = fresh(), TieredCache(stack)
    for ids in (prompt(30), prompt(30), prompt(40, seed=1), prompt(25)):
        check(model, ids, stack, cached=0 if cache.usage.prompt_tokens == 0 else stored(stack, ids), cache=cache)
        cold = run(model, ids, new_tokens=8, **options)
        out = run(model, ids, new_tokens=8, past_key_values=cache, **options)
        assert out.sequences.tolist() == cold.sequences.tolist()
        assert cache.usage.miss_reason is MissReason.DISABLED_CALL
        assert cache.usage.prompt_tokens == ids.shape[1]
        fresh_out = run(model, ids, new_tokens=8, past_key_values=TieredCache(stack), **options)
        assert fresh_out.sequences.tolist() == cold.sequences.tolist()
    assert_consistent(stack)


def stored(stack: TierStack, ids: torch.Tensor) -> int:
    """Return how many tokens of a prompt of one row any root of the stack knows, at most all but one."""
    from tiered_cache.keys import encode_tokens

    tokens = encode_tokens(ids[0].numpy())
    found = [sum(part.num_tokens for part in stack._index.match(root, tokens, 0.0)) for root in stack._index.roots.values()]
    return min(max(found, default=0), ids.shape[1] - 1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunked_prefill(stack: TierStack, chunk: int) -> None:
    """Before transformers 5.24 a chunked prefill starts from the whole prompt: nothing is reused there, but it is stored."""
    continues = compat.CHUNKED_PREFILL_CONTINUES
    ids = prompt(40)
    cold = run(tiny(), ids)
    for cached in (0, 39, 39):
        cache = TieredCache(stack)
        with forwarded(tiny()) as columns:
            out = run(tiny(), ids, past_key_values=cache, prefill_chunk_size=chunk)
        assert_same(out, cold)
        expected = cached if continues else 0
        assert sum(columns) == 40 - expected + 4
        assert cache.usage.cached_tokens == expected
    kept = TieredCache(stack)
    check(tiny(), ids, stack, cached=39, cache=kept)
    assert_same(run(tiny(), prompt(25), past_key_values=kept, prefill_chunk_size=chunk), run(tiny(), prompt(25)))


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_outputs_of_the_whole_prompt(stack: TierStack, wanted: str) -> None:
    """They cover the whole prompt, so it is computed; it is stored all the same."""
    model = fresh(attn_implementation="eager")
    name = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}[wanted]
    check(model, prompt(20), stack, cached=0)
    ids = prompt(30)
    cold = run(model, ids, **{wanted: True})
    cache = TieredCache(stack)
    out = run(model, ids, past_key_values=cache, **{wanted: True})
    assert_same(out, cold)
    for step, step_cold in zip(getattr(out, name), getattr(cold, name), strict=True):
        for layer, layer_cold in zip(step, step_cold, strict=True):
            torch.testing.assert_close(layer, layer_cold, rtol=0, atol=1e-4)
    assert cache.usage.miss_reason is MissReason.OUTPUTS_REQUESTED
    check(model, ids, stack, cached=29)


def test_inputs_embeds(stack: TierStack) -> None:
    embeds = tiny().get_input_embeddings()(prompt(30)).detach()
    cold = run(tiny(), None, inputs_embeds=embeds)
    check(tiny(), prompt(30), stack, cached=0)
    cache = TieredCache(stack)
    for _ in range(2):
        assert_same(run(tiny(), None, inputs_embeds=embeds, past_key_values=cache), cold)
        assert cache.usage.miss_reason is MissReason.UNKNOWN_CONTENT
        assert (cache.usage.prompt_tokens, cache.usage.cached_tokens, cache.usage.created_tokens) == (30, 0, 0)


def test_position_ids(stack: TierStack) -> None:
    shifted = torch.arange(5, 35)[None]
    check(tiny(), prompt(30), stack, cached=0)
    cold = run(tiny(), prompt(30), position_ids=shifted)
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(tiny(), prompt(30), position_ids=shifted, past_key_values=cache), cold)
        assert cache.usage.cached_tokens == cache.usage.created_tokens == 0
        assert cache.usage.miss_reason is MissReason.UNKNOWN_CONTENT
    check(tiny(), prompt(30), stack, cached=29, position_ids=torch.arange(30)[None])  # as generate() would number them


def test_a_cache_implementation_in_the_generation_config(stack: TierStack) -> None:
    """Stock refuses any cache of the user's there, with words of its own; ours is unharmed."""
    model = fresh()
    cache = TieredCache(stack)
    check(model, prompt(30), stack, cached=0, cache=cache)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match="cache_implementation"):
        run(model, prompt(30), past_key_values=cache)
    model.generation_config.cache_implementation = None
    assert cache.get_seq_length() == 34
    check(model, prompt(30), stack, cached=29, cache=cache)


def seq2seq(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        config: Any = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    else:
        size = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        config = BartConfig(vocab_size=99, d_model=32, max_position_embeddings=64, **size, **heads)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder(stack: TierStack, kind: str) -> None:
    """Served as without a cache, also where one is kept: never with what an earlier input was encoded to."""
    model, kept = seq2seq(kind), TieredCache(stack)
    pair = EncoderDecoderCache(TieredCache(stack), DynamicCache())
    for options in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        for seed in (0, 1, 0):
            ids = prompt(12, seed) % 99
            settings = {"max_new_tokens": 5, "do_sample": False, **options}
            torch.manual_seed(0)
            cold = model.generate(ids, **settings)
            for cache in (kept, TieredCache(stack), pair):
                torch.manual_seed(0)
                assert model.generate(ids, past_key_values=cache, **settings).tolist() == cold.tolist()
    assert kept.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS
    assert kept.usage.prompt_tokens == 12
    assert "encoder-decoder" in kept.explain()
    enable(stack)
    try:
        assert (
            model.generate(ids, max_new_tokens=5, do_sample=False).tolist()
            == model.generate(ids, max_new_tokens=5, do_sample=False, past_key_values=TieredCache(stack)).tolist()
        )
    finally:
        disable()
    assert not stack._index.blocks
    with pytest.raises(UnsupportedModelError):
        TieredCache(stack).restore(model, ids)


@pytest.mark.parametrize("decoder_start", [[5, 6, 7], [5, 6, 8]])
def test_encoder_decoder_with_a_decoder_prompt(stack: TierStack, decoder_start: list[int]) -> None:
    """The same beginning of the answer for another input."""
    model, kept = seq2seq("bart"), TieredCache(stack)
    for seed in (0, 1, 0):
        options = {"decoder_input_ids": torch.tensor([decoder_start]), "max_new_tokens": 5, "do_sample": False}
        ids = prompt(12, seed) % 99
        cold = model.generate(ids, **options)
        assert model.generate(ids, past_key_values=kept, **options).tolist() == cold.tolist()


@pytest.mark.skipif(Version("5.17") > compat.VERSION, reason="recurrent and hybrid layers are supported from 5.17 on")
@pytest.mark.parametrize(("name", "said"), [("DeepseekV32", "DynamicIndexedLayer"), ("Jamba", "jamba in transformers")])
def test_layers_without_reuse(stack: TierStack, name: str, said: str) -> None:
    """They work as with DynamicCache, fresh or kept, and explain() names them."""
    model, cache = tiny(name), TieredCache(stack)
    for length in (20, 40, 40, 30):
        for used in (cache, TieredCache(stack)):
            ids = prompt(length)
            assert_same(run(model, ids, past_key_values=used), run(model, ids))
            assert (used.usage.cached_tokens, used.usage.created_tokens) == (0, 0)
            assert used.usage.miss_reason is MissReason.UNSUPPORTED_LAYERS
            assert said in used.explain()
    enable(stack)
    try:
        assert_same(run(model, prompt(30)), run(model, prompt(30), past_key_values=DynamicCache(config=model.config)))
    finally:
        disable()


def test_training_mode(stack: TierStack) -> None:
    model = fresh()
    check(model, prompt(30), stack, cached=0)
    model.train()
    cache = TieredCache(stack)
    check(model, prompt(30), stack, cached=0, cache=cache)
    assert cache.usage.miss_reason is MissReason.DISABLED_CALL
    assert cache.usage.created_tokens == 0
    model.eval()
    check(model, prompt(30), stack, cached=29)


# --- interruptions ------------------------------------------------------------------------------------------------------


class Interrupts(StoppingCriteria):
    def __init__(self, error: type[BaseException], step: int = 2) -> None:
        self.error = error
        self.step = step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.step -= 1
        if self.step == 0:
            raise self.error("on purpose")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_an_exception_from_a_stopping_criterion(stack: TierStack, error: type[BaseException], options: dict[str, Any]) -> None:
    cache = TieredCache(stack)
    criteria = StoppingCriteriaList([Interrupts(error)])
    with pytest.raises(error, match="on purpose"):
        run(tiny(), prompt(30), past_key_values=cache, stopping_criteria=criteria, **options)
    assert cache.usage.created_tokens == 30  # the prompt was complete
    assert_consistent(stack)
    check(tiny(), prompt(30), stack, cached=29, cache=cache, **options)
    check(tiny(), prompt(30), stack, cached=29, **options)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("forward", [0, 1, 3], ids=["in prefill", "first step", "later step"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_exception_in_mid_forward(stack: TierStack, error: type[BaseException], forward: int, warm: bool) -> None:
    """Layer 0 has appended its K/V, layer 1 has not."""
    model = tiny()
    if warm:
        check(model, prompt(20), stack, cached=0)
    cache, calls = TieredCache(stack), [0]

    def fail(module: torch.nn.Module, args: Any) -> None:
        if module is model.model.layers[1].self_attn.q_proj:
            calls[0] += 1
            if calls[0] == forward + 1:
                raise error("on purpose")

    before = stored_bytes(stack)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(fail)
    try:
        with pytest.raises(error, match="on purpose"):
            run(model, prompt(30), past_key_values=cache)
    finally:
        handle.remove()
    assert_consistent(stack)
    assert {key: stored_bytes(stack)[key] for key in before if key in stored_bytes(stack)}.items() <= before.items()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    kept = 20 if warm else 0
    assert cache.get_seq_length() == (30 if forward else kept)
    check(model, prompt(30), stack, cached=29 if forward else kept, cache=cache)


def test_ctrl_c_at_any_moment(stack: TierStack) -> None:
    """A real SIGINT, at a hundred different moments: the index and the budgets stay whole, and answers stay right."""
    import signal
    import time

    ids = prompt(40)
    cold = run(tiny(), ids).sequences.tolist()
    started = time.perf_counter()
    run(tiny(), ids, past_key_values=TieredCache(new_stack()))
    span = time.perf_counter() - started
    interrupted = 0
    cache = TieredCache(stack)
    for moment in range(100):
        if moment % 10 == 0:
            stack.clear()
        timer = threading.Timer(span * 1.1 * moment / 100, signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            out = run(tiny(), ids, past_key_values=cache).sequences.tolist()
            timer.join()
            time.sleep(0.001)
            assert out == cold
        except KeyboardInterrupt:
            interrupted += 1
        assert_consistent(stack)
        assert run(tiny(), ids, past_key_values=cache).sequences.tolist() == cold
    assert interrupted > 20
    assert_consistent(stack)


def test_an_exception_while_storing_costs_only_the_storing(
    stack: TierStack, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    cold = run(tiny(), prompt(30))
    monkeypatch.setattr(type(stack), "commit", lambda *args: 1 / 0)
    cache = TieredCache(stack)
    assert_same(run(tiny(), prompt(30), past_key_values=cache), cold)
    assert "Storing failed" in caplog.text
    monkeypatch.undo()
    assert_consistent(stack)
    check(tiny(), prompt(30), stack, cached=29, cache=cache)
    assert cache.usage.cached_by_tier == {"resident": 29}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_while_storing_publishes_nothing_half_written(stack: TierStack, error: type[BaseException]) -> None:
    from tiered_cache.port import SequencePort

    save, calls = SequencePort.save, [0]

    def interrupted(self: SequencePort, kind: str, start: int, num_tokens: int, buffers: Any) -> Any:
        calls[0] += 1
        transfer = save(self, kind, start, num_tokens, buffers)
        if calls[0] == 2:
            buffers[0][: len(buffers[0]) // 2] = 255
            raise error("on purpose")
        return transfer

    cache = TieredCache(stack)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequencePort, "save", interrupted)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                run(tiny(), prompt(40), past_key_values=cache)
        else:
            run(tiny(), prompt(40), past_key_values=cache)
            assert stack.stats().dropped_blocks == 1
            assert not stack.flush()
            assert stack.flush()
    assert len(stack._index.blocks) == 1
    assert_consistent(stack)
    check(tiny(), prompt(40), stack, cached=16)


def test_reuse_that_fails_is_a_miss(stack: TierStack, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    check(tiny(), prompt(30), stack, cached=0)
    monkeypatch.setattr(type(stack), "fetch", lambda *args: 1 / 0)
    cache = TieredCache(stack)
    assert_same(run(tiny(), prompt(30), past_key_values=cache), run(tiny(), prompt(30)))
    assert cache.usage.miss_reason is MissReason.TIER_ERROR
    monkeypatch.undo()
    assert_consistent(stack)


def test_a_stack_closed_between_calls_is_a_miss(stack: TierStack, caplog: Any) -> None:
    cache = TieredCache(stack)
    check(tiny(), prompt(30), stack, cached=0, cache=cache)
    stack.close()
    assert_same(run(tiny(), prompt(40, seed=1), past_key_values=cache), run(tiny(), prompt(40, seed=1)))
    assert cache.usage.miss_reason is MissReason.TIER_ERROR


# --- threads and copies -------------------------------------------------------------------------------------------------


def test_one_cache_in_two_threads(stack: TierStack) -> None:
    cache, inside, go = TieredCache(stack), threading.Event(), threading.Event()
    outs: list[Any] = []

    class Waits(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            inside.set()
            assert go.wait(60)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    criteria = StoppingCriteriaList([Waits()])
    thread = threading.Thread(
        target=lambda: outs.append(run(tiny(), prompt(30), past_key_values=cache, stopping_criteria=criteria))
    )
    thread.start()
    assert inside.wait(60)
    attempts: list[Callable[[], Any]] = [
        lambda: run(tiny(), prompt(30), past_key_values=cache),
        lambda: cache.restore(tiny(), prompt(30)),
        lambda: cache.commit(prompt(30)),
        lambda: copy.deepcopy(cache),
    ]
    for attempt in attempts:
        with pytest.raises(CacheInUseError):
            attempt()
    go.set()
    thread.join()
    assert_same(outs[0], run(tiny(), prompt(30)))
    check(tiny(), prompt(30), stack, cached=29, cache=cache)


def test_eight_threads_on_one_stack() -> None:
    """Small budget, shared prefixes: blocks are stored, read and evicted by all at once."""
    model = tiny()
    prompts = [torch.cat([prompt(40, seed=n % 3), prompt(20, seed=10 + n)], dim=1) for n in range(8)]
    cold = [run(model, ids) for ids in prompts]
    stack = new_stack(40_000)
    problems: list[str] = []

    def work(number: int) -> None:
        cache = TieredCache(stack)
        for round_ in range(12):
            place = (number + round_) % len(prompts)
            try:
                out = model.generate(
                    prompts[place],
                    past_key_values=cache if round_ % 2 else TieredCache(stack),
                    max_new_tokens=5,
                    do_sample=False,
                )
                if out.tolist() != cold[place].sequences.tolist():
                    problems.append(f"wrong tokens in thread {number}, round {round_}")
            except Exception as error:  # noqa: BLE001
                problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    stats = stack.stats()
    assert stats.requests == 96
    assert stats.cached_tokens > 0
    assert stats.tiers["host"].evicted_pieces > 0
    assert_consistent(stack)


def test_deepcopy(stack: TierStack) -> None:
    """The copy has the sequence of its own and the stack in common."""
    cache = TieredCache(stack)
    out = check(tiny(), prompt(30), stack, cached=0, cache=cache)
    twin = copy.deepcopy(cache)
    assert twin.stack is stack
    one = torch.cat([out.sequences, prompt(6, seed=1)], dim=1)
    other = torch.cat([out.sequences, prompt(6, seed=2)], dim=1)
    check(tiny(), one, stack, cached=34, cache=cache)
    check(tiny(), other, stack, cached=35 + int(one[0, 35] == other[0, 35]), cache=twin)
    assert twin.usage.cached_by_tier.keys() <= {"resident", "host"}
    check(tiny(), one, stack, cached=40, cache=cache)


def test_one_kept_cache_across_inference_modes(stack: TierStack) -> None:
    cache, ids = TieredCache(stack), prompt(30)
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            out = run(tiny(), ids, past_key_values=cache)
            assert_same(out, run(tiny(), ids))
            ids = torch.cat([out.sequences, prompt(3, seed=ids.shape[1])], dim=1).clone()
    assert cache.usage.cached_by_tier.keys() == {"resident"}


def test_a_model_can_be_freed(stack: TierStack) -> None:
    """Neither a kept cache nor the stack keeps a model alive."""
    import weakref

    model, cache = fresh(), TieredCache(stack)
    check(model, prompt(30), stack, cached=0, cache=cache)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    check(fresh(), prompt(30), stack, cached=29, cache=cache)
