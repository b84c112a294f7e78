"""Other projects' weights in a float model, and the statistics of their comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench import quant_peers
from bench.quant_peers import Inputs, changed, interval, ours
from bench.spread import linear_layers
from qoff.errors import QoffError
from qoff.eval.perplexity.models import open_float
from qoff.quant import QuantConfig, quantize
from tests.tiny_models import save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float")
    save_model(path, "llama-head64", intermediate_size=128)
    return path


def inputs(source: Path, folder: Path) -> Inputs:
    return Inputs(source, source, torch.arange(3, 67)[None], folder, 1)


@pytest.mark.parametrize("solver", ["hqq", "gptq"])
def test_ours_are_what_a_conversion_stores(solver: str, source: Path, tmp_path: Path) -> None:
    found, bits = ours(inputs(source, tmp_path), QuantConfig(4, 32, solver))
    model, before = open_float(source), open_float(source)
    changed(model, found, solver)
    assert bits == 4.5
    assert not [*tmp_path.iterdir()]
    for (name, after), (_, old) in zip(*map(linear_layers, (model, before)), strict=True):
        error = float(((after.weight - old.weight).norm() / old.weight.norm()).detach())
        assert 0.02 < error < 0.2, name
        if solver == "hqq":
            wanted = quantize(
                old.weight.detach(), 4, 32, "hqq", scale_dtype=torch.uint8
            ).dequantize()
            assert torch.equal(after.weight, wanted), name
    heads = (m.get_output_embeddings().weight for m in (model, before))
    assert torch.equal(*heads)


@pytest.mark.parametrize("wrong", ["missing", "shape", "nan"])
def test_a_peer_without_a_matrix_is_an_error(wrong: str, source: Path) -> None:
    model = open_float(source)
    found: dict[str, Tensor] = load_file(source / "model.safetensors")
    name = next(f"{name}.weight" for name, _ in linear_layers(model))
    if wrong == "missing":
        del found[name]
    else:
        found[name] = found[name][1:] if wrong == "shape" else found[name] * torch.nan
    with pytest.raises(QoffError, match=r"x has no finite matrix of the same shape for model\."):
        changed(model, found, "x")


def test_intervals_are_those_of_students_t() -> None:
    for count, quantile in ((4, 3.182), (8, 2.365), (12, 2.201), (24, 2.069)):
        values = np.arange(count, dtype=float)
        mean, half = interval([*values])
        assert mean == values.mean()
        assert half == pytest.approx(quantile * values.std(ddof=1) / count**0.5, rel=0.01)


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_peers.native, "llama_cpp", lambda tool: None)
    missing = {peer.name: peer.missing for peer in quant_peers.peers() if peer.missing}
    assert missing["llama.cpp Q4_K_M, importance"] == "llama.cpp is not built"
    assert not any(name.startswith("qoff") for name in missing)
