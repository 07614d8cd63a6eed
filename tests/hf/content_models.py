"""Tiny random models that see and hear, and prompts for them: lists of text and of items of content."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.hf.models import prompt

VOCABULARY = 128
IMAGE, VIDEO, AUDIO, START, END, PAD = 120, 121, 122, 123, 124, 0
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_QWEN_TOWER = {"depth": 1, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip


def _config(name: str) -> Any:
    if name == "Llava":
        tower = {**_TOWER, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32}
        text = {**_TEXT, "model_type": "llama"}
        return transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=IMAGE)
    if name == "Gemma3":
        tower = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 2}
        layers = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
        text = {**_TEXT, **layers, "model_type": "gemma3_text"}
        ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
        return transformers.Gemma3Config(vision_config=tower, text_config=text, mm_tokens_per_image=4, **ids)
    if name == "PaliGemma":
        tower = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32}
        text = {**_TEXT, "model_type": "gemma", "head_dim": 8}
        return transformers.PaliGemmaConfig(
            vision_config=tower, text_config=text, image_token_index=IMAGE, projection_dim=32, hidden_size=32
        )
    if name == "Qwen2Audio":
        tower = {
            "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32,
            "max_source_positions": 16, "initializer_range": 0.3,
        }  # fmt: skip
        text = {**_TEXT, "model_type": "qwen2"}
        return transformers.Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=AUDIO)
    tower = {
        "Qwen2VL": {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 32},
        "Qwen2_5_VL": {
            **_QWEN_TOWER, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        "Qwen3VL": {
            **_QWEN_TOWER, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    }[name]  # fmt: skip
    text = {**_TEXT, **_MROPE, **({"head_dim": 8} if name == "Qwen3VL" else {})}
    return getattr(transformers, f"{name}Config")(
        vision_config={**tower, "initializer_range": 0.3}, text_config=text, **_QWEN_IDS
    )


@functools.cache
def tiny(name: str) -> PreTrainedModel:
    """Return the tiny `name`ForConditionalGeneration."""
    torch.manual_seed(0)
    config = _config(name)
    config.initializer_range = 0.3
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():  # some towers fix their own
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model


@dataclass(frozen=True)
class Item:
    """An image, a video of two frames, or a sound. The same seed gives the same."""

    seed: int
    grid: tuple[int, int] = (4, 4)  # of patches, where images have any size
    video: bool = False

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid) // 4 * (1 + self.video)


def text(length: int, seed: int) -> list[int]:
    return (prompt(length, seed)[0] % 115 + 3).tolist()


def request(name: str, *rows: list[Any]) -> dict[str, Any]:
    """Return generate()'s arguments for rows of text (lists of ids) and items, left-padded to one length."""
    ids = [[token for part in row for token in (_tokens(name, part) if isinstance(part, Item) else part)] for row in rows]
    length = max(map(len, ids))
    input_ids = torch.tensor([[PAD] * (length - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids])
    items = [part for row in rows for part in row if isinstance(part, Item)]
    return {"input_ids": input_ids, "attention_mask": mask, **_types(name, input_ids), **_features(name, items)}


def _tokens(name: str, item: Item) -> list[int]:
    if name == "Qwen2Audio":
        return [AUDIO] * 8
    if name.startswith("Qwen"):
        return [START, *[VIDEO if item.video else IMAGE] * item.num_tokens, END]
    return [START, *[IMAGE] * 4, END]


def _types(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    if name.startswith("Qwen") and name != "Qwen2Audio":
        return {"mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}
    if name == "Gemma3":
        return {"token_type_ids": (ids == IMAGE).long()}
    return {"token_type_ids": torch.zeros_like(ids)} if name == "PaliGemma" else {}


def _features(name: str, items: list[Item]) -> dict[str, torch.Tensor]:
    if not items:
        return {}
    if name == "Qwen2Audio":
        mask = torch.ones(len(items), 32, dtype=torch.long)
        return {"input_features": torch.stack([_noise(item, 8, 32) for item in items]), "feature_attention_mask": mask}
    if not name.startswith("Qwen"):
        return {"pixel_values": torch.stack([_noise(item, 3, 8, 8) for item in items])}
    features = {}
    for feature, grid_name, is_video in (
        ("pixel_values", "image_grid_thw", False),
        ("pixel_values_videos", "video_grid_thw", True),
    ):
        chosen = [item for item in items if item.video is is_video]
        grid = torch.tensor([[1 + is_video, *item.grid] for item in chosen])
        if chosen:
            patches = [_noise(item, int(rows), 3 * 2 * 4 * 4) for item, rows in zip(chosen, grid.prod(-1), strict=True)]
            features |= {feature: torch.cat(patches), grid_name: grid}
    return features


def _noise(item: Item, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(item.seed))


@contextmanager
def encoded(model: PreTrainedModel) -> Iterator[list[int]]:
    """Collect how many rows of features each run of a model's tower gets."""
    towers = [
        module for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("vision_tower", "visual", "audio_tower")
    ]  # fmt: skip
    assert len(towers) == 1
    runs: list[int] = []
    original = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is towers[0]:
            runs.append(len(args[0] if args else next(iter(kwargs.values()))))
        return original(self, *args, **kwargs)

    torch.nn.Module.__call__ = call  # torch's global hooks do not see keyword arguments
    try:
        yield runs
    finally:
        torch.nn.Module.__call__ = original
