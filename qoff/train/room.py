"""What bounds of memory leave for the arenas of a training, and for packed layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qoff.budgets import CPU, resolve_dtype
from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.hf.plugin.streaming import frozen_of
from qoff.memory.arena import PAGE, round_up
from qoff.system_memory import free_memory

from .finetune import OPTIMIZERS, Lora, Recipe
from .heap import GAPS
from .placement import PARTS, TILES, columns, fitted, placed_with
from .planned import Planned, planned

_SHARE = 0.9  # of what is free, where no bound is given
_SAVED = 16  # times the hidden states, by a layer whose costs depend on what its router chooses


@dataclass(frozen=True)
class Room:
    """options: of `from_pretrained`. device_memory: of `offload`; None: as much as it takes."""

    options: dict[str, Any]
    device_memory: int | None = None


def room_of(
    path: Path,
    lora: Lora,
    recipe: Recipe,
    device: torch.device,
    device_memory: int | None,
    host_memory: int | None,
    activation_memory: int = 0,
    dtype: str = "auto",
    activation_disk: int = 0,
) -> Room:
    """What `from_pretrained` and `offload` are told for a qoff checkpoint.

    On a CPU layers stream from their files, and device_memory is as of `arenas_within`. On a GPU
    they lie there, in host memory and in files, as far as bounds allow beside the training: its
    arenas, as `offload` counts them, activations
    that are kept, and twice what a layer saves, in float32. Hidden states of all micro-batches are
    on the GPU only where packed layers then still fit, inputs of layers where all of these do.
    device_memory, host_memory: bytes of all; None: nine tenths of what is free. dtype: what is
    computed in, see `resolve_dtype`. activation_disk: as of `offload`, whose copies pass through
    buffers in host memory. Raises BudgetError where a GPU has not enough for embedding, head and
    slots, ArgumentError for a dtype that the device does not compute in.
    """
    checkpoint = Checkpoint.open(path)
    computes = resolve_dtype(dtype, checkpoint.config, device)
    if device.type == "cpu":
        options: dict[str, Any] = {"device_map": "disk", "dtype": computes}
        if torch.cuda.is_available():  # "disk" would have it compute
            stays = frozen_of(checkpoint, device).stays
            options |= {"device_map": "auto", "max_memory": {"cpu": stays}}
        if device_memory is None:
            return Room(options)
        job = _job(checkpoint.config, lora, recipe, "float32", device, checkpoint)
        return Room(options, arenas_within(device_memory, host_memory, job))
    if device_memory is None:
        device_memory = int(_SHARE * torch.cuda.mem_get_info(device)[0])
    if host_memory is None:
        host_memory = int(_SHARE * (free_memory() or 0))
    named = str(computes).removeprefix("torch.")
    job = _job(checkpoint.config, lora, recipe, named, device, checkpoint)
    job = replace(job, sizes=replace(job.sizes, swaps=bool(activation_disk)))
    saved = _saved(job)
    assert job.frozen is not None
    most = None
    for column in columns(job.sizes):
        arenas, in_host, _ = placed_with(column, job.sizes, None, host_memory, True, True).totals
        training = arenas + activation_memory + 2 * saved
        missing = training + job.frozen.stays - device_memory
        if missing <= 0:
            break
        most = arenas - 1  # `offload` is to do without the column, too
    else:
        raise BudgetError(
            f"device memory: {device_memory:,} bytes are too few by {missing:,}: training takes "
            f"{training:,}, packed weights {job.frozen.stays:,} with all layers streamed; train "
            "with shorter sequences or fewer micro-batches"
        )
    room = {device.index or 0: device_memory - training, "cpu": max(0, host_memory - in_host)}
    options = {"device_map": "auto", "max_memory": room, "dtype": computes}
    if most is None:
        left = -missing - sum(job.frozen.layers)  # for inputs of layers
        inputs = recipe.micro_batches * round_up(job.sizes.hidden, PAGE)  # of one
        most = arenas + max(left, inputs - 1)
    return Room(options, most)


def room_beside(
    config: Mapping[str, Any],
    lora: Lora | None,
    recipe: Recipe,
    device_memory: int | None,
    host_memory: int | None,
    dtype: str = "auto",
) -> Room:
    """The same of a model of transformers that a CPU trains. Raises BudgetError."""
    if device_memory is None:
        return Room({})
    job = _job(config, lora, recipe, dtype, CPU)
    return Room({}, arenas_within(device_memory, host_memory, job))


def arenas_within(device_memory: int, host_memory: int | None, job: Planned) -> int:
    """What a bound of a CPU's memory leaves for the arenas of a step, which `offload` counts.

    Beside these are a layer with its gradients, in float32, gaps that the heap keeps, and packed
    weights that stay. Raises BudgetError with the bytes that are missing.
    """
    beside = beside_arenas(job)
    left = device_memory - sum(beside.values())
    try:
        fitted(job.sizes, job.cut, left, host_memory, True)
    except BudgetError:
        sizes = job.cut(TILES[-1], PARTS[-1])
        arenas = placed_with(columns(sizes)[-1], sizes, None, host_memory, True).totals[0]
        rows = ", ".join(f"{n:,} {what}" for what, n in beside.items() if n)
        raise BudgetError(
            f"device memory: {device_memory:,} bytes are too few by {arenas - left:,}: what a step "
            f"works with takes {arenas:,}, with {rows} beside it; train with shorter sequences or "
            "fewer micro-batches"
        ) from None
    return left


def beside_arenas(job: Planned) -> dict[str, int]:
    """Bytes of a CPU's memory that a step takes beside its arenas, by purpose."""
    return {
        "for a layer with gradients": 2 * _saved(job),
        "for gaps in the heap": GAPS,
        "for packed weights that stay": 0 if job.frozen is None else job.frozen.stays,
    }


def _saved(job: Planned) -> int:
    """Bytes that a layer saves for its backward, at most."""
    return max((cost.nbytes for cost in job.costs), default=_SAVED * job.sizes.hidden)


def _job(
    config: Mapping[str, Any],
    lora: Lora | None,
    recipe: Recipe,
    dtype: str,
    device: torch.device,
    packed: Checkpoint | None = None,
) -> Planned:
    return planned(
        config,
        OPTIMIZERS[recipe.optimizer](recipe.rate),
        lora=lora,
        packed=packed,
        dtype=dtype,
        tokens=recipe.sequence,
        micro_batches=recipe.micro_batches,
        clips=recipe.max_norm is not None,
        device=device.type,
        delayed=recipe.delayed,
        gradients=recipe.gradients,
    )
