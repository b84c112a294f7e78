"""`qoff.train.offload`: train a model of transformers with what does not fit on disk."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from qoff.budgets import memory_size
from qoff.errors import ArgumentError
from qoff.memory.arena import PAGE, round_up
from qoff.process import only_here
from qoff.system_memory import refusals

from . import factored
from .activations import Activations
from .boundaries import STAGES, Boundaries
from .delayed import Delayed, NextWeights
from .frozen import FrozenWeights
from .fused_lora import fuse
from .gradients import Gradients
from .head import FusedHead
from .held import HeldUnits
from .homes import Home, Homes
from .needs import needs_of
from .optimizers import AdamW, Optimizer
from .placement import Placement, Sizes, placed
from .slots import SLOTS, WeightSlots
from .step import Engine, Parts
from .stepping import Stepping
from .swaps import Swaps
from .training import Training
from .updates import BUFFERS, Updater


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
) -> Training:
    """Return what trains a model of transformers on this CPU, one step after another.

    model: in memory, float32, bfloat16 or float16, or a path or hub id that transformers loads. Its
    parameters that require gradients learn; it is changed, and computes as before. Of float16, the
    loss is scaled, and gradients are kept until all are known to be finite. optimizer: None:
    AdamW(). A step has up to `micro_batches` batches of up to `tokens` tokens each, padding
    included. max_norm: clip gradients by their global norm.

    device_memory bounds what a step works with: slots of weights, gradients, states and hidden
    states on their way, and weights outside of layers. host_memory bounds what is kept between:
    weights, states, the layers' inputs. Both in bytes or like "8GiB"; None: no bound. What goes
    beyond host_memory is in a file without a name in the folder `disk`. What torch computes with
    inside of one layer and in the loss, for one micro-batch, comes on top, as do frozen weights.
    activation_memory bounds, beside these, what layers keep for their backward, from the second
    step on; the others are computed again. activation_disk: bytes of the disk that more of them go
    to, where that is faster; two stages in memory count as activation_memory. Which are kept, and
    where, changes no bit. delayed: a step's gradients change weights during the next step, beside
    all of it, and so one step later; weights then lie twice, and gradients stay.

    Raises BudgetError with the bytes wanted, ArgumentError, UnsupportedModelError for a model whose
    layers are not known or do not run one after another.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    for name, value in (("tokens", tokens), ("micro_batches", micro_batches)):
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")
    if max_norm is not None and not max_norm > 0:
        raise ArgumentError(f"max_norm is {max_norm!r}; use a number above 0, or None")
    device = memory_size("device_memory", device_memory)
    host = memory_size("host_memory", host_memory)
    kept = memory_size("activation_memory", activation_memory) or 0
    swapped = memory_size("activation_disk", activation_disk) or 0
    if swapped and (disk is None or not kept):
        raise ArgumentError("activation_disk needs disk=, and activation_memory for two stages")
    built = model if isinstance(model, nn.Module) else _loaded(model)
    clips = max_norm is not None
    layers, head, sizes = needs_of(built, optimizer, tokens, micro_batches, clips, delayed=delayed)
    fuse(built)
    placement = placed(sizes, device, host, disk is not None)
    folder = None if disk is None else Path(disk)
    swapped = round_up(swapped, PAGE)
    on_device, on_host, on_disk = placement.totals
    homes = Homes(on_device, on_host, on_disk + swapped, folder)
    try:
        engine = _engine(built, head, layers, sizes, placement, homes, (kept, swapped))
    except BaseException:
        homes.close()
        raise
    training = Training(
        built, engine, optimizer, homes, placement, max_norm, micro_batches, sizes.hidden
    )
    weakref.finalize(training, only_here(homes.close))  # the last is called first
    weakref.finalize(training, only_here(engine.parts.updater.close))
    return training


