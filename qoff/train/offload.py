"""`qoff.train.offload`: train a model of transformers with what does not fit on disk."""

from __future__ import annotations

import math
import weakref
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from qoff.budgets import memory_size
from qoff.errors import ArgumentError, BudgetError, UnsupportedModelError, raised_as
from qoff.memory.arena import PAGE, round_up
from qoff.process import only_here
from qoff.system_memory import check_machine, refusals

from .batches import Limits
from .building import engine_of
from .fused_lora import fuse
from .gpu_link import device_for, streams_of
from .heap import GAPS
from .homes import Homes
from .needs import needs_of
from .optimizers import AdamW, Optimizer, checked, from_zero
from .passes import check_order
from .placement import fitted
from .sizes import Sizes
from .training import Training


@refusals()
def offload(
    model: nn.Module | str | PathLike[str],
    optimizer: Optimizer | None = None,
    *,
    tokens: int,
    micro_batches: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | PathLike[str] | None = None,
    max_norm: float | None = None,
    activation_memory: int | str = 0,
    activation_disk: int | str = 0,
    delayed: bool = False,
    gradients: str = "auto",
    device: torch.device | str = "cpu",
) -> Training:
    """Return what trains a model of transformers, one step after another.

    model: in memory, float32, bfloat16 or float16, or a path or hub id that transformers loads. Its
    parameters that require gradients learn; it is changed, and computes as before. Of float16, the
    loss is scaled, and gradients are kept until all are known to be finite. optimizer: None:
    AdamW(). A step has up to `micro_batches` batches of up to `tokens` tokens each, padding
    included. max_norm: clip gradients by their global norm.

    device_memory bounds what a step works with: slots of weights, gradients, states and hidden
    states on their way, and weights outside of layers. Where it is too small, linear layers in
    layers, or embedding and head, or all of these are cut into tiles of rows, 64 MiB to 1. What a
    GPU has left of it takes inputs of layers.
    host_memory bounds what is kept between: weights, states, the layers' inputs. Both in bytes or
    like "8GiB"; None: no bound. What goes beyond host_memory is in a file without a name in the
    folder `disk`. What torch computes with inside of one layer and in the loss, for one
    micro-batch, comes on top, as do frozen weights. activation_memory bounds, beside these, what
    layers keep for their backward, from the second step on; the others are computed again.
    activation_disk: bytes of the disk that more of them go to, where that is faster; two stages in
    memory count as activation_memory. Which are kept, and where, changes no bit. delayed: a step's
    gradients change weights during the next step, beside all of it, and so one step later; weights
    then lie twice, and gradients stay. gradients: what those of a layer are kept as when all
    micro-batches are added in float32: "float32", or "bfloat16", rounded once; "auto": bfloat16
    where layers' weights are.

    device: computes, "cpu" or a GPU, like "cuda". On a GPU device_memory is of its memory, where
    what does not learn, and does not stream, has to be. Weights, gradients and layers' inputs are
    copied from pinned host memory and back beside what it computes, and weights are stepped by the
    CPU.

    Raises BudgetError with the bytes wanted, ArgumentError, UnsupportedModelError for a model whose
    layers are not known or do not run one after another.
    """
    optimizer = AdamW() if optimizer is None else checked(optimizer)
    for name, value in (("tokens", tokens), ("micro_batches", micro_batches)):
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")
    if max_norm not in (None, math.inf) and (max_norm == 0 or not from_zero(max_norm)):
        raise ArgumentError(f"max_norm is {max_norm!r}; use a number above 0, or None")
    room = memory_size("device_memory", device_memory)
    host = memory_size("host_memory", host_memory)
    kept = memory_size("activation_memory", activation_memory) or 0
    swapped = memory_size("activation_disk", activation_disk) or 0
    where = device_for(device)
    streams = streams_of(where)
    apart = streams is not None
    if swapped and (disk is None or not kept):
        raise ArgumentError("activation_disk needs disk=, and activation_memory for two stages")
    built = model if isinstance(model, nn.Module) else _loaded(model)
    limits = Limits.of(built, tokens)
    clips = max_norm is not None
    needs = partial(
        needs_of, built, optimizer, tokens, micro_batches, clips,
        delayed=delayed, device=where, gradients=gradients, swaps=bool(swapped),
    )  # fmt: skip
    layers, head, sizes = needs()
    check_order(built, layers)
    fuse(built)

    def cut(most: int, part: str) -> Sizes:
        return needs(most=most, part=part)[2]

    sizes, placement = fitted(sizes, cut, room, host, disk is not None, apart)
    folder = None if disk is None else Path(disk)
    swapped = round_up(swapped, PAGE)
    on_device, on_host, on_disk = placement.totals
    if apart and host is not None and on_host > host:
        raise BudgetError(
            f"host memory: {host:,} bytes are too few by {on_host - host:,}; raise the bound to "
            f"{on_host:,}"
        )
    main = on_host if apart else on_device + on_host
    check_machine(main, "weights, states and what a step works with")
    homes = Homes(on_device, on_host, on_disk + swapped, folder, streams and streams[0])
    try:
        engine = engine_of(built, head, layers, sizes, placement, homes, (kept, swapped), streams)
    except BaseException:
        homes.close()
        raise
    gaps = None if room is host is None else GAPS
    training = Training(
        built, engine, optimizer, homes, placement, max_norm, micro_batches, limits, gaps
    )
    built.__dict__["__reduce_ex__"] = _not_copied  # which `copy` and `pickle` ask the object for
    weakref.finalize(training, only_here(homes.close))  # the last is called first
    weakref.finalize(training, only_here(engine.parts.updater.close))
    return training


def _not_copied(_: object) -> NoReturn:
    """Refuse: threads, files and arenas of a training have no copy."""
    raise ArgumentError(
        "a model in training can be neither copied nor pickled; use its training's state_dict(), "
        "which has copies of the weights, or save_model"
    )


def _loaded(path: str | PathLike[str]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from qoff.hf.checkpoints import is_checkpoint, local_source

    source = local_source(path)
    if is_checkpoint(source):
        raise ArgumentError(
            f"{path} is a qoff checkpoint, whose packed weights do not learn; load it with "
            "from_pretrained and add an adapter, or give the model that it was made of"
        )
    with raised_as(UnsupportedModelError, f"{path}: cannot be loaded by transformers"):
        found: nn.Module = AutoModelForCausalLM.from_pretrained(source)
    return found
