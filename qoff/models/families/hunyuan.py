"""Hunyuan 1: norms of query and key heads after RoPE."""

from __future__ import annotations

from typing import Any

from qoff.models.spec_parts import ExpertsSpec, RopeSpec, unsupported
from qoff.schema import is_number

from .family import (
    Family,
    Fields,
    TensorNames,
    activation,
    biases,
    common_fields,
    head_dim_of,
    whole_heads,
)


def _hunyuan(config: Any) -> Fields:
    """Llama whose RoPE may have a base stretched by a constant, called "dynamic"."""
    if getattr(config, "use_cla", False):
        raise unsupported("use_cla", True, "false: layers that attend to another one's keys")
    return {**biases(config.attention_bias), "qk_norm": "rotated", "rope": _rope(config)}


def _rope(config: Any) -> RopeSpec | None:
    """`alpha` multiplies the base as in NTK-aware scaling, whatever the length of a sequence."""
    found: RopeSpec | None = common_fields(config)["rope"]
    parameters = config.rope_parameters or {}
    if found is None or found.kind != "dynamic" or not (alpha := parameters.get("alpha")):
        if found is not None and found.kind == "default":
            whole_heads(found, head_dim_of(config))
        return found
    if not is_number(alpha) or not alpha > 0:
        raise unsupported("rope_parameters.alpha", alpha, "a number above 0")
    dim = head_dim_of(config)
    if dim < 4:
        raise unsupported("head_dim", dim, "4 and more")
    return RopeSpec("default", found.theta * alpha ** (dim / (dim - 2)), dim)


def _hunyuan_moe(config: Any) -> Fields:
    """Experts in every layer, beside one for all tokens of the same size."""
    experts = ExpertsSpec(
        count=_uniform(config, "num_experts"),
        top_k=_uniform(config, "moe_topk"),
        intermediate_size=config.intermediate_size,
        layers=(True,) * config.num_hidden_layers,
        activation=activation(config.hidden_act),
        shared_size=config.intermediate_size,
    )
    return {**_hunyuan(config), "experts": experts}


def _uniform(config: Any, key: str) -> int:
    """A number that may be given for each layer, the same for all."""
    value = getattr(config, key)
    numbers = set(value) if isinstance(value, list | tuple) else {value}
    if len(numbers) != 1:
        raise unsupported(key, value, "the same number for all layers")
    return int(numbers.pop())


_NORMS = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
}
FAMILIES = {
    "hunyuan_v1_dense": Family(
        "Hunyuan 0.5B to 7B, Hunyuan-MT", _hunyuan, TensorNames(modules=_NORMS)
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan A13B",
        _hunyuan_moe,
        TensorNames(
            modules={
                **_NORMS,
                "mlp.router": "mlp.gate.wg",
                "mlp.shared_expert": "mlp.shared_mlp",
            }
        ),
    ),
}
