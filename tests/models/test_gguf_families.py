"""GGUF files of every family become what their safetensors become: the same spec, the same bytes.

What that computes is compared with transformers in `test_decoder.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import FormatError, QoffError, QuantizationError, UnsupportedModelError
from qoff.kernels.layout.qtensor import QTensor
from qoff.models import names
from qoff.models.convert.builder import Builder
from qoff.models.convert.convert import convert
from qoff.models.convert.unconverted import Unconverted
from qoff.models.sources import open_source
from qoff.models.spec import DecoderSpec
from tests.gguf_models import GGUFModel
from tests.mtp_models import save_with_mtp
from tests.tiny_families import FAMILIES
from tests.tiny_models import QUANT, read_all, save_model, tiny_checkpoint, tiny_model

# What a GGUF file cannot say, as it says nothing: what llama.cpp takes it for.
_MSCALE = {**FAMILIES["deepseek-v3"]["rope_scaling"], "mscale": 0.7}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral-window": {"model_type": "llama", "sliding_window": None},
    "qwen2-window": {"use_sliding_window": False},
    "smollm3": {"no_rope_layer_interval": 4},
    "glm": {"head_dim": 16},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "starcoder2": {"sliding_window": None},
    "cohere2": {"layer_types": None, "num_hidden_layers": 4},
    "exaone4": {"layer_types": None, "num_hidden_layers": 4},
    "glm4-moe": {"n_group": 1, "topk_group": 1},
    "llama4": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_parameters": {
            **FAMILIES["llama4"]["rope_parameters"],
            "original_max_position_embeddings": 8192,
        },
    },
    "phimoe": {"router_jitter_noise": 0.01},
    "step-3.5": {"query_pre_attn_scalar": 32},
    "mimo-v2": {  # a file has the number of channels that rotate, not their part
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1 / 3}
            for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e3))
        },
    },
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "deepseek-v2": {"rope_scaling": _MSCALE},
    "deepseek-v3": {"rope_scaling": _MSCALE},
    "deepseek-v3.2": {"rope_scaling": _MSCALE},
    "falcon-h1": {  # its constants are in the file's matrices: `test_falcon_h1.py`
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **{
            f"{name}_multiplier": 1.0
            for name in (
                *("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in"),
                "ssm_out",
            )
        },
    },
}
# llama.cpp has no such architecture, does not tell it from another, or the package `gguf` does not
# have it.
WITHOUT: tuple[str, ...] = (
    *("opt", "opt-350m", "solar-open", "hy-v3", "laguna", "laguna-per-element"),
)
WITHOUT += ("glm4-moe-lite", "ministral", "internlm3", "cwm")
WITHOUT += ("mellum", "hyperclovax", "helium", "iquestcoder", "bamba", "ling3", "ling3-free")
WITHOUT += ("olmo-hybrid", "olmo-hybrid-rope")


def source_of(base: Path, family: str) -> Path:
    """The saved model of transformers, without what a GGUF file cannot say."""
    if family not in CHANGES:
        return tiny_model(base, family)
    path = base / "gguf-families" / family
    if not path.exists():
        save_model(path, family, **CHANGES[family])
    return path


def all_weights(path: Path) -> dict[str, list[Tensor]]:
    return {
        name: [w.codes, w.scale_min] if isinstance(w, QTensor) else [w]
        for name, w in read_all(path).items()
    }


def assert_same_weights(found: Path, wanted: Path) -> None:
    """Every weight of two checkpoints is the same to the bit."""
    weights, same = all_weights(found), all_weights(wanted)
    assert weights.keys() == same.keys()
    for name, parts in weights.items():
        assert all(map(torch.equal, parts, same[name])), name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT])
def test_files_of_every_family(family: str, base: Path, tmp_path: Path) -> None:
    source = source_of(base, family)
    path = GGUFModel.of(source).write(tmp_path / "m.gguf")
    found = convert(path, tmp_path / "out", quant=QUANT, for_cpu=True)
    if family in CHANGES:
        wanted = convert(source, tmp_path / "wanted", quant=QUANT, for_cpu=True)
    else:
        wanted = tiny_checkpoint(base, family)
    specs = [DecoderSpec.from_config(Checkpoint.open(x).config) for x in (found, wanted)]
    assert specs[0] == specs[1]
    weights, same = all_weights(found), all_weights(wanted)
    assert weights.keys() == same.keys()
    for name, parts in weights.items():
        if name.endswith((names.DECAY, names.MAMBA_DECAY)):  # the logarithm of its exponential
            torch.testing.assert_close(parts, same[name])
        else:
            assert all(map(torch.equal, parts, same[name])), name


@pytest.mark.parametrize(
    ("family", "kind", "apart"),
    [
        ("iquestcoder", "llama", {"model_type"}),
        ("internlm3", "llama", {"model_type"}),
        ("llama3-rope", "exaone", set()),
        ("llama-gqa-tied", "internlm2", set()),
        ("llama-biased", "pangu_embedded", set()),
        ("granite", "minicpm", set()),
        ("solar-open", "glm4_moe", {"model_type", "intermediate_size", "rope"}),
    ],
)
def test_files_of_another_architecture(
    family: str, kind: str, apart: set[str], base: Path, tmp_path: Path
) -> None:
    """Some compute the same by other names: those that transformers does not know, and others."""
    model = GGUFModel.of(tiny_model(base, family), kind)
    found = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out", quant=QUANT, for_cpu=True)
    wanted = tiny_checkpoint(base, family)
    specs = [DecoderSpec.from_config(Checkpoint.open(x).config) for x in (found, wanted)]
    ropes = [(spec.rope.kind, spec.rope.theta, spec.rope.dim) for spec in specs if spec.rope]
    assert ropes[0] == ropes[1]
    assert specs[0] == replace(specs[1], **{name: getattr(specs[0], name) for name in apart})
    assert_same_weights(found, wanted)


def test_mistral_large_3_is_a_file_of_deepseek_2(base: Path, tmp_path: Path) -> None:
    """Whose queries are scaled by position."""
    model = GGUFModel.of(tiny_model(base, "mistral4"))
    other = GGUFModel("deepseek2", {**model.metadata, "expert_gating_func": 1}, model.tensors)
    found = convert(other.write(tmp_path / "m.gguf"), tmp_path / "out", quant=QUANT, for_cpu=True)
    wanted = tiny_checkpoint(base, "mistral4")
    specs = [DecoderSpec.from_config(Checkpoint.open(x).config) for x in (found, wanted)]
    assert specs[0] == specs[1]
    assert_same_weights(found, wanted)


def test_the_first_qwen_becomes_the_second(base: Path, tmp_path: Path) -> None:
    """Its queries, keys and values are one matrix, and its gates count as rows of the MLP."""
    model = GGUFModel.of(tiny_model(base, "qwen2"))
    tensors, inner = dict(model.tensors), "feed_forward_length"
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{x}")) for x in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    first = GGUFModel("qwen", {**model.metadata, inner: 2 * model.metadata[inner]}, tensors)
    found = convert(first.write(tmp_path / "m.gguf"), tmp_path / "out", quant=QUANT, for_cpu=True)
    wanted = tiny_checkpoint(base, "qwen2")
    specs = [DecoderSpec.from_config(Checkpoint.open(x).config) for x in (found, wanted)]
    assert specs[0] == specs[1]
    assert_same_weights(found, wanted)


@pytest.mark.parametrize("key", ["embedding_scale", "residual_scale"])
def test_files_from_before_their_factors_were_written_are_refused(
    base: Path, tmp_path: Path, key: str
) -> None:
    model = GGUFModel.of(tiny_model(base, "granite"), "minicpm")
    del model.metadata[key]
    with pytest.raises(FormatError, match=key):
        open_source(model.write(tmp_path / "m.gguf")).config()


def test_factors_without_the_length_from_which_they_are_long(base: Path, tmp_path: Path) -> None:
    """MiniCPM 4's files; as in llama.cpp, up to the end of the context they are the short ones."""
    model = GGUFModel.of(tiny_model(base, "granite"), "minicpm")
    pairs = int(model.metadata["rope.dimension_count"]) // 2
    for name in ("long", "short"):
        model.tensors[f"rope_factors_{name}.weight"] = np.linspace(1, 2, pairs, dtype=np.float32)
    model.metadata["rope.scaling.type"] = "longrope"
    rope = open_source(model.write(tmp_path / "m.gguf")).config()["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["original_max_position_embeddings"] == model.metadata["context_length"]


def test_keys_and_values_that_no_layer_attends_to(base: Path, tmp_path: Path) -> None:
    """Gemma 3n's checkpoints have them, and so do its files."""
    model = GGUFModel.of(tiny_model(base, "gemma3n"))
    for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
        assert f"blk.3.{name}" not in model.tensors
        model.tensors[f"blk.3.{name}"] = model.tensors[f"blk.1.{name}"]
    found = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out", quant=QUANT, for_cpu=True)
    weights, same = all_weights(found), all_weights(tiny_checkpoint(base, "gemma3n"))
    assert weights.keys() == same.keys()
    for name, parts in weights.items():
        assert all(map(torch.equal, parts, same[name])), name


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2", "qwen2vl"), ("qwen3-tied", "qwen3vl"), ("qwen3-moe", "qwen3vlmoe")],
)
def test_text_models_of_vision_models(family: str, kind: str, base: Path, tmp_path: Path) -> None:
    """For text, the three positions of a token are one, and no layer adds what is seen."""
    model = GGUFModel.of(source_of(base, family))
    wanted = model.write(tmp_path / "wanted.gguf")
    more = {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3}
    seeing = GGUFModel(kind, model.metadata | more, model.tensors)
    found = seeing.write(tmp_path / "m.gguf")
    assert open_source(found).config() == open_source(wanted).config()
    assert_same(found, wanted)


