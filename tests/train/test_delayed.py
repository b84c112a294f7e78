"""Updates that are delayed by a step are those of a loop that delays them by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff import train
from qoff.errors import ArgumentError, TrainingError

from .test_training import (
    EPS,
    LOSSES,
    LR,
    PLACES,
    assert_same_weights,
    batches_of,
    model_of,
    offloaded,
    torch_step,
)

STEPS = 12


def late(kind: Any, **options: Any) -> Callable[..., Any]:
    """An optimizer of torch that steps by the gradients of the call before."""

    class Late(kind):
        waits: list[torch.Tensor] | None = None

        def step(self, *_: Any) -> None:
            learns = self.param_groups[0]["params"]
            made = [p.grad.clone() for p in learns]
            if self.waits is not None:
                for p, grad in zip(learns, self.waits, strict=True):
                    p.grad = grad
                super().step()
            self.waits = made

    return partial(Late, **options)


OPTIMIZERS: dict[str, tuple[train.Optimizer, Callable[..., Any]]] = {
    "adamw": (train.AdamW(lr=LR, eps=EPS), late(torch.optim.AdamW, lr=LR, eps=EPS)),
    "adafactor": (train.Adafactor(lr=LR), late(torch.optim.Adafactor, lr=LR)),
}


def delayed(
    place: str, folder: Path, norm: float | None = None, kind: str = "adamw", **model: Any
) -> train.Training:
    made, optimizer = model_of("llama", **model), OPTIMIZERS[kind][0]
    return offloaded(made, place, folder, optimizer=optimizer, max_norm=norm, delayed=True)


@pytest.mark.parametrize(
    ("place", "norm", "kind"),
    [
        (PLACES[0], None, "adamw"),
        (PLACES[1], 0.5, "adamw"),
        (PLACES[2], 0.5, "adamw"),
        (PLACES[2], None, "adafactor"),
    ],
)
def test_steps_are_those_of_a_loop_that_delays(
    place: str, norm: float | None, kind: str, tmp_path: Path
) -> None:
    reference, training = model_of("llama"), delayed(place, tmp_path, norm, kind)
    optimizer = OPTIMIZERS[kind][1](reference.parameters())
    for step in range(STEPS):
        wanted = torch_step(reference, optimizer, batches_of(step), norm)
        assert training.step(batches_of(step)) == pytest.approx(wanted, abs=LOSSES)
    assert_same_weights(training.state_dict(), reference)
    first = model_of("llama").state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(training.state_dict()["model.embed_tokens.weight"], first)


@pytest.mark.parametrize(("before", "after"), [(PLACES[0], PLACES[2]), (PLACES[2], PLACES[0])])
def test_a_resumed_run_is_the_same_bit_for_bit(before: str, after: str, tmp_path: Path) -> None:
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    whole, first = delayed(before, tmp_path, **half), delayed(before, tmp_path, **half)
    wanted = [whole.step(batches_of(i)) for i in range(5)]
    found = [first.step(batches_of(i)) for i in range(2)]
    first.save(tmp_path / "run")
    second = delayed(after, tmp_path, **half)
    second.resume(tmp_path / "run")
    assert found + [second.step(batches_of(i)) for i in range(2, 5)] == wanted
    ours, theirs = second.state_dict(), whole.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    with pytest.raises(ArgumentError, match="another run: its updates are delayed"):
        offloaded(model_of("llama", **half), PLACES[0], tmp_path).resume(tmp_path / "run")


def test_a_step_that_is_refused_leaves_the_update_of_the_one_before(tmp_path: Path) -> None:
    training, other = (delayed(PLACES[2], tmp_path) for _ in range(2))
    for one in (training, other):
        for step in range(2):
            one.step(batches_of(step))
    inputs = training.model.get_input_embeddings()
    handle = inputs.register_forward_hook(lambda *x: x[2] * float("nan"))
    with pytest.raises(TrainingError, match="loss is nan"):
        training.step(batches_of(2))
    handle.remove()
    other.step(batches_of(2))
    ours, theirs = training.state_dict(), other.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    training.step(batches_of(3))
