"""Falcon H1, each of whose layers has Mamba 2 and attention: its switches, and what both take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.kernels.cpu import ops as cpu
from qoff.kernels.reference import ops as reference_ops
from qoff.models.convert.convert import convert
from qoff.models.spec import DecoderSpec
from qoff.plan.native_sizes import NativeSizes
from tests.gguf_models import GGUFModel
from tests.models.test_decoder import LENGTHS, compare, forward
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import QUANT, PlainRun, save_model
from tests.tolerances import assert_close

POWERS = {  # of two, all different
    "embedding_multiplier": 0.5,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 8.0,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 4.0,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.125,
    "ssm_multipliers": [0.25, 0.5, 2.0, 4.0, 0.125],
    "mlp_multipliers": [2.0, 0.5],
}
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2}
BIASED = {
    "attention_bias": True,
    "attention_in_multiplier": 1.0,
    "mlp_bias": True,
    "mlp_multipliers": [1.0, 0.6],
    "mamba_conv_bias": False,
}


@pytest.mark.parametrize("changes", [NORMED, BIASED], ids=["normed", "biased"])
def test_logits_of_other_switches_are_those_of_transformers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    save_model(tmp_path / "model", "falcon-h1", **changes, num_hidden_layers=2)
    for ops in (cpu, reference_ops):
        path = tmp_path / ops.PACKING
        convert(tmp_path / "model", path, quant=QUANT, for_cpu=ops is cpu)
        compare(path, LENGTHS, ops)


def test_a_gguf_file_has_the_constants_in_its_matrices(tmp_path: Path) -> None:
    """Powers of two, so that codes are those of the source."""
    save_model(tmp_path / "model", "falcon-h1", **POWERS)
    model, tokens = GGUFModel.of(tmp_path / "model"), torch.randint(3, 128, (30,))
    assert "blk.0.ffn_norm" in model.tensors  # as llama.cpp calls it
    found = list[Tensor]()
    for source in (tmp_path / "model", model.write(tmp_path / "m.gguf")):
        path = tmp_path / f"from-{source.name}"
        run = PlainRun(convert(source, path, quant=QUANT), reference_ops)
        found.append(forward(run, run.decoder.new_cache(1), [tokens]))
    assert_close(found[1], found[0])


def test_layers_have_states_and_keys_and_count_for_both() -> None:
    config = {**TINY, **FAMILIES["falcon-h1"]}
    spec, alone = DecoderSpec.from_config(config), {**config, "model_type": "llama"}
    assert spec.cache_places == ((0, 1), (2, 3), (4, 5))
    assert spec.cached_layers == (1, 3, 5)
    assert spec.state_places == (True, False) * 3
    assert len(spec.state_shapes) == 3
    both, attention = NativeSizes.of(config), NativeSizes.of(alone)
    assert spec.state_shape is not None
    mamba = spec.state_shape.projections[0] + spec.state_shape.values
    assert both.layer_columns == attention.layer_columns + 3 * mamba * spec.hidden_size
    last = spec.state_shape.values * spec.hidden_size
    assert both.last_columns == attention.last_columns + last
