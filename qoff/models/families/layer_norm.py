"""Families with LayerNorm: OPT, GPT-NeoX and others, whose MLPs have no gate, and Command-R."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qoff.memory.plan import EMBEDDING, LM_HEAD
from qoff.models.spec_parts import unsupported

from .family import (
    Config,
    Family,
    Fields,
    Has,
    TensorNames,
    activation,
    biases,
    one_window,
    windows,
)

_OPT_EPS = 1e-5  # torch's default


def _opt(config: Any) -> Fields:
    """Learned positions, from row 2 of their table; the sizes of 350M add before they normalize."""
    if not config.layer_norm_elementwise_affine:
        raise unsupported("layer_norm_elementwise_affine", False, "true")
    if config.word_embed_proj_dim != config.hidden_size:
        raise unsupported("word_embed_proj_dim", config.word_embed_proj_dim, "hidden_size")
    first = config.do_layer_norm_before
    return {
        "intermediate_size": config.ffn_dim,
        "num_kv_heads": config.num_attention_heads,
        "norm": "layer",
        "norm_eps": _OPT_EPS,
        "activation": activation(config.activation_function),
        "gated": False,
        **biases(config.enable_bias, config.enable_bias),
        "pre_norm": first,
        "norm_after_add": not first,
        "final_norm": first and not config._remove_final_layer_norm,
        "learned_positions": config.max_position_embeddings + 2,
        "position_offset": 2,
    }


def _gpt_neox(config: Any) -> Fields:
    """Attention and MLP side by side; a part of each head rotates."""
    return {
        "num_kv_heads": config.num_attention_heads,
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "gated": False,
        **biases(config.attention_bias, mlp=True),
        "parallel": config.use_parallel_residual,
    }


def _starcoder2(config: Any) -> Fields:
    return {
        "norm": "layer",
        "norm_eps": config.norm_epsilon,
        "gated": False,
        **biases(config.use_bias, config.use_bias),
        "sliding_window": one_window(config),
    }


def _jais2(config: Any) -> Fields:
    return {
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "gated": False,
        **biases(config.attention_bias, config.mlp_bias),
    }


def _nemotron(config: Any) -> Fields:
    """An MLP of squared ReLU; a part of each head rotates; norms are stored less 1."""
    return {
        "norm": "layer",
        "norm_eps": config.norm_eps,
        "gated": False,
        **biases(config.attention_bias, config.mlp_bias),
    }


def _cohere(config: Any) -> Fields:
    """Attention and MLP side by side, after one norm without a bias; pairs of channels turn."""
    if getattr(config, "use_qk_norm", False):
        raise unsupported("use_qk_norm", True, "false")
    return {
        "norm": "layer",
        "norm_bias": False,
        "norm_eps": config.layer_norm_eps,
        "parallel": True,
        "logit_scale": float(config.logit_scale),
        **biases(config.attention_bias),
    }


def _cohere2(config: Any) -> Fields:
    """Cohere whose layers with a sliding window rotate, and no others."""
    sliding = windows(config)
    return {
        **_cohere(config),
        "sliding_window": sliding,
        "rope_layers": tuple(window is not None for window in sliding),
    }


def _without_projections(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
    """350M's embedding is narrower than its layers: its projections are multiplied into it."""
    width, hidden = config.get("word_embed_proj_dim"), config.get("hidden_size")
    if width in (None, hidden):
        return dict(config), _OPT_NAMES
    names = replace(
        _OPT_NAMES,
        head=_OPT_NAMES.head if has(_OPT_NAMES.head) else _OPT_NAMES.embedding,
        times={
            EMBEDDING: ("model.decoder.project_in.weight", True),
            LM_HEAD: ("model.decoder.project_out.weight", False),
        },
    )
    return {**config, "word_embed_proj_dim": hidden, "tie_word_embeddings": False}, names


_OPT_NAMES = TensorNames(
    layer="model.decoder.layers.{}.",
    modules={
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    norm="model.decoder.final_layer_norm",
)
_COHERE_NAMES = TensorNames(
    rope_pairs=True, modules={"post_attention_layernorm": "input_layernorm"}
)
FAMILIES = {
    "opt": Family("OPT, all sizes", _opt, _OPT_NAMES, _without_projections),
    "gpt_neox": Family(
        "GPT-NeoX 20B, Pythia, Dolly",
        _gpt_neox,
        TensorNames(
            layer="gpt_neox.layers.{}.",
            modules={
                "self_attn.qkv_proj": "attention.query_key_value",
                "self_attn.o_proj": "attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            embedding="gpt_neox.embed_in.weight",
            norm="gpt_neox.final_layer_norm",
            head="embed_out.weight",
            fused_qkv="heads",
        ),
    ),
    "jais2": Family("Jais 2 8B, 70B", _jais2),
    "nemotron": Family("Nemotron 4 340B, Minitron", _nemotron, TensorNames(norm_offset=1.0)),
    "cohere": Family("Command-R 35B", _cohere, _COHERE_NAMES),
    "cohere2": Family("Command R7B, Command A", _cohere2, _COHERE_NAMES),
    "starcoder2": Family(
        "StarCoder 2",
        _starcoder2,
        TensorNames(modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    ),
}