def _engine(
    model: nn.Module,
    head: FusedHead,
    layers: Sequence[nn.Module],
    sizes: Sizes,
    placement: Placement,
    homes: Homes,
    kept: tuple[int, int],
) -> Engine:
    """Move weights to their homes and make what computes steps. kept: bounds of activations."""
    units, count, batches = sizes.units, len(layers), range(sizes.micro_batches)
    rows = placement.device
    copies = 2 if sizes.delayed else 1

    def memory(what: str, parts: int) -> list[Tensor]:
        each = rows[what] // parts
        return [homes.device.alloc(each, what) for _ in range(parts)] if each else []

    (outer,) = memory("weights outside of layers", 1) or [torch.empty(0, dtype=torch.uint8)]
    outer_grads = memory("their gradients", copies) or [torch.empty(0, dtype=torch.uint8)] * copies
    slots = memory("slots of weights", SLOTS * copies)
    at_work = memory("gradients at work", 2)
    on_way = memory("states on their way", BUFFERS)
    column = memory("hidden states", sizes.micro_batches)
    stages = memory("inputs on their way", STAGES)
    weights, later = (
        [homes.home("weights", units[i].nbytes, i in placement.weights) for i in range(count)]
        if times < copies
        else []
        for times in range(2)
    )
    inputs = [
        [homes.home("inputs of units", len(column[0]), i in placement.inputs) for _ in batches]
        for i in range(count)
    ]
    gradients = (
        [
            homes.home("gradients", 4 * units[i].count, i in placement.gradients)
            for i in range(count)
        ]
        if sizes.keeps
        else None
    )
    states = [
        [homes.home("states", nbytes, i in placement.states) for nbytes in form.of_pieces(unit)]
        for i, (unit, form) in enumerate(zip(units, sizes.forms, strict=True))
    ]
    own = [
        homes.device.alloc(round_up(4 * n, PAGE), "moments by rows and columns")
        for n in sizes.factored
    ]
    moments = [
        factored.FactoredMoments(unit, memory.view(torch.float32))
        for unit, memory in zip(units, own, strict=False)
    ]
    updater = Updater(homes, sizes.forms, states, on_way, moments or [None] * len(units))
    flat_outer = units[-1].flat(outer)
    for i, unit in enumerate(units):
        place = outer if i == count else weights[i].memory
        flat = unit.flat(slots[0] if place is None else place)
        for name, x in unit.views(flat.zero_()).items():
            x.copy_(unit.parameters[name].data)
        updater.begin(i, unit, flat)
        if place is None:
            homes.write(weights[i], slots[0][: weights[i].nbytes], lambda: None).result()
        unit.bind(None if place is None else flat)
    swaps = Swaps(homes, homes.home("activations", kept[1], False) if kept[1] else None)
    homes.moved.clear()
    frozen = FrozenWeights(layers)
    frozen.order()
    stay = [Home("weights", len(x), x) for x in (outer, *own)]
    sums = Gradients(homes, units, outer_grads[0], at_work, gradients)
    held = HeldUnits(units, WeightSlots(homes, weights, slots[:SLOTS]), frozen, flat_outer)
    saved, delayed = [*stay, *chain.from_iterable(states)], None
    if gradients is not None and sizes.delayed:
        saved += [*gradients, Home("gradients", len(outer_grads[1]), outer_grads[1])]
        after = NextWeights(homes, held.weights, later, slots[SLOTS:])
        waits = outer_grads[1][: 4 * units[-1].count].view(torch.float32)
        delayed = Delayed(held, sums, updater, after, waits)
    logits = memory("logits", 1)
    head.begin(logits[0] if logits else torch.empty(0, dtype=torch.uint8), sums.sum_of)
    parts = Parts(
        model,
        head,
        held,
        Boundaries(homes, column, inputs, stages),
        Activations(kept[0], lambda i: not frozen.has(i), swaps),
        sums,
        updater,
        Stepping(held, sums, updater, delayed),
        saved,
    )
    return Engine(parts, layers)


def _loaded(path: str | PathLike[str]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    found: nn.Module = AutoModelForCausalLM.from_pretrained(path)
    return found
