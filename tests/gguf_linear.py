"""Linear attention in GGUF files, as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a model with such layers."""
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }


def renamed(config: Mapping[str, Any], name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Linear attention, key head by key head only in the matrix of b and a of Qwen3-Next."""
    if config["model_type"] != "qwen3_next":
        values = _tiled(config, name, values)
    if name.endswith(".A_log"):
        yield name, -np.exp(values)
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), values
    elif name.endswith("in_proj_qkvz.weight"):
        key, heads = config["linear_key_head_dim"], config["linear_num_key_heads"]
        group = config["linear_value_head_dim"] * config["linear_num_value_heads"] // heads
        parts = np.split(
            values.reshape(heads, -1, values.shape[1]), np.cumsum([key, key, group]), axis=1
        )
        *mixed, z = (part.reshape(-1, values.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate(mixed)
        yield name.replace("qkvz", "z"), z
    else:
        yield name, values.squeeze(1) if "conv1d" in name else values


def kda_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of Kimi Linear. Layers with KDA have no KV heads."""
    return {
        "attention.head_count_kv": [int(x == "full_attention") for x in config["layer_types"]],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
        "expert_shared_count": config["num_shared_experts"],
        "expert_gating_func": 2,
    }


def kda_renamed(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Tensors of a model of transformers, which saves its MLP among the experts."""
    if name.endswith(".A_log"):
        yield name, -np.exp(values)
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), values
    elif "_conv1d" in name:
        yield name, values[None].reshape(1, len(values), 1, -1)
    else:
        yield name.replace(".block_sparse_moe.", ".mlp."), values


def _tiled(config: Mapping[str, Any], name: str, values: Array) -> Array:
    """The same with value heads as llama.cpp repeats keys: the first of each key head, ..."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before, axis = 0, int("out_proj" in name)
    if "in_proj_qkv" in name or "conv1d" in name:
        before = 2 * keys * config["linear_key_head_dim"]
    elif name.endswith("linear_attn.norm.weight"):
        return values
    others, moved = np.split(values, [before], axis=axis)
    shape = (*moved.shape[:axis], keys, heads // keys, -1, *moved.shape[axis + 1 :])
    moved = moved.reshape(shape).swapaxes(axis, axis + 1).reshape(moved.shape)
    return np.concatenate((others, moved), axis=axis)
