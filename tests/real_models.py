"""The real models: their published config keys and sizes. Facts only; no weights."""

VISION = {"model_type": "vision", "depth": 27, "hidden_size": 1152}
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
QWEN_ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7,
    "rope_type": "default",
}  # fmt: skip


def qwen3_5(model_type, **text):
    """Text and vision in one config, as Qwen publishes it."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": model_type, "image_token_id": 248056,
        "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
        "tie_word_embeddings": text.get("tie_word_embeddings", False), "transformers_version": "5.5.0",
        "vision_config": VISION,
        "text_config": {
            "model_type": f"{model_type}_text", "attention_bias": False, "attention_dropout": 0.0,
            "attn_output_gate": True, "bos_token_id": None, "dtype": "bfloat16", "eos_token_id": 248044,
            "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "initializer_range": 0.02,
            "layer_types": HYBRID * (text["num_hidden_layers"] // 4), "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "pad_token_id": None,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_parameters": QWEN_ROPE,
            "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320, **text,
        },
    }  # fmt: skip


def gemma4(pattern, **text):
    layers = text["num_hidden_layers"]
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_config": None,
        "image_token_id": 258880, "eos_token_id": [1, 106], "tie_word_embeddings": True, "vision_config": VISION,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
            "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
            "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "layer_types": kinds,
            "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": None,
            "num_experts": None, "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
            "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False,
            "vocab_size": 262144, "vocab_size_per_layer_input": 262144, **text,
        },
    }  # fmt: skip


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.46.3",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def qwen3(**text):
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "initializer_range": 0.02,
        "max_position_embeddings": 40960, "max_window_layers": 48, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936, **text,
    }  # fmt: skip


QWEN_MOE = {"router_aux_loss_coef": 0.001, "output_router_logits": False}
REAL = {
    "Qwen3.5-35B-A3B": qwen3_5(
        "qwen3_5_moe", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, **QWEN_MOE,
    ),
    "Qwen3.5-397B-A17B": qwen3_5(
        "qwen3_5_moe", hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=2,
        linear_num_value_heads=64, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024, **QWEN_MOE,
    ),
    "Qwen3.5-4B": qwen3_5(
        "qwen3_5", hidden_size=2560, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4,
        linear_num_value_heads=32, intermediate_size=9216, tie_word_embeddings=True,
    ),
    "Qwen3.6-27B": qwen3_5(
        "qwen3_5", hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        linear_num_value_heads=48, intermediate_size=17408,
    ),
    "Qwen3-Next-80B-A3B": {
        **qwen3(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2,
            intermediate_size=5120, max_position_embeddings=262144, rope_theta=1e7,
        ),
        "model_type": "qwen3_next", "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, **QWEN_MOE,
    },
    "gemma-4-26B-A4B": gemma4(
        6, hidden_size=2816, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, intermediate_size=2112, enable_moe_block=True, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704,
    ),
    "gemma-4-31B": gemma4(
        6, hidden_size=5376, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, intermediate_size=21504,
    ),
    "gemma-4-E2B": gemma4(
        5, hidden_size=1536, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1, sliding_window=512,
        intermediate_size=6144, hidden_size_per_layer_input=256, num_kv_shared_layers=20, use_double_wide_mlp=True,
        attention_k_eq_v=False, max_position_embeddings=131072, use_bidirectional_attention=None,
    ),
    "gemma-4-E4B": gemma4(
        6, hidden_size=2560, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2, sliding_window=512,
        intermediate_size=10240, hidden_size_per_layer_input=256, num_kv_shared_layers=18, attention_k_eq_v=False,
        max_position_embeddings=131072, use_bidirectional_attention=None,
    ),
    "DeepSeek-V3": DEEPSEEK_V3,
    "Cogito-V2-671B": {**DEEPSEEK_V3, "vocab_size": 128815},
    "Qwen3-30B-A3B": {
        **qwen3(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
            intermediate_size=6144,
        ),
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, **QWEN_MOE,
    },
    "Qwen3-4B": qwen3(
        model_type="qwen3", hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=9728, tie_word_embeddings=True,
    ),
}  # fmt: skip
