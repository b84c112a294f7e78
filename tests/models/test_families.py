"""Models that become another one when they are converted."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from qoff.checkpoint import Checkpoint
from qoff.errors import UnsupportedModelError
from qoff.models.convert.convert import convert
from qoff.models.families import converted
from qoff.models.spec import DecoderSpec
from tests.converted_models import EIGHT, NEARLY, expected, logits, random_weights
from tests.tiny_families import TINY
from tests.tiny_models import save_model
from tests.tolerances import relative_rms


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_embedding_is_multiplied_by_its_projections(tmp_path: Path, tied: bool) -> None:
    """OPT 350M: embedding and head of 32 columns, layers of 64."""
    changes = {"word_embed_proj_dim": 32, "tie_word_embeddings": tied}
    save_model(tmp_path / "model", "opt-350m", **changes)
    convert(tmp_path / "model", tmp_path / "out", quant=EIGHT)
    tokens = torch.randint(3, 128, (19,))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found, wanted = logits(tmp_path / "out", tokens), expected(model, tokens)
    assert relative_rms(found, wanted) < NEARLY
    config = Checkpoint.open(tmp_path / "out").config
    assert config["word_embed_proj_dim"] == 64
    assert not config["tie_word_embeddings"]


def test_kimi_k2_becomes_deepseek_v3(tmp_path: Path) -> None:
    """By a name that transformers does not know."""
    source = tmp_path / "model"
    save_model(source, "deepseek-v3")
    tokens, found = torch.randint(3, 128, (19,)), []
    for kind in ("deepseek_v3", "kimi_k2"):
        file = source / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
        convert(source, tmp_path / kind, quant=EIGHT)
        assert Checkpoint.open(tmp_path / kind).config["model_type"] == "deepseek_v3"
        found.append(logits(tmp_path / kind, tokens))
    assert torch.equal(*found)


_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "exaone": {
        **{k: v for k, v in TINY.items() if k != "num_hidden_layers"},
        "num_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-3,
        "rope_theta": 5000.0,
    },
    "sarvam_moe": {
        **TINY,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 4,  # all, whatever rounding does to scores
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "use_qkv_bias": True,
    },
    "sarvam_mla": {
        **TINY,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 96,
        "q_head_dim": 48,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "deepseek_yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 16,
        },
    },
}


@pytest.mark.parametrize(
    ("kind", "becomes", "tensor"),
    [
        ("exaone", "llama", "transformer.h.1.mlp.c_fc_0.weight"),
        ("sarvam_moe", "glm4_moe", "model.layers.1.attention.query_key_value.weight"),
        ("sarvam_mla", "deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight"),
    ],
)
def test_a_model_by_other_names_becomes_one_of_its_family(
    tmp_path: Path, kind: str, becomes: str, tensor: str
) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("transformers knows it since 5.24")
    source = tmp_path / "model"
    config = AutoConfig.for_model(kind, **deepcopy(_AS_PUBLISHED[kind]))
    model = AutoModelForCausalLM.from_config(config)
    random_weights(model)
    model.save_pretrained(source)
    assert tensor in load_file(source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": kind, **_AS_PUBLISHED[kind]}))
    convert(source, tmp_path / "out", quant=EIGHT)
    tokens = torch.randint(3, 128, (19,))
    assert Checkpoint.open(tmp_path / "out").config["model_type"] == becomes
    assert relative_rms(logits(tmp_path / "out", tokens), expected(model, tokens)) < NEARLY
    AutoConfig.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("value", [4, 0])
def test_what_transformers_4_wrote_becomes_what_transformers_5_takes(
    tmp_path: Path, value: int
) -> None:
    """A number says whether Llama 4 scales its queries."""
    source = tmp_path / "model"
    save_model(source, "llama4")
    file = source / "config.json"
    config = json.loads(file.read_text()) | {"attn_temperature_tuning": value}
    file.write_text(json.dumps(config))
    convert(source, tmp_path / "out", quant=EIGHT)
    found = Checkpoint.open(tmp_path / "out").config
    assert found["attn_temperature_tuning"] is (value > 0)
    assert (DecoderSpec.from_config(found).query_scale is None) == (value == 0)
    AutoConfig.from_pretrained(tmp_path / "out")
    seen, _ = converted({"model_type": "llama4", "text_config": config}, lambda name: False)
    assert seen["attn_temperature_tuning"] is (value > 0)


def test_what_neither_wrote_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama4")
    config = json.loads((tmp_path / "config.json").read_text())
    for value in (-1, "yes"):
        found, _ = converted({**config, "attn_temperature_tuning": value}, lambda name: False)
        with pytest.raises(UnsupportedModelError, match="attn_temperature_tuning"):
            DecoderSpec.from_config(found)


def test_experts_in_one_tensor_are_those_of_one_each(tmp_path: Path) -> None:
    """As Qwen 3.5 is published, and as transformers saves it."""
    source = tmp_path / "model"
    save_model(source, "qwen3.5-moe")
    convert(source, tmp_path / "apart", quant=EIGHT)
    file = source / "model.safetensors"
    whole = "model.language_model."
    tensors = {k.replace("model.", whole, 1): v for k, v in load_file(file).items()}
    for layer in range(3):
        module = f"{whole}layers.{layer}.mlp.experts"
        parts = [
            [tensors.pop(f"{module}.{e}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for e in range(8)
        ]
        tensors[f"{module}.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
        tensors[f"{module}.down_proj"] = torch.stack([part[2] for part in parts])
    save_file(tensors, file, {"format": "pt"})
    convert(source, tmp_path / "together", quant=EIGHT)
    tokens = torch.randint(3, 128, (9,))
    assert torch.equal(*(logits(tmp_path / name, tokens) for name in ("apart", "together")))
