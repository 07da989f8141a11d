"""What a tiny config of one class needs beyond `sizes.py`, and why. Key: model_type, or class name if it has none."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from .configs import DEFAULT, Override, Shape, make_config
from .sizes import HEAD_DIM, HEADS

# Default None is as many as heads; their large models group queries.
_GROUPED = {"num_key_value_heads": 2}
# Latent attention expands keys and values to every head.
_UNGROUPED = {"num_key_value_heads": HEADS}
_LATENT = (
    *("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("kimi_linear", "minicpm3", "youtu"),
)


def _local_then_global(shape: Shape) -> list[str]:
    return shape.cycle("sliding_attention", "full_attention")


def _rope_with_sections(shape: Shape) -> dict[str, Any]:
    """Sections must sum to half of the head dimension."""
    one = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    return {"full_attention": dict(one), "sliding_attention": dict(one)}


def _shared_text_config(base: str):
    """Gemma 4 assistants: every layer reads keys and values of the main model, none has its own."""

    def make(shape: Shape):
        shared = {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": shape.layers,
            "layer_types": _local_then_global,
        }
        return make_config(CONFIG_MAPPING[base], shape, {**OVERRIDES, base: {**OVERRIDES.get(base, {}), **shared}})

    return make


OVERRIDES: dict[str, Override] = {
    # grouped queries where the default has none
    **dict.fromkeys(("llama", "mistral", "nemotron", "olmo2", "phi3", "granite"), _GROUPED),
    **dict.fromkeys(_LATENT, _UNGROUPED),
    "longcat_flash": {**_UNGROUPED, "head_dim": 8},  # head_dim is the rotary part here
    "dots3_note_text": {
        **_UNGROUPED,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
    },
    # default None, yet read as a number
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": HEAD_DIM}),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    # per-layer structure that is not a list of names
    "gpt_neo": {"attention_types": lambda shape: [[["global", "local"], shape.layers // 2]]},
    "bamba": {"attn_layer_indices": lambda shape: list(range(1, shape.layers, 2))},
    "lfm2": {"full_attn_idxs": lambda shape: list(range(1, shape.layers, 2))},
    "lfm2_moe": {"layer_types": lambda shape: shape.cycle("conv", "full_attention")},
    "granitemoehybrid": {"layer_types": lambda shape: shape.cycle("mamba", "attention")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _local_then_global},  # the last two read others' keys
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _local_then_global},
    "gemma4_assistant": {"text_config": _shared_text_config("gemma4_text")},
    "gemma4_unified_assistant": {"text_config": _shared_text_config("gemma4_unified_text")},
    # layers called more than once in a forward: the loop must lie inside the stack
    "inkling2_loop_text": {
        "num_hidden_layers": lambda shape: shape.layers + 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    # sizes bound to one another
    "cohere_compass_text": {"rope_parameters": _rope_with_sections},
    "mamba2": {"num_heads": 8, "head_dim": 16},  # heads * head_dim = 2 * hidden
    "dbrx": {
        "attn_config": lambda shape: {"kv_n_heads": 2, "attn_pdrop": shape.dropout, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},  # its router is written for the best expert alone
    # the rest
    # decoders need it; block_sparse turns into it, with new modules, in the first short forward
    "big_bird": {"attention_type": "original_full"},
    "MptAttentionConfig": {"attn_pdrop": 0},  # an int field upstream: a float is refused
    "diffllama": {"attention_dropout": 0.0},  # refused by its constructor: two attention calls cannot share one mask
    "reformer": {
        "axial_pos_embds": False,
        "num_hidden_layers": DEFAULT,  # derived from attn_layers
        "attn_layers": lambda shape: shape.cycle("local", "lsh"),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
        "is_decoder": True,
    },
    "whisper": {"begin_suppress_tokens": None},  # ids beyond the tiny vocabulary
    "xmod": {"default_language": "en_XX"},  # adapters are chosen by language
}
