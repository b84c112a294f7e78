"""OLMo Hybrid under all names that its tensors have, and what of it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qoff.errors import QoffError, UnsupportedModelError
from qoff.models import names
from qoff.models.convert.convert import convert
from qoff.models.layer_weights import layer_weights
from qoff.models.spec import DecoderSpec
from qoff.quant import QuantConfig
from tests.models.test_gguf_families import assert_same_weights
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import QUANT, save_model, tiny_checkpoint, tiny_model

FAMILY, FILE = "olmo-hybrid", "model.safetensors"
CONFIG = {**TINY, **FAMILIES[FAMILY]}


def test_layers_have_norms_where_their_kind_has_them() -> None:
    spec = DecoderSpec.from_config(CONFIG)
    assert [spec.norms_before(i) for i in range(3)] == [True, False, True]
    assert [spec.norms_after(i) for i in range(3)] == [False, True, False]
    assert spec.rope is None
    of_layers = [{x.name for x in layer_weights(spec, i)} for i in range(2)]
    assert "input_layernorm.weight" in of_layers[0] - of_layers[1]
    assert "mlp.post_norm.weight" in of_layers[1] - of_layers[0]


def test_states_turn_signs_and_have_an_eps_of_their_own() -> None:
    shapes = [
        DecoderSpec.from_config({**CONFIG, "linear_allow_neg_eigval": allowed}).state_shape
        for allowed in (True, False)
    ]
    assert [(x.learns, x.norm_eps) for x in shapes] == [(2.0, 1e-5), (1.0, 1e-5)]  # type: ignore[union-attr]


@pytest.mark.parametrize("rope", [{"rope_theta": None}, {"rope_parameters": {"rope_theta": None}}])
def test_nothing_rotates_where_a_config_has_no_theta(rope: dict[str, Any]) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    assert DecoderSpec.from_config({**config, **rope}).rope is None
    found = DecoderSpec.from_config({**config, "rope_theta": 5e5}).rope
    assert found is not None
    assert found.theta == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"layer_types": ["linear_attention"] * 3}, "not one that transformers accepts"),
        ({"layer_types": ["linear_attention", "conv", "full_attention"]}, "layer_types is 'conv'"),
        ({"linear_key_head_dim": 24}, "keys of 24 channels"),
        ({"linear_num_value_heads": 4}, "4 value heads for 3 key heads"),
    ],
)
def test_what_nothing_computes_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderSpec.from_config({**CONFIG, **change})


@pytest.mark.parametrize("other_norms", [True, False])
def test_published_tensors(other_norms: bool, base: Path, tmp_path: Path) -> None:
    """Queries, keys and values have convolutions of their own."""
    source, other = tiny_model(base, FAMILY), tmp_path / "model"
    shutil.copytree(source, other)
    found = {}
    for name, tensor in load_file(source / FILE).items():
        if name.endswith("conv1d.weight"):
            sizes = [96, 96, 192]
            for x, part in zip("qkv", tensor.split(sizes), strict=True):
                found[name.replace("conv1d", f"{x}_conv1d")] = part.contiguous()
        elif other_norms and ".1." not in name:
            name = name.replace("input_layernorm", "attention_layer_norm")
            found[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = tensor
        else:
            found[name] = tensor
    save_file(found, other / FILE, {"format": "pt"})
    path = convert(other, tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    assert_same_weights(path, tiny_checkpoint(base, FAMILY))


def saved_again(source: Path, folder: Path) -> None:
    """Save a model as one that was made of a config; one that was loaded is saved as it was."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.load_state_dict(load_file(source / FILE))
    model.save_pretrained(folder)


def test_tensors_as_transformers_saves_them(tmp_path: Path) -> None:
    """It cuts a convolution into equal parts, which are right where all have as many channels."""
    save_model(tmp_path / "model", FAMILY, linear_value_head_dim=32)
    saved_again(tmp_path / "model", tmp_path / "saved")
    assert "model.layers.1.feedforward_layer_norm.weight" in load_file(tmp_path / "saved" / FILE)
    assert_same_weights(
        *(convert(tmp_path / x, tmp_path / f"{x}-4", quant=QUANT) for x in ("model", "saved"))
    )


def test_convolutions_in_wrong_parts_are_refused(base: Path, tmp_path: Path) -> None:
    saved_again(tiny_model(base, FAMILY), tmp_path / "saved")
    with pytest.raises(QoffError, match=r"q_conv1d.*\(128, 1, 4\)"):
        convert(tmp_path / "saved", tmp_path / "checkpoint", quant=QUANT)


def test_what_forgets_has_eight_bits() -> None:
    quant = QuantConfig(bits=4, group_size=32)
    weights = layer_weights(DecoderSpec.from_config(CONFIG), 0)
    bits = {x.name: x.form("", quant).bits for x in weights if x.name.startswith("linear_attn.")}
    assert {name for name, some in bits.items() if some == 8} == {names.DELTA_B, names.DELTA_A}
