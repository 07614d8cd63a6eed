"""What a request holds besides tokens: images, videos and sounds, at the places of its placeholder tokens.

Owns which of a call's arguments are such content and of which models, the ids that stand for it in place of the
placeholders', where a restored prefix may end, and what of it need not be encoded again. Refuses to own how K/V are found and
stored: that sees ids only. Refuses models where K/V in front of content depend on it, and arguments it does not know.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from tiered_cache.hf import compat
from tiered_cache.hf.checks import has_plain_positions, is_absent
from tiered_cache.hf.columns import Columns
from tiered_cache.hf.explain import Refusal
from tiered_cache.usage import MissReason

# An id has 63 bits of a digest. Prefixes end only behind whole runs, so this many agree before two contents are confused.
SHORTEST_RUN = 4
_TYPES = ("token_type_ids", "mm_token_type_ids")  # say of each token whether it is a placeholder, and of what
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


@dataclass(frozen=True, slots=True)
class Modality:
    """One kind of content, as models take it.

    Attributes:
        placeholder: attribute of the config with the id of its placeholder tokens.
        arguments: the features, and what comes with them; one row an item (but see `grid`), in the order of placeholders.
        grid: the argument `[items, 3]` whose products say how many rows of the features an item has; four of them, or as
            the config says, are one placeholder.
        is_even: with nothing but features, items of one call have equally many placeholders.
    """

    placeholder: str
    arguments: tuple[str, ...]
    grid: str | None = None
    is_even: bool = False


_GRIDS = (
    Modality("image_token_id", ("pixel_values", "image_grid_thw"), grid="image_grid_thw"),
    Modality("video_token_id", ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"), grid="video_grid_thw"),
)
_IMAGES = (Modality("image_token_id", ("pixel_values", "image_sizes", "pixel_attention_mask"), is_even=True),)
_SOUNDS = (Modality("audio_token_id", ("input_features", "feature_attention_mask", "input_features_mask")),)

# Models that continue behind content from K/V alone, each tested. Those that attend to later tokens (PaliGemma) do not.
KINDS: dict[str, tuple[Modality, ...]] = {
    "llava": _IMAGES,
    "gemma3": _IMAGES,
    "qwen2_vl": _GRIDS,
    "qwen2_5_vl": _GRIDS,
    "qwen3_vl": _GRIDS,
    "qwen2_audio": _SOUNDS,
}
# Models that number content in three dimensions, and keep on themselves by how much that shortens a row. In generate() they
# compute both for the whole prompt, before it is known what is restored: as long as the cache is empty then, as in a cold call.
_NUMBERED_IN_3D = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})


@dataclass(frozen=True, slots=True)
class _Item:
    """An image, video or sound: place `index` in the arguments of a modality, columns `start` to `stop` of a row."""

    modality: int
    index: int
    row: int
    start: int
    stop: int


class Content:
    """The content of one call, taken out of its arguments; `feed` puts back what is to be encoded.

    Args:
        model: the model that generates.
        arguments: by name.
        rows: rows of the batch that they belong to.
        encode: turns arguments into what forward() takes; None where forward() takes them as they are.
    """

    def __init__(
        self,
        model: Any,
        arguments: dict[str, torch.Tensor],
        rows: int,
        encode: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self._model = model
        self._modalities = [
            replace(modality, arguments=tuple(name for name in modality.arguments if name in arguments))
            for modality in KINDS[model.config.model_type]
            if modality.arguments[0] in arguments
        ]
        self._arguments = arguments
        self._rows = rows
        self._encode = encode
        self._items: list[_Item] | None = None  # None where it is not known which item is at which placeholders
        self._end = 0  # the column behind the last placeholder

    @classmethod
    def take(
        cls,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        rows: int,
        encode: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Self | None:
        """Take the content out of a call's arguments; None, and nothing taken, where there is none or it is not understood."""
        if not _is_known(model):
            return None
        modalities = KINDS[model.config.model_type]
        passed = {
            name: model_kwargs[name]
            for modality in modalities
            for name in modality.arguments
            if model_kwargs.get(name) is not None
        }
        features = {modality.arguments[0] for modality in modalities}
        without = {name for modality in modalities if modality.arguments[0] not in passed for name in modality.arguments}
        if not passed.keys() & features or passed.keys() & without:
            return None
        if not all(isinstance(value, torch.Tensor) and value.ndim for value in passed.values()):
            return None
        for name in passed:
            del model_kwargs[name]
        return cls(model, passed, rows, encode)

    @classmethod
    def defer(cls, model: Any, model_kwargs: dict[str, Any], rows: int, encode: Callable[[dict[str, Any]], Any]) -> Self | None:
        """Take the content out before generate() encodes it; None where it would not, or with arguments not known here."""
        known = {name for modality in KINDS.get(model.config.model_type, ()) for name in modality.arguments}
        known |= {*compat.PLAIN_MODEL_ARGUMENTS, *compat.OUTPUT_ARGUMENTS, *_TYPES}
        passed = {name for name, value in model_kwargs.items() if not is_absent(value)}
        if not model._supports_mm_encoder_outputs() or passed - known:
            return None
        return cls.take(model, model_kwargs, rows, encode)

    @property
    def names(self) -> str:
        """The arguments, in words."""
        return ", ".join(sorted(self._arguments))

    def key(self, prompt: Columns, model_kwargs: dict[str, Any]) -> Columns | Refusal:
        """Put ids that only this content has in place of the placeholders'; or say why that cannot be done.

        Args:
            prompt: the rows as they are fed, perhaps several copies of each.
            model_kwargs: what else the call passes.
        """
        copies = prompt.rows // self._rows
        if self._encode is not None:  # not expanded yet
            prompt = prompt.take(range(0, prompt.rows, copies))
        real = np.arange(prompt.length) >= np.array(prompt.pads)[:, None]
        places = [real & (prompt.ids == _placeholder(self._model, modality)) for modality in self._modalities]
        is_placeholder = np.logical_or.reduce(places)
        runs = _runs(is_placeholder)
        if not all(place.any() for place in places):
            return self._refused("but has no tokens that stand for it")
        if min(stop - start for _, start, stop in runs) < SHORTEST_RUN:
            return self._refused(f"with fewer than {SHORTEST_RUN} tokens that stand for it")
        types = []
        for name in _TYPES:
            if (value := model_kwargs.get(name)) is None:
                continue
            given = value[:: len(value) // prompt.rows].cpu().numpy()
            if given.shape != prompt.ids.shape or given[~is_placeholder].any():
                return Refusal(MissReason.UNKNOWN_CONTENT, f"the call passes {name}, which mark other tokens than placeholders")
            types.append((name, given))
        solid: tuple[tuple[int, int], ...]
        self._items = self._find_items(places)
        self._end = max(stop for _, _, stop in runs)
        ids = prompt.ids.copy()
        if self._items is None:
            seed = hashlib.sha256(b"all")
            for name in sorted(self._arguments):
                _add(seed, name, self._arguments[name])
            for name, given in types:
                _add(seed, name, torch.from_numpy(given[is_placeholder]))
            ids[is_placeholder] = _ids(seed.digest(), int(is_placeholder.sum()))
            solid = ((min(start for _, start, _ in runs), self._end),)
        else:
            for row, start, stop in runs:
                ids[row, start:stop] = _ids(self._digest(row, start, stop, types), stop - start)
            solid = tuple({(start, stop) for _, start, stop in runs})
        if self._model.config.model_type in compat.CONTENT_FROM_EMPTY:
            solid = ((0, self._end),)
        prompt = replace(prompt, ids=ids, solid=solid)
        if self._encode is not None or copies == 1:
            return prompt
        one_each = prompt.take(range(0, prompt.rows, copies))
        if not np.array_equal(one_each.repeat(copies).ids, prompt.ids):
            return self._refused("which copies of one row (beams, return sequences) do not share")
        return one_each

    def feed(self, model_kwargs: dict[str, Any], input_ids: torch.Tensor, covered: int) -> None:
        """Hand to the prefill what the first `covered` columns do not hold, encoded where generate() does that before it."""
        left = self._left(covered)
        if self._encode is not None and left:
            copies = len(input_ids) // self._rows
            encoded = self._encode(left)
            _, left = self._model._expand_inputs_for_generation(
                expand_size=copies, input_ids=input_ids[::copies, covered:], **encoded
            )
        model_kwargs.update(left)

    def _left(self, covered: int) -> dict[str, torch.Tensor]:
        """Return the arguments without the items that `covered` columns hold."""
        if not covered:
            return dict(self._arguments)
        if covered >= self._end:
            return {}
        if self._items is None:
            return dict(self._arguments)
        left = {}
        for number, modality in enumerate(self._modalities):
            indices = [item.index for item in self._items if item.modality == number and item.start >= covered]
            for name in modality.arguments if indices else ():
                left[name] = torch.cat([self._rows_of(modality, name, index) for index in indices])
        return left

    def _find_items(self, places: Sequence[np.ndarray]) -> list[_Item] | None:
        """Return which item is at which placeholders, in the order of modalities; None where that is not certain."""
        items = []
        for number, (modality, place) in enumerate(zip(self._modalities, places, strict=True)):
            where = np.argwhere(place)  # row by row, as models fill them
            counts = self._counts(modality, len(where))
            if counts is None or sum(counts) != len(where) or min(counts) < 1:
                return None
            last = 0
            for index, count in enumerate(counts):
                first, last = last, last + count
                (row, start), (end_row, end) = where[first].tolist(), where[last - 1].tolist()
                if row != end_row or end - start != count - 1:  # an item with other tokens in between
                    return None
                items.append(_Item(number, index, row, start, end + 1))
        return items

    def _counts(self, modality: Modality, placeholders: int) -> list[int] | None:
        """Return the number of placeholders of each item; None where it is not known."""
        features = self._arguments[modality.arguments[0]]
        if modality.grid is not None:
            grid = self._arguments.get(modality.grid)
            if grid is None:
                return None
            merged = self._model.config.vision_config.spatial_merge_size**2
            return [int(rows) // merged for rows in grid.prod(-1)]
        if modality.is_even and len(modality.arguments) == 1 and features.ndim == 4 and placeholders % len(features) == 0:
            return [placeholders // len(features)] * len(features)
        return None

    def _rows_of(self, modality: Modality, name: str, index: int) -> torch.Tensor:
        """Return what one item has of an argument."""
        first, last = index, index + 1
        if modality.grid is not None and name == modality.arguments[0]:
            rows = self._arguments[modality.grid].prod(-1)
            first, last = int(rows[:index].sum()), int(rows[: index + 1].sum())
        return self._arguments[name][first:last]

    def _digest(self, row: int, start: int, stop: int, types: Sequence[tuple[str, np.ndarray]]) -> bytes:
        """Return a digest of all items in a run of placeholders: where attention goes both ways, they see each other."""
        digest = hashlib.sha256(b"run")
        assert self._items is not None
        for item in sorted(self._items, key=lambda item: item.start):
            if item.row == row and start <= item.start < stop:
                modality = self._modalities[item.modality]
                digest.update(b"%d+%d" % (item.start - start, item.stop - start))
                for name in modality.arguments:
                    _add(digest, name, self._rows_of(modality, name, item.index))
        for name, given in types:
            _add(digest, name, torch.from_numpy(given[row, start:stop]))
        return digest.digest()

    def _refused(self, why: str) -> Refusal:
        return Refusal(MissReason.UNKNOWN_CONTENT, f"the call passes {self.names}, {why}")


def plain_arguments(model: PreTrainedModel, model_kwargs: dict[str, Any], content: Content | None) -> frozenset[str]:
    """Return the names of arguments that token ids, and content as it was keyed, do tell."""
    if not _is_known(model):
        return frozenset()
    given = {name: model_kwargs[name] for name in _TYPES if isinstance(model_kwargs.get(name), torch.Tensor)}
    return frozenset(name for name, value in given.items() if content is not None or not value.any())


def refuse_state(model: PreTrainedModel) -> Refusal | None:
    """Refuse a model that keeps something of earlier requests on itself, unless generate() computes it anew each time."""
    if compat.keeps_state(model) and not (_is_known(model) and model.config.model_type in _NUMBERED_IN_3D):
        return Refusal(MissReason.UNKNOWN_CONTENT, "the model keeps something of earlier requests on itself")
    return None


def refuse_encoded(before: dict[str, Any], after: dict[str, Any]) -> Refusal | None:
    """Refuse arguments that generate() encoded: what came out does not tell what went in."""
    if is_absent(after.get("mm_encoder_outputs")):
        return None
    passed = {name for name, value in before.items() if not is_absent(value)}
    names = sorted(passed - compat.PLAIN_MODEL_ARGUMENTS - {*_TYPES})
    why = f"the call passes {', '.join(names)}, which token ids do not tell"
    return Refusal(MissReason.UNKNOWN_CONTENT, why)


def refuse_by_hand(model: PreTrainedModel, input_ids: Any) -> Refusal | None:
    """Refuse what a loop written by hand cannot tell restore(): content, and what the model keeps of earlier requests."""
    if compat.keeps_state(model):
        return Refusal(MissReason.UNKNOWN_CONTENT, "the model keeps something of earlier requests on itself")
    tokens = [getattr(model.config, name, None) for name in _PLACEHOLDERS]
    if any(token is not None and bool((input_ids == token).any()) for token in tokens):
        why = "input_ids has placeholders of images or sounds, which restore() is not given; generate() is"
        return Refusal(MissReason.UNKNOWN_CONTENT, why)
    return None


def positions_follow(model: PreTrainedModel, prompt: Columns, position_ids: torch.Tensor | None, *, are_own: bool) -> bool:
    """Say whether positions are those that generate() gives to these tokens and this content.

    Args:
        are_own: it did; the call passed none.
    """
    if model.config.model_type not in _NUMBERED_IN_3D or not _is_known(model):
        return has_plain_positions(model, prompt, position_ids)
    return are_own or (not prompt.solid and has_plain_positions(model, prompt, position_ids))


def _is_known(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.") and model.config.model_type in KINDS


def _placeholder(model: PreTrainedModel, modality: Modality) -> int:
    token = getattr(model.config, modality.placeholder, None)
    return -1 if token is None else int(token)


def _runs(is_placeholder: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the longest stretches of placeholders `[B, T]` as (row, start, stop)."""
    edges = np.diff(np.pad(is_placeholder.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, stops = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return [(int(row), int(start), int(stop)) for (row, start), (_, stop) in zip(starts, stops, strict=True)]


def _ids(digest: bytes, count: int) -> np.ndarray:
    """Return `count` ids that no tokenizer has and no other digest gives: negative, 63 bits each."""
    return np.frombuffer(hashlib.shake_256(digest).digest(8 * count), "<i8") | np.int64(-(2**63))


def _add(digest: Any, name: str, value: torch.Tensor) -> None:
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
    digest.update(data)
