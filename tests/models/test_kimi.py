"""Kimi Linear under all names that its tensors have, and with a `config.json` as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qoff.errors import UnsupportedModelError
from qoff.models import names
from qoff.models.convert.convert import convert
from qoff.models.layer_weights import layer_weights
from qoff.models.spec import DecoderSpec
from qoff.quant import QuantConfig
from tests.gguf_models import GGUFModel
from tests.models.test_gguf_families import assert_same_weights
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import QUANT, tiny_checkpoint, tiny_model

FAMILY, FILE = "kimi-linear", "model.safetensors"
DELTA = {
    "head_dim": 32,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
}


def published(**changes: Any) -> dict[str, Any]:
    """The config of the tiny model as the real one's is written; layers are counted from 1."""
    config = {**TINY, **FAMILIES[FAMILY]}
    for key in ("layer_types", "linear_num_heads", "linear_head_dim", "max_position_embeddings"):
        del config[key]
    return config | {
        "model_max_length": 256,
        "head_dim": 72,
        "mla_use_nope": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "linear_attn_config": DELTA,
        **changes,
    }


def test_a_published_config_is_that_of_transformers() -> None:
    wanted = DecoderSpec.from_config({**TINY, **FAMILIES[FAMILY]})
    found = DecoderSpec.from_config(published())
    assert found == wanted
    assert found.rope is None
    assert found.recurrent is not None
    assert found.recurrent.layers == (True, False, True)
    assert found.experts is not None
    assert found.experts.layers == (False, True, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; supported: true"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"linear_attn_config": DELTA | {"kda_layers": [1]}}, "not one that transformers accepts"),
        ({"linear_attn_config": DELTA | {"kda_layers": [1, 9]}}, "not one that transformers"),
        ({"linear_attn_config": DELTA | {"head_dim": 24}}, "keys of 24 channels"),
        (
            {"linear_attn_config": DELTA | {"short_conv_kernel_size": 1}},
            "linear_conv_kernel_dim is 1",
        ),
    ],
)
def test_what_nothing_computes_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderSpec.from_config(published(**change))


@pytest.mark.parametrize("called", ["as published", "as modules"])
def test_tensors_under_other_names_than_transformers_saves(
    called: str, base: Path, tmp_path: Path
) -> None:
    """It saves the MLP of the first layer among experts, where no published model has it."""
    source, other = tiny_model(base, FAMILY), tmp_path / "model"
    if called == "as modules":
        model = AutoModelForCausalLM.from_pretrained(source)
        model.save_pretrained(other, save_original_format=False)
        assert "model.layers.0.self_attn.forget_gate.A_log" in load_file(other / FILE)
    else:
        other.mkdir()
        tensors = load_file(source / FILE)
        first = "model.layers.0.block_sparse_moe."
        assert any(name.startswith(first) for name in tensors)
        save_file({x.replace(first, "model.layers.0.mlp."): y for x, y in tensors.items()},
                  other / FILE, {"format": "pt"})  # fmt: skip
        (other / "config.json").write_text(
            json.dumps(published(architectures=["KimiLinearForCausalLM"]))
        )
    found = convert(other, tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    assert_same_weights(found, tiny_checkpoint(base, FAMILY))


def test_a_file_that_llama_quantize_wrote_has_shapes_of_fewer_dimensions(
    base: Path, tmp_path: Path
) -> None:
    model = GGUFModel.of(tiny_model(base, FAMILY))
    paths = []
    for name in ("converted", "quantized"):
        path = model.write(tmp_path / f"{name}.gguf")
        paths.append(convert(path, tmp_path / name, quant=QUANT, for_cpu=True))
        four = [x for x, values in model.tensors.items() if values.ndim == 4]
        for tensor in four:
            values = model.tensors[tensor]
            wanted = values.shape[2:] if tensor.endswith("ssm_a") else values.shape[1:]
            model.tensors[tensor] = values.reshape(wanted)
        assert len(four) == (8 if name == "converted" else 0)
    assert_same_weights(*paths)


def test_what_forgets_has_eight_bits() -> None:
    quant = QuantConfig(bits=4, group_size=32)
    weights = layer_weights(DecoderSpec.from_config({**TINY, **FAMILIES[FAMILY]}), 0)
    bits = {x.name: x.form("", quant).bits for x in weights if x.name.startswith("linear_attn.")}
    assert {name for name, some in bits.items() if some == 8} == {names.KDA_FGB, names.KDA_FORGET}
