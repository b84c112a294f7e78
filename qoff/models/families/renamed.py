"""Models that are a family's by other names, of fields of the config and of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from . import corrected
from .family import Config, Family, Has, TensorNames, class_of
from .known import FAMILIES


def _family(
    models: str,
    becomes: str,
    *,
    fields: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    own: TensorNames | None = None,
) -> Family:
    """becomes: a `model_type` of FAMILIES.

    fields: from the model's names to the family's; without: those that say nothing; defaults: those
    that the family has others for. own: what its files call tensors, unless as the family does.
    """
    family, called = FAMILIES[becomes], fields or {}

    def converted(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
        found = {called.get(k, k): v for k, v in config.items() if k not in without}
        found = {**(defaults or {}), **found}
        found |= {"model_type": becomes, "architectures": [class_of(becomes)]}
        if isinstance(rope := found.get("rope_scaling"), dict):
            found["rope_scaling"] = _usual_yarn(rope)
        return found, own if own is not None and has(own.embedding) else family.names

    return Family(models, family.fields, family.names, converted)


def _usual_yarn(rope: Config) -> dict[str, Any]:
    """RoPE under transformers' name for YaRN."""
    kinds = {k: "yarn" for k in ("type", "rope_type") if rope.get(k) == "deepseek_yarn"}
    return {**rope, **kinds}


_EXPERTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_EXAONE = TensorNames(
    layer="transformer.h.{}.",
    modules={
        "self_attn": "attn.attention",
        "self_attn.o_proj": "attn.attention.out_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    },
    embedding="transformer.wte.weight",
    norm="transformer.ln_f",
)
_SARVAM = replace(
    corrected.NAMES,
    modules={
        **corrected.NAMES.modules,
        "mlp.router.correction": "mlp.gate.expert_bias",
        "self_attn": "attention",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
    },
    fused_qkv="rows",
    embedding="model.word_embeddings.weight",
)
SOURCES = {
    "exaone": _family(
        "EXAONE 3.0, 3.5 and Deep",
        "llama",
        fields={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 500_000.0},
        own=_EXAONE,
    ),
    "sarvam_moe": _family(
        "Sarvam 30B",
        "glm4_moe",
        fields={**_EXPERTS, "use_qkv_bias": "attention_bias"},
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 1024,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "partial_rotary_factor": 1.0,
            "rope_theta": 8_000_000.0,
        },
        own=_SARVAM,
    ),
    "sarvam_mla": _family(
        "Sarvam 105B",
        "deepseek_v3",
        fields=_EXPERTS,
        without=("head_dim", "q_head_dim"),  # of the cache, of queries
        defaults={
            "num_key_value_heads": None,
            "n_routed_experts": 128,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "kimi_k2": _family("Kimi K2", "deepseek_v3"),
}
