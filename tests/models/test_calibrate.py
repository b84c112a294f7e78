"""Calibration: the model it runs is the model, and what it solves loses less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qoff.checkpoint import Checkpoint, QuantEntry, verify
from qoff.errors import ArgumentError, QuantizationError
from qoff.kernels.ops import ops_for
from qoff.models.convert import solving
from qoff.models.convert.builder import Builder
from qoff.models.convert.calibration import Calibration
from qoff.models.convert.convert import convert, modules_source
from qoff.models.convert.layerwise import Layerwise
from qoff.models.convert.module_run import _Multiply
from qoff.models.convert.modules import ModulesJob, _is_of_mixture
from qoff.models.convert.solving import Moments, Unsolved
from qoff.models.convert.unconverted import Unconverted
from qoff.models.modules.structure import Matrix
from qoff.models.names import POSITIONS
from qoff.models.sources import open_source
from qoff.quant import Format, QuantConfig, compensated, quantize
from tests.module_models import MODULES, dequantized, module_source
from tests.tiny_families import FAMILIES, VOCAB
from tests.tiny_models import reference_model, tiny_model
from tests.tolerances import DECODER_LOGITS, assert_close

GPTQ = QuantConfig(group_size=32, solver="gptq")


def texts(count: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (count, tokens), generator=torch.Generator().manual_seed(seed))


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def divergence(wanted: Any, found: Any, ids: Tensor) -> float:
    """Mean KL divergence of the predictions of two transformers models."""
    p, q = (model(ids).logits.log_softmax(-1) for model in (wanted, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.no_grad()
def by_layers(path: Path, ids: Tensor) -> Tensor:
    """The logits of texts as a conversion computes them, [texts, tokens, vocabulary]."""
    model = Unconverted.of(open_source(path))
    builder = Builder(model.source, QuantConfig(), False)
    run = Layerwise(model.spec, ids)
    outer = {w.name: builder.floats(w) for w in model.units[-1][1]}
    hidden = run.embedded(lambda name, ids: outer[name][ids])
    for layer, (prefix, weights) in enumerate(model.units[:-1]):
        # tables of positions are looked up, and come quantized only
        built = {
            w.name: builder.build(prefix, w) if w.name == POSITIONS else builder.floats(w)
            for w in weights
        }
        before = hidden.clone()
        hidden = run.run(layer, built, hidden)
        assert not torch.equal(hidden, before)
    return run.logits(outer, hidden).view(*ids.shape, -1)


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_layer_at_a_time_is_the_whole_model(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, ids = tiny_model(tmp_path_factory.getbasetemp(), family), texts(3, 20)
    found = by_layers(path, ids)
    wanted = reference(path)(ids).logits
    # OPT's table of positions is quantized above
    assert_close(found, wanted, tolerance=0.02 if family.startswith("opt") else DECODER_LOGITS)


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "gemma2", "mixtral"])
def test_solving_on_a_text_loses_less_of_it(
    family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, ids = tiny_model(tmp_path_factory.getbasetemp(), family), texts(16, 48)
    solved = convert(path, tmp_path / "gptq", quant=GPTQ, calibration=ids)
    verify(solved)
    assert Checkpoint.open(solved).config["quantization_config"]["solver"] == "gptq"
    model = reference(path)
    lost = divergence(model, reference_model(solved), ids)
    for solver in ("rtn", "hqq"):
        quant = QuantConfig(group_size=32, solver=solver)
        plain = convert(path, tmp_path / solver, quant=quant)
        assert lost < 0.8 * divergence(model, reference_model(plain), ids)


def solved_stream(path: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states behind all layers, of what was solved and of the source."""
    model = Unconverted.of(open_source(path))
    calibration = Calibration(model, Builder(model.source, GPTQ, False), ids)
    for layer in range(model.spec.num_layers):
        calibration.layer(layer)
    mine, others = calibration._hidden.chunk(2)
    return mine, others


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_second_half_of_all_rows_is_the_source_s(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_model(tmp_path_factory.getbasetemp(), family)
    check_second_half(path, texts(2, 140), monkeypatch)


@torch.no_grad()
def check_second_half(path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is the source's, whatever becomes of the matrices, and the first one is not."""
    monkeypatch.setattr(solving, "aimed", lambda w, *_: w)
    monkeypatch.setattr(
        solving,
        "compensated",
        lambda w, _, form, *, scale_dtype, name: quantize(w, form.bits, form.group_size, "rtn"),
    )
    mine, others = solved_stream(path, ids)
    model = Unconverted.of(open_source(path))
    run, builder = Layerwise(model.spec, ids), Builder(model.source, GPTQ, False)
    outer = {w.name: builder.floats(w) for w in model.units[-1][1]}
    wanted = run.embedded(lambda name, ids: outer[name][ids])
    for layer, (prefix, weights) in enumerate(model.units[:-1]):
        own = {
            w.name: builder.floats(w) if builder.calibrates(prefix, w) else builder.build(prefix, w)
            for w in weights
        }
        wanted = run.run(layer, own, wanted)
    scale = wanted.norm(dim=1)
    assert float(((others - wanted).norm(dim=1) / scale).max()) < 1e-4
    assert float(((mine - wanted).norm(dim=1) / scale).min()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ["granite", "mixtral", "llama4", "deepseek-v3", "glm-5", "gemma4-small", "gemma3n"]
)
def test_matrices_are_aimed_at_outputs_of_the_source(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, ids = tiny_model(tmp_path_factory.getbasetemp(), family), texts(16, 48)
    mine, others = solved_stream(path, ids)
    monkeypatch.setattr(compensated, "AIM", 0.0)
    plain, _ = solved_stream(path, ids)
    assert (mine - others).norm() < 0.97 * (plain - others).norm()


@torch.no_grad()
@pytest.mark.parametrize("rows", [0, 3])
def test_an_expert_that_only_the_source_s_tokens_go_to_is_not_solved(rows: int) -> None:
    values, x = torch.randn(32, 64), torch.randn(2 * rows + 5, 64)
    matrix = Unsolved("m", (32, 64), Format(4, 32), torch.float16, Moments(), lambda: values, True)
    found = matrix.products(x, rows)
    assert_close(found[rows:], x[rows:] @ values.T)
    assert (matrix._found is None) == (rows == 0)
    if rows:
        assert_close(found[:rows], x[:rows] @ matrix.dequantize().T, tolerance=0.01)


def test_a_matrix_that_meets_no_rows_first_is_solved_for_those_it_meets() -> None:
    values, x = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))

    def unsolved() -> Unsolved:
        return Unsolved("m", (32, 64), Format(4, 32), torch.float16, Moments(), lambda: values)

    late, at_once = unsolved(), unsolved()
    late.solved(x[:0])
    assert torch.equal(late.solved(x).dequantize(), at_once.solved(x).dequantize())
    assert not torch.equal(late.result().dequantize(), unsolved().result().dequantize())


def test_formats_are_those_asked_for_in_both_packings(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, ids = tiny_model(tmp_path_factory.getbasetemp(), "llama"), texts(4, 32)
    quant = QuantConfig(group_size=32, solver="gptq", weights={"*.o_proj": Format(8, 64)})
    found = []
    for for_cpu in (False, True):
        out = convert(path, tmp_path / str(for_cpu), quant=quant, for_cpu=for_cpu, calibration=ids)
        found.append(reference_model(out).state_dict())
        for file in Checkpoint.open(out).layers:
            for name, entry in file.weights.items():
                if isinstance(entry, QuantEntry):
                    wide = name.endswith("o_proj")
                    assert (entry.bits, entry.group_size) == ((8, 64) if wide else (4, 32))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("family", "quant", "ids", "error", "message"),
    [
        ("llama", GPTQ, None, QuantizationError, "needs a text to calibrate on"),
        ("llama", QuantConfig(group_size=32), texts(2, 8), QuantizationError, "no calibration"),
        ("llama", GPTQ, texts(2, 8)[0], ArgumentError, r"\[texts, tokens\], not \[8\]"),
        ("llama", GPTQ, texts(2, 0), ArgumentError, r"\[texts, tokens\], not \[2, 0\]"),
        ("llama", GPTQ, texts(2, 8) + VOCAB, ArgumentError, "token ids are 0 to 127"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    family: str,
    quant: QuantConfig,
    ids: Tensor | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_model(tmp_path_factory.getbasetemp(), family)
    with pytest.raises(error, match=message):
        convert(path, tmp_path / "out", quant=quant, calibration=ids)
    assert not (tmp_path / "out").exists()


def test_texts_are_cut_to_the_positions_of_a_model(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, ids = tiny_model(tmp_path_factory.getbasetemp(), "opt"), texts(1, 300)
    long, short = (
        convert(path, tmp_path / str(tokens), quant=GPTQ, calibration=ids[:, :tokens])
        for tokens in (300, 256)
    )
    pairs = zip(Checkpoint.open(long).layers, Checkpoint.open(short).layers, strict=True)
    assert all(a.sha256 == b.sha256 for a, b in pairs)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "jamba", "deepseek_v4"])
def test_models_of_transformers_modules_are_solved_too(
    family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, ids = module_source(tmp_path_factory.getbasetemp(), family), texts(16, 48)
    wanted = reference(source)(ids).logits
    lost = []
    for solver in ("gptq", "hqq"):
        quant = QuantConfig(group_size=GPTQ.group_size, solver=solver)
        given = ids if solver == "gptq" else None
        path = convert(source, tmp_path / solver, quant=quant, calibration=given)
        verify(path)
        found = dequantized(source, path)(ids).logits
        lost.append(float((found - wanted).square().mean()))
    assert lost[0] < 0.8 * lost[1]


@torch.no_grad()
@pytest.mark.parametrize("family", sorted({*MODULES} - {"jamba", "gemma3n", "falcon_h1"}))
def test_modules_are_aimed_at_outputs_of_the_source(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, ids = module_source(tmp_path_factory.getbasetemp(), family), texts(8, 32)
    wanted = reference(path)(ids).logits.flatten(0, 1)

    def errors() -> tuple[float, float]:
        """What the logits are off, of the half that is solved and of the source's."""
        source = modules_source(open_source(path))
        assert source is not None
        job = ModulesJob(source, source.config(), GPTQ, False, ids)
        run = job._calibration
        assert run is not None
        for unit in range(job.units - 1):
            job.build(unit)
        floats = job._model.floats(job.units - 1)
        found = run.logits(0, floats[job._model.head]).chunk(2)
        return tuple(float((x - wanted).norm() / wanted.norm()) for x in found)

    lost, own = errors()
    assert own < 1e-4
    monkeypatch.setattr(compensated, "AIM", 0.0)
    assert lost < 0.99 * errors()[0]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("model.layers.0.mlp.up_proj", False),
        ("model.layers.0.block_sparse_moe.experts.3.w1", True),  # a linear layer in a list
    ],
)
def test_rows_of_experts_are_not_those_of_the_source(name: str, chosen: bool) -> None:
    assert _is_of_mixture(Matrix(name, (32, 64))) == chosen


@torch.no_grad()
def test_rows_in_another_order_are_not_taken_for_two_halves() -> None:
    values, x = torch.randn(32, 64), torch.randn(4, 10, 64)
    multiply = _Multiply(ops_for(torch.device("cpu")), torch.float32, torch.Size((4, 10)))

    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        moments = Moments()
        matrix = Unsolved(
            "m", (32, 64), Format(4, 32), torch.float16, moments, lambda: values, True
        )
        return multiply(x, matrix, None), matrix.dequantize()

    for own in (x, x.flatten(0, 1), x[:, None]):
        found, _ = products(own)
        assert_close(found.view(4, 10, 32)[2:], x[2:] @ values.T)
    found, matrix = products(x.transpose(0, 1))
    assert_close(found, x.transpose(0, 1) @ matrix.T, tolerance=0.01)
