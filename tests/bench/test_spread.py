"""Weights between the points of a grid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.spread import linear_layers, spread, write
from qoff.eval.perplexity.models import open_float
from qoff.quant import quantize
from tests.tiny_models import tiny_model


def test_spread_weights_round_to_the_grid_they_came_from() -> None:
    w = quantize(torch.randn(16, 64), 4, 32, "rtn", scale_dtype=torch.float16).dequantize()
    moved = spread(w, torch.Generator().manual_seed(0))
    form = quantize(w, 4, 32, "rtn", scale_dtype=torch.float16)
    step = form.scale_min[..., 0].T.float().repeat_interleave(32, 1)
    assert bool(((moved - w).abs() <= 0.5001 * step).all())
    assert float((moved - w).abs().mean()) > 0.2 * float(step.mean())


def test_matrices_of_layers_move_and_nothing_else(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tiny_model(tmp_path_factory.getbasetemp(), "llama-head64")
    write(source, tmp_path / "out")
    before, after = open_float(source), open_float(tmp_path / "out")
    matrices = {f"{name}.weight" for name, _ in linear_layers(before)}
    other = after.state_dict()
    changed = {name for name, w in before.state_dict().items() if not torch.equal(w, other[name])}
    assert changed == matrices
