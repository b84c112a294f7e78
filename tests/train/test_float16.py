"""Training in float16: the loss is scaled, and steps whose gradients overflow are left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qoff import train
from qoff.errors import TrainingError

from .test_training import LR, PLACES, batch, model_of, offloaded

STEPS, SCALE = 50, 2.0**12  # at the scale that training begins with, some gradients overflow


def training_of(place: str, folder: Path) -> train.Training:
    optimizer = train.AdamW(lr=LR)
    return offloaded(model_of("llama", torch.float16), place, folder, optimizer=optimizer)


def test_where_it_lies_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for place in PLACES:
        training = training_of(place, tmp_path)
        found.append(([training.step([batch(i)]) for i in range(4)], training.state_dict()))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(x, found[0][1][name]) for name, x in weights.items())


def test_50_steps_are_those_of_scaled_losses_in_memory(tmp_path: Path) -> None:
    training = training_of(PLACES[2], tmp_path)
    assert training.loss_scale is not None
    training.loss_scale.value = SCALE
    found = [training.step([batch(i)]) for i in range(STEPS)]
    assert (training.loss_scale.value, training.loss_scale.good) == (SCALE, STEPS)
    reference = model_of("llama", torch.float16)
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    theirs = torch.optim.AdamW(masters, lr=LR)
    losses = []
    for step in range(STEPS):
        loss = reference(**batch(step), use_cache=False).loss
        (loss * SCALE).backward()
        for master, p in zip(masters, reference.parameters(), strict=True):
            master.grad, p.grad = p.grad.float() / SCALE, None
        theirs.step()
        for master, p in zip(masters, reference.parameters(), strict=True):
            p.data.copy_(master)
        losses.append(float(loss.detach()))
    assert found == pytest.approx(losses, rel=2e-3)
    ours = training.state_dict()
    for name, p in reference.named_parameters():
        assert (ours[name].float() - p.float()).abs().mean() < LR, name


def test_gradients_that_overflow_change_nothing_but_the_scale(tmp_path: Path) -> None:
    training = training_of(PLACES[2], tmp_path / "disk")
    before = training.state_dict()
    assert training.loss_scale is not None
    training.loss_scale.value = 2.0**34
    training.step([batch(0)])
    assert (training.steps, training.skipped, training.loss_scale.value) == (0, 1, 2.0**33)
    assert all(torch.equal(x, before[name]) for name, x in training.state_dict().items())
    while training.steps < 2:
        training.step([batch(0)])
    assert 1 < training.skipped < 30
    training.save(tmp_path / "run")
    again = training_of(PLACES[0], tmp_path)
    again.resume(tmp_path / "run")
    assert again.loss_scale == training.loss_scale
    assert again.step([batch(1)]) == training.step([batch(1)])


def test_a_scale_grows_and_has_an_end() -> None:
    scale = train.training.LossScale(4.0)
    for _ in range(2000):
        scale.fits()
    assert (scale.value, scale.good) == (8.0, 0)
    for _ in range(3):
        scale.overflows()
    with pytest.raises(TrainingError, match="not finite at a loss scale of 1"):
        scale.overflows()
