"""The bench of weights runs, and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import weights
from qoff.quant import Format, quantize
from tests.cli.test_convert_mixed import LONG
from tests.tiny_models import save_model, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model"
    save_model(path, "llama", num_hidden_layers=2, intermediate_size=128)
    save_tokenizer(path)
    return path


def test_the_bench_runs(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(LONG)
    texts = ["--text", str(text), "--calibration", str(text)]
    weights.main(["--quick", "--model", str(model), *texts, "--out", str(out)])
    found = json.loads(out.read_text())["measured"]
    assert {"rtn, 64", "mse, 64", "hqq, 64", "gptq, 64"} <= set(found)
    assert 0 < found["gptq, 64"]["kl"] < found["rtn, 64"]["kl"]  # its own text, in part
    assert all(0 < x["same_top"] <= 1 for x in found.values())


@torch.no_grad()
def test_nothing_changed_is_nothing_lost(model: Path) -> None:
    ids = torch.randint(3, 120, (2, 16), generator=torch.Generator().manual_seed(0))
    found = weights.Model(model, ids).loss(lambda w, _: w)
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert found["same_top"] == 1
    assert found["perplexity_ratio"] == pytest.approx(1)


def test_spread_weights_round_to_the_grid_they_came_from() -> None:
    w = quantize(torch.randn(16, 64), 4, 32, "rtn").dequantize()
    spread = weights._spread(w, torch.Generator().manual_seed(0))
    step = quantize(w, 4, 32, "rtn").scale_min[..., 0].T.float().repeat_interleave(32, 1)
    assert bool(((spread - w).abs() <= 0.5001 * step).all())
    assert float((spread - w).abs().mean()) > 0.2 * float(step.mean())


def test_groups_that_do_not_divide_become_smaller() -> None:
    assert weights._form(torch.empty(1, 576), 128) == Format(4, 64)
    assert weights._form(torch.empty(1, 1536), 128) == Format(4, 128)
