"""Images, videos and sounds: reused with the same content only, not encoded again, and answered as in a cold run."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.hf.content_models import AUDIO, END, IMAGE, START, VIDEO, Item, encoded, request, text, tiny
from tests.hf.harness import assert_consistent, assert_same, drop_pieces, forwarded, new_stack, run, stored_bytes
from tests.hf.test_disk import Disk
from tests.hf.test_disk import disk as disk
from tiered_cache import ConfigError, MissReason, TieredCache, TierStack, disable, enable, warm
from tiered_cache.hf import compat, content, identity
from tiered_cache.hf.columns import Columns

SEEING = ("Llava", "Gemma3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
NUMBERED_IN_3D = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
ALL = (*SEEING, "Qwen2Audio")
A, B, C = Item(1), Item(2), Item(3)
NO_PLACEHOLDERS = {"suppress_tokens": [IMAGE, VIDEO, AUDIO, START, END]}


@pytest.fixture
def stack() -> TierStack:
    return new_stack()


def check(
    name: str,
    rows: list[Any] | dict[str, Any],
    stack: TierStack,
    cached: int,
    items: int,
    *,
    cache: TieredCache | None = None,
    automatic: bool = False,
    **options: Any,
) -> Any:
    """Assert that rows answer as cold, with `cached` columns reused and `items` images or sounds encoded; return the output."""
    model = tiny(name)
    given = rows if isinstance(rows, dict) else request(name, *rows)
    if not isinstance(rows, dict) and len(rows) == 1 and name != "Qwen2Audio":
        del given["attention_mask"]
    ids = given["input_ids"]
    cold = run(model, None, **given, **options)
    stack.flush(60)
    before = stored_bytes(stack)
    cache = TieredCache(stack) if cache is None else cache
    with forwarded(model) as columns, encoded(model) as encodings:
        out = run(model, None, **given, **options, **({} if automatic else {"past_key_values": cache}))
    assert_same(out, cold)
    assert columns[0] == ids.shape[1] - cached, cache.explain()
    assert sum(encodings) == items * patches(name)
    assert len(encodings) == bool(items)
    if not automatic:
        mask = given.get("attention_mask", torch.ones_like(ids))
        pads = (mask == 0).sum(dim=1)
        assert cache.usage.prompt_tokens == int(mask.sum())
        assert cache.usage.cached_tokens == int((cached - pads).clamp(min=0).sum()) == sum(cache.usage.cached_by_tier.values())
    stack.flush(60)
    after = stored_bytes(stack)
    assert all(after[key] == digest for key, digest in before.items() if key in after)
    assert_consistent(stack)
    return out


def starts(name: str) -> int:
    """Return how many tokens mark the beginning of an item."""
    return 0 if name == "Qwen2Audio" else 1


def num_tokens(name: str) -> int:
    return 8 if name == "Qwen2Audio" else 4


def patches(name: str) -> int:
    """Return how many rows of features an item has."""
    return 16 if name in NUMBERED_IN_3D else 1


def without_marks(given: dict[str, Any]) -> dict[str, Any]:
    """Take out the tokens before and after each image, so that images are side by side."""
    kept = ~torch.isin(given["input_ids"][0], torch.tensor([START, END]))
    return {key: value if key == "pixel_values" else value[:, kept] for key, value in given.items()}


def before_content(name: str, columns: int) -> int:
    """Return what is reused of a prompt up to its first placeholder, at `columns`, where content is still to be fed."""
    return 0 if name.lower() in compat.CONTENT_FROM_EMPTY else columns


# --- one item -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_same_content(name: str, stack: TierStack) -> None:
    prompt = [text(20, 0), A, text(9, 1)]
    length = request(name, prompt)["input_ids"].shape[1]
    check(name, [prompt], stack, 0, 1)
    check(name, [prompt], stack, length - 1, 0)
    other_question = [text(20, 0), A, text(9, 2)]
    check(name, [other_question], stack, length - 9, 0)


@pytest.mark.parametrize("name", ALL)
def test_other_content_behind_the_same_tokens(name: str, stack: TierStack) -> None:
    check(name, [[text(20, 0), A, text(9, 1)]], stack, 0, 1)
    for other in (B, C):
        check(name, [[text(20, 0), other, text(9, 1)]], stack, before_content(name, 20 + starts(name)), 1)


@pytest.mark.parametrize("name", ALL)
def test_no_content_behind_the_same_tokens(name: str, stack: TierStack) -> None:
    """Placeholders without features are tokens like others."""
    given = request(name, [text(20, 0), A, text(9, 1)])
    length = given["input_ids"].shape[1]
    bare = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}
    check(name, given, stack, 0, 1)
    check(name, bare, stack, 20 + starts(name), 0)
    check(name, bare, stack, length - 1, 0)
    check(name, given, stack, length - 1, 0)


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_that_ends_in_content(name: str, stack: TierStack) -> None:
    """No prefix ends within it, so it is encoded each time."""
    given = request(name, [text(20, 0), A])
    end = 20 + starts(name) + num_tokens(name)
    given = {key: value[:, :end] if value.shape[1:] == given["input_ids"].shape[1:] else value for key, value in given.items()}
    check(name, given, stack, 0, 1)
    check(name, given, stack, before_content(name, 20 + starts(name)), 1)


@pytest.mark.parametrize("name", NUMBERED_IN_3D)
def test_the_same_bytes_in_another_shape(name: str, stack: TierStack) -> None:
    """2 x 8 patches are numbered otherwise than 4 x 4."""
    check(name, [[text(20, 0), A, text(9, 1)]], stack, 0, 1)
    check(name, [[text(20, 0), dataclasses.replace(A, grid=(2, 8)), text(9, 1)]], stack, 21, 1)


def test_the_same_numbers_in_another_precision() -> None:
    pixels = torch.zeros(1, 3, 8, 8)
    one, other = hashlib.sha256(), hashlib.sha256()
    content._add(one, "pixel_values", pixels.int())
    content._add(other, "pixel_values", pixels)
    assert one.digest() != other.digest()


@pytest.mark.parametrize("name", SEEING)
def test_half_of_an_image(name: str, stack: TierStack) -> None:
    """Where only the front of it is held, or stored, it is computed from its beginning."""
    start = before_content(name, 14)
    given = request(name, [text(13, 0), A, text(9, 1)])  # at columns 14 to 18: over the end of a block
    cache = TieredCache(stack)
    check(name, given, stack, 0, 1, cache=cache)
    if name != "Gemma3":
        stack.clear()
        cache.crop(16 - cache.get_seq_length())
        check(name, given, stack, start, 1, cache=cache)
        assert cache.usage.cached_by_tier.keys() == {"resident"}
    drop_pieces(stack, "main", lambda place: place < 16)
    check(name, given, stack, start, 1)


def test_half_of_an_image_in_a_window(stack: TierStack) -> None:
    """A hit that is shortened to where a whole window is stored, and that is within the image."""
    given = request("Gemma3", [text(45, 0), A, text(29, 1)])  # at columns 46 to 50: over the end of a block
    check("Gemma3", given, stack, 0, 1)
    drop_pieces(stack, "side", lambda place: place < 48)
    check("Gemma3", given, stack, before_content("Gemma3", 46), 1)


@pytest.mark.parametrize("kind", ["main", "side"])
def test_most_of_a_long_run_in_a_window(kind: str, stack: TierStack) -> None:
    """What is read of a window is that before where the prefix ends in the end."""
    given = without_marks(request("Gemma3", [text(53, 0), A, B, C, text(9, 1)]))  # at columns 53 to 65
    check("Gemma3", given, stack, 0, 3)
    drop_pieces(stack, kind, lambda place: place < 64)
    check("Gemma3", given, stack, before_content("Gemma3", 53), 3)


# --- several items --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEING)
def test_a_second_image(name: str, stack: TierStack) -> None:
    """Requests share up to the first image that differs, and only the others are encoded."""
    from_empty = name.lower() in compat.CONTENT_FROM_EMPTY
    check(name, [[text(20, 0), A, text(9, 1), B, text(5, 2)]], stack, 0, 2)
    check(name, [[text(20, 0), A, text(9, 1), B, text(5, 3)]], stack, 41, 0)
    check(name, [[text(20, 0), A, text(9, 1), C, text(5, 2)]], stack, 0 if from_empty else 36, 2 if from_empty else 1)
    check(name, [[text(20, 0), C, text(9, 1), B, text(5, 2)]], stack, 0 if from_empty else 21, 2)
    check(name, [[text(20, 0), A, text(9, 1), A, text(5, 2)]], stack, 0 if from_empty else 36, 2 if from_empty else 1)
    check(name, [[text(20, 0), A, text(30, 4)]], stack, 26, 0)


def test_two_sounds(stack: TierStack) -> None:
    """Which frames are whose is not known, so they are reused together or not at all."""
    check("Qwen2Audio", [[text(20, 0), A, text(9, 1), B, text(5, 2)]], stack, 0, 2)
    check("Qwen2Audio", [[text(20, 0), A, text(9, 1), B, text(5, 3)]], stack, 45, 0)
    check("Qwen2Audio", [[text(20, 0), A, text(9, 1), C, text(5, 2)]], stack, 20, 2)
    check("Qwen2Audio", [[text(20, 0), A, text(9, 1)]], stack, 20, 1)


def test_sounds_of_other_lengths(stack: TierStack) -> None:
    """The mask of the features says how much of them there is."""
    for frames, cached in ((32, 0), (28, 20), (32, 36)):
        given = request("Qwen2Audio", [text(20, 0), A, text(9, 1)])
        given["feature_attention_mask"][0, frames:] = 0
        if frames == 28:
            keep = [column for column in range(37) if column != 20]
            given |= {key: given[key][:, keep] for key in ("input_ids", "attention_mask")}
        check("Qwen2Audio", given, stack, cached, int(cached != 36))


@pytest.mark.parametrize("name", ["Llava", "Gemma3"])
def test_images_without_tokens_between_them(name: str, stack: TierStack) -> None:
    """Where attention goes both ways in a stretch of images, they see each other: reused together."""
    start = before_content(name, 20)
    for images, question, cached in (([A, B], 1, 0), ([A, B], 2, 28), ([A, C], 1, start), ([C, B], 1, start)):
        given = without_marks(request(name, [text(20, 0), *images, text(9, question)]))
        check(name, given, stack, cached, 0 if cached == 28 else 2)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_a_video_between_images(name: str, stack: TierStack) -> None:
    video = Item(5, video=True)
    model = tiny(name)
    for last, cached, patches in ((B, 0, 64), (B, 50, 0), (C, 46, 16)):
        given = request(name, [text(20, 0), A, text(4, 1), video, text(5, 2), last, text(6, 3)])
        if cached == 50:
            given["input_ids"][0, -6:] = torch.tensor(text(6, 4))
        cold = run(model, None, **given)
        cache = TieredCache(stack)
        with encoded(model) as encodings:
            assert_same(run(model, None, **given, past_key_values=cache), cold)
        assert (cache.usage.cached_tokens, sum(encodings)) == (cached + (cached == 50), patches)
    other = request(name, [text(20, 0), A, text(4, 1), Item(6, video=True), text(5, 2), B, text(6, 3)])
    cache = TieredCache(stack)
    assert_same(run(model, None, **other, past_key_values=cache), run(model, None, **other))
    assert cache.usage.cached_tokens == 31


def test_a_video_in_frames(stack: TierStack) -> None:
    """Its frames have text in between: all content of the call is reused together."""
    model = tiny("Qwen3VL")
    for seed, question, cached, patches in ((5, 1, 0, 32), (5, 2, 33, 0), (6, 1, 21, 32)):
        given = request("Qwen3VL", [text(20, 0), Item(seed, video=True), text(9, question)])
        ids = given["input_ids"][0].tolist()
        ids[25:25] = [END, *text(2, 9), START]  # after the first frame
        given["input_ids"] = torch.tensor([ids])
        given["mm_token_type_ids"] = 2 * (given["input_ids"] == VIDEO).long()
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        cold = run(model, None, **given)
        cache = TieredCache(stack)
        with encoded(model) as encodings:
            assert_same(run(model, None, **given, past_key_values=cache), cold)
        assert (cache.usage.cached_tokens, sum(encodings)) == (cached + (cached == 33), patches)


def test_the_front_of_content_that_belongs_together(stack: TierStack) -> None:
    """Only the first sound, or the first frame, is stored: both are computed."""
    given = request("Qwen2Audio", [text(20, 0), A, text(9, 1), B, text(5, 2)])  # sounds end at 28 and at 45
    check("Qwen2Audio", given, stack, 0, 2)
    drop_pieces(stack, "main", lambda place: place < 32)
    check("Qwen2Audio", given, stack, 20, 2)
    given = request("Qwen3VL", [text(24, 0), Item(5, video=True), text(9, 1)])
    ids = given["input_ids"][0].tolist()
    ids[29:29] = [END, *text(2, 9), START]  # frames end at 29 and at 37
    given["input_ids"] = torch.tensor([ids])
    given["mm_token_type_ids"] = 2 * (given["input_ids"] == VIDEO).long()
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    check("Qwen3VL", given, stack, 0, 2)
    drop_pieces(stack, "main", lambda place: place < 32)
    check("Qwen3VL", given, stack, 25, 2)


# --- chats ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_chat(name: str, stack: TierStack) -> None:
    """Each turn adds something; what came before is held or found, and not encoded again."""
    model, kept = tiny(name), TieredCache(stack)
    is_known = name != "Qwen2Audio" and name.lower() not in compat.CONTENT_FROM_EMPTY
    turns: list[Any] = [text(20, 0), A, text(9, 1)]
    held = 0
    for more in ([], [text(6, 2)], [B, text(5, 3)], [text(30, 4)], [C, text(4, 5)]):
        turns += more
        new = sum(isinstance(part, Item) for part in more) if held else 1
        given = request(name, turns)
        cold = run(model, None, **given, **NO_PLACEHOLDERS)
        with encoded(model) as encodings:
            assert_same(run(model, None, **given, **NO_PLACEHOLDERS, past_key_values=kept), cold)
        if not new or is_known:
            assert kept.usage.cached_tokens == held
            assert sum(encodings) == new * patches(name)
        again = TieredCache(stack)
        with encoded(model) as encodings:
            assert_same(run(model, None, **given, **NO_PLACEHOLDERS, past_key_values=again), cold)
        assert again.usage.computed_tokens == 1
        assert not encodings
        held = kept.get_seq_length()
        turns.append(cold.sequences[0, given["input_ids"].shape[1] :].tolist())
    assert_consistent(stack)


@pytest.mark.parametrize("name", ALL)
def test_a_kept_cache_and_other_content(name: str, stack: TierStack) -> None:
    cache = TieredCache(stack)
    check(name, [[text(20, 0), A, text(9, 1)]], stack, 0, 1, cache=cache)
    stack.clear()  # so that only what the cache holds can be reused
    check(name, [[text(20, 0), B, text(9, 1)]], stack, before_content(name, 20 + starts(name)), 1, cache=cache)
    stack.clear()
    check(name, [[text(20, 0), B, text(9, 2)]], stack, 20 + 2 * starts(name) + num_tokens(name), 0, cache=cache)
    assert cache.usage.cached_by_tier.keys() == {"resident"}


@pytest.mark.parametrize("name", NUMBERED_IN_3D)
def test_requests_in_between(name: str, stack: TierStack) -> None:
    """The model keeps by how much the last request's positions are shorter; each call starts with its own."""
    model, cache = tiny(name), TieredCache(stack)
    first = [text(20, 0), Item(1, grid=(4, 8)), text(9, 1)]
    given = request(name, first)
    cold = run(model, None, **given)
    state = model.model.rope_deltas.clone()
    assert state.any()
    plain = request(name, [text(30, 5)])
    for between in (
        lambda: run(model, None, **plain),
        lambda: run(model, None, **plain, past_key_values=TieredCache(stack)),
        lambda: run(model, None, **request(name, [text(3, 1), A, B, text(5, 2)])),
        lambda: setattr(model.model, "rope_deltas", None),
    ):
        assert_same(run(model, None, **given, past_key_values=cache), cold)
        assert torch.equal(model.model.rope_deltas, state)
        between()
        assert_same(run(model, None, **given, past_key_values=TieredCache(stack)), cold)
        assert torch.equal(model.model.rope_deltas, state)
        between()
        turn = torch.cat([cold.sequences, torch.tensor([text(4, 7)])], dim=1)
        more = {**given, "input_ids": turn, "attention_mask": torch.ones_like(turn)}
        more["mm_token_type_ids"] = (turn == IMAGE).long()
        cold_turn = run(model, None, **more)
        between()
        with encoded(model) as encodings:
            assert_same(run(model, None, **more, past_key_values=cache), cold_turn)
        assert not encodings
        assert cache.usage.cached_tokens >= 43
        between()


