"""Linear attention in GGUF files: Qwen3-Next.

Files of Qwen3.5 have their value heads in another order, in the columns of matrices, too; they are
not read.
"""

from __future__ import annotations

from qoff.errors import FormatError

from .gguf_experts import qwen3_moe
from .gguf_fields import Config
from .gguf_metadata import Metadata

MODULES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


def qwen3_next(metadata: Metadata, config: Config) -> Config:
    """Every so many layers one attends."""
    heads, inner = metadata.need("ssm.time_step_rank"), metadata.need("ssm.inner_size")
    if inner % heads:
        raise FormatError(
            f"{metadata.path}: {metadata.architecture}.ssm.inner_size is {inner}; expected a "
            f"multiple of {heads} heads"
        )
    interval = metadata.get("full_attention_interval", 4)
    layers = range(config["num_hidden_layers"])
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    shared = metadata.get("expert_shared_feed_forward_length", config["intermediate_size"])
    return {
        **qwen3_moe(metadata, config),
        "shared_expert_intermediate_size": shared,
        "attention_bias": any(metadata.has(f"blk.{i}.attn_q.bias") for i in layers),
        "layer_types": kinds,
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": heads,
    }