def floats(path: Path) -> dict[str, Tensor]:
    """The values of all weights, as a conversion reads them."""
    model = Unconverted.of(open_source(path))
    builder, units = Builder(model.source, QUANT, requantize=False), model.units
    for unit in units:
        builder.check(*unit)
    return {f"{at}{w.name}": builder.floats(w) for at, unit in units for w in unit}


def assert_same(found: Path, wanted: Path) -> None:
    values, same = floats(found), floats(wanted)
    assert values.keys() == same.keys()
    for name, value in values.items():
        assert torch.equal(value, same[name]), name


def test_latent_attention_of_quantized_types(base: Path, tmp_path: Path) -> None:
    """Keys' matrices are transposed, so the values of both are quantized again."""
    model = GGUFModel.of(source_of(base, "deepseek-v3"))
    model.kinds = {"attn_v_b": Kind.Q8_0, "attn_q_b": Kind.Q8_0}
    wanted = model.rounded().write(tmp_path / "wanted.gguf")
    found = model.write(tmp_path / "m.gguf")
    assert_same(found, wanted)
    info = open_source(found).info("blk.0.attn_kv_b.weight")
    assert info is not None
    assert (info.shape, info.quantized) == ((4 * 32, 64), (8, 32))
    broken = dict(model.tensors)
    broken["blk.0.attn_v_b.weight"] = broken["blk.0.attn_v_b.weight"][:3]
    damaged = GGUFModel(model.architecture, model.metadata, broken).write(tmp_path / "d.gguf")
    with pytest.raises(FormatError, match=r"expected \[heads, latent, keys\] and") as refusal:
        open_source(damaged)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4, Kind.BF16])