@pytest.mark.parametrize("name", NUMBERED_IN_3D)
def test_text_only(name: str, stack: TierStack) -> None:
    check(name, [[text(30, 0)]], stack, 0, 0)
    check(name, [[text(30, 0)]], stack, 29, 0)
    cache = TieredCache(stack)
    out = check(name, [[text(30, 0)]], stack, 29, 0, cache=cache)
    ids = torch.cat([out.sequences, torch.tensor([text(5, 1)])], dim=1)
    cold = run(tiny(name), ids)
    new = ids[:, 34:]
    turn = run(tiny(name), new, attention_mask=torch.ones_like(ids), past_key_values=cache)  # only the new tokens
    torch.testing.assert_close(turn.logits, cold.logits, rtol=0, atol=1e-4)
    assert cache.usage.cached_tokens == 34


# --- batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEING)
def test_a_left_padded_batch(name: str, stack: TierStack) -> None:
    is_whole = name.lower() in compat.CONTENT_FROM_EMPTY
    rows = [text(20, 0), A, text(9, 1)], [text(14, 0), B, text(7, 2)]
    check(name, list(rows), stack, 0, 2)
    check(name, list(rows), stack, 34, 0)
    check(name, [rows[1], rows[0]], stack, 34, 0)
    check(name, [rows[0]], stack, 34, 0)
    # Row 1 has another image: all rows start before it.
    others = rows[0], [text(14, 0), C, text(7, 2)]
    check(name, list(others), stack, 0 if is_whole else 21, 2)  # 23, but that is within row 0's


