"""Tiny random models. `initializer_range=0.3` makes attention matter: at 0.02 a wrong prefix hardly shows in the logits."""

import functools
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "Phi": {"num_key_value_heads": 4},
    "StableLm": {"num_key_value_heads": 4},
    "OpenAIGPT": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "GPTNeoX": {"num_key_value_heads": None},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 48},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Qwen3": {"head_dim": 16},
    "Starcoder2": {"sliding_window": None},
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
    "Mistral": {"sliding_window": 24},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "num_key_value_heads": None},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "FalconH1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2,
        "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32, "position_embedding_type": "rope",
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "expand": 2, "head_dim": 8,
    },
    "Qwen3_5Text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
    },
    "OlmoHybrid": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_key_value_heads": 4,
    },
    "Lfm2Moe": {
        "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "KimiLinear": {
        "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "num_local_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
    },
    "Zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 24, "head_dim": 8, "num_experts": 2},
    "Jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "Mamba": {"state_size": 8, "num_key_value_heads": None},
    "FalconMamba": {"state_size": 8, "num_key_value_heads": None},
    "DeepseekV32": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 8,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 2,
    },
    "GlmMoeDsa": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 8,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 2,
    },
    "DeepseekV4": {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 12, "sliding_window": 24,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
    },
    "Gemma3nText": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "head_dim": 16, "sliding_window": 24, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4Text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "head_dim": 16, "global_head_dim": 24, "sliding_window": 24, "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    },
    "Gemma2": {"head_dim": 16, "sliding_window": 24},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2},
    "Cohere2": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmo3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {
        "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Llama4Text": {
        "head_dim": 16, "attention_chunk_size": 24, "num_local_experts": 2, "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
    },
}  # fmt: skip

FULL_ATTENTION = (
    "Llama", "Qwen2", "Qwen3", "GPT2", "GPTNeoX", "Phi", "Phi3", "Olmo2", "Granite", "OPT", "Bloom", "StableLm",
    "Starcoder2", "Mixtral", "DeepseekV3",
)  # fmt: skip


INDEXED = ("DeepseekV32", "GlmMoeDsa", "DeepseekV4")  # pick 12 tokens to attend to, by keys of their own, or compress them
SHARING = ("Gemma3nText", "Gemma4Text")  # windows, and layers that use another one's K/V; heads of two widths

REFUSED = ("Jamba", "Mamba", "FalconMamba", "Bamba")  # wrong in transformers itself where they go on from a prefix, or some are

RECURRENT = (
    "Mamba2", "Lfm2", "Lfm2Moe", "Qwen3Next", "Qwen3_5Text", "FalconH1", "GraniteMoeHybrid", "NemotronH", "OlmoHybrid",
    "KimiLinear", "Zaya",
)  # fmt: skip  # with states in place of tokens, alone or beside attention: from transformers 5.17 on

SLIDING = ("Mistral", "Gemma2", "Gemma3Text", "Cohere2", "Olmo3", "GptOss", "Llama4Text")  # windows or chunks of 24 tokens


@functools.cache
def tiny(name: str = "Llama", seed: int = 0) -> PreTrainedModel:
    """Return the tiny `name`ForCausalLM of a seed. Shared: a test that changes a model makes its own with `fresh`."""
    return fresh(name, seed)


def fresh(name: str = "Llama", seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a new tiny model."""
    settings = {**_SIZES, **_OWN.get(name, {}), **config}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**settings)).eval()
    model.generation_config.pad_token_id = 0
    return model


def prompt(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Return random token ids `[rows, length]` without special tokens."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
