"""Specs agree with transformers' configs and modules, and refuse what the decoder cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from qoff.errors import ArgumentError, UnsupportedModelError
from qoff.models.families import converted
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.spec import DecoderSpec
from tests.tiny_families import FAMILIES, LLAMA3_ROPE
from tests.tiny_models import tiny_model

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, **TINY},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **TINY},
    "mistral": {"model_type": "mistral", "sliding_window": 7, **TINY},
    "mistral-full": {"model_type": "mistral", "sliding_window": None, **TINY},
    "qwen2": {"model_type": "qwen2", **TINY},
    "qwen2-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        **TINY,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, **TINY},
    "qwen3-biased": {"model_type": "qwen3", "attention_bias": True, **TINY},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, **TINY},
    "smollm3-untied": {"model_type": "smollm3", "tie_word_embeddings": False, **TINY},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_saved_model_has_its_place(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The weights' parts are exactly the tensors that transformers saves, shape by shape."""
    path = tiny_model(tmp_path_factory.getbasetemp(), family)
    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config, names = converted(json.loads((path / "config.json").read_text()), stored.__contains__)
    spec = DecoderSpec.from_config(config)
    weights = [w for i in range(spec.num_layers) for w in layer_weights(spec, i, names)]
    used = set()
    for weight in (*weights, *outer_weights(spec, names)):
        for i, part in enumerate(weight.parts):
            shape, wanted = stored[part.source], weight.stored_shape(i)
            used.add(part.source)
            if part.expert is not None:
                shape = shape[1:]
            if part.times is not None:
                used.add(part.times[0])
                wanted = (wanted[0], shape[1])
            assert shape == wanted
    assert used == set(stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_parts_fill_a_weight(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_model(tmp_path_factory.getbasetemp(), family)
    config, names = converted(json.loads((path / "config.json").read_text()), lambda name: True)
    spec = DecoderSpec.from_config(config)
    for weight in (*layer_weights(spec, 0, names), *outer_weights(spec, names)):
        rows = [weight.destination(i, 0, part.rows) for i, part in enumerate(weight.parts)]
        assert sorted(torch.cat(rows).tolist()) == list(range(weight.rows))


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_switches_are_those_of_the_module(name: str) -> None:
    spec = DecoderSpec.from_config(CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))
    for layer, module in enumerate(model.model.layers):
        attention = module.self_attn
        assert attention.head_dim == spec.head_dim
        assert attention.scaling == spec.head_dim**-0.5
        assert bool(getattr(attention, "use_rope", True)) == spec.rope_layers[layer]
        window = getattr(attention, "sliding_window", None)
        if spec.model_type == "mistral":  # its attention reads the window from the config
            window = model.config.sliding_window
        assert window == spec.sliding_window[layer]
    assert model.model.norm.variance_epsilon == spec.norm_eps
    assert model.config.tie_word_embeddings == spec.tie_word_embeddings


def test_old_and_new_configs_give_one_spec() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    specs = [DecoderSpec.from_config({**CONFIGS["llama"], **keys}) for keys in (old, new)]
    assert specs[0] == specs[1]
    assert hash(specs[0]) == hash(specs[1])
    assert (specs[0].rope.kind, specs[0].rope.theta) == ("llama3", 5e5)
    assert dict(specs[0].rope.scaling) == scaling


def test_head_dim_and_kv_heads_have_defaults() -> None:
    config = {**CONFIGS["llama"], "head_dim": None, "num_key_value_heads": None}
    spec = DecoderSpec.from_config(config)
    assert (spec.head_dim, spec.num_kv_heads) == (16, 4)


def test_reading_leaves_the_config_alone() -> None:
    config = {**CONFIGS["llama"], "rope_scaling": {"type": "linear", "factor": 2.0}}
    before = repr(config)
    DecoderSpec.from_config(config)
    assert repr(config) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"model_type is 'mamba'; supported: llama, mistral"),
        ({"model_type": None}, r"model_type is None"),
        ({"hidden_act": "gelu_10"}, r"hidden_act is 'gelu_10'; supported: silu"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; supported: a divisor of 4"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads is 0"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers is -1"),
        ({"intermediate_size": 0}, r"intermediate_size is 0"),
        ({"head_dim": 7}, r"(?s)head_dim"),
        ({"hidden_size": 63}, r"(?s)hidden size \(63\)"),
        ({"hidden_size": "big"}, r"hidden_size"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"(?s)longrope"),
        ({"rope_parameters": {"rope_type": "spiral"}}, r"rope_type is 'spiral'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"(?s)Missing required keys"),
        ({"partial_rotary_factor": 0.03}, r"partial_rotary_factor is 'of 0 channels'"),
        ({"rope_theta": 0.0}, r"rope_theta is 0.0"),
    ],
)
def test_what_cannot_run_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderSpec.from_config({**CONFIGS["llama"], **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2", {"layer_types": ["full_attention"] * 2}, r"(?s)layer"),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"] * 3},
            r"layer_types is 'chunked_attention'",
        ),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers|transformers"),
        ("mistral", {"sliding_window": 0}, r"sliding_window is 0"),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            r"rope_parameters is \['full_attention'\]",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderSpec.from_config({**CONFIGS[name], **change})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("gemma3", {"model_type": "gemma3"}, "text_config is None"),
        ("gemma3n", {"altup_active_idx": 1}, "altup_active_idx is 1"),
        ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale is False"),
        ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs is 1"),
        ("gemma3n", {"laurel_rank": 40}, "laurel_rank is 40"),
        ("gemma3n", {"intermediate_size": [96, 96, 96, 64]}, r"intermediate_size is \[64, 96\]"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern is 1"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True; supported: false"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "layer_types is 'conv alone'"),
        ("lfm2", {"layer_types": ["conv", "linear_attention"] * 2}, "is 'linear_attention'"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1"),
        ("lfm2", {"block_ffn_dim_multiplier": -1.0}, "intermediate_size is -96"),
        ("nemotron-h", {"use_bias": True}, "use_bias is True; supported: false"),
        ("nemotron-h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu'"),
        ("nemotron-h", {"ssm_state_size": 24}, "a state of 24; use multiples of 16"),
        ("nemotron-h", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1"),
        ("nemotron-h", {"layers_block_type": ["linear_attention", "mlp"]}, "one that has full_att"),
        ("nemotron-h-moe", {"mlp_bias": True}, "mlp_bias is True; supported: false"),
        ("granite-h", {"mamba_proj_bias": True}, "mamba_proj_bias is True; supported: false"),
        ("granite-h", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias is True; supported: false"),
        ("falcon-h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is True; supported: false"),
        ("falcon-h1", {"attention_bias": True}, "attention_in_multiplier beside attention_bias is"),
        ("falcon-h1", {"mlp_bias": True}, r"mlp_multipliers beside mlp_bias is \[0.8, 0.6\]"),
        ("falcon-h1", {"ssm_multipliers": [1.0] * 4}, r"ssm_multipliers is .*; supported: 5 num"),
        ("falcon-h1", {"mlp_multipliers": [0.0, 1.0]}, r"mlp_multipliers is .*; supported: 2 num"),
        ("falcon-h1", {"key_multiplier": None}, "key_multiplier is None; supported: a number abo"),
        ("bamba", {"attn_layer_indices": []}, "layer_types is 'linear_attention alone'"),
        ("lfm2-moe", {"layer_types": None}, "layer_types is None; supported: conv, full_att"),
        ("lfm2-moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0"),
        ("laguna", {"gating": "per-channel"}, "gating is 'per-channel'; supported: true, per-head"),
        ("laguna", {"attention_bias": True}, "attention_bias is True; supported: false"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 6]}, "is 2; supported: a divisor of 3"),
        ("laguna", {"moe_routed_scaling_factor": 0.0}, "moe_routed_scaling_factor is 0"),
        ("step-3.5", {"mlp_bias": True}, "mlp_bias is True; supported: false"),
        ("step-3.5", {"gating": "per-element"}, "gating is 'per-element'; supported: true, per-h"),
        ("step-3.5", {"swiglu_limits": [0, 0, -1.0]}, "swiglu_limits is"),
        ("step-3.5", {"swiglu_limits_shared": [1.0]}, "swiglu_limits_shared is '1 entries'"),
        ("mimo-v2", {"v_head_dim": 64}, "v_head_dim is 64; supported: 1 to 48"),
        ("mimo-v2", {"rope_parameters": LLAMA3_ROPE}, "supported: one object for each kind of"),
        ("mimo-v2", {"attention_value_scale": float("inf")}, "attention_value_scale is"),
        (
            "mimo-v2",
            {"attention_value_scale": 0.0},
            "attention_value_scale is 0.0; supported: null",
        ),
        ("mimo-v2", {"num_key_value_heads": 4}, "num_key_value_heads is 8; supported: a divisor"),
        ("mimo-v2", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0"),
        (
            "mimo-v2",
            {"hybrid_layer_pattern": [1, 0, 1]},
            r"hybrid_layer_pattern is \[1, 0, 1\]; su",
        ),
        ("mimo-v2", {"moe_layer_freq": [1, 1, 1]}, "moe_layer_freq is"),
        ("mimo-v2", {"add_full_attention_sink_bias": True}, "sink_bias is True; supported: False"),
        ("mimo-v2", {"add_swa_attention_sink_bias": False}, "sink_bias is False; supported: True"),
        ("mimo-v2", {"swa_num_key_value_heads": 4}, "heads is 4; supported: 2"),
        ("mimo-v2", {"swa_head_dim": 64}, "swa_head_dim is 64; supported: 48"),
        ("mimo-v2", {"swa_rope_theta": 2e4}, "swa_rope_theta is 20000.0; supported: 1000.0"),
        ("mimo-v2", {"n_shared_experts": 1}, "n_shared_experts is 1; supported: 0"),
        ("step-3.5", {"swiglu_limits": [1.0]}, "swiglu_limits is '1 entries'"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise is -0.1; supported: 0 or"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; supported: 2 in this"),
        (
            "phimoe",
            {"rope_scaling": {**FAMILIES["phimoe"]["rope_scaling"], "short_mscale": 0}},
            "short_mscale is 0; supported: a number above 0",
        ),
        (
            "phimoe",
            {"rope_scaling": {**LLAMA3_ROPE, "short_mscale": 1.0, "long_mscale": 1.0}},
            "rope_type is 'llama3'; supported: default, longrope",
        ),
        ("llama", {"hidden_act": "xielu"}, "hidden_act is 'xielu'; supported: silu, "),
    ],
)
def test_numbers_of_other_families_are_refused(
    family: str, change: dict[str, Any], message: str
) -> None:
    config = {**TINY, **FAMILIES[family], **change}
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderSpec.from_config(converted(config, lambda name: False)[0])


