"""Sensitivities of models that run through transformers' modules, against what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qoff.errors import ArgumentError, QuantizationError
from qoff.eval.mixing.by_modules import ModuleSensitivities
from qoff.eval.mixing.mixing import mixed_for_bits, mixed_for_loss
from qoff.eval.mixing.sensitivity import Sensitivity
from qoff.kernels.ops import ops_for
from qoff.models.convert.convert import modules_source
from qoff.models.convert.module_run import _Multiply
from qoff.models.sources import GGUFModulesSource, open_source
from qoff.quant import Format, QTensor, QuantConfig
from tests.models.test_gguf_modules import written
from tests.module_models import module_source
from tests.tiny_families import VOCAB

RTN = QuantConfig(group_size=32, solver="rtn")
FORMATS = (Format(4, 64), Format(4, 32), Format(8, 64), Format(8, 32))
KINDS = {
    "gpt2": 3,  # a matrix of 80 columns stays as it is
    "stablelm": 7,
    "jamba": 4 + 4 + 2 + 3,  # Mamba, attention, experts, an MLP
}


def texts(count: int, tokens: int) -> Tensor:
    return torch.randint(3, VOCAB, (count, tokens), generator=torch.Generator().manual_seed(0))


def opened(path: Path) -> ModuleSensitivities:
    source = modules_source(open_source(path))
    assert source is not None
    return ModuleSensitivities(source, texts(4, 64), RTN)


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModuleSensitivities:
    return opened(module_source(tmp_path_factory.getbasetemp(), request.param))


@pytest.fixture(scope="module")
def found(model: ModuleSensitivities) -> list[Sensitivity]:
    return model.of(FORMATS)


def test_a_size_below_all_formats_is_refused_before_the_model_runs(
    model: ModuleSensitivities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.eval.mixing.by_modules.UnconvertedModules.run", None)
    with pytest.raises(ArgumentError, match=r"2.1 bits a weight are too few; the smallest .* 2"):
        ModuleSensitivities(model._source, texts(4, 64), RTN, bits=2.1)


def test_every_matrix_is_there_with_its_bytes(
    model: ModuleSensitivities, found: list[Sensitivity]
) -> None:
    for one in found:
        for form, nbytes in one.nbytes.items():
            assert nbytes == one.weights * (form.bits + 16 / form.group_size) / 8
    kinds = {one.name.split(".", 3)[3] for one in found}
    assert len(kinds) == KINDS[model._source.config()["model_type"]]


def test_estimates_are_of_the_size_of_measured_losses(
    model: ModuleSensitivities, found: list[Sensitivity]
) -> None:
    nothing, ratios = model.measured({}), []
    known = [one for one in found if len(one.nbytes) > 1]  # Jamba's code looks into some
    for one in known[:: max(1, len(known) // 6)]:
        form = min(one.nbytes, key=one.nbytes.__getitem__)
        ratios.append((model.measured({one.name: form}) - nothing) / one.loss[form])
    logs = torch.tensor(ratios).log2()
    assert len(known) > 0.8 * len(found)
    assert bool((logs.abs() < 3).all()), ratios
    assert abs(float(logs.median())) < 1, ratios


def test_mixes_keep_within_their_bits_and_their_loss(
    model: ModuleSensitivities, found: list[Sensitivity]
) -> None:
    coarse = mixed_for_bits(model, found, 4.5)
    assert coarse.bits_per_weight <= 4.5
    mix = mixed_for_loss(model, found, 0.3 * coarse.loss)
    assert mix.loss <= 0.3 * coarse.loss
    assert mix.bits_per_weight > coarse.bits_per_weight
    assert len(set(mix.formats.values())) > 1


def test_a_whole_mix_is_calibrated(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = module_source(tmp_path_factory.getbasetemp(), "stablelm")
    source = modules_source(open_source(path))
    assert source is not None
    ids, gptq = texts(12, 64), QuantConfig(group_size=32, solver="gptq")
    plain, solved = (
        ModuleSensitivities(source, ids[:4], quant, calibration=text)
        for quant, text in ((RTN, None), (gptq, ids[4:]))
    )
    names = [m.name for layer in range(plain.layers) for m in plain._matrices(layer)]
    formats = dict.fromkeys(names, Format(4, 32))
    assert solved.solved(formats) < 0.8 * plain.solved(formats)


def test_embedding_and_head_have_the_group_that_is_asked_for(
    model: ModuleSensitivities,
) -> None:
    other = ModuleSensitivities(model._source, texts(4, 64), QuantConfig(group_size=64))
    assert isinstance(other._head, QTensor)
    assert other._head.group_size == 64
    names = [
        [m.name for layer in range(x.layers) for m in x._matrices(layer)] for x in (other, model)
    ]
    assert names[0] == names[1]


def test_quantized_files_are_refused(tmp_path: Path) -> None:
    source = open_source(written("bloom", tmp_path / "m.gguf"))
    assert isinstance(source, GGUFModulesSource)
    source.quantized = True
    with pytest.raises(QuantizationError, match="is quantized already"):
        ModuleSensitivities(source, texts(1, 8))


def test_products_of_what_has_no_gradient_tell_nothing() -> None:
    """Those of positions, say, by which some layers bias their scores."""
    seen: list[object] = []
    multiply = _Multiply(
        ops_for(torch.device("cpu")),
        torch.float32,
        torch.Size((1, 3)),
        lambda *one: seen.append(one),
    )
    x, matrix = torch.randn(3, 8), torch.randn(5, 8)
    with torch.enable_grad():
        torch.testing.assert_close(multiply(x, matrix, None), x @ matrix.T)
        assert not seen
        multiply(x.requires_grad_(), matrix, None)
    assert len(seen) == 1


def test_a_model_without_a_matrix_that_a_group_divides_has_no_formats(tmp_path: Path) -> None:
    sizes = {"n_embd": 80, "n_inner": 80, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    config = AutoConfig.for_model("gpt2", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source = modules_source(open_source(tmp_path))
    assert source is not None
    with pytest.raises(QuantizationError, match=r"no group size divides .*; leave the target out"):
        ModuleSensitivities(source, torch.randint(0, 100, (1, 8)))
