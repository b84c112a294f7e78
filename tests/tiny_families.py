"""Tiny configurations of every family."""

from __future__ import annotations

from typing import Any

VOCAB = 128
PAD, BOS, EOS = 0, 1, 2
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 3}
_GROUPS = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 4},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-gqa-tied": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 5,
        "vocab_size": 130,  # no multiple of 16
        "tie_word_embeddings": True,
    },
    "llama-head64": {"model_type": "llama", "head_dim": 64, "num_key_value_heads": 2},
    "llama-head64-deep": {
        "model_type": "llama",
        "head_dim": 64,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
    },
    "llama3-rope": {"model_type": "llama", "head_dim": 32, "rope_parameters": LLAMA3_ROPE},
    "mistral-window": {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "hidden_size": 128, "num_key_value_heads": 2},
    "qwen2-window": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3-tied": {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 96,
        "head_dim": 32,  # 4 heads of 32 are wider than the model
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "no_rope_layer_interval": 2,
    },
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 9},
    "phi4-partial": {
        "model_type": "phi3",
        "hidden_size": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
    },
    "phi3-longrope": {
        "model_type": "phi3",
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        },
        "original_max_position_embeddings": 64,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2},
    "cohere": {
        "model_type": "cohere",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "logit_scale": 0.3,
    },
    "glm": {"model_type": "glm", "head_dim": 32, "num_key_value_heads": 2},
    "glm4": {"model_type": "glm4", "head_dim": 32, "num_key_value_heads": 2},
    "gemma": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "opt": {"model_type": "opt", "ffn_dim": 96, "tie_word_embeddings": True},
    "opt-350m": {
        "model_type": "opt",
        "ffn_dim": 96,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 64,
    },
    "gpt-neox": {"model_type": "gpt_neox", "hidden_size": 128, "rotary_pct": 0.25},
    "gpt-neox-serial": {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "attention_bias": False,
        "use_parallel_residual": False,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "olmo3": {
        "model_type": "olmo3",
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "exaone4": {
        "model_type": "exaone4",
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
    },
    "seed-oss": {
        "model_type": "seed_oss",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "ernie4.5": {
        "model_type": "ernie4_5",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "logit_scale": 0.3,
        "tie_word_embeddings": True,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "granite-moe": {
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        **_GROUPS,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
    },
    "dots1": {
        "model_type": "dots1",
        **_GROUPS,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "solar-open": {"model_type": "solar_open", **_GROUPS, "n_group": 1, "topk_group": 1},
    "exaone-moe": {
        "model_type": "exaone_moe",
        **_GROUPS,
        "num_experts": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "hy-v3": {
        "model_type": "hy_v3",
        **_EXPERTS,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
    },
    "ernie4.5-moe": {
        "model_type": "ernie4_5_moe",
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": True,
    },
}
FAMILIES |= {
    "ministral": {
        "model_type": "ministral",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 7,
    },
    "ministral3": {
        "model_type": "ministral3",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 6,
            "llama_4_scaling_beta": 0.7,
        },
    },
    "internlm3": {
        "model_type": "internlm3",
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "cwm": {
        "model_type": "cwm",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "rope_parameters": LLAMA3_ROPE,
    },
}
_LATENT = {
    **_GROUPS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
del _LATENT["head_dim"]
_INDEX = {"q_lora_rank": 32, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 11}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
FAMILIES |= {
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "topk_method": "group_limited_greedy",
        "rope_scaling": _YARN,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "q_lora_rank": 32,
        "rope_scaling": _YARN,
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        **_LATENT,
        **_INDEX,
        "rope_scaling": _YARN,
    },
    "glm-5": {
        "model_type": "glm_moe_dsa",
        **_LATENT,
        **_INDEX,
        "n_group": 1,
        "topk_group": 1,
        "index_topk_freq": 2,  # every other layer chooses, the next one goes by it
        "index_skip_topk_offset": 1,
    },
    "youtu": {
        "model_type": "youtu",
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "tie_word_embeddings": True,
        "pad_token_id": None,  # whose embedding transformers makes zeros
    },
    "glm4-moe-lite": {
        "model_type": "glm4_moe_lite",
        **_LATENT,
        "q_lora_rank": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
    },
}
FAMILIES |= {
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "attn_scale": 0.7,
        "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0},
    },
}
FAMILIES |= {
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 1.0,
            "alpha": 50.0,
        },
    },
    "hunyuan-moe": {
        "model_type": "hunyuan_v1_moe",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "moe_topk": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES |= {
    "mistral4": {
        "model_type": "mistral4",
        **_LATENT,
        "q_lora_rank": 32,
        "rope_parameters": {
            **_YARN,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 6,
            "llama_4_scaling_beta": 0.7,
            "partial_rotary_factor": 2 / 3,
        },
    },
    "afmoe": {
        "model_type": "afmoe",
        **_EXPERTS,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_shared_experts": 1,
        "route_scale": 1.5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "mup_enabled": True,
    },
    "mellum": {
        "model_type": "mellum",
        **_EXPERTS,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 6,
    },
    "granite-moe-shared": {
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "shared_intermediate_size": 64,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "hyperclovax": {
        "model_type": "hyperclovax",
        "num_key_value_heads": 2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.3,
    },
    "helium": {"model_type": "helium", "num_key_value_heads": 2, "head_dim": 16},
    "iquestcoder": {"model_type": "iquestcoder", "num_key_value_heads": 2, "head_dim": 16},
    "nemotron": {
        "model_type": "nemotron",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
}
FAMILIES |= {
    "arcee": {"model_type": "arcee", "num_key_value_heads": 2},
    "jais2": {"model_type": "jais2", "num_key_value_heads": 2},
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA3N = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 120,  # tokens beyond have the embeddings of token 0
    "num_kv_shared_layers": 2,
    "laurel_rank": 32,
    "altup_num_inputs": 3,
    "tie_word_embeddings": True,
}
FAMILIES |= {
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma4-small": {
        **_GEMMA4,
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4-moe": {
        **_GEMMA4,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": False,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
_DELTA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
_SHARED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_SHARED |= {"shared_expert_intermediate_size": 64}
FAMILIES |= {
    "qwen3-next": {
        "model_type": "qwen3_next",
        **_DELTA,
        **_SHARED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "qwen3-next-head64": {  # whose K and V can be packed, with more linear layers
        "model_type": "qwen3_next",
        **_DELTA,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 8,
        "mlp_only_layers": [0, 1, 2, 3],
    },
    "qwen3.5": {"model_type": "qwen3_5_text", **_DELTA, "attention_bias": True},
    "qwen3.5-moe": {"model_type": "qwen3_5_moe_text", **_DELTA, **_SHARED},
}
_CONVOLUTIONS = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
}
FAMILIES |= {
    "lfm2": {
        "model_type": "lfm2",
        **_CONVOLUTIONS,
        "intermediate_size": 176,  # 117 of it are used, in whole blocks
        "block_multiple_of": 32,
        "tie_word_embeddings": True,
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe",
        **_CONVOLUTIONS,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 4,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "use_expert_bias": True,
    },
}
_MAMBA = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}
_GRANITE_H = {
    "model_type": "granitemoehybrid",
    **_MAMBA,
    "mamba_n_heads": 16,  # whole blocks of rows of `in_proj`, which may be adapted
    "mamba_expand": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "num_local_experts": 0,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
FAMILIES |= {
    "granite-h": {
        **_GRANITE_H,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_conv_bias": False,
        "tie_word_embeddings": True,
        "position_embedding_type": "rope",
    },
    "granite-h-moe": {
        **_GRANITE_H,
        "mamba_n_groups": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        "num_key_value_heads": 1,
        "num_attention_heads": 2,
        "head_dim": 64,
        "layers_block_type": [
            *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
        ],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 32,
        "time_step_min": 1e-9,  # transformers bounds steps of prompts by it, and of no others
    },
    "bamba": {
        "model_type": "bamba",
        **_MAMBA,
        "attn_layer_indices": [1, 2],
        "mamba_d_conv": 3,
    },
}
EXPERTS = [
    name
    for name, config in FAMILIES.items()
    if any("experts" in key and value for key, value in config.items())
]
# Mixtures that name, fuse or route their weights in ways of their own, or have other attention.
KINDS_OF_EXPERTS = (
    *("mixtral", "qwen2-moe", "gpt-oss", "granite-moe", "deepseek-v3", "llama4", "hunyuan-moe"),
    *("gemma4-moe", "qwen3.5-moe", "afmoe"),
)
