"""Field name -> tiny value, for every config class of Transformers that a causal LM uses.

Owns the sizes that are the same for all architectures. A field that is not named here keeps its default; a field whose
default is None is left None (None means "derived" or "off"), unless `overrides.py` says otherwise.
"""

from __future__ import annotations

import re

VOCAB = 128
"""Vocabulary size. Special tokens live in [FIRST_SPECIAL, VOCAB), text tokens in [3, FIRST_SPECIAL)."""
FIRST_SPECIAL = 96
HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
WINDOW = 8
"""Sliding windows and chunks: shorter than the test sequences, so that local attention masks something."""

_BY_VALUE: tuple[tuple[object, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input audio_vocab_size unpadded_vocab_size"),
    (
        HIDDEN,
        "hidden_size d_model n_embd embedding_size backbone_hidden_size emb_dim input_embedding_size "
        "output_embedding_size pronunciation_embed_dim shape_embed_dim hidden_size_global out_hidden_size "
        "input_size embed_dim codebook_dim output_proj_dims projector_input_dim projector_output_dim "
        "vision_output_dim mm_embed_dim audio_embed_dim",
    ),
    (
        2 * HIDDEN,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff dff d_ff d_inner mlp_dim "
        "feed_forward_size ffn_hidden_size intermediate_size_mlp dense_intermediate_size "
        "shared_intermediate_size mamba_d_ssm",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "expert_ffn_hidden_size moe_shared_expert_intermediate_size pronunciation_vocab_size shape_vocab_size "
        "prompt_mid_dim image_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
        "index_n_heads linear_num_key_heads linear_num_value_heads linear_num_heads",
    ),
    (2, "num_key_value_heads swa_num_key_value_heads kv_n_heads"),
    (
        HEAD_DIM,
        "head_dim swa_head_dim dim_head attention_head_size kv_channels linear_head_dim index_head_dim "
        "v_head_dim d_kv linear_key_head_dim linear_value_head_dim qk_nope_head_dim query_pre_attn_scalar",
    ),
    (
        16,
        "q_lora_rank kv_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input adapter_rank "
        "gated_norm_rank router_hidden_size loop_gate_rank hc_lowrank mamba_d_state state_size ssm_state_size "
        "mamba_head_dim mamba_d_head position_bias_num_buckets num_centroids d_rel",
    ),
    (
        WINDOW,
        "qk_rope_head_dim rotary_dim sliding_window sliding_window_size attention_window_size window_size "
        "local_attention index_topk attention_chunk_size keep_window_size local_attention_window_len "
        "chunk_size mamba_chunk_size block_size index_block_size mamba_n_heads mamba_num_heads n_mamba_heads "
        "patch_size",
    ),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts centroid_intermediate_top_k"),
    (2, "num_experts_per_tok moe_topk moe_k moe_top_k zero_expert_num n_layers_per_attn_res_block loop_num_passes"),
    (
        1,
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
        "num_dense_layers mamba_n_groups mamba_ngroups n_groups split_ngram_parts",
    ),
    (0, "num_mtp_layers num_nextn_predict_layers"),
    (
        128,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
        "max_source_positions rel_extent position_bias_max_distance",
    ),
    (HIDDEN, "block_multiple_of ffn_round_up_to_multiple_of"),
    (2, "depth num_global_layers conf_num_hidden_layers"),
    (1000, "ngram_vocab_size_base"),
    (500, "encoder_hash_byte_group_vocab"),
    (64, "position_embedding_size mm_posemb_size num_position_embeddings codebook_size"),
)

SIZES: dict[str, object] = {name: value for value, names in _BY_VALUE for name in names.split()}

DEPTHS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"}
    | {"decoder_layers", "num_decoder_layers", "encoder_layers", "num_encoder_layers"}
)
"""Fields that take the number of layers asked for."""

DROPOUT = re.compile(r"dropout|pdrop|drop_prob|drop_rate")
"""Fields that take the dropout probability asked for ..."""
NO_DROPOUT = re.compile(r"classifier|summary|layerdrop")
"""... except heads that a causal LM lacks, and layer dropping, which is a variant of its own (`Shape.layer_drop`)."""
JITTER = frozenset({"router_jitter_noise", "input_jitter_noise"})
"""Routing noise: on whenever dropout is on, since a replay must draw the same noise."""
