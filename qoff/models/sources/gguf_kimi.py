"""Kimi Linear in GGUF files: KDA in layers without KV heads, latent attention in others.

A file says nothing of the norm of experts' weights: llama.cpp divides by their sum.
"""

from __future__ import annotations

from .gguf_experts import deepseek
from .gguf_fields import Config, by_layer, common
from .gguf_latent import MODULES as LATENT
from .gguf_latent import latent_sizes
from .gguf_metadata import Metadata

MODULES = {
    **LATENT,
    "linear_attn.q_proj": "attn_q",
    "linear_attn.k_proj": "attn_k",
    "linear_attn.v_proj": "attn_v",
    "linear_attn.q_conv1d": "ssm_conv1d_q",
    "linear_attn.k_conv1d": "ssm_conv1d_k",
    "linear_attn.v_conv1d": "ssm_conv1d_v",
    "linear_attn.f_a_proj": "ssm_f_a",
    "linear_attn.f_b_proj": "ssm_f_b",
    "linear_attn.g_a_proj": "ssm_g_a",
    "linear_attn.g_b_proj": "ssm_g_b",
    "linear_attn.b_proj": "ssm_beta",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "attn_output",
}


def base(metadata: Metadata) -> Config:
    """What is common to all, and which layers attend. There is no RoPE."""
    kv_heads = by_layer(metadata, "attention.head_count_kv")
    heads, rope_dim = metadata.need("attention.head_count"), metadata.need("rope.dimension_count")
    found = common(metadata, head_dim=rope_dim, kv_heads=heads)
    del found["rope_parameters"], found["head_dim"]
    kinds = ["full_attention" if x else "linear_attention" for x in kv_heads]
    return {**found, "layer_types": kinds}


def kimi_linear(metadata: Metadata, config: Config) -> Config:
    metadata.only("expert_weights_norm", True)
    found = deepseek(metadata)
    return {
        **latent_sizes(metadata),
        "num_experts": found.pop("n_routed_experts"),
        **found,
        "norm_topk_prob": True,
        "linear_head_dim": metadata.need("kda.head_dim"),
        "linear_num_heads": config["num_attention_heads"],
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
    }
