"""Rotary tables equal transformers' float32 cosines and sines bit for bit, however they grew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qoff.errors import ArgumentError
from qoff.models.native.rope import RotaryTable, table_bytes
from qoff.models.spec import DecoderSpec

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default-smollm2": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {**YARN, "factor": 16.0},
    "yarn-tuned": {**YARN, "factor": 16.0, "beta_fast": 24, "beta_slow": 2, "mscale": 1.5},
    "yarn-factor": {**YARN, "factor": 16.0, "attention_factor": 0.8},
}


def _config(kind: str, head_dim: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "rope_parameters": dict(KINDS[kind]),
    }


def _reference(config: dict[str, Any], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = LlamaRotaryEmbedding(AutoConfig.for_model(**config))
    cos, sin = rotary(torch.empty(1), torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def _table(config: dict[str, Any]) -> RotaryTable:
    spec = DecoderSpec.from_config(config)
    assert spec.rope is not None
    return RotaryTable(spec, spec.rope)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("head_dim", "lengths"), [(64, (1024,)), (16, (1, 300, 301, 1000)), (6, (7,))]
)
def test_equals_transformers(kind: str, head_dim: int, lengths: tuple[int, ...]) -> None:
    config = _config(kind, head_dim)
    table = _table(config)
    for length in lengths:
        cos, sin = table.upto(length)
        wanted_cos, wanted_sin = _reference(config, length)
        assert cos.dtype == sin.dtype == torch.float32
        assert torch.equal(cos, wanted_cos)
        assert torch.equal(sin, wanted_sin)


def test_a_long_enough_table_is_not_computed_again() -> None:
    table = _table(_config("default", 16))
    first, _ = table.upto(100)
    again, _ = table.upto(90)
    assert first.data_ptr() == again.data_ptr()
    assert len(again) == 90


def test_growing_leaves_older_views_valid() -> None:
    table = _table(_config("yarn", 16))
    cos, sin = table.upto(10)
    before = cos.clone(), sin.clone()
    grown, _ = table.upto(5000)
    assert torch.equal(cos, before[0])
    assert torch.equal(sin, before[1])
    assert torch.equal(grown[:10], before[0])


@pytest.mark.parametrize("upto", [(1,), (256,), (257,), (100, 300, 301, 700)])
def test_tables_take_no_more_than_is_said(upto: tuple[int, ...]) -> None:
    spec = DecoderSpec.from_config(_config("default", 16))
    assert spec.rope is not None
    table = RotaryTable(spec, spec.rope)
    for positions in upto:
        table.upto(positions)
    held = table._cos.nbytes + table._sin.nbytes
    assert 0 < held <= table_bytes(spec, max(upto))


@pytest.mark.parametrize("kind", ["dynamic", "default"])
def test_only_dynamic_frequencies_would_change(kind: str) -> None:
    spec = DecoderSpec.from_config(_config(kind, 16))
    spec.check_positions(1024)
    if kind == "default":
        spec.check_positions(1025)
    else:
        with pytest.raises(ArgumentError, match=r"up to 1024 tokens a sequence.* not 1025"):
            spec.check_positions(1025)