@pytest.mark.parametrize("name", SEEING)
def test_rows_with_and_without_images(name: str, stack: TierStack) -> None:
    rows = [text(20, 0), A, text(4, 3), B, text(9, 1)], [text(30, 4)], [text(6, 5), C, text(20, 6)]
    length = request(name, *rows)["input_ids"].shape[1]
    check(name, list(rows), stack, 0, 3)
    check(name, list(rows), stack, length - 1, 0)
    check(name, [rows[2], rows[1]], stack, 31, 0)


def test_a_batch_of_sounds(stack: TierStack) -> None:
    rows = [text(20, 0), A, text(9, 1)], [text(14, 0), B, text(7, 2)]
    check("Qwen2Audio", list(rows), stack, 0, 2)
    check("Qwen2Audio", list(rows), stack, 36, 0)
    check("Qwen2Audio", [rows[0], [text(14, 0), C, text(7, 2)]], stack, 20, 2)
    check("Qwen2Audio", [rows[1], rows[0]], stack, 20, 2)


EXPANDED: list[dict[str, Any]] = [
    {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"num_return_sequences": 2, "do_sample": True},
]  # fmt: skip


@pytest.mark.parametrize("options", EXPANDED, ids=str)
@pytest.mark.parametrize("name", SEEING)
def test_beams_and_samples(name: str, options: dict[str, Any], stack: TierStack) -> None:
    copies = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    model = tiny(name)
    encodes_copies = not hasattr(transformers.GenerationMixin, compat.ENCODING)
    rows = [text(20, 0), A, text(9, 1)], [text(14, 0), B, text(7, 2)]
    given = request(name, *rows)
    for cached in (0, 34):
        cold = run(model, None, **given, **options)
        cache = TieredCache(stack)
        with encoded(model) as encodings, forwarded(model) as columns:
            assert_same(run(model, None, **given, **options, past_key_values=cache), cold)
        assert columns[0] == 35 - cached
        assert sum(encodings) == (0 if cached else 2 * patches(name) * (copies if encodes_copies else 1))
    check(name, [rows[0]], stack, 34, 0)
    # The second image is new: encoded once, and expanded.
    given = request(name, [text(20, 0), A, text(4, 3), C, text(5, 4)])
    cold = run(model, None, **given, **options)
    cache = TieredCache(stack)
    assert_same(run(model, None, **given, **options, past_key_values=cache), cold)
    is_known = name in NUMBERED_IN_3D or not encodes_copies
    assert cache.usage.cached_tokens == (26 if is_known and name.lower() not in compat.CONTENT_FROM_EMPTY else 0)