@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_types_of_experts(family: str, kind: Kind, base: Path, tmp_path: Path) -> None:
    model = GGUFModel.of(tiny_model(base, family))
    model.kinds = {"_exps.weight": kind}
    wanted = model.rounded().write(tmp_path / "wanted.gguf")
    assert_same(model.write(tmp_path / "m.gguf"), wanted)


def test_experts_one_by_one_and_gates_above_up(base: Path, tmp_path: Path) -> None:
    """As files of before 2024 have them, and as llama.cpp's converter can fuse them."""
    model = GGUFModel.of(tiny_model(base, "mixtral"))
    wanted = model.write(tmp_path / "wanted.gguf")
    apart = GGUFModel(model.architecture, model.metadata, dict(model.tensors))
    fused = GGUFModel(model.architecture, model.metadata, dict(model.tensors))
    for layer in range(2):
        name = f"blk.{layer}.ffn_{{}}_exps.weight"
        for x in ("gate", "up", "down"):
            for e, values in enumerate(apart.tensors.pop(name.format(x))):
                apart.tensors[f"blk.{layer}.ffn_{x}.{e}.weight"] = values
        both = [fused.tensors.pop(name.format(x)) for x in ("gate", "up")]
        fused.tensors[name.format("gate_up")] = np.concatenate(both, axis=1)
    assert_same(apart.write(tmp_path / "apart.gguf"), wanted)
    assert_same(fused.write(tmp_path / "fused.gguf"), wanted)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.MXFP4])
