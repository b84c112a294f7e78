"""Scores against a plain loop, and of packed caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import ArgumentError, BudgetError
from qoff.eval.perplexity import models
from qoff.eval.perplexity.metrics import Estimate, Scores, significant, summarize
from qoff.eval.perplexity.models import (
    PIECE_TOKENS,
    open_runtime,
    opened_original,
)
from qoff.eval.perplexity.reference import Rows
from qoff.eval.perplexity.scoring import Original, Sample, evaluate, make_reference
from qoff.eval.perplexity.subjects import (
    LayerwiseSubject,
    QoffSubject,
    TransformersSubject,
)
from qoff.eval.perplexity.windows import cut
from qoff.kvcache import KVQuant
from qoff.models.convert.unconverted import Unconverted
from qoff.models.runtime import Runtime
from qoff.models.sources import open_source
from tests.module_models import module_source
from tests.tiny_families import VOCAB
from tests.tiny_models import reference_model, save_gguf, tiny_model

from .conftest import FAMILY

MIXTURE = "qwen3-moe"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    """transformers, with the dequantized weights of the checkpoint."""
    return reference_model(checkpoint)


def sample(tokens: int = 300, length: int = 100, seed: int = 0, **options: Any) -> Sample:
    ids = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Sample(ids, cut(tokens, length, **options), prefix=2)


def plain_nll(model: Any, text: Sample) -> list[float]:
    """Window after window through transformers, nothing shared with what is tested."""
    out = []
    for window in text.windows:
        ids = ([2] if window.prefix else []) + text.ids[window.start : window.stop].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        skip = len(ids) - window.scored
        out += [-float(torch.log_softmax(logits[i - 1], 0)[ids[i]]) for i in range(skip, len(ids))]
    return out


@pytest.mark.parametrize("definition", ["strided", "llama.cpp", "lm_eval"])
@pytest.mark.parametrize("piece", [1, 7, 64, None])
def test_perplexity_is_that_of_a_plain_loop(
    definition: str, piece: int | None, runtime: Runtime, model: Any
) -> None:
    text = sample(170, 60, definition=definition)
    scores = evaluate(QoffSubject(runtime, "x", piece), text)
    wanted = plain_nll(model, text)
    assert math.exp(np.mean(wanted)) == pytest.approx(summarize(scores).perplexity.value, rel=1e-4)
    np.testing.assert_allclose(scores.nll, wanted, atol=5e-3)


def test_windows_read_what_begins_a_text_in_place_of_their_first_token(
    runtime: Runtime, model: Any
) -> None:
    plain = sample(170, 60)
    text = Sample(plain.ids, plain.windows, first=1)
    assert text.digest != plain.digest
    ids = plain.ids.clone()
    ids[[window.start for window in plain.windows]] = 1  # each is read, and none is scored
    scores = evaluate(QoffSubject(runtime, "x"), text)
    np.testing.assert_allclose(scores.nll, plain_nll(model, Sample(ids, plain.windows)), atol=5e-3)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_transformers_models_score_alike_in_any_batch(batch: int, model: Any) -> None:
    text = sample(stride=40)
    scores = evaluate(TransformersSubject(model, "x"), text, batch=batch)
    np.testing.assert_allclose(scores.nll, plain_nll(model, text), atol=1e-4)


def test_windows_that_are_read_together_score_as_alone(runtime: Runtime) -> None:
    text = sample(stride=40)
    alone = evaluate(QoffSubject(runtime, "x", 32), text)
    together = evaluate(QoffSubject(runtime, "x", 32), text, batch=3)
    np.testing.assert_allclose(together.nll, alone.nll, atol=1e-3)


def test_a_model_does_not_differ_from_itself(runtime: Runtime, tmp_path: Path) -> None:
    subject, text = QoffSubject(runtime, "x"), sample()
    reference = make_reference(subject, text, tmp_path / "reference")
    scores = evaluate(subject, text, reference)
    assert scores.kl is not None
    assert scores.same_top is not None
    assert scores.kl.max() < 1e-6
    assert scores.same_top.mean() > 0.99  # equal but for ties
    np.testing.assert_allclose(scores.nll, scores.reference_nll, atol=1e-4)
    found = summarize(scores).divergence
    assert found is not None
    assert found.perplexity_ratio.value == pytest.approx(1, abs=1e-4)


def test_divergence_is_what_its_definition_says(
    runtime: Runtime, model: Any, tmp_path: Path
) -> None:
    text = sample(200, 100)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
        reference = make_reference(TransformersSubject(model, "r"), text, tmp_path / "reference")
        scores = evaluate(QoffSubject(runtime, "x"), text, reference)
        rows = []
        for window in text.windows:
            ids = text.tokens(window)
            theirs = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
            model.lm_head.weight.div_(1.3)
            ours = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
            model.lm_head.weight.mul_(1.3)
            rows.append((theirs.exp() * (theirs - ours)).sum(-1)[:-1])
        model.lm_head.weight.div_(1.3)
    assert scores.kl is not None
    np.testing.assert_allclose(scores.kl, torch.cat(rows).numpy(), atol=2e-4)
    assert scores.kl.mean() > 1e-3


@given(
    st.integers(0, 2**31), st.integers(1, 40), st.integers(2, 40), st.floats(0.1, 8),
    st.floats(0, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_is_stored_bounds_the_divergence(
    seed: int, likeliest: int, drawn: int, sharp: float, apart: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 40, generator=random) * sharp
    other = torch.log_softmax((logits + apart * torch.randn(3, 40, generator=random)).double(), -1)
    exact = torch.log_softmax(logits.double(), -1)
    kl = (exact.exp() * (exact - other)).sum(1)
    rows = Rows.of(logits, torch.arange(3), likeliest, drawn, seed)
    found = rows.compare(other, likeliest)
    assert (found.low <= kl + 1e-9).all()
    assert (kl <= found.high + 1e-9).all()
    torch.testing.assert_close(found.nll, -exact.diagonal())
    assert (found.same_top == (exact.argmax(1) == other.argmax(1))).all()
    if likeliest == 40:
        torch.testing.assert_close(found.kl, kl, atol=1e-9, rtol=0)
        assert (found.error == 0).all()


def test_draws_estimate_the_divergence_without_bias() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 300, generator=random) * 2
    other = torch.log_softmax((logits + torch.randn(2, 300, generator=random)).double(), -1)
    exact = torch.log_softmax(logits.double(), -1)
    kl = (exact.exp() * (exact - other)).sum(1)
    wanted = torch.zeros(2, dtype=torch.int64)
    found = [Rows.of(logits, wanted, 10, 8, seed).compare(other, 10) for seed in range(400)]
    kls, errors = (torch.stack([getattr(x, name) for x in found]) for name in ("kl", "error"))
    spread = kls.std(0)
    assert ((kls.mean(0) - kl).abs() < 4 * spread / 20).all()
    assert (spread < 1.3 * errors.mean(0)).all()  # systematic draws are no worse than free ones


def test_beside_the_original_and_against_its_file_a_model_scores_alike(
    runtime: Runtime, model: Any, tmp_path: Path
) -> None:
    text, subject = sample(stride=60), QoffSubject(runtime, "x", 32)
    truth = TransformersSubject(model, "r")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
        beside = evaluate(subject, text, Original(truth), batch=2)
        stored = make_reference(truth, text, tmp_path / "r", likeliest=50, drawn=100)
        model.lm_head.weight.div_(1.3)
    from_file = evaluate(subject, text, stored)
    exact, near = summarize(beside).divergence, summarize(from_file).divergence
    assert exact is not None
    assert near is not None
    assert exact.kl_at_least == exact.mean_kl.value == exact.kl_at_most
    assert near.kl_at_least < exact.mean_kl.value < near.kl_at_most
    assert abs(near.mean_kl.value - exact.mean_kl.value) < 4 * near.kl_draws_error
    assert 0 < near.kl_draws_error < 0.05 * exact.mean_kl.value
    assert from_file.reference_nll is not None
    np.testing.assert_allclose(from_file.reference_nll, beside.reference_nll, atol=1e-4)


@pytest.mark.parametrize("family", [FAMILY, MIXTURE])
def test_a_model_read_from_its_files_layer_by_layer_is_the_same(family: str, base: Path) -> None:
    source, text = tiny_model(base, family), sample(170, 60, stride=50)
    whole, least = LayerwiseSubject.nbytes(Unconverted.of(open_source(source)))
    found = {}
    for memory in (whole, least):
        with opened_original(source, text, 2, memory) as subject:
            found[type(subject)] = evaluate(subject, text, batch=2).nll
    assert set(found) == {TransformersSubject, LayerwiseSubject}
    np.testing.assert_allclose(*found.values(), atol=1e-4)
    with (
        pytest.raises(BudgetError, match="raise --reference-memory"),
        opened_original(source, text, 2, least - 1),
    ):
        pass


def test_a_window_beyond_the_positions_is_refused_before_layers_are_read(base: Path) -> None:
    source = tiny_model(base, "opt")
    least = LayerwiseSubject.nbytes(Unconverted.of(open_source(source)))[1]
    with (
        pytest.raises(ArgumentError, match="up to 256 tokens"),
        opened_original(source, sample(300, 300), 1, least),
    ):
        pass
    with opened_original(source, sample(257, 257), 1, least):
        pass


@pytest.mark.parametrize("kind", ["safetensors", "pickled"])
def test_a_bound_holds_for_models_that_only_transformers_runs(
    kind: str, base: Path, tmp_path: Path
) -> None:
    source = module_source(base, "stablelm")
    if kind == "pickled":
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(bytes(2048))
        source = tmp_path
    with (
        pytest.raises(BudgetError, match=r"more than 1,024.* raise --reference-memory"),
        opened_original(source, sample(), 1, 1024),
    ):
        pass


def test_the_size_of_a_gguf_file_in_floats_is_in_its_header(tmp_path: Path) -> None:
    save_gguf(path := tmp_path / "x.gguf")
    wanted, _ = LayerwiseSubject.nbytes(Unconverted.of(open_source(path)))
    assert models._float_bytes(path) == wanted
    (link := tmp_path / "link.gguf").symlink_to(path.rename(tmp_path / "blob"))
    assert [size for _, size, _ in models.model_stamps(link)] == [link.stat().st_size]


def test_a_packed_cache_costs_something_and_fewer_bits_more(
    checkpoint: Path, runtime: Runtime, tmp_path: Path
) -> None:
    text = sample(384, 192)
    reference = make_reference(QoffSubject(runtime, "x"), text, tmp_path / "r")
    found = {}
    for bits in [(4, 4), (8, 4), (8, 8), (16, 16)]:
        with open_runtime(checkpoint, KVQuant(*bits, window=0)) as packed:
            scores = evaluate(QoffSubject(packed, "x", PIECE_TOKENS), text, reference)
        assert scores.kl is not None
        found[bits] = float(scores.kl.mean())
    assert found[4, 4] > found[8, 4] > 4 * found[8, 8] > found[16, 16]
    assert found[16, 16] < 1e-6


def test_errors_of_means() -> None:
    nll = np.array([1.0, 2.0, 4.0])
    base = np.array([1.0, 1.5, 3.0])
    scores = Scores(nll, base, nll - base, np.array([True, False, True]))
    found = summarize(scores)
    assert found.perplexity.value == pytest.approx(math.exp(7 / 3))
    deviation = math.sqrt(((nll - nll.mean()) ** 2).sum() / 2) / math.sqrt(3)
    assert found.perplexity.error == pytest.approx(math.exp(7 / 3) * deviation)
    assert found.divergence is not None
    assert found.divergence.perplexity_ratio.value == pytest.approx(math.exp(0.5))
    assert found.divergence.same_top.value == pytest.approx(2 / 3)
    assert found.divergence.median_kl == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.6, "12346"),
        (1.23456, "1.23"),
        (0.0249, "0.0249"),
        (0.00110049, "0.00110"),
        (-3e-9, "0.000000"),
        (0.0, "0.00"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits_and_zero_no_sign(value: float, text: str) -> None:
    assert significant(value) == text


def test_an_error_that_is_not_known_is_a_dash() -> None:
    assert str(Estimate(12.3, math.nan)) == "12.3000 ± -"
    assert Estimate(0.5, math.nan).percent == "50.00% ± -"
    assert str(Estimate(-1e-9, 1e-8)) == "0.000000 ± 0.000000"
