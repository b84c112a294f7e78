"""Tiles under Adafactor, whose means are of whole matrices, and with updates a step late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qoff import train
from qoff.errors import ArgumentError

from .test_delayed import OPTIMIZERS
from .test_tiles import tiled
from .test_training import (
    LOSSES,
    LR,
    PLACES,
    assert_same_weights,
    batches_of,
    model_of,
    torch_step,
)

STEPS = 4
LATE: dict[str, Any] = {"delayed": True}


@pytest.mark.parametrize(
    ("place", "part", "name"),
    [(PLACES[2], "layers", "llama"), (PLACES[0], "layers", "llama"), (PLACES[2], "all", "tied")],
)
def test_adafactor_is_that_of_torch(
    place: str, part: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.train.factored.PIECE", 500)  # tiles go in parts
    rule = train.Adafactor(weight_decay=0.1)
    training = tiled(place, tmp_path, monkeypatch, None, part, name, options={"optimizer": rule})
    reference = model_of(name)
    theirs = torch.optim.Adafactor(reference.parameters(), weight_decay=0.1)
    for step in range(STEPS):
        wanted = torch_step(reference, theirs, batches_of(step), None)
        assert training.step(batches_of(step)) == pytest.approx(wanted, abs=LOSSES)
    assert_same_weights(training.state_dict(), reference, 2e-5)


@pytest.mark.parametrize(
    ("place", "norm", "part", "name", "kind"),
    [
        (PLACES[2], 0.5, "layers", "llama", "adamw"),
        (PLACES[0], None, "all", "tied", "adamw"),
        (PLACES[2], None, "all", "llama", "adamw"),
        (PLACES[2], 0.5, "all", "llama", "adafactor"),
    ],
)
def test_late_steps_are_those_of_a_loop_that_delays(
    place: str,
    norm: float | None,
    part: str,
    name: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = OPTIMIZERS[kind]
    options = {**LATE, "optimizer": ours}
    training = tiled(place, tmp_path, monkeypatch, norm, part, name, options=options)
    reference = model_of(name)
    optimizer = theirs(reference.parameters())
    for step in range(STEPS):
        wanted = torch_step(reference, optimizer, batches_of(step), norm)
        assert training.step(batches_of(step)) == pytest.approx(wanted, abs=LOSSES)
    assert_same_weights(training.state_dict(), reference)


@pytest.mark.parametrize("rule", [train.AdamW(lr=LR), train.Adafactor()], ids=["adamw", "factored"])
def test_a_late_run_goes_on_bit_for_bit(
    rule: train.Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding of a token that is not in a batch has no gradient, and waits as 0."""
    half: dict[str, Any] = {"dtype": torch.bfloat16, "part": "all"}
    half["options"] = {**LATE, "optimizer": rule}
    whole, first, second = (tiled(PLACES[2], tmp_path, monkeypatch, **half) for _ in range(3))
    wanted = [whole.step(batches_of(i)) for i in range(4)]
    found = [first.step(batches_of(i)) for i in range(2)]
    first.save(tmp_path / "run")
    second.resume(tmp_path / "run")
    assert found + [second.step(batches_of(i)) for i in range(2, 4)] == wanted
    ours, theirs = second.state_dict(), whole.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    one = {**half, "options": {**LATE, "optimizer": rule, "micro_batches": 1}}
    with pytest.raises(ArgumentError, match="gradients of tiles are float32, here bfloat16"):
        tiled(PLACES[2], tmp_path, monkeypatch, **one).resume(tmp_path / "run")
    now = {**half, "options": {"optimizer": rule}}
    with pytest.raises(ArgumentError, match="another run: its updates are delayed"):
        tiled(PLACES[2], tmp_path, monkeypatch, **now).resume(tmp_path / "run")
