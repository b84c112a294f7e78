"""Ling 3 under all names that its tensors have, and with a `config.json` as published."""

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
from tests.models.test_gguf_families import assert_same_weights
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import QUANT, tiny_checkpoint, tiny_model

FAMILY, FILE = "ling3", "model.safetensors"


def published(**changes: Any) -> dict[str, Any]:
    """The config of the tiny model as the real one's may be written."""
    config = {**TINY, **FAMILIES[FAMILY]}
    del config["layer_types"]
    return config | {
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
        "partial_rotary_factor": 0.5,  # of `head_dim`: the channels that rotate have their own key
        "rope_theta": 6_000_000,
        "rope_scaling": None,
        **changes,
    }


def test_a_published_config_is_that_of_transformers() -> None:
    found = DecoderSpec.from_config(published())
    assert found == DecoderSpec.from_config({**TINY, **FAMILIES[FAMILY]})
    assert found.rope is not None
    assert (found.rope.dim, found.rope.theta) == (32, 6e6)
    assert found.recurrent is not None
    assert found.recurrent.layers == (True, False, True)
    assert found.experts is not None
    assert found.experts.layers == (False, True, True)
    assert [found.gates(i) for i in range(3)] == [4] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"layer_types": ["mamba"] * 3}, "layer_types"),
        ({"layer_group_size": 4}, "linear_attention alone"),
        ({"kda_lower_bound": 0.0}, "kda_lower_bound is 0.0; supported: a number below 0"),
        ({"kda_lower_bound": float("-inf")}, "kda_lower_bound is -inf; supported: a number below"),
        ({"attention_bias": True}, "attention_bias is True; supported: false, where q_lora_rank"),
        ({"head_dim": 24}, "keys of 24 channels"),
        ({"short_conv_kernel_size": 1}, "linear_conv_kernel_dim is 1"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "partial_rotary_factor is 0.5; supported: 1",
        ),
    ],
)
def test_what_nothing_computes_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderSpec.from_config(published(**change))


@pytest.mark.parametrize("called", ["with one o_proj", "with both o_proj", "as modules"])
def test_tensors_under_other_names_than_transformers_saves(
    called: str, base: Path, tmp_path: Path
) -> None:
    """It saves the matrix of the output as `dense` in all layers, and reads `o_proj`, too."""
    source, other = tiny_model(base, FAMILY), tmp_path / "model"
    if called == "as modules":
        model = AutoModelForCausalLM.from_pretrained(source)
        model.save_pretrained(other, save_original_format=False)
        assert "model.layers.0.self_attn.forget_gate.A_log" in load_file(other / FILE)
    else:
        other.mkdir()
        tensors, layers = load_file(source / FILE), "02" if "one" in called else "012"
        for layer in layers:
            name = f"model.layers.{layer}.attention.{{}}.weight"
            tensors[name.format("o_proj")] = tensors.pop(name.format("dense"))
        save_file(tensors, other / FILE, {"format": "pt"})
        (other / "config.json").write_text(
            json.dumps(published(architectures=["BailingHybridForCausalLM"]))
        )
    found = convert(other, tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    assert_same_weights(found, tiny_checkpoint(base, FAMILY))


def test_what_forgets_has_eight_bits() -> None:
    quant = QuantConfig(bits=4, group_size=32)
    weights = layer_weights(DecoderSpec.from_config({**TINY, **FAMILIES[FAMILY]}), 0)
    bits = {x.name: x.form("", quant).bits for x in weights if x.name.startswith("linear_attn.")}
    assert {name for name, some in bits.items() if some == 8} == {names.KDA_FB}
