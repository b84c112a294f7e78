"""Mamba 2 in GGUF files, as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a model with such layers: lists say which layers are what."""
    heads = config["num_key_value_heads"]
    kinds = config.get("layer_types") or config["layers_block_type"]
    found: dict[str, Any] = {
        "attention.head_count_kv": [heads * (kind == "full_attention") for kind in kinds]
    }
    if config["model_type"] != "nemotron_h":
        found["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
        if not config["num_local_experts"]:
            found["feed_forward_length"] = config["shared_intermediate_size"]
        return found | _sizes(config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups",
                              "mamba_d_state", "mamba_d_conv")  # fmt: skip
    inner, kind = config["intermediate_size"], "mlp"
    if "moe" in kinds:
        inner, kind = config["moe_intermediate_size"], "moe"
        found |= {
            "expert_feed_forward_length": inner,
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            **({"moe_latent_size": x} if (x := config.get("moe_latent_size")) else {}),
        }
    found["feed_forward_length"] = [inner * (one == kind) for one in kinds]
    found["attention.layer_norm_rms_epsilon"] = config["layer_norm_epsilon"]
    return found | _sizes(config, "mamba_num_heads", "mamba_head_dim", "n_groups",
                          "ssm_state_size", "conv_kernel")  # fmt: skip


def _sizes(config: Mapping[str, Any], *keys: str) -> dict[str, int]:
    heads, head_dim, groups, state, taps = (config[key] for key in keys)
    return {
        "ssm.conv_kernel": taps,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * head_dim,
    }


def renamed(config: Mapping[str, Any], name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """A tensor of a mixer."""
    if name.endswith("A_log"):
        yield name, -np.exp(values)[:, None]
    elif name.endswith(".D"):
        yield name, values[:, None]
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), values
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = config.get("n_groups") or config["mamba_n_groups"]
        yield name, values.reshape(groups, -1)
    else:
        yield name, values.squeeze(1) if "conv1d.weight" in name else values