def test_copies_that_are_fed_different_content(stack: TierStack) -> None:
    """generate() repeats each sound, not each row's sounds: what a copy hears is not what its tokens say."""
    given = request("Qwen2Audio", [text(20, 0), A, text(9, 1), B, text(5, 2)])
    for _ in range(2):
        cold = run(tiny("Qwen2Audio"), None, **given, num_beams=2)
        cache = TieredCache(stack)
        assert_same(run(tiny("Qwen2Audio"), None, **given, num_beams=2, past_key_values=cache), cold)
        assert (cache.usage.cached_tokens, cache.usage.created_tokens) == (0, 0)
        assert "copies of one row" in cache.explain()


# --- ways in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_enabled(name: str, stack: TierStack) -> None:
    prompt = [text(20, 0), A, text(9, 1)]
    length = request(name, prompt)["input_ids"].shape[1]
    colds = {item: run(tiny(name), None, **request(name, [text(20, 0), item, text(9, 1)])) for item in (A, B)}
    enable(stack)
    try:
        for item, cached in ((A, 0), (A, length - 1), (B, before_content(name, 20 + starts(name))), (B, length - 1)):
            with forwarded(tiny(name)) as columns, encoded(tiny(name)) as encodings:
                out = run(tiny(name), None, **request(name, [text(20, 0), item, text(9, 1)]))
            assert_same(out, colds[item])
            assert columns[0] == length - cached
            assert bool(encodings) == (cached < length - 1)
    finally:
        disable()


