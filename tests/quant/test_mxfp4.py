"""MXFP4 experts are read as transformers dequantizes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qoff.checkpoint import Checkpoint, read_weight
from qoff.errors import FormatError
from qoff.models.convert.convert import convert
from qoff.models.convert.unconverted import Unconverted
from qoff.models.sources import open_source
from qoff.quant import QTensor, QuantConfig
from tests.tiny_models import save_model
from tests.tolerances import relative_rms

NAME = "model.layers.0.mlp.experts.{}_proj"
EIGHT = QuantConfig(bits=8, group_size=32, solver="rtn")


def save(folder: Path, **changes: Tensor) -> dict[str, Tensor]:
    """A tiny gpt-oss whose experts are random MXFP4; returns them, as transformers reads them."""
    save_model(folder, "gpt-oss", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors, experts = load_file(file), {}
    for which in ("gate_up", "down"):
        name = NAME.format(which)
        count, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        experts[which] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors |= changes
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return experts


def test_every_expert_is_that_of_transformers(tmp_path: Path) -> None:
    wanted = save(tmp_path)
    source = Unconverted.of(open_source(tmp_path)).source
    for which, experts in wanted.items():
        info = source.info(NAME.format(which))
        assert info is not None
        assert info.shape == tuple(experts.shape)
        for e, expert in enumerate(experts):
            assert torch.equal(source.item(NAME.format(which), e), expert)


def test_a_checkpoint_of_it(tmp_path: Path) -> None:
    wanted = save(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", quant=EIGHT)
    file = Checkpoint.open(tmp_path / "out").layers[0]
    for e, expert in enumerate(wanted["down"]):
        found: Any = read_weight(file, file.weights[f"model.layers.0.mlp.experts.{e}.down_proj"])
        assert isinstance(found, QTensor)
        assert relative_rms(found.dequantize(), expert.T) < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scales": torch.full((4, 64, 3), 255, dtype=torch.uint8)}, "down_proj_scales holds NaN"),
        ({"_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}, "down_proj_scales"),
        ({"_blocks": torch.zeros(4, 64, 3, 16)}, "down_proj_blocks"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "model", **{NAME.format("down") + end: x for end, x in change.items()})
    with pytest.raises(FormatError, match=message):
        convert(tmp_path / "model", tmp_path / "out", quant=EIGHT)
