"""Choosing tokens on the CPU: the same as torch's operations choose."""

from __future__ import annotations

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

from qoff.errors import OpError
from qoff.kernels.cpu.sampling import sampling as compiled
from qoff.kernels.layout.distribution import Shape
from qoff.kernels.sampling import Warp, columns, draw_, noise_size

SIZES = [5, 16, 255, 256, 1003]
SHAPES = [
    Shape(),
    Shape(temperature=0.5),
    Shape(min_p=0.02),
    Shape(top_k=3),
    Shape(top_k=10**6),
    Shape(top_p=0.8),
    Shape(top_p=1e-9),
    Shape(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01),
]
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def random(rows: int, size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_the_likeliest_is_the_first_of_the_largest(size: int) -> None:
    logits = random(40, size).round()  # many are equal
    logits[:20, ::3] = -torch.inf
    assert compiled.likeliest(logits.unbind()) == logits.argmax(1).tolist()
    assert [compiled.likeliest([row])[0] for row in logits] == logits.argmax(1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_are_not_finite_have_no_token(size: int, bad: float) -> None:
    logits = random(size + 1, size)
    logits[range(size), range(size)] = bad  # at each place once
    nothing = torch.full((1, size), -torch.inf)
    rows, wanted = torch.cat([logits, nothing]).unbind(), [-1] * size
    noise = torch.rand(len(rows), noise_size(size), dtype=torch.float64)
    for found in (
        compiled.likeliest(rows),
        compiled.draw(rows, [Shape()] * len(rows), noise),
        compiled.multinomial(rows, Shape()),
    ):
        assert found[:size] == wanted
        assert found[size] >= 0
        assert found[size + 1] == -1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_drawn_by_noise_is_what_torchs_operations_draw(size: int, shape: Shape) -> None:
    logits = random(30, size, seed=1)
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(30, noise_size(size), dtype=torch.float64, generator=generator)
    padded = torch.full((30, columns(size)), -torch.inf)
    padded[:, :size] = logits
    numbers = torch.tensor([shape.temperature, shape.min_p, shape.top_p])
    warp = Warp(numbers[:, None, None].expand(3, 30, 1), shape.top_p < 1)
    if shape.top_k:
        top_k = min(shape.top_k, size)
        warp = Warp(warp.numbers, warp.nucleus, torch.full((30, 1), top_k), top_k)
    found = compiled.draw(logits.unbind(), [shape] * 30, noise)
    assert found == draw_(padded, noise, warp).tolist()
    alone = [compiled.draw([x], [shape], n[None])[0] for x, n in zip(logits, noise, strict=True)]
    assert alone == found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_torchs_generator_draws_what_it_draws_in_torch(size: int, shape: Shape) -> None:
    assert compiled.follows_torch()
    logits = random(7, size, seed=3)
    processors = LogitsProcessorList()
    for name, kind in WARPERS.items():
        value: Any = getattr(shape, name)
        if value != getattr(Shape(), name):
            processors.append(kind(value))
    scores = processors(torch.empty(7, 0, dtype=torch.int64), logits.clone())  # type: ignore[arg-type]
    likely = scores.softmax(-1)
    for seed in range(4):
        torch.manual_seed(seed)
        torch.rand(seed)  # of float32, a word each: numbers may begin at any word
        before = torch.get_rng_state()
        wanted = torch.multinomial(likely, 1)[:, 0].tolist()
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        assert compiled.multinomial(logits.unbind(), shape) == wanted
        assert torch.equal(torch.get_rng_state(), after)
        torch.set_rng_state(before)
        assert compiled.multinomial(logits[:1].unbind(), shape) == wanted[:1]


def test_other_rows_are_refused() -> None:
    good = torch.zeros(8)
    for bad in (good.double(), good[:7], torch.zeros(16)[::2], torch.zeros(1, 8)):
        with pytest.raises(OpError, match=r"rows must be|side by side"):
            compiled.likeliest([good, bad])
    with pytest.raises(OpError, match="noise"):
        compiled.draw([good], [Shape()], torch.rand(1, noise_size(8)))