@pytest.mark.parametrize("name", ALL)
def test_outputs_of_the_whole_prompt(name: str, stack: TierStack) -> None:
    """They are computed, content and all, and stored."""
    given = request(name, [text(20, 0), A, text(9, 1)])
    length = given["input_ids"].shape[1]
    for _ in range(2):
        cache = TieredCache(stack)
        out = run(tiny(name), None, **given, output_hidden_states=True, past_key_values=cache)
        assert_same(out, run(tiny(name), None, **given))
        assert cache.usage.miss_reason is MissReason.OUTPUTS_REQUESTED
    check(name, given, stack, length - 1, 0)


def test_another_way_of_decoding(stack: TierStack) -> None:
    given = request("Llava", [text(20, 0), A, text(9, 1)])
    check("Llava", given, stack, 0, 1)
    options = {"prompt_lookup_num_tokens": 2, "eos_token_id": 127}
    cache = TieredCache(stack)
    cold = run(tiny("Llava"), None, **given, **options)
    assert run(tiny("Llava"), None, **given, **options, past_key_values=cache).sequences.equal(cold.sequences)
    assert cache.usage.miss_reason is MissReason.DISABLED_CALL


@pytest.mark.parametrize("name", SEEING)
def test_after_a_restart(name: str, disk: Disk) -> None:
    given = request(name, [text(20, 0), A, text(21, 1)])
    check(name, given, disk.open(), 0, 1)
    check(name, given, disk.restart(), 32, 0)
    check(name, [[text(20, 0), B, text(21, 1)]], disk.restart(), before_content(name, 16), 1)


def test_a_damaged_block_within_an_image(disk: Disk) -> None:
    """What could be read ends within it: the prefix ends before."""
    given = request("Llava", [text(13, 0), A, text(30, 1)])  # at columns 14 to 18: over the end of a block
    check("Llava", given, disk.open(), 0, 1)
    stack = disk.restart()
    disk.damage(1)
    check("Llava", given, stack, 14, 1)


