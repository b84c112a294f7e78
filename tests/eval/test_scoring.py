"""Scores against a plain loop, references on disk, and packed caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qoff.errors import ArgumentError, FormatError
from qoff.eval.perplexity.metrics import Scores, summarize
from qoff.eval.perplexity.models import PIECE_TOKENS, open_runtime
from qoff.eval.perplexity.reference import Reference, ReferenceMeta, write_reference
from qoff.eval.perplexity.scoring import Sample, evaluate, make_reference
from qoff.eval.perplexity.subjects import QoffSubject, TransformersSubject
from qoff.eval.perplexity.windows import cut
from qoff.kvcache import KVQuant
from qoff.models.runtime import Runtime
from tests.tiny_models import VOCAB, reference_model, tiny_checkpoint

FAMILY = "llama-head64"
META = ReferenceMeta("m", VOCAB, "text")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), FAMILY)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    """transformers, with the dequantized weights of the checkpoint."""
    return reference_model(checkpoint)


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Iterator[Runtime]:
    with open_runtime(checkpoint) as runtime:
        yield runtime


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
    np.testing.assert_allclose(scores.nll, reference.nll, atol=1e-4)
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


def test_a_reference_keeps_log_probabilities_to_a_thousandth(tmp_path: Path) -> None:
    logits = torch.randn(5, VOCAB) * 6
    logits[0, 0] = -300.0
    write_reference(tmp_path / "r", META, [(logits, torch.arange(5))])
    reference = Reference(tmp_path / "r")
    wanted = torch.log_softmax(logits, -1)
    wanted = wanted.clamp_min(wanted.amax(1, keepdim=True) - 40)
    assert (reference.log_probabilities(0, 5) - wanted).abs().max() < 1e-3
    assert (reference.log_probabilities(3, 2) - wanted[3:]).abs().max() < 1e-3
    exact = torch.log_softmax(logits, -1).diagonal()
    np.testing.assert_allclose(reference.nll, -exact.numpy(), rtol=1e-5)


def test_a_reference_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    parts = [(torch.randn(2, VOCAB), torch.arange(2)), (torch.randn(2, VOCAB), torch.tensor(1))]
    with pytest.raises(IndexError):
        write_reference(tmp_path / "r", META, parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["missing", "short", "row", "all"])
def test_a_damaged_reference_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    write_reference(path, META, [(torch.randn(3, VOCAB), torch.arange(3))])
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "short":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "row":
        data[100] ^= 255  # in the first row's numbers
        path.write_bytes(data)
    elif damage == "all":
        path.write_bytes(bytes(255 - x for x in data))
    with pytest.raises(FormatError, match="damaged"):
        Reference(path).log_probabilities(0, 3)


def test_a_reference_of_something_else_is_refused(
    runtime: Runtime, checkpoint: Path, tmp_path: Path
) -> None:
    subject = QoffSubject(runtime, "x")
    reference = make_reference(subject, sample(), tmp_path / "r")
    with pytest.raises(ArgumentError, match="other tokens"):
        evaluate(subject, sample(seed=1), reference)
    with pytest.raises(ArgumentError, match="other tokens"):
        evaluate(subject, sample(length=50), reference)
    subject.vocab_size += 1
    with pytest.raises(ArgumentError, match="not the same model"):
        evaluate(subject, sample(), reference)


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
