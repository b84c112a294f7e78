"""Sizes from a config are those of the checkpoint that the model is converted to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qoff.checkpoint import Checkpoint, WeightFile
from qoff.checkpoint.layout import layer_file
from qoff.errors import UnsupportedModelError
from qoff.kvcache import KVQuant
from qoff.memory.plan import LM_HEAD, plan_residency
from qoff.models.families import tensor_names
from qoff.models.layer_weights import layer_weights
from qoff.models.names import layer_prefix
from qoff.plan import Plan
from qoff.plan.kv_blocks import KVBlocks
from qoff.plan.native_sizes import NativeSizes, planned
from qoff.plan.planned_files import planned_file
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from tests.plan.machines import SMALL, machine
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import QUANT, tiny_checkpoint, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_is_known_from_the_config(
    tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    base = tmp_path_factory.getbasetemp()
    path = tiny_model(base, family)
    config = json.loads((path / "config.json").read_text())
    sizes = NativeSizes.of(config, replace(QUANT, packing="rows16"))
    real = Checkpoint.open(tiny_checkpoint(base, family))
    assert [_described(file) for file in sizes.checkpoint.files] == [
        _described(file) for file in real.files
    ]
    assert sizes.nbytes == NativeSizes.of_checkpoint(real).nbytes


def _described(file: WeightFile) -> object:
    return file.path.name, file.data_start, file.nbytes, file.weights


def test_layers_alike_are_made_once_and_named_apart() -> None:
    """Each file is that of a model whose layers are all made, with headers of its own length."""
    sizes = NativeSizes.of(SMALL)
    names, spec = tensor_names("llama"), sizes.spec
    for i, file in enumerate(sizes.checkpoint.layers):
        weights = planned(layer_prefix(i), layer_weights(spec, i, names), QuantConfig())
        assert file == planned_file(file.path, weights, QuantConfig())
        assert file.path.name == layer_file(i)


@pytest.mark.parametrize(
    ("seeing", "tied"), [("gemma3", True), ("mistral3", False), ("qwen3_vl", False)]
)
def test_a_head_is_tied_as_the_language_model_has_it(seeing: str, tied: bool) -> None:
    """Published configs of models that see do not always say so."""
    text = {k: v for k, v in SMALL.items() if k not in ("model_type", "tie_word_embeddings")}
    weights = NativeSizes.of({"model_type": seeing, "text_config": text}).checkpoint.outer.weights
    assert (LM_HEAD not in weights) == tied


def test_placement_takes_it_as_a_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    config = json.loads((tiny_model(base, "llama") / "config.json").read_text())
    sizes = NativeSizes.of(config, replace(QUANT, packing="rows16"))
    real = Checkpoint.open(tiny_checkpoint(base, "llama"))
    budget = sizes.nbytes * 3 // 4
    assert plan_residency(sizes.checkpoint, budget) == plan_residency(real, budget)


def test_the_formula_of_a_large_model() -> None:
    """GPT-3 175B in OPT's shape: 12 l h^2 weights in the layers."""
    config = {
        "model_type": "opt",
        "hidden_size": 12288,
        "ffn_dim": 49152,
        "num_hidden_layers": 96,
        "num_attention_heads": 96,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 12288,
    }
    sizes = NativeSizes.of(config)
    assert sizes.layer_columns == 12 * 96 * 12288**2
    assert sizes.parameters == pytest.approx(175e9, rel=0.01)
    assert sum(sizes.layer_bytes) == pytest.approx(4.5 / 8 * sizes.layer_columns, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {}),
        ("qwen3-next-head64", {}),
        ("kimi-linear", {"mlp_layer_types": ["dense"] * 3}),
        ("ling3", {"mlp_layer_types": ["dense"] * 3}),
        ("olmo-hybrid", {}),
        ("ling3-free", {"mlp_layer_types": ["dense"] * 3}),
    ],
)
def test_a_token_is_multiplied_by_all_matrices_once(family: str, change: dict[str, Any]) -> None:
    sizes = NativeSizes.of({**TINY, **FAMILIES[family], **change})
    layers = range(sizes.spec.num_layers)
    weights = [weight for i in layers for weight in layer_weights(sizes.spec, i)]
    assert sizes.layer_columns == sum(x.rows * x.columns for x in weights if x.columns is not None)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size"),
        ({"model_type": "llama", "quantization_config": GPTQ}, "convert"),
    ],
)
def test_what_a_config_cannot_tell_is_refused(config: dict[str, object], what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what) as refusal:
        NativeSizes.of(config)
    assert "\n" not in str(refusal.value)


def test_logits_of_every_row_of_every_pass_are_counted() -> None:
    """Of each sequence with its drafts in each batch, float32; and the sequences' tokens, int32."""
    plan = Plan(batch_size=3, batches=4, context=128, draft_tokens=2)
    logits, tokens = 3 * 4 * (1 + 2) * 1000, 3 * 4 * 128
    assert plan.logits_bytes(1000) == 4 * (logits + tokens)


def test_an_index_bounds_what_is_attended() -> None:
    config = {**TINY, **FAMILIES["deepseek-v3.2"], "index_topk": 2048}
    sizes, dense = NativeSizes.of(config), NativeSizes.of({**TINY, **FAMILIES["deepseek-v3"]})
    layers = sizes.spec.num_layers
    assert [shape.indexes for shape in sizes.shapes] == [True, False] * layers
    assert sizes.readers == (1,) * (2 * layers)
    assert sizes.attention == sizes.shapes[1] == dense.shapes[0]
    assert sizes.spec.position_limit is None

    def seconds(of: NativeSizes, tokens: int) -> float:
        """Of attention of a token to so many packed ones, in the model of costs."""
        blocks = KVBlocks(of, KVQuant(), Workload(Lengths.of(tokens)), True, False)
        found = blocks.attention_s(machine().device, np.ones(1), np.array([float(tokens)]))
        return float(found[0]) * tokens

    scanned = seconds(sizes, 2048) - seconds(dense, 2048)
    assert scanned > 0
    assert seconds(sizes, 65536) == pytest.approx(seconds(dense, 2048) + 32 * scanned)