def test_generating_twice_in_one_call(stack: TierStack) -> None:
    """From scratch each time, with all content."""
    model = tiny("Llava")
    given = request("Llava", [text(20, 0), A, text(9, 1)])
    check("Llava", given, stack, 0, 1)
    cold = run(model, None, **given).sequences

    def decode(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        for _ in range(2):
            out = model.generate(**given, past_key_values=cache, max_new_tokens=5, do_sample=False)
        return out

    cache = TieredCache(stack)
    out = model.generate(**given, custom_generate=decode, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert out.tolist() == cold.tolist()


# --- refused --------------------------------------------------------------------------------------------------------------


def refused(name: str, given: dict[str, Any], stack: TierStack, why: str, **options: Any) -> None:
    """Assert that a call is answered as cold, that nothing is reused or stored, and that the reason says `why`."""
    cold = run(tiny(name), None, **given, **options)
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(tiny(name), None, **given, past_key_values=cache, **options), cold)
        assert (cache.usage.cached_tokens, cache.usage.created_tokens) == (0, 0), cache.explain()
        assert why in cache.explain()


def test_models_that_look_ahead(stack: TierStack) -> None:
    given = request("PaliGemma", [text(20, 0), A, text(9, 1)])
    refused("PaliGemma", given, stack, "looks at later tokens")


def test_models_not_known(stack: TierStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what was passed."""
    for name in ("Llava", "Gemma3", "Qwen2Audio", "Qwen2VL"):
        monkeypatch.delitem(content.KINDS, tiny(name).config.model_type)
        why = {"Qwen2Audio": "input_features", "Qwen2VL": "of earlier requests"}.get(name, "pixel_values")
        refused(name, request(name, [text(20, 0), A, text(9, 1)]), stack, why)


def test_classes_not_known(stack: TierStack) -> None:
    model = tiny("Llava")

    class Other(type(model)):  # type: ignore[misc]
        pass

    given = request("Llava", [text(20, 0), A, text(9, 1)])
    model.__class__, stock = Other, type(model)
    try:
        refused("Llava", given, stack, "pixel_values")
    finally:
        model.__class__ = stock


def test_arguments_not_known(stack: TierStack) -> None:
    given = request("Llava", [text(20, 0), A, text(9, 1)])
    check("Llava", given, stack, 0, 1)
    refused("Llava", given, stack, "vision_feature_layer", vision_feature_layer=-1)


def test_features_encoded_by_the_user(stack: TierStack) -> None:
    if not hasattr(transformers.GenerationMixin, compat.ENCODING):
        pytest.skip("before transformers 5.24 there is no such argument")
    model = tiny("Llava")
    given = request("Llava", [text(20, 0), A, text(9, 1)])
    check("Llava", given, stack, 0, 1)
    pixels = given.pop("pixel_values")

    def outputs() -> Any:
        with torch.no_grad():
            return {"image": model.model.get_image_features(pixels, return_dict=True)}

    cold = run(model, None, **given, mm_encoder_outputs=outputs())
    cache = TieredCache(stack)
    assert_same(run(model, None, **given, mm_encoder_outputs=outputs(), past_key_values=cache), cold)
    assert cache.usage.miss_reason is MissReason.UNKNOWN_CONTENT
    assert "mm_encoder_outputs" in cache.explain()


@pytest.mark.parametrize("name", SEEING[1:])
def test_types_that_mark_text(name: str, stack: TierStack) -> None:
    given = request(name, [text(20, 0), A, text(9, 1)])
    types = "token_type_ids" if name == "Gemma3" else "mm_token_type_ids"
    marked = request(name, [text(30, 0)])
    marked[types] = torch.zeros_like(marked["input_ids"])
    marked[types][0, 10:14] = 1
    if name == "Gemma3":
        check(name, marked | {types: torch.zeros_like(marked[types])}, stack, 0, 0)
        refused(name, marked, stack, types)
        given[types][0, 28:31] = 1
        refused(name, given, stack, types)
    else:
        model = tiny(name)
        cold = run(model, None, **marked)
        cache = TieredCache(stack)
        assert_same(run(model, None, **marked, past_key_values=cache), cold)
        assert cache.usage.created_tokens == 0


def test_types_that_leave_out_an_image(stack: TierStack) -> None:
    """Gemma-3 then looks at it from left to right only."""
    given = request("Gemma3", [text(20, 0), A, text(9, 1)])
    check("Gemma3", given, stack, 0, 1)
    given["token_type_ids"] = torch.zeros_like(given["token_type_ids"])
    check("Gemma3", given, stack, before_content("Gemma3", 21), 1)


@pytest.mark.parametrize("name", NUMBERED_IN_3D)
def test_positions_of_the_users(name: str, stack: TierStack) -> None:
    given = request(name, [text(20, 0), A, text(9, 1)])
    check(name, given, stack, 0, 1)
    refused(name, given, stack, "positions", position_ids=torch.arange(35)[None])
    refused(name, given, stack, "positions", position_ids=torch.arange(35)[None].expand(4, 1, -1))
    plain = request(name, [text(20, 0), text(9, 1)])
    refused(name, plain, stack, "positions", position_ids=2 * torch.arange(29)[None].expand(4, 1, -1))


def test_short_content(stack: TierStack) -> None:
    """Its ids would have too few bits of its digest."""
    refused("Qwen2VL", request("Qwen2VL", [text(20, 0), Item(1, grid=(2, 6)), text(9, 1)]), stack, "fewer than 4 tokens")


def test_more_features_than_places(stack: TierStack) -> None:
    """A call that fails stores nothing, and the next one is right."""
    given = request("Llava", [text(20, 0), A, text(9, 1)])
    wrong = given | {"pixel_values": torch.cat([given["pixel_values"]] * 3)}
    with pytest.raises(Exception, match=r"(?i)image"):
        run(tiny("Llava"), None, **wrong, past_key_values=TieredCache(stack))
    check("Llava", given, stack, 0, 1)
    bare = request("Llava", [text(30, 0)]) | {"pixel_values": given["pixel_values"]}
    cache = TieredCache(stack)
    with pytest.raises(Exception, match=r"(?i)image"):
        run(tiny("Llava"), None, **bare, past_key_values=cache)
    assert "no tokens that stand for it" in cache.explain()


@pytest.mark.skipif(not compat.CHUNKED_PREFILL_CONTINUES, reason="before 5.24 nothing is reused there")
def test_chunked_prefill(stack: TierStack) -> None:
    """Stock feeds the features of the first placeholders to the chunks that are left."""
    given = request("Qwen2VL", [text(20, 0), A, text(9, 1), B, text(5, 2)])
    check("Qwen2VL", [[text(20, 0), A, text(9, 1)]], stack, 0, 1)
    refused("Qwen2VL", given, stack, "prefill_chunk_size", prefill_chunk_size=16)


@pytest.mark.parametrize("name", ALL)
def test_only_the_new_tokens(name: str, stack: TierStack) -> None:
    """What the cache holds cannot be fed again without its content: an error, and the cache as it was."""
    cache = TieredCache(stack)
    given = request(name, [text(20, 0), A, text(9, 1)])
    out = check(name, given, stack, 0, 1, cache=cache)
    held = cache.get_seq_length()
    ids = torch.cat([out.sequences, torch.tensor([text(5, 2)])], dim=1)
    with pytest.raises(ConfigError, match="whole conversation"):
        run(tiny(name), ids[:, held:], attention_mask=torch.ones_like(ids), past_key_values=cache)
    new = request(name, [B, text(5, 2)])
    new["attention_mask"] = torch.ones(1, held + new["input_ids"].shape[1], dtype=torch.long)
    with pytest.raises((ConfigError, ValueError, IndexError, RuntimeError)):
        run(tiny(name), None, **new, past_key_values=cache)
    check(name, given, stack, given["input_ids"].shape[1] - 1, 0, cache=cache)


def test_only_the_new_tokens_with_an_image(stack: TierStack) -> None:
    cache = TieredCache(stack)
    check("Llava", [[text(30, 0)]], stack, 0, 0, cache=cache)
    new = request("Llava", [B, text(5, 2)])
    new["attention_mask"] = torch.ones(1, 34 + new["input_ids"].shape[1], dtype=torch.long)
    with pytest.raises(ConfigError, match="whole conversation"):
        run(tiny("Llava"), None, **new, past_key_values=cache)


def test_hooks_that_transformers_puts_on_by_itself() -> None:
    """At the first call that collects hidden states, as a tower's always does: the model is the same before and after."""
    model = tiny.__wrapped__("Llava")
    before = identity.identify(model)
    run(model, None, **request("Llava", [text(20, 0), A, text(9, 1)]))
    assert before is not None
    assert identity.is_unchanged(model, before)
    after = identity.identify(model)
    assert after is not None
    assert after.is_portable
    assert after.digest == before.digest


@pytest.mark.parametrize("name", ALL)
def test_by_hand(name: str, stack: TierStack) -> None:
    """restore() is given tokens only."""
    given = request(name, [text(20, 0), A, text(9, 1)])
    check(name, given, stack, 0, 1)
    token = AUDIO if name == "Qwen2Audio" else IMAGE
    assert (given["input_ids"] == token).any()
    for features in (A, B):
        given = request(name, [text(20, 0), features, text(9, 1)])
        cache = TieredCache(stack)
        assert cache.restore(tiny(name), given["input_ids"]) == 0
        with torch.no_grad():
            tiny(name)(**given, past_key_values=cache)
        cache.commit(given["input_ids"])
        assert cache.usage.created_tokens == 0
        assert cache.usage.miss_reason is MissReason.UNKNOWN_CONTENT
    assert warm(tiny(name), given["input_ids"], stack=stack).created_tokens == 0
    check(name, request(name, [text(20, 0), A, text(9, 1)]), stack, given["input_ids"].shape[1] - 1, 0)


@pytest.mark.parametrize("name", NUMBERED_IN_3D)
def test_text_by_hand_after_an_image(name: str, stack: TierStack) -> None:
    """A forward by hand on a cache adds what the last image shortened: nothing is reused or stored."""
    model, ids = tiny(name), torch.tensor([text(30, 0)])
    check(name, [[text(30, 0)]], stack, 0, 0)
    run(model, None, **request(name, [text(3, 1), A, text(5, 2)]))
    cache = TieredCache(stack)
    assert cache.restore(model, ids) == 0
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.commit(ids)
    assert cache.usage.created_tokens == 0


def test_pads_that_are_placeholders(stack: TierStack) -> None:
    """They stand for nothing: they are masked."""
    given = request("Llava", [text(20, 0), A, text(9, 1)], [text(12, 1), B, text(9, 2)])
    check("Llava", given, stack, 0, 2)
    keyed = content.Content(tiny("Llava"), {"pixel_values": given["pixel_values"]}, 2, None)
    ids = given["input_ids"].masked_fill(given["attention_mask"] == 0, IMAGE)
    prompt = keyed.key(Columns.of(ids, given["attention_mask"]), {})
    assert isinstance(prompt, Columns)
    assert prompt.solid == ((21, 25),)


def test_embeddings_and_an_image(stack: TierStack) -> None:
    model = tiny("Llava")
    given = request("Llava", [text(20, 0), A, text(9, 1)])
    embeds = model.get_input_embeddings()(given["input_ids"]).detach()
    options = {"inputs_embeds": embeds, "pixel_values": given["pixel_values"], "num_beams": 2}
    cold = run(model, None, **options)
    for _ in range(2):
        cache = TieredCache(stack)
        assert_same(run(model, None, **options, past_key_values=cache), cold)
        assert (cache.usage.cached_tokens, cache.usage.created_tokens) == (0, 0)


def test_grids_without_pixels(stack: TierStack) -> None:
    """They number the tokens that the types mark."""
    given = request("Qwen2VL", [text(20, 0), A, text(9, 1)])
    check("Qwen2VL", given, stack, 0, 1)
    refused("Qwen2VL", given | {"video_grid_thw": given["image_grid_thw"]}, stack, "video_grid_thw")
    del given["pixel_values"]
    refused("Qwen2VL", given, stack, "mm_token_type_ids")


def test_lists_instead_of_tensors(stack: TierStack) -> None:
    given = request("Qwen2_5_VL", [text(20, 0), Item(5, video=True), text(9, 1)])
    given["second_per_grid_ts"] = [1.5]
    refused("Qwen2_5_VL", given, stack, "second_per_grid_ts")
    given["second_per_grid_ts"] = torch.tensor([1.5])
    cold = run(tiny("Qwen2_5_VL"), None, **given)
    for cached in (0, 38):
        cache = TieredCache(stack)
        assert_same(run(tiny("Qwen2_5_VL"), None, **given, past_key_values=cache), cold)
        assert cache.usage.cached_tokens == cached
    given["second_per_grid_ts"] = torch.tensor([3.0])
    cache = TieredCache(stack)
    cold = run(tiny("Qwen2_5_VL"), None, **given)
    assert_same(run(tiny("Qwen2_5_VL"), None, **given, past_key_values=cache), cold)
    assert cache.usage.cached_tokens == 21


@pytest.mark.parametrize(
    "wrong",
    [{"image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}, {"image_sizes": torch.tensor([[8, 8], [8, 8]])}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_items_whose_sums_do_not_fit(wrong: dict[str, Any], stack: TierStack) -> None:
    """Then it is not certain which features are whose, and they are reused together."""
    name = "Llava" if "image_sizes" in wrong else "Qwen2VL"
    given = request(name, [text(20, 0), A, text(5, 1), B, text(9, 1)])
    arguments = {key: given[key] for key in ("pixel_values", "image_grid_thw") if key in given} | wrong
    keyed = content.Content(tiny(name), arguments, 1, None).key(Columns.of(given["input_ids"], None), {})
    assert isinstance(keyed, Columns)
    assert keyed.solid == ((21, 36),)


# --- at random ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ALL)
def test_many_requests(name: str, seed: int) -> None:
    """Branches of conversations, in batches, by kept caches and new ones, on a budget that evicts."""
    choose = np.random.default_rng(seed)
    stack = new_stack("400KB")
    kept = TieredCache(stack)
    parts: list[Any] = [A, B, C, text(3, 1), text(7, 2), text(11, 3)]
    hits = 0
    for _ in range(25):
        rows = [
            [text(6, 0), *(parts[choose.integers(6)] for _ in range(choose.integers(1, 5))), text(2, int(choose.integers(3)))]
            for _ in range(choose.integers(1, 3))
        ]
        options: dict[str, Any] = [{}, {"num_beams": 2}][choose.integers(2)]
        given = request(name, *rows)
        cold = run(tiny(name), None, **given, **options)
        cache = kept if choose.integers(2) else TieredCache(stack)
        assert_same(run(tiny(name), None, **given, **options, past_key_values=cache), cold)
        hits += cache.usage.cached_tokens > 0
        assert_consistent(stack)
    assert hits > 3
