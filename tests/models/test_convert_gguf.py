"""GGUF files convert code for code, rows in Hugging Face order, config and tokenizer rebuilt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from qoff.errors import FormatError, QoffError, UnsupportedModelError
from qoff.hf.tokenizer import load_tokenizer
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import COMPACT
from qoff.models.convert.convert import convert
from qoff.models.spec import DecoderSpec
from qoff.quant import QuantConfig, quantize
from tests.tiny_models import interleave16, read_all

from .gguf_model import (
    FAMILIES,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    Model,
)


def wanted_fused(model: Model, layer: int, suffix: str) -> dict[str, Tensor]:
    def value(name: str) -> Tensor:
        return model.value(f"model.layers.{layer}.{name}.{suffix}")

    gate, up = value("mlp.gate_proj"), value("mlp.up_proj")
    return {
        "self_attn.qkv_proj": torch.cat([value(f"self_attn.{x}_proj") for x in "qkv"]),
        "self_attn.o_proj": value("self_attn.o_proj"),
        "mlp.gate_up_proj": interleave16(gate, up),
        "mlp.down_proj": value("mlp.down_proj"),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("for_cpu", [False, True])
def test_codes_and_row_order_survive(family: str, for_cpu: bool, tmp_path: Path) -> None:
    model = Model(family)
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out", for_cpu=for_cpu)
    found = read_all(out)
    for layer in range(LAYERS):
        for name, value in wanted_fused(model, layer, "weight").items():
            weight = found[f"model.layers.{layer}.{name}"]
            assert isinstance(weight, QTensor)
            assert (weight.bits, weight.group_size) == (4, 32)
            assert torch.equal(weight.dequantize(), value), name
    for name in ("model.embed_tokens", "lm_head"):
        if f"{name}.weight" in model.tensors:
            weight = found[name]
            assert isinstance(weight, QTensor)
            assert (weight.bits, weight.packing) == (8, "rows16" if for_cpu else "split32")
            assert torch.equal(weight.dequantize(), model.value(f"{name}.weight"))
    for name, tensor in model.tensors.items():
        if "norm" in name:
            assert torch.equal(found.pop(name), tensor)
    if family == "llama-biased":
        for layer in range(LAYERS):
            for name, value in wanted_fused(model, layer, "bias").items():
                assert torch.equal(found[f"model.layers.{layer}.{name}.bias"], value)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_describes_the_model(family: str, tmp_path: Path) -> None:
    model = Model(family)
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(model_class(model)).__name__]
    assert config["quantization_config"] == {
        "quant_method": "qoff",
        "version": 1,
        "bits": 4,
        "group_size": 32,
        "solver": "imported",
        "packing": "split32",
    }
    found, wanted = (DecoderSpec.from_config(c) for c in (config, model.config.to_dict()))
    assert found.norm_eps == pytest.approx(wanted.norm_eps, rel=1e-6)  # stored as float32
    assert found == type(wanted)(**{**vars(wanted), "norm_eps": found.norm_eps})
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)


def test_texts_that_end_a_turn_end_answers_without_a_key_or_a_type(tmp_path: Path) -> None:
    model = Model("qwen2")
    model.tokenizer["texts"] = {33: "<|end|>", 34: "<|im_end|>"}
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 33, 34]
    assert load_tokenizer(out).decode([3, 34], skip_special_tokens=True) == "a"
    model.tokenizer["texts"] |= {35: "<|return|>", 36: "<|call|>"}  # <|end|> ends a message then
    out = convert(model.write(tmp_path / "n.gguf"), tmp_path / "other")
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 34, 35, 36]


def model_class(model: Model) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config)


JOINED: list[tuple[dict[str, Kind], dict[str, int]]] = [  # types, and bits of matrices
    *(
        ({"_proj": kind}, {"": int(kind.name[1])})
        for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
    ),
    ({"q_proj": Kind.Q4_0, "up_proj": Kind.Q4_0}, {"": 4}),
    ({"v_proj": Kind.Q8_0, "up_proj": Kind.Q5_1}, {"qkv": 8, "gate_up": 5, "": 4}),
]


@pytest.mark.parametrize("for_cpu", [False, True])
@pytest.mark.parametrize(("kinds", "bits"), JOINED)
def test_imported_types_are_exact_and_join_in_the_widest(
    kinds: dict[str, Kind], bits: dict[str, int], for_cpu: bool, tmp_path: Path
) -> None:
    """4-bit codes fit 5 and 8 bits, so a fused matrix of both has the values of its parts."""
    model = Model("llama", kinds)
    found = read_all(convert(model.write(tmp_path / "m.gguf"), tmp_path / "out", for_cpu=for_cpu))
    for name, value in wanted_fused(model, 1, "weight").items():
        weight = found[f"model.layers.1.{name}"]
        assert isinstance(weight, QTensor)
        assert weight.bits == next(width for part, width in bits.items() if part in name)
        assert torch.equal(weight.dequantize(), value), name


@pytest.mark.parametrize("kind", [Kind.F16, Kind.F32, Kind.BF16])
def test_floats_are_quantized(kind: Kind, tmp_path: Path) -> None:
    """Alone by the solver as configured; beside imported rows in the format of those."""
    model = Model("llama", {"o_proj": kind, "v_proj": kind})
    quant = QuantConfig(group_size=64, solver="mse")
    path = model.write(tmp_path / "m.gguf")
    found = read_all(convert(path, tmp_path / "out", quant=quant))
    alone, joined = (
        found["model.layers.0.self_attn.o_proj"],
        found["model.layers.0.self_attn.qkv_proj"],
    )
    assert isinstance(alone, QTensor)
    assert isinstance(joined, QTensor)
    values = model.value("model.layers.0.self_attn.o_proj.weight")
    assert alone.group_size == 64
    assert torch.equal(alone.dequantize(), quantize(values, 4, 64, "mse").dequantize())
    values = model.value("model.layers.0.self_attn.v_proj.weight")
    assert joined.group_size == 32
    rows = joined.dequantize()[-values.shape[0] :]
    again = quantize(values, 4, 32, "mse", scale_dtype=torch.float16)
    assert torch.equal(rows, again.dequantize())


def test_a_file_of_q4_k_m(tmp_path: Path) -> None:
    """Q4_K and Q5_K keep their codes, also beside Q6_K, whose values are quantized to 8 bits."""
    six = ("layers.0.self_attn.v_proj", "layers.0.mlp.down_proj", "lm_head")
    kinds = dict.fromkeys(six, Kind.Q6_K) | {"layers.1.mlp.up_proj": Kind.Q5_K}
    model = Model("llama-wide", {**kinds, "_proj": Kind.Q4_K, "embed_tokens": Kind.Q4_K})
    quant = QuantConfig(solver="rtn")
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out", quant=quant)
    found = read_all(out)
    wide = {"0.self_attn.qkv_proj": 8, "0.mlp.down_proj": 8, "1.mlp.gate_up_proj": 5}
    for layer in range(LAYERS):
        for name, value in wanted_fused(model, layer, "weight").items():
            weight = found[f"model.layers.{layer}.{name}"]
            assert isinstance(weight, QTensor)
            assert (weight.bits, weight.group_size) == (wide.get(f"{layer}.{name}", 4), 32)
            rows = value.shape[0]
            if (layer, name) == (0, "self_attn.qkv_proj"):
                rows -= KV_HEADS * 64  # of V
            if (layer, name) == (0, "mlp.down_proj"):
                rows = 0
            assert torch.equal(weight.dequantize()[:rows], value[:rows]), name
            if rows < value.shape[0]:
                scales = torch.float16 if rows else COMPACT  # beside rows that keep theirs
                again = quantize(value[rows:], 8, 32, "rtn", scale_dtype=scales).dequantize()
                assert torch.equal(weight.dequantize()[rows:], again), name
    embedding, head = found["model.embed_tokens"], found["lm_head"]
    assert isinstance(embedding, QTensor)
    assert isinstance(head, QTensor)
    assert (embedding.bits, head.bits) == (4, 8)
    assert torch.equal(embedding.dequantize(), model.value("model.embed_tokens.weight"))
    again = quantize(model.value("lm_head.weight"), 8, 32, "rtn")
    assert torch.equal(head.dequantize(), again.dequantize())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["solver"]) == (4, 32, "imported")


def test_rope_factors_become_llama3_scaling(tmp_path: Path) -> None:
    """Llama 3.1's frequency factors, as llama.cpp's converter computes them, give its config."""
    model = Model("llama")
    rope = {"rope_type": "llama3", "rope_theta": 1e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    base = 1e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    wavelength = 2 * np.pi / base
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    model.extra["rope_freqs.weight"] = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["rope_parameters"] == rope
    model.extra["rope_freqs.weight"][3] *= 1.5
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight does not hold"):
        convert(model.write(tmp_path / "n.gguf"), tmp_path / "other")


def test_rope_scaling_keys(tmp_path: Path) -> None:
    model = Model("qwen2")
    model.metadata |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    model.metadata |= {"rope.scaling.original_context_length": 128}
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    spec = DecoderSpec.from_config(json.loads((out / "config.json").read_text()))
    assert spec.rope.kind == "yarn"
    assert dict(spec.rope.scaling) == {"factor": 4.0, "original_max_position_embeddings": 128}
    model.metadata["rope.scaling.type"] = "longrope"
    with pytest.raises(UnsupportedModelError, match=r"scaling.type is 'longrope'; supported: none"):
        convert(model.write(tmp_path / "n.gguf"), tmp_path / "other")


def test_the_old_key_of_linear_rope_scaling(tmp_path: Path) -> None:
    model = Model("llama")
    model.metadata["rope.scale_linear"] = 4.0
    out = convert(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    spec = DecoderSpec.from_config(json.loads((out / "config.json").read_text()))
    assert (spec.rope.kind, dict(spec.rope.scaling)) == ("linear", {"factor": 4.0})


def _missing(model: Model) -> None:
    del model.tensors["model.layers.1.mlp.up_proj.weight"]


def _shape(model: Model) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    model.tensors[name] = model.tensors[name][:64]


def _nan(model: Model) -> None:
    model.tensors["model.layers.1.self_attn.k_proj.weight"][2, 5] = torch.nan


def _partial(model: Model) -> None:
    model.metadata["rope.dimension_count"] = 16


def _experts(model: Model) -> None:
    model.arch = "qwen2"
    model.metadata["expert_count"] = 8


def _no_heads(model: Model) -> None:
    del model.metadata["attention.head_count"]


def _unknown(model: Model) -> None:
    model.extra["blk.0.ffn_down.extra"] = np.zeros(3, np.int32)


def _pre(model: Model) -> None:
    model.tokenizer["pre"] = "chameleon"


def _unigram(model: Model) -> None:
    model.tokenizer["model"] = "t5"


def _arch(model: Model) -> None:
    model.arch = "mpt"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_missing, FormatError, r"m.gguf: no tensor blk.1.ffn_up.weight"),
        (_shape, FormatError, r"ffn_up.weight has shape \(64, 64\), but config.json wants \(96,"),
        (_nan, FormatError, r"m.gguf: tensor blk.1.attn_k.weight \(Q4_1\) holds NaN"),
        (_partial, UnsupportedModelError, r"rope.dimension_count is 16; supported: 32"),
        (_experts, UnsupportedModelError, r"qwen2.expert_count is 8; supported: 0"),
        (_no_heads, FormatError, r"key llama.attention.head_count is missing; expected a whole"),
        (_unknown, UnsupportedModelError, r"blk.0.ffn_down.extra is not one that"),
        (_pre, UnsupportedModelError, r"tokenizer.ggml.pre is 'chameleon'; supported: default"),
        (_unigram, UnsupportedModelError, r"tokenizer.ggml.model is 't5'; supported: 'gpt2'"),
        (
            _arch,
            UnsupportedModelError,
            r"general.architecture is 'mpt'; supported: afmoe, apertus, ",
        ),
    ],
)
def test_what_is_wrong_is_named(
    damage: Any, error: type[QoffError], message: str, tmp_path: Path
) -> None:
    model = Model("llama")
    damage(model)
    with np.errstate(invalid="ignore"):
        path = model.write(tmp_path / "m.gguf")
    with pytest.raises(error, match=message):
        convert(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
