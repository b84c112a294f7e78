"""`from_pretrained` of what transformers' modules run: codes under names of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import qoff
from qoff.checkpoint import Checkpoint
from qoff.errors import FormatError
from qoff.hf.packed.module import CodesModule
from qoff.hf.packed.own_experts import QoffOwnExperts
from tests.hf.plugin_models import CONFIG, load, logits
from tests.module_models import changed, module_checkpoint, module_reference, module_source
from tests.tolerances import DECODER_LOGITS, assert_close

# A head that is tied, transposed linear layers, a class of linears of its own, experts and states.
FAMILIES = ["bloom", "gpt2", "falcon", "jamba", "aria", "deepseek_v4"]


def packed(model: Any) -> int:
    return sum(isinstance(module, CodesModule) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_streams_and_is_saved(base: Path, tmp_path: Path, family: str) -> None:
    path = module_checkpoint(base, family)
    model, expected = load(path), logits(module_reference(base, family))
    matrices = packed(model)
    assert matrices > len(Checkpoint.open(path).layers) * 3
    found = logits(model)
    assert_close(found, expected, tolerance=DECODER_LOGITS)
    streamed = load(path, device_map="disk")
    assert [*streamed.hf_device_map.values()][1:] == ["disk"] * len(Checkpoint.open(path).layers)
    assert torch.equal(logits(streamed), found)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert packed(again) == matrices
    assert torch.equal(logits(again), found)
    again.dequantize()
    assert packed(again) == 0
    assert_close(logits(again), found, tolerance=DECODER_LOGITS)


def test_a_model_that_sees_is_its_language_model(base: Path, tmp_path: Path) -> None:
    path, ids = module_checkpoint(base, "minimax_m3_vl"), torch.tensor([[5, 6, 7, 8, 9]])
    expected = module_reference(base, "minimax_m3_vl")(ids).logits
    model = AutoModelForImageTextToText.from_pretrained(path)
    assert packed(model) > 3 * len(Checkpoint.open(path).layers)
    found = model(ids).logits
    assert_close(found, expected, tolerance=DECODER_LOGITS)
    streamed = AutoModelForImageTextToText.from_pretrained(path, device_map="disk")
    assert torch.equal(streamed(ids).logits, found)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, found)


@pytest.mark.parametrize("family", ["gpt2", "aria"])
def test_quantized_while_loading_and_dequantized(base: Path, tmp_path: Path, family: str) -> None:
    """What is transposed has its rows in columns again."""
    config = qoff.QoffConfig(**CONFIG, modules_to_not_convert=["mlp.c_proj"])  # of 80 columns
    model = load(module_source(base, family), quantization_config=config)
    assert any(isinstance(m, QoffOwnExperts) for m in model.modules()) == (family == "aria")
    found = logits(model)
    model.dequantize()
    assert packed(model) == 0
    assert_close(logits(model), found, tolerance=DECODER_LOGITS)
    model.save_pretrained(tmp_path)
    assert_close(logits(load(tmp_path)), found, tolerance=DECODER_LOGITS)


def test_what_does_not_fit_the_model_is_refused(base: Path, tmp_path: Path) -> None:
    path = shutil.copytree(module_checkpoint(base, "stablelm"), tmp_path / "checkpoint")
    with pytest.raises(FormatError, match=r"_proj\.bias' is not there, but asked for by config"):
        load(changed(path, use_qkv_bias=True))
