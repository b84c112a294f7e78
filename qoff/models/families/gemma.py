"""Gemma: scaled embeddings, norms stored less one, heads of their own size."""

from __future__ import annotations

from typing import Any

from qoff.models.spec_parts import (
    ExpertsSpec,
    HeadsSpec,
    PerLayerSpec,
    StreamsSpec,
    unsupported,
)

from .family import (
    Family,
    Fields,
    TensorNames,
    activation,
    biases,
    for_all,
    positive,
    rope_of,
    whole_heads,
    windows,
)


def _gemma(config: Any) -> Fields:
    """Llama with scaled embeddings and a GELU."""
    act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    both = getattr(config, "use_bidirectional_attention", None)
    if both and both != "vision":  # between images, which are not read
        raise unsupported("use_bidirectional_attention", both, "false")
    return {
        "activation": activation(act or "gelu_pytorch_tanh"),
        **biases(config.attention_bias),
        "embedding_scale": float(config.hidden_size) ** 0.5,
    }


def _gemma2(config: Any) -> Fields:
    """Norms before and after, soft caps, a sliding window in every other layer."""
    return {
        **_gemma(config),
        "post_norm": True,
        "attention_scale": positive(config, "query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": config.attn_logit_softcapping or 0.0,
        "logit_soft_cap": config.final_logit_softcapping or 0.0,
        "sliding_window": windows(config),
    }


def _gemma3(config: Any) -> Fields:
    """Norms of query and key heads; layers with a sliding window have a RoPE of their own.

    transformers' attention ignores `attn_logit_softcapping` here.
    """
    ropes = config.rope_parameters
    layers = config.num_hidden_layers
    return {
        **_gemma2(config),
        "attention_soft_cap": 0.0,
        "qk_norm": "head",
        "rope": rope_of(config, ropes["full_attention"], config.head_dim),
        "local_rope": rope_of(config, ropes["sliding_attention"], config.head_dim),
        "rope_layers": (True,) * layers,
    }


def _gemma3n(config: Any) -> Fields:
    """Streams of hidden states, embeddings of layers, gates of which few numbers are left.

    The last layers attend to others' keys and values. Factors are clipped in training alone.
    """
    widths = set(config.intermediate_size)
    if len(widths) > 1:
        raise unsupported("intermediate_size", sorted(widths), "one number for all layers")
    if config.altup_active_idx:
        raise unsupported("altup_active_idx", config.altup_active_idx, "0")
    if not config.altup_correct_scale:
        raise unsupported("altup_correct_scale", config.altup_correct_scale, "true")
    layers, ropes = config.num_hidden_layers, config.rope_parameters
    full, sliding = (
        whole_heads(rope_of(config, ropes[kind], config.head_dim), config.head_dim)
        for kind in ("full_attention", "sliding_attention")
    )
    return {
        **_gemma(config),
        "intermediate_size": widths.pop(),
        "post_norm": True,
        "qk_norm": "head",
        "value_norm": True,
        "attention_scale": 1.0,
        "logit_soft_cap": config.final_logit_softcapping or 0.0,
        "sliding_window": windows(config),
        "rope": full,
        "local_rope": sliding,
        "rope_layers": (True,) * layers,
        "shared_kv": config.num_kv_shared_layers or 0,
        "per_layer": PerLayerSpec(
            config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
        ),
        "streams": StreamsSpec(config.altup_num_inputs, config.laurel_rank),
        "sparsity": tuple(config.activation_sparsity_pattern),
    }


def _gemma4(config: Any) -> Fields:
    """Layers without a window have larger heads; values are normalized, scores are not scaled.

    Experts, where there are any, are beside the MLP. Small ones have embeddings of their layers,
    the last of which attend to others' keys and values, perhaps with MLPs that are twice as wide.
    """
    full, sliding = (_heads(config, kind) for kind in ("full_attention", "sliding_attention"))
    ropes, layers = config.rope_parameters, config.num_hidden_layers
    fields = {
        **_gemma(config),
        "num_kv_heads": sliding.kv_heads,
        "head_dim": sliding.head_dim,
        "full_heads": full,
        "post_norm": True,
        "qk_norm": "head",
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scale": True,
        "logit_soft_cap": config.final_logit_softcapping or 0.0,
        "sliding_window": windows(config),
        "rope": rope_of(config, ropes["full_attention"], full.head_dim),
        "local_rope": whole_heads(
            rope_of(config, ropes["sliding_attention"], sliding.head_dim), sliding.head_dim
        ),
        "rope_layers": (True,) * layers,
    }
    shared = config.num_kv_shared_layers or 0
    if shared and config.use_double_wide_mlp:
        fields["shared_intermediate_size"] = 2 * config.intermediate_size
    fields["shared_kv"] = shared
    if width := config.hidden_size_per_layer_input:
        fields["per_layer"] = PerLayerSpec(width, config.vocab_size_per_layer_input)
    if config.enable_moe_block:
        if width or shared:
            raise unsupported("enable_moe_block", True, "false beside embeddings of layers")
        fields["experts"] = ExpertsSpec(
            count=config.num_experts,
            top_k=config.top_k_experts,
            intermediate_size=config.moe_intermediate_size,
            layers=(True,) * layers,
            gains=True,
            beside=True,
            activation=fields["activation"],
        )
    return fields


def _heads(config: Any, kind: str) -> HeadsSpec:
    """Heads of layers of a kind, which transformers has layer by layer."""
    layers = [i for i, x in enumerate(config.layer_types) if x == kind]
    own = config.per_layer_config
    found = {(own[i].head_dim, own[i].num_key_value_heads) for i in layers}
    if len(found) > 1:
        raise unsupported("per_layer_config", sorted(found), "one size of heads for each kind")
    sizes = tuple(for_all(config, key, None) for key in ("head_dim", "num_key_value_heads"))
    dim, kv_heads = found.pop() if found else sizes
    return HeadsSpec(dim, kv_heads, bool(config.attention_k_eq_v) and kind == "full_attention")


_SANDWICH = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "self_attn.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
_NAMES = TensorNames(norm_offset=1.0, modules=_SANDWICH)
_PER_LAYER = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.projection": "per_layer_projection",
    "per_layer.post_norm": "post_per_layer_input_norm",
}
GEMMA3N_NAMES = TensorNames(
    modules={
        **_SANDWICH,
        **_PER_LAYER,
        "streams.router": "altup.modality_router",
        "streams.router_norm": "altup.router_norm",
        "streams.prediction": "altup.prediction_coefs",
        "streams.correction": "altup.correction_coefs",
        "streams.scale.weight": "altup.correct_output_scale",
        "laurel.left": "laurel.linear_left",
        "laurel.right": "laurel.linear_right",
        "laurel.post_norm": "laurel.post_laurel_norm",
    },
)
GEMMA4_NAMES = TensorNames(
    modules={
        **_SANDWICH,
        **_PER_LAYER,
        "mlp.router": "router.proj",
        "mlp.router.gains": "router.per_expert_scale",
        "mlp.experts": "experts",
        "mlp.routing_norm.weight": "router.scale",
        "mlp.routed_norm": "pre_feedforward_layernorm_2",
        "mlp.dense_norm": "post_feedforward_layernorm_1",
        "mlp.mixture_norm": "post_feedforward_layernorm_2",
        "layer_scale": "layer_scalar",
    },
    stacked_experts="bare-halves",
)
FAMILIES = {
    "gemma": Family("Gemma 1", _gemma, TensorNames(norm_offset=1.0)),
    "gemma2": Family("Gemma 2", _gemma2, _NAMES),
    "gemma3_text": Family("Gemma 3 1B", _gemma3, _NAMES),
    "gemma3n_text": Family("Gemma 3n", _gemma3n, GEMMA3N_NAMES),
    "gemma4_text": Family("Gemma 4", _gemma4, GEMMA4_NAMES),
}
