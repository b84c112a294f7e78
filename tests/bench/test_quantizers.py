"""Other packages' weights in a float model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.quantizers import PEERS, Peer, available, changed, linear_layers
from qoff.errors import ArgumentError, QoffError
from qoff.eval.perplexity.models import open_float
from qoff.quant import quantize
from tests.tiny_models import save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float")
    save_model(path, "llama-head64", intermediate_size=128)
    return path


def weights(model: object) -> dict[str, Tensor]:
    return {name: linear.weight for name, linear in linear_layers(model)}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_changes_matrices_a_little_and_nothing_else(peer: Peer, source: Path) -> None:
    if not available([peer])[0]:
        pytest.skip(f"{peer.package} is not installed")
    before = open_float(source)
    with changed(source, peer) as subject:
        after = subject._model
        for name, weight in weights(after).items():
            old = weights(before)[name]
            error = float((weight - old).detach().norm() / old.detach().norm())
            assert 0.02 < error < 0.2, name
        heads = (m.get_output_embeddings().weight for m in (before, after))
        assert torch.equal(*heads)


def test_ours_are_what_a_conversion_would_store(source: Path) -> None:
    (peer,) = (p for p in PEERS if p.name == "qoff hqq, group 64")
    before = weights(open_float(source))
    with changed(source, peer) as subject:
        for name, weight in weights(subject._model).items():
            assert torch.equal(weight, quantize(before[name], 4, 64, "hqq").dequantize())


def test_what_is_not_installed_is_named() -> None:
    here, missing = available([replace(PEERS[0], package="no.such"), PEERS[0]])
    assert here == [PEERS[0]]
    assert missing == ["no.such"]


def test_a_peer_that_fails_is_one_error(source: Path) -> None:
    def wrong(w: Tensor) -> Tensor:
        return w[1:]

    def fails(w: Tensor) -> Tensor:
        raise RuntimeError("a\nb")

    with pytest.raises(ArgumentError, match="no finite matrix of the same shape for model"):
        changed(source, Peer("x", "qoff", 4, wrong)).__enter__()
    with pytest.raises(QoffError, match=r"x cannot quantize model\..*: a b"):
        changed(source, Peer("x", "qoff", 4, fails)).__enter__()
