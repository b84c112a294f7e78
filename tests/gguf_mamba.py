"""Mamba 2 in GGUF files, as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_FACTORS = {  # of Falcon H1, by parts of names: where it is, and an entry of a list
    "down_proj": (("mlp_multipliers", 1),),
    "gate_proj": (("mlp_multipliers", 0),),
    "k_proj": (("key_multiplier", None), ("attention_in_multiplier", None)),
    "q_proj": (("attention_in_multiplier", None),),
    "v_proj": (("attention_in_multiplier", None),),
    "o_proj": (("attention_out_multiplier", None),),
    "out_proj": (("ssm_out_multiplier", None),),
    "in_proj": (("ssm_in_multiplier", None),),
    "lm_head": (("lm_head_multiplier", None),),
    "embed_tokens": (("embedding_multiplier", None),),
}


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a model with such layers: lists say which layers are what."""
    if config["model_type"] == "falcon_h1":
        return _sizes(config, *_SIZES)
    heads = config["num_key_value_heads"]
    kinds = config.get("layer_types") or config["layers_block_type"]
    found: dict[str, Any] = {
        "attention.head_count_kv": [heads * (kind == "full_attention") for kind in kinds]
    }
    if config["model_type"] != "nemotron_h":
        found["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
        if not config["num_local_experts"]:
            found["feed_forward_length"] = config["shared_intermediate_size"]
        return found | _sizes(config, *_SIZES)
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


def multiplied(config: Mapping[str, Any], name: str, values: Array) -> Array:
    """A tensor of Falcon H1 with the model's constants."""
    for part, factors in _FACTORS.items():
        if f".{part}." in f".{name}":
            for key, place in factors:
                factor = config[key] if place is None else config[key][place]
                values = values * np.float32(factor)
    if ".in_proj." not in name:
        return values
    inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    counts = (inner, inner, state, state, config["mamba_n_heads"])
    return values * np.repeat(np.float32(config["ssm_multipliers"]), counts)[:, None]


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
