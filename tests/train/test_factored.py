"""Adafactor's means of rows and columns are torch's, through kernels and beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qoff import train
from qoff.train.factored import FactoredMoments, count, runs
from qoff.train.layout import FlatUnit

SHAPES = {
    "matrix of whole vectors": (33, 48),
    "several of them": (3, 20, 32),
    "other rows": (40, 24),
    "vector": (50,),
}


@pytest.mark.parametrize("size", [1.0, 1e-7, 1e-12])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_steps_are_those_of_torch(
    shape: tuple[int, ...], size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients so small that torch takes the least mean for theirs, too."""
    monkeypatch.setattr("qoff.train.factored.PIECE", 400)
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape))
    theirs = torch.optim.Adafactor([p], weight_decay=0.1)
    unit = FlatUnit("layer", {"weight": nn.Parameter(p.data.clone())})
    flat = torch.zeros(unit.count)
    unit.views(flat)["weight"].copy_(p.data)
    memory = torch.empty(count([p.shape]))
    moments, parts = FactoredMoments([p.shape], memory), list(runs(unit))
    assert len(parts) > 1 or p.dim() == 1
    moments.begin(parts, flat)
    optimizer = train.Adafactor(weight_decay=0.1)
    for step in range(4):
        p.grad = size * torch.randn(shape)
        p.grad.view(-1)[:5] = 0
        given = torch.zeros(unit.count)
        unit.views(given)["weight"].copy_(p.grad)
        rule: Any = optimizer.rule(step, optimizer.rate(step), 1.0)
        moments.prepare(rule, lambda given=given: [(parts, given)])  # type: ignore[misc]
        for run in parts:
            place = slice(run.start, run.stop)
            moments.step(rule, run, flat[place], given, None)
        theirs.step()
        torch.testing.assert_close(unit.views(flat)["weight"], p.data, rtol=2e-6, atol=2e-6)
