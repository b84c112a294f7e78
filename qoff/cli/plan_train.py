"""`qoff plan --train`: what fine-tuning a model takes of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typer import Option

from qoff.errors import ArgumentError

from .output import print_json, print_table

if TYPE_CHECKING:
    from qoff.checkpoint import Checkpoint
    from qoff.plan.profile import MachineProfile


@dataclass(frozen=True)
class FinetuneOptions:
    """For `--train`: as `qoff finetune` has them."""

    train: bool = Option(False, "--train", help="Plan qoff finetune instead.")
    lora: str | None = Option(None, help="With --train: adapters like r=16; default: all weights.")
    micro_batches: int = Option(8, min=1, help="With --train: sequences per step.")
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "lion"] = Option(
        "adamw", help="With --train: the optimizer of qoff finetune."
    )
    clip: bool = Option(False, "--clip", help="With --train: clip gradients (--max-norm).")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Option(
        "auto", help="With --train: type of the trained weights; auto: the model's."
    )
    gradients: Literal["auto", "float32", "bfloat16"] = Option(
        "auto", help="With --train: type of the layers' gradients."
    )


def print_training(
    config: Path,
    how: FinetuneOptions,
    sequence: int,
    machine: MachineProfile,
    packed: Checkpoint | None,
    as_json: bool,
) -> None:
    """Plan a training and print it. packed: the checkpoint that adapters are beside.

    Raises BudgetError where it does not fit.
    """
    from qoff.schema import read_object
    from qoff.train.choice import training_plan
    from qoff.train.finetune import OPTIMIZERS, Lora
    from qoff.train.planned import planned
    from qoff.train.schedules import Schedule

    if how.lora is not None and how.dtype != "auto":
        raise ArgumentError("--lora trains beside packed weights; leave --dtype out")
    job = planned(
        read_object(config),
        OPTIMIZERS[how.optimizer](Schedule(1e-4)),
        lora=None if how.lora is None else Lora.parse(how.lora),
        packed=packed,
        dtype=how.dtype,
        tokens=sequence,
        micro_batches=how.micro_batches,
        clips=how.clip,
        device="cuda" if machine.on_gpu else "cpu",
        gradients=how.gradients,
    )
    found = training_plan(job, machine)
    if as_json:
        print_json(found.values())
        return
    typer.echo(f"{machine.name}: {found.line()}")
    typer.echo(found.activation_line())
    chosen = " ".join(f"{name} {value}" for name, value in found.options().items())
    typer.echo(f"qoff finetune {chosen or 'without bounds'}")
    print_table("what lives where", found.tiers(), ("tier", "what", "bytes"))
    columns = ("resource", *found.step.phases)
    print_table("busy in a step", found.resources(), columns)
    for warning in found.warnings():
        typer.echo(f"note: {warning}")
