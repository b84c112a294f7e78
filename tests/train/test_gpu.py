"""Training on a GPU, simulated: losses and weights are those of the CPU, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff import train
from qoff.errors import ArgumentError, BudgetError

from .gpu import simulated
from .test_training import LR, OPTIMIZERS, TOKENS, batch, model_of

MANY = 5  # layers, of which three are in slots
PLACES = ["host", "host and disk", "disk"]


def run(
    model: Any, place: str, folder: Path, steps: int = 2, **options: Any
) -> tuple[list[float], dict[str, Tensor], train.Training]:
    given = {"tokens": TOKENS, "micro_batches": 3, "disk": folder, **options}
    if place != PLACES[0]:
        with pytest.raises(BudgetError, match="host memory: 0 bytes are too few") as refused:
            train.offload(model, **given, host_memory=0)
        least = int(str(refused.value).rpartition(" ")[2].replace(",", ""))
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        given["host_memory"] = least + 5 * layer // 2 * (place == PLACES[1])
    training = train.offload(model, **given)
    losses = [training.step([batch(step), batch(step + 9)]) for step in range(steps)]
    return losses, training.state_dict(), training


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, x in wanted.items() if not torch.equal(found[name], x)] == []


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "disk") for name in OPTIMIZERS), ("adamw", "host"), ("adamw", "host and disk")],
)
def test_full_training_is_that_of_the_cpu(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if name == "adamw" else torch.float32
    made = partial(model_of, "llama", dtype, num_hidden_layers=MANY)
    wanted, weights, _ = run(made(), PLACES[0], tmp_path, optimizer=OPTIMIZERS[name]())
    simulated(monkeypatch)
    losses, found, training = run(made(), place, tmp_path, optimizer=OPTIMIZERS[name]())
    assert losses == wanted
    assert_same(found, weights)
    where, stats = training.placement, training.stats
    assert len(where.weights) == {"host": MANY, "host and disk": 2, "disk": 0}[place]
    assert (stats.device_peak, stats.host_peak) == where.totals[:2]
