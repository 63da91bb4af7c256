"""Tiny models of every family: the config keys of the real ones, with sizes that fit in a test."""

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 160,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 130,
    "max_position_embeddings": 1024, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
MOE = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
QWEN3_5 = {
    **QWEN3, **DELTA, "model_type": "qwen3_5", "num_hidden_layers": 4, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN3_5_MOE = {**QWEN3_5, **MOE, "model_type": "qwen3_5_moe"}
QWEN3_NEXT = {
    **QWEN3, **DELTA, **MOE, "model_type": "qwen3_next", "num_hidden_layers": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 96, "num_hidden_layers": 6, "intermediate_size": 160,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 32,
    "global_head_dim": 64, "rms_norm_eps": 1e-6, "vocab_size": 130, "vocab_size_per_layer_input": 130,
    "sliding_window": 7, "sliding_window_pattern": 3, "max_position_embeddings": 1024,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA4_MOE = {
    **GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA4_E = {
    **GEMMA4, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "enable_moe_block": False, "attention_k_eq_v": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 160,
    "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 2,
    "n_routed_experts": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "qk_nope_head_dim": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "vocab_size": 130, "rope_theta": 1e4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.8,
    },
}  # fmt: skip

TINY = {
    "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE, "qwen3_next": QWEN3_NEXT,
    "gemma4_moe": GEMMA4_MOE, "gemma4_e": GEMMA4_E, "deepseek_v3": DEEPSEEK_V3,
}  # fmt: skip
FORMATS = {
    "2bit": (2, 32, "affine"), "3bit": (3, 32, "affine"), "4bit": (4, 32, "affine"), "5bit": (5, 32, "affine"),
    "6bit": (6, 32, "affine"), "8bit": (8, 32, "affine"), "mxfp4": (4, 32, "mxfp4"), "dense": None,
}  # fmt: skip
