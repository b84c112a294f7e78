"""Drawing tokens from logits: the distribution, and what the draw does not depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qoff.kernels import sampling
from qoff.kernels.sampling import Warp, columns, draw_, log_probabilities, noise_size

VOCAB = 600  # three groups, the last one not full
SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"min_p": 0.02},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"temperature": 1.5, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
]


def rows(*logits: Tensor) -> Tensor:
    """Logits [R, columns] of rows [V]."""
    found = torch.full((len(logits), columns(len(logits[0]))), -torch.inf)
    found[:, : len(logits[0])] = torch.stack(logits)
    return found


def warp(count: int, **options: Any) -> Warp:
    """The same options for each row."""
    given = {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, **options}
    numbers = torch.tensor([given[name] for name in ("temperature", "min_p", "top_p")])
    found = Warp(numbers[:, None, None].expand(3, count, 1), given["top_p"] < 1)
    if "top_k" not in options:
        return found
    return replace(found, top_k=torch.full((count, 1), options["top_k"]), ranked=options["top_k"])


def expected(logits: Tensor, **options: Any) -> Tensor:
    """The probabilities [V] that transformers' warpers give, in vLLM's order."""
    warpers: Any = LogitsProcessorList()
    warpers.append(TemperatureLogitsWarper(options.get("temperature", 1.0)))
    for name, kind in (
        ("min_p", MinPLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        if name in options:
            warpers.append(kind(options[name]))
    found: Tensor = warpers(torch.empty(1, 0, dtype=torch.int64), logits[None]).softmax(-1)[0]
    return found


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [3.0, 0.1])
def test_weights_are_those_of_transformers(options: dict[str, Any], scale: float) -> None:
    logits = scale * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    found = sampling._weights(rows(*logits), warp(2, **options))[:, :VOCAB]
    for row, weights in zip(logits, found, strict=True):
        torch.testing.assert_close(weights / weights.sum(), expected(row, **options))


@pytest.mark.parametrize("options", [SHAPES[0], SHAPES[-1]], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    logits, count = 2 * torch.randn(VOCAB, generator=generator), 5_000
    noise = torch.rand(count, noise_size(VOCAB), dtype=torch.float64, generator=generator)
    tokens = draw_(rows(logits).expand(count, -1).clone(), noise, warp(count, **options))
    likely = expected(logits, **options)
    often = torch.bincount(tokens, minlength=VOCAB) / count
    assert not often[likely == 0].any()
    wanted = count * likely[likely * count > 5]
    squares = ((count * often[likely * count > 5] - wanted) ** 2 / wanted).sum()
    assert squares < len(wanted) + 5 * (2 * len(wanted)) ** 0.5  # chi-square, 5 deviations


def test_logits_that_differ_in_rounding_seldom_give_another_token() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(100, VOCAB, generator=generator)
    noise = torch.rand(100, noise_size(VOCAB), dtype=torch.float64, generator=generator)
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=generator)
    one, other = (draw_(rows(*x), noise, warp(100, top_p=0.95)) for x in (logits, rounded))
    assert (one != other).sum() <= 1


def test_log_probabilities_and_ranks() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    value, rank, best, ids = log_probabilities(logits, torch.tensor([2, 0]), 2)
    torch.testing.assert_close(value.exp(), torch.tensor([0.2, 0.1]))
    assert rank.tolist() == [3, 2]
    assert ids[:, 0].tolist() == [0, 2]
    torch.testing.assert_close(best.exp(), torch.tensor([[0.5, 0.3], [0.8, 0.1]]))


@pytest.mark.gpu
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_a_gpu_draws_what_the_cpu_does(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = rows(*(3 * torch.randn(64, VOCAB, generator=generator)))
    noise = torch.rand(64, noise_size(VOCAB), dtype=torch.float64, generator=generator)
    here = warp(64, **options)
    there = replace(
        here,
        numbers=here.numbers.cuda(),
        top_k=None if here.top_k is None else here.top_k.cuda(),
    )
    found = draw_(logits.cuda(), noise.cuda(), there).cpu()
    assert torch.equal(found, draw_(logits, noise, here))