@pytest.mark.parametrize(
    ("family", "limit"), [("opt", 128), ("phi3-longrope", 64), ("llama", None), ("gemma3", None)]
)
def test_position_limits(family: str, limit: int | None) -> None:
    config = {**TINY, **FAMILIES[family], "head_dim": 16}
    spec = DecoderSpec.from_config(config)
    assert spec.position_limit == limit
    spec.check_positions(limit or 1 << 20)
    if limit is not None:
        with pytest.raises(ArgumentError, match=f"up to {limit} tokens .* not {limit + 1}"):
            spec.check_positions(limit + 1)


def test_lfm2_has_the_mlp_that_transformers_makes_and_may_have_no_convolution() -> None:
    for change in (
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_ff_dim": 384},
        {"layer_types": None},
        {"layer_types": None, "full_attn_idxs": [1, 2]},
    ):
        config = {**TINY, **FAMILIES["lfm2"], **change}
        spec = DecoderSpec.from_config(config)
        full = Lfm2Config(**config)
        assert spec.intermediate_size == Lfm2MLP(full).w1.out_features
        assert [not spec.is_recurrent(i) for i in range(4)] == [
            kind == "full_attention" for kind in full.layer_types
        ]


def test_step_as_it_was_published_first() -> None:
    """Lists have entries of layers that predict further tokens, too."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    rope = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    tiny = {**TINY, **FAMILIES["step-3.5"]}
    wanted = DecoderSpec.from_config(tiny)
    new = ("n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "rope_parameters")
    new += ("num_sliding_attention_heads", "mlp_layer_types")
    published = {
        **{key: value for key, value in tiny.items() if key not in new},
        "architectures": ["Step3p5ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "layer_types": kinds,
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_layers_enum": "1,2",
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "rope_theta": [1e4, 1e3, 1e4, 1e3],
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
        "rope_scaling": rope,
        "swiglu_limits": [*tiny["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*tiny["swiglu_limits_shared"], 0.0],
        "zero_centered": True,
    }
    found = DecoderSpec.from_config(published)
    assert found.local_rope is not None
    local = replace(found.local_rope, scaling=())  # the whole head rotates
    assert replace(found, local_rope=local) == wanted
    assert [found.query_heads(i) for i in range(3)] == [2, 6, 2]
    assert [found.gates(i) for i in range(3)] == [2, 6, 2]


def test_mimo_as_it_was_published_first() -> None:
    """Its fields say what transformers takes for granted; windows leave the token itself out."""
    tiny = {**TINY, **FAMILIES["mimo-v2"], "num_hidden_layers": 7, "routed_scaling_factor": None}
    new = ("layer_types", "mlp_layer_types", "rope_parameters")
    published = {
        **{key: value for key, value in tiny.items() if key not in new},
        "architectures": ["MiMoV2FlashForCausalLM"],
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": tiny["num_attention_heads"],
        "swa_num_key_value_heads": 2 * tiny["num_key_value_heads"],
        "swa_head_dim": tiny["head_dim"],
        "swa_v_head_dim": tiny["v_head_dim"],
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "sliding_window": 5,
        "sliding_window_size": 5,
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_value_scale": 0.5,
    }
    spec = DecoderSpec.from_config(published)
    assert spec.sliding_window == (None, 6, 6, 6, 6, None, 6)
    assert [spec.heads(i) for i in range(2)] == [(1, 48), (2, 48)]
    assert [spec.has_sinks(i) for i in range(2)] == [False, True]
    ropes = spec.rope_of(0), spec.rope_of(1)
    assert [(rope.theta, rope.dim) for rope in ropes if rope is not None] == [(5e6, 16), (1e4, 16)]
    assert spec.attention_output_scale == 0.5
    assert spec.experts is not None
    assert spec.experts.layers == (False, *[True] * 6)
    assert spec.experts.scale == 1.0
    assert (spec.qkv_rows, spec.o_columns) == ((4 + 2) * 48 + 2 * 32, 4 * 32)


@pytest.mark.parametrize("change", [{"head_dim": 24}, {"intermediate_size": 100}])
def test_row_blocks_of_two_parts_are_refused(change: dict[str, int]) -> None:
    spec = DecoderSpec.from_config({**CONFIGS["llama"], **change})
    with pytest.raises(UnsupportedModelError, match=r"supported: multiples of 16"):
        layer_weights(spec, 0)