def test_value_heads_of_quantized_types(kind: Kind, tmp_path: Path) -> None:
    """Whole groups of columns are moved, so codes stay as they are."""
    save_model(tmp_path, "qwen3.5", linear_num_key_heads=4, linear_value_head_dim=32)
    model = GGUFModel.of(tmp_path)
    model.metadata["attention.recurrent_layers"] = [True, False, True]
    model.kinds = dict.fromkeys(("ssm_out", "attn_qkv", "attn_gate", "ssm_beta"), kind)
    wanted = model.rounded().write(tmp_path / "wanted.gguf")
    assert_same(model.write(tmp_path / "m.gguf"), wanted)


def test_value_heads_within_a_group_of_columns(base: Path, tmp_path: Path) -> None:
    model = GGUFModel.of(tiny_model(base, "qwen3.5"))
    model.kinds = {"ssm_out": Kind.Q8_0}
    with pytest.raises(QuantizationError, match=r"ssm_out.weight: quantized columns are moved in"):
        floats(model.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("family", ["glm", "llama-biased", "qwen2", "mimo-v2"])
def test_fused_queries_keys_and_values(family: str, base: Path, tmp_path: Path) -> None:
    model = GGUFModel.of(source_of(base, family))
    wanted = model.write(tmp_path / "wanted.gguf")
    for layer in range(model.metadata["block_count"]):
        for suffix in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{x}.{suffix}" for x in "qkv"]
            parts = [model.tensors.pop(name) for name in names if name in model.tensors]
            if parts:
                model.tensors[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(parts)
    assert_same(model.write(tmp_path / "m.gguf"), wanted)


@pytest.mark.parametrize("family", ["glm4", "exaone-moe", "step-3.5", "mimo-v2"])
def test_layers_beyond_those_that_compute(family: str, base: Path, tmp_path: Path) -> None:
    """The last layers of some files predict further tokens; without all their tensors they are of
    no use."""
    model = GGUFModel.of(tiny_model(base, family))
    wanted = model.write(tmp_path / "wanted.gguf")
    layers = model.metadata["block_count"]
    lists = {key: [*x, x[-1]] for key, x in model.metadata.items() if isinstance(x, list)}
    model.metadata |= {"block_count": layers + 1, "nextn_predict_layers": 1, **lists}
    model.tensors[f"blk.{layers}.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    assert_same(model.write(tmp_path / "m.gguf"), wanted)


def test_a_layer_for_multi_token_prediction(tmp_path: Path) -> None:
    save_with_mtp(tmp_path / "model", "glm4-moe", n_group=1, topk_group=1)
    path = GGUFModel.of(tmp_path / "model").write(tmp_path / "m.gguf")
    found = convert(path, tmp_path / "found", quant=QUANT)
    wanted = convert(tmp_path / "model", tmp_path / "wanted", quant=QUANT)
    files = [Checkpoint.open(one).mtp for one in (found, wanted)]
    assert all(file is not None and len(file.weights) > 20 for file in files)
    assert_same_weights(found, wanted)


def test_the_rope_that_step_has(base: Path, tmp_path: Path) -> None:
    """Its lengths change over a wider range than Llama's, and its factors fill whole heads."""
    model = GGUFModel.of(source_of(base, "step-3.5"))
    model.metadata["rope.freq_base"] = 5e6
    wavelengths = 2 * np.pi * 5e6 ** np.arange(0, 1, 1 / 8)
    smooth = np.clip((131072 / wavelengths - 1) / 31, 0, 1)
    factors = np.concatenate([1 / ((1 - smooth) / 2 + smooth), np.ones(8)])
    model.tensors["rope_freqs.weight"] = factors.astype(np.float32)
    ropes = open_source(model.write(tmp_path / "m.gguf")).config()["rope_parameters"]
    assert ropes["full_attention"] == {
        "rope_type": "llama3",
        "rope_theta": 5e6,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131072,
    }
    assert ropes["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e3}


def test_parts_are_one_model(base: Path, tmp_path: Path) -> None:
    model = GGUFModel.of(tiny_model(base, "llama"))
    wanted = model.write(tmp_path / "m.gguf")
    folder = tmp_path / "parts"
    folder.mkdir()
    model.write(folder / "m.gguf", per_file=16)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    (folder / "mmproj-m.gguf").touch()
    assert_same(folder, wanted)
    assert_same(folder / names[1], wanted)
    (folder / names[2]).rename(folder / "other.gguf")
    with pytest.raises(FormatError, match=r"00001-of-00003.gguf: one of 3 files, of which m-00003"):
        open_source(folder / names[0])
    with pytest.raises(FormatError, match=r"other.gguf: is part 2 of 3 by its metadata"):
        open_source(folder / "other.gguf")
    (tmp_path / "n.gguf").touch()
    with pytest.raises(FormatError, match=r"holds several GGUF files, m.gguf and n.gguf"):
        open_source(tmp_path)


@pytest.mark.parametrize(("layers", "window"), [(64, 4096), (4, None)])
def test_exaone_has_windows_by_its_depth(
    layers: int, window: int | None, base: Path, tmp_path: Path
) -> None:
    model = GGUFModel.of(source_of(base, "exaone4"))
    del model.metadata["attention.sliding_window"]
    model.metadata["block_count"] = layers
    first = {name: x for name, x in model.tensors.items() if name.startswith("blk.0.")}
    for i in range(layers):
        model.tensors |= {name.replace("blk.0.", f"blk.{i}."): x for name, x in first.items()}
    config = open_source(model.write(tmp_path / "m.gguf")).config()
    assert config["sliding_window"] == window
    assert ("sliding_attention" in config["layer_types"]) == (window is not None)


@pytest.mark.parametrize("key", [None, "rope.dimension_count"])
@pytest.mark.parametrize("family", ["glm4", "glm4-moe", "gpt-neox"])
def test_whole_heads_turn_where_transformers_would_turn_a_part(
    family: str, key: str | None, base: Path, tmp_path: Path
) -> None:
    model = GGUFModel.of(source_of(base, family))
    hidden, heads = model.metadata["embedding_length"], model.metadata["attention.head_count"]
    head_dim = model.metadata.get("attention.key_length", hidden // heads)
    del model.metadata["rope.dimension_count"]
    if key is not None:
        model.metadata[key] = head_dim
    rope = Unconverted.of(open_source(model.write(tmp_path / "m.gguf"))).spec.rope
    assert rope is not None
    assert rope.dim == head_dim


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("qwen3-moe", {"expert_used_count": 9}, FormatError, "expert_used_count is 9 of 8 experts"),
        ("qwen3-moe", {"expert_count": 6}, FormatError, "6 experts, but tensor blk.1.ffn_gate_inp"),
        ("qwen3-moe", {"expert_count": 2**32 - 1}, FormatError, "expert_count is 4294967295"),
        ("qwen3-moe", {"expert_feed_forward_length": 48}, FormatError, r"ffn_gate_exps.weight has"),
        ("qwen3-moe", {"expert_gating_func": 2}, UnsupportedModelError, "expert_gating_func is 2"),
        ("llama4", {"attention.sliding_window": 0}, UnsupportedModelError, "sliding_window is 0"),
        ("exaone-moe", {"attention.sliding_window": 0}, UnsupportedModelError, "window is 0; supp"),
        ("step-3.5", {"attention.head_count": [2, 6, 4]}, FormatError, r"is \[2, 6, 4\]; expected"),
        ("step-3.5", {"attention.head_count": [2, 6]}, FormatError, "for each of 3 layers what"),
        ("step-3.5", {"swiglu_clamp_exp": [0.0]}, FormatError, "a limit for each of 3 layers"),
        ("step-3.5", {"swiglu_clamp_shexp": [0.0, -1.0, 0.0]}, FormatError, "a limit for each of"),
        ("step-3.5", {"expert_weights_norm": False}, UnsupportedModelError, "norm is False; supp"),
        ("step-3.5", {"rope.dimension_count": 16}, UnsupportedModelError, "is 16; supported: 32"),
        (
            "mimo-v2",
            {"attention.head_count_kv": [1, 4, 4]},
            UnsupportedModelError,
            "kv is 4 in lay",
        ),
        ("mimo-v2", {"attention.head_count_kv": [1, 2]}, FormatError, "for each of 3 layers what"),
        (
            "mimo-v2",
            {
                "attention.sliding_window_pattern": [1, 0, 1],
                "attention.head_count_kv": [2, 1, 2],
            },
            FormatError,
            "layer 0 is one with a window; expected it with tensor blk.0.attn_sinks.weight",
        ),
        ("mimo-v2", {"expert_weights_norm": False}, UnsupportedModelError, "norm is False; suppo"),
        ("glm4-moe", {"expert_gating_func": 1}, UnsupportedModelError, "expert_gating_func is 1"),
        ("glm4-moe", {"expert_group_count": 2}, UnsupportedModelError, "expert_group_count is 2"),
        ("glm4-moe", {"expert_feed_forward_length": 48}, FormatError, "a multiple of glm4moe.exp"),
        ("qwen3-moe", {"expert_weights_scale": 2.5}, UnsupportedModelError, "weights_scale is 2.5"),
        ("gpt-oss", {"attention.sliding_window_pattern": [True]}, FormatError, "has 1 entries for"),
        ("gemma2", {"attention.sliding_window": 0.5}, FormatError, "sliding_window is 0.5"),
        ("granite", {"rope.scaling.finetuned": False}, UnsupportedModelError, "finetuned is False"),
        ("granite", {"logit_scale": 0.0}, FormatError, "granite.logit_scale is 0.0"),
        ("qwen3.5", {"ssm.inner_size": 250}, FormatError, "inner_size is 250; expected a multiple"),
        ("qwen3.5", {"attention.recurrent_layers": [True]}, FormatError, "entry for 3 layers"),
        ("lfm2", {"attention.head_count_kv": [0, 1, 0]}, FormatError, "for each of 4 layers 0, or"),
        ("lfm2", {"attention.head_count_kv": [0, 1, 2, 0]}, FormatError, r"is \[0, 1, 2, 0\]; exp"),
        ("lfm2", {"attention.head_count_kv": [0.0, 1.0] * 2}, FormatError, r"is \[0.0, 1.0"),
        (
            "granite-h",
            {"ssm.inner_size": 130},
            FormatError,
            "is 130; expected a multiple of 16 heads",
        ),
        (
            "granite-h",
            {"ssm.inner_size": 208},
            FormatError,
            "expected a multiple of the embedding's",
        ),
        ("falcon-h1", {"ssm.inner_size": 250}, FormatError, "is 250; expected a multiple of 16 he"),
        ("nemotron-h-moe", {"attention.head_count_kv": [0, 0, 1]}, FormatError, "4 layers 0, or"),
        (
            "nemotron-h",
            {"block_count": 6, "attention.head_count_kv": [0, 0, 0, 1, 0, 0]},
            FormatError,
            "layer 5 has none of the tensors ffn_gate_inp, ffn_up",
        ),
        ("lfm2", {"attention.sliding_window": 64}, UnsupportedModelError, "sliding_window is 64"),
        ("lfm2-moe", {"expert_gating_func": 1}, UnsupportedModelError, "func is 1; supported: 2"),
        ("glm4", {"rope.dimension_sections": [8, 4, 4]}, UnsupportedModelError, "dimensions"),
        ("glm4", {"rope.dimension_count": 64}, UnsupportedModelError, "count is 64; supported: 32"),
        ("glm4", {"nextn_predict_layers": 2}, UnsupportedModelError, "predict_layers is 2"),
        ("phi3", {"attention.value_length": 8}, UnsupportedModelError, "value_length is 8"),
        ("phi3-longrope", {"rope.dimension_count": 8}, FormatError, "has 8 numbers; expected 4"),
        ("gemma", {"attention.head_count_kv": [4, 2]}, UnsupportedModelError, "the same in all"),
        ("gpt-neox", {"rope.scaling.type": "dynamic"}, UnsupportedModelError, "is 'dynamic'"),
    ],
)
def test_what_no_model_has(
    family: str,
    changes: dict[str, Any],
    error: type[QoffError],
    message: str,
    base: Path,
    tmp_path: Path,
) -> None:
    model = GGUFModel.of(source_of(base, family))
    model.metadata |= changes
    path = model.write(tmp_path / "m.gguf")
    with pytest.raises(error, match=message) as refusal:
        floats(path)
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


def test_which_layers_of_glm_5_have_an_index(tmp_path: Path) -> None:
    """Files without a word of it are of GLM 5, or from so many tokens of context on of GLM 5.2."""
    save_model(tmp_path / "model", "glm-5", num_hidden_layers=7)
    model, full, shared = GGUFModel.of(tmp_path / "model"), True, False
    for changes, wanted in (
        ({"attention.indexer.types": [full] * 7}, [full] * 7),
        ({"attention.indexer.types": None}, [full] * 7),
        ({"context_length": 1 << 20}, [full, full, full, shared, shared, shared, full]),
    ):
        model.metadata |= changes
        model.metadata = {key: value for key, value in model.metadata.items() if value is not None}
        for name in [name for name in model.tensors if name.startswith("blk.4.indexer.")]:
            del model.tensors[name]  # as in the last of these
        source = open_source(model.write(tmp_path / "m.gguf"))
        spec = DecoderSpec.from_config(source.config())
        assert spec.index is not None
        assert list(spec.index.layers) == wanted


def test_numbers_of_xielu(base: Path, tmp_path: Path) -> None:
    """One of each layer, or, as llama.cpp reads it, one for all; others are refused."""
    model = GGUFModel.of(tiny_model(base, "apertus"))
    once = {key: x[0] for key, x in model.metadata.items() if key.startswith("xielu.")}
    apart = {key: [x, x] for key, x in once.items()}
    for changed, name in ((once, "once"), (apart, "apart")):
        model.metadata |= changed
        model.write(tmp_path / f"{name}.gguf")
    assert_same(tmp_path / "once.gguf", tmp_path / "apart.gguf")
    model.metadata["xielu.beta"] = [0.5]
    with pytest.raises(FormatError, match=r"xielu.beta is .*expected a number for each of 2 la"):
        open_source(model.write(tmp_path / "m.gguf"))
    del model.metadata["xielu.beta"]
    with pytest.raises(FormatError, match=r"xielu.beta is missing"):
        open_source(model.write(tmp_path / "m.gguf"))
