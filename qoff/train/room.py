"""Where the packed layers of a qoff checkpoint lie while adapters beside them learn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qoff.budgets import resolve_dtype
from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.hf.plugin.streaming import frozen_of
from qoff.memory.arena import PAGE, round_up
from qoff.system_memory import free_memory

from .finetune import OPTIMIZERS, Lora, Recipe
from .placement import columns, placed_with
from .planned import planned

_SHARE = 0.9  # of what is free, where no bound is given
_SAVED = 16  # times the hidden states, by a layer whose costs depend on what its router chooses


@dataclass(frozen=True)
class Room:
    """options: of `from_pretrained`. device_memory: of `offload`; None, where a CPU computes."""

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

    On a CPU layers stream from their files. On a GPU they lie there, in host memory and in files,
    as far as bounds allow beside the training: its arenas, as `offload` counts them, activations
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
        return Room(options)
    if device_memory is None:
        device_memory = int(_SHARE * torch.cuda.mem_get_info(device)[0])
    if host_memory is None:
        host_memory = int(_SHARE * (free_memory() or 0))
    job = planned(
        checkpoint.config,
        OPTIMIZERS[recipe.optimizer](recipe.rate),
        lora=lora,
        packed=checkpoint,
        dtype=str(computes).removeprefix("torch."),
        tokens=recipe.sequence,
        micro_batches=recipe.micro_batches,
        clips=recipe.max_norm is not None,
        device=device.type,
        delayed=recipe.delayed,
        gradients=recipe.gradients,
    )
    job = replace(job, sizes=replace(job.sizes, swaps=bool(activation_disk)))
    saved = max((cost.nbytes for cost in job.costs), default=_SAVED * job.sizes.hidden)
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
