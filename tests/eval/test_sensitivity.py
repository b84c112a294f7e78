"""Estimated losses against measured ones, and choices that keep what they promise."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qoff.errors import ArgumentError, QuantizationError, UnsupportedModelError
from qoff.eval.mixing import sensitivity
from qoff.eval.mixing.mixing import mixed_for_bits, mixed_for_loss
from qoff.eval.mixing.native import NativeSensitivities
from qoff.eval.mixing.sensitivity import Sensitivity
from qoff.models.convert.unconverted import Unconverted
from qoff.models.sources import open_source
from qoff.quant import Format, QuantConfig
from tests.models.gguf_model import Model as GGUFModel
from tests.tiny_families import VOCAB
from tests.tiny_models import save_model, tiny_model

RTN = QuantConfig(group_size=32, solver="rtn")
FORMATS = (Format(4, 128), Format(4, 64), Format(4, 32), Format(8, 64))


def texts(count: int, tokens: int) -> Tensor:
    return torch.randint(3, VOCAB, (count, tokens), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["llama", "gpt-neox", "mixtral"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeSensitivities:
    path = tmp_path_factory.mktemp("sensitivity") / request.param
    save_model(path, request.param, hidden_size=128, intermediate_size=256)
    return NativeSensitivities(Unconverted.of(open_source(path)), texts(8, 64), RTN)


@pytest.fixture(scope="module")
def found(model: NativeSensitivities) -> list[Sensitivity]:
    return model.of(FORMATS)


def test_every_matrix_is_there_with_its_bytes(
    model: NativeSensitivities, found: list[Sensitivity]
) -> None:
    for one in found:
        for form, nbytes in one.nbytes.items():
            assert nbytes == one.weights * (form.bits + 16 / form.group_size) / 8
    kinds = {one.name.rpartition(".")[2] for one in found}
    assert {"qkv_proj", "o_proj", "down_proj"} < kinds
    layers = {one.name.split(".")[2] for one in found}
    assert len(found) == 4 * len(layers)


def test_better_formats_lose_less(found: list[Sensitivity]) -> None:
    for one in found:
        losses = [one.loss[form] for form in FORMATS]
        assert all(better < 1.1 * worse for worse, better in pairwise(losses))
        assert losses[-1] < 0.02 * losses[1]  # 16 times the levels


def test_estimates_are_of_the_size_of_measured_losses(
    model: NativeSensitivities, found: list[Sensitivity]
) -> None:
    nothing, form = model.measured({}), Format(4, 64)
    pairs = torch.tensor(
        [[one.loss[form], model.measured({one.name: form}) - nothing] for one in found]
    )
    ratios = pairs[:, 1] / pairs[:, 0]
    assert bool(((ratios > 0.4) & (ratios < 2.5)).all()), ratios
    # Of all matrices together, errors of one format add up by chance in models of few channels.
    together = [model.measured({one.name: form for one in found}) - nothing for form in FORMATS[:3]]
    estimates = [one.loss[form] for one in found for form in FORMATS[:3]]
    assert 0.8 < sum(together) / sum(estimates) < 1.25


def test_estimates_repeat(model: NativeSensitivities, found: list[Sensitivity]) -> None:
    again = NativeSensitivities(Unconverted.of(model._source), texts(8, 64), RTN).of(FORMATS[:1])
    for one, other in zip(found, again, strict=True):
        assert other.loss[FORMATS[0]] == pytest.approx(one.loss[FORMATS[0]], rel=1e-4)


@pytest.mark.parametrize("bits", [4.125, 4.2, 4.45, 6.0, 8.25])
def test_a_mix_keeps_within_its_bits(
    model: NativeSensitivities, found: list[Sensitivity], bits: float
) -> None:
    mix = mixed_for_bits(model, found, bits)
    assert mix.formats.keys() == {one.name for one in found}
    assert bits - 0.3 < mix.bits_per_weight <= bits
    if bits in (4.125, 8.25):
        assert len(set(mix.formats.values())) == 1
    elif bits != 4.45:  # where one format may lose less
        assert len(set(mix.formats.values())) > 1


def test_a_mix_loses_less_than_one_format_of_its_size(
    model: NativeSensitivities, found: list[Sensitivity]
) -> None:
    mix = mixed_for_bits(model, found, 4.5)
    assert mix.loss <= model.measured({one.name: Format(4, 32) for one in found})


def test_a_mix_keeps_within_its_loss(model: NativeSensitivities, found: list[Sensitivity]) -> None:
    coarse = mixed_for_bits(model, found, 4.125).loss
    sizes = []
    for part in (0.2, 0.5, 1.0):
        mix = mixed_for_loss(model, found, part * coarse)
        assert mix.loss <= part * coarse
        sizes.append(mix.bits_per_weight)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 8.25


def test_what_cannot_be_had_is_refused(
    model: NativeSensitivities, found: list[Sensitivity]
) -> None:
    with pytest.raises(ArgumentError, match=r"4.1 bits a weight are too few; .* take 4.125"):
        mixed_for_bits(model, found, 4.1)
    with pytest.raises(ArgumentError, match=r"1e-09 nats a token cannot be reached"):
        mixed_for_loss(model, found, 1e-9)


def test_experts_of_a_layer_have_one_format(
    model: NativeSensitivities, found: list[Sensitivity]
) -> None:
    experts = {one.name: one.weights for one in found if ".experts.*." in one.name}
    spec = model._model.spec.experts
    sizes = {} if spec is None else {"gate_up_proj": 2 * 256 * 128, "down_proj": 256 * 128}
    assert experts == {
        f"model.layers.{layer}.mlp.experts.*.{name}": size * (spec.count if spec else 0)
        for layer in range(model.layers)
        for name, size in sizes.items()
    }


def test_some_experts_stand_for_all(
    model: NativeSensitivities, found: list[Sensitivity], monkeypatch: pytest.MonkeyPatch
) -> None:
    if model._model.spec.experts is None:
        pytest.skip("has no experts")
    monkeypatch.setattr(sensitivity, "_EXPERTS", 3)
    for one, other in zip(found, model.of(FORMATS[:1]), strict=True):
        assert other.loss[FORMATS[0]] == pytest.approx(one.loss[FORMATS[0]], rel=0.3)
        assert other.nbytes[FORMATS[0]] == one.nbytes[FORMATS[0]]


def test_models_without_floats_or_with_layers_that_need_more_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = GGUFModel("llama").write(tmp_path / "model.gguf")
    with pytest.raises(QuantizationError, match="is quantized already"):
        NativeSensitivities(Unconverted.of(open_source(file)), texts(1, 8))
    for family in ("gemma4-small", "glm-5"):
        lending = tiny_model(tmp_path_factory.getbasetemp(), family)
        with pytest.raises(UnsupportedModelError, match="given more than hidden states"):
            NativeSensitivities(Unconverted.of(open_source(lending)), texts(1, 8))
