"""What computes steps, made of a model: weights, states and all else moved to their homes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from qoff.budgets import CPU
from qoff.memory.arena import PAGE, Arena, map_pages, round_up
from qoff.memory.io.copy_stream import CopyStream

from . import factored, stays, tiled
from .activations import Activations
from .boundaries import STAGES, STAGES_WITHOUT_COLUMN, Boundaries
from .cuts import whole_shapes
from .delayed import Delayed, NextWeights
from .embedding import by_rows
from .factored import FactoredMoments, FactoredPart
from .frozen import FrozenWeights
from .generators import Generators
from .gpu_link import BUFFERS as STAGING_BUFFERS
from .gpu_link import GpuLink
from .gradients import Gradients
from .head import FusedHead
from .held import HeldUnits, OuterWeights
from .homes import Home, Homes, Link
from .placement import Placement
from .sizes import Sizes
from .slots import SLOTS, WeightSlots
from .step import Engine, Parts
from .stepping import Stepping
from .swaps import Swaps
from .tile_steps import TileSteps
from .tiles import SLOTS as TILE_SLOTS
from .tiles import STEPPED, SUMS, TileHomes, TileMemory, Tiles
from .updates import BUFFERS, Updater


def engine_of(
    model: nn.Module,
    head: FusedHead,
    layers: Sequence[nn.Module],
    sizes: Sizes,
    placement: Placement,
    homes: Homes,
    kept: tuple[int, int],
    streams: tuple[CopyStream, CopyStream] | None = None,
) -> Engine:
    """Move weights to their homes and make what computes steps.

    kept: bounds of activations. streams: to a GPU that computes, and from it.
    """
    units, count, batches = sizes.units, len(layers), range(sizes.micro_batches)
    rows = placement.device
    copies = sizes.copies
    device = CPU if streams is None else streams[0].device
    near = homes.device if streams is None else homes.host  # where units are stepped
    of_near = placement.device if streams is None else placement.host

    def memory(what: str, parts: int, arena: Arena = homes.device) -> list[Tensor]:
        each = (rows if arena is homes.device else of_near).get(what, 0) // parts
        return [arena.alloc(each, what) for _ in range(parts)] if each else []

    def one(what: str, arena: Arena, parts: int = 1) -> list[Tensor]:
        return memory(what, parts, arena) or [torch.empty(0, dtype=torch.uint8)] * parts

    link: Link = homes
    if streams is not None:
        link = gpu_link = GpuLink(homes, *streams, memory("staging buffers", STAGING_BUFFERS, near))
        homes.closes(gpu_link.close)
    (outer,) = one("weights outside of layers", near)
    outer_grads = one("their gradients", near, copies)
    outer_here, grads_here = outer, outer_grads[0]
    if streams is not None:
        (outer_here,) = one("weights outside of layers", homes.device)
        (grads_here,) = one("their gradients", homes.device)
    slots = memory("slots of weights", SLOTS * copies, near)
    slots_here = slots[:SLOTS] if streams is None else memory("slots of weights", SLOTS)
    dtypes = sizes.gradients
    at_work = memory("gradients at work", 1 if dtypes.rounds else 2)
    rounded = memory("gradients on their way", 1) if dtypes.rounds else []
    on_way = memory("states on their way", BUFFERS, near)
    column = memory("hidden states", sizes.micro_batches)
    stages = memory("inputs on their way", STAGES if column else STAGES_WITHOUT_COLUMN)
    weights, later = (
        [homes.home("weights", units[i].nbytes, i in placement.weights) for i in range(count)]
        if times < copies
        else []
        for times in range(2)
    )
    inputs = [
        [
            homes.home("inputs of units", sizes.hidden, i in placement.inputs, i in placement.near)
            for _ in batches
        ]
        for i in range(count + (not column))
    ]
    gradients = (
        [
            homes.home(
                "gradients", sizes.gradient.itemsize * units[i].count, i in placement.gradients
            )
            for i in range(count)
        ]
        if sizes.keeps
        else None
    )
    states = [
        [homes.home("states", nbytes, i in placement.states) for nbytes in form.of_pieces(unit)]
        for i, (unit, form) in enumerate(zip(units, sizes.forms, strict=False))
    ]
    of_tiles, states_of_tiles = _homes_of_tiles(homes, sizes, placement)
    own = [near.alloc(round_up(4 * n, PAGE), "moments by rows and columns") for n in sizes.factored]
    all_states = [*states, *states_of_tiles]
    moments = _parts_of_moments(sizes, own) if own else [None] * len(all_states)
    updater = Updater(homes, sizes.forms, all_states, on_way, moments)
    outer_home = Home("weights outside of layers", len(outer), outer)
    held_outer = OuterWeights(units[-1], outer_here, outer_home, link)
    for i, unit in enumerate(units):
        place = outer if i == count else weights[i].memory
        flat = unit.flat(slots[0] if place is None else place)
        for name, x in unit.views(flat.zero_()).items():
            x.copy_(unit.parameters[name].data)
        updater.begin(i, unit, flat)
        if place is None:
            homes.write(weights[i], slots[0][: weights[i].nbytes], lambda: None).result()
        unit.on(device)
        unit.bind(None if place is None or streams is not None else flat)
    held_outer.arrive()
    units[-1].bind(held_outer.flat)
    if streams is not None:
        stays.move(model, homes)
    more = STEPPED if streams is None else 0  # parts of the device's
    slots_of_tiles = memory("tiles of weights", TILE_SLOTS + more)
    sums_of_tiles = memory("tiles of gradients", SUMS + more)
    stepped_tiles, landed_tiles = slots_of_tiles[TILE_SLOTS:], sums_of_tiles[SUMS:]
    if streams is not None:
        stepped_tiles = memory("tiles of weights", STEPPED, near)
        landed_tiles = memory("tiles of gradients", STEPPED, near)
    of_disk = TileMemory(
        slots_of_tiles[:TILE_SLOTS], sums_of_tiles[:SUMS], stepped_tiles, landed_tiles
    )
    tiles = Tiles(homes, link, sizes.tiles, of_tiles, of_disk, device)
    tiled.replace(tiles)
    for j, tile in enumerate(sizes.tiles):
        updater.begin(len(units) + j, tile.unit, tiles.fill(j))
    on_disk = homes.home("activations", kept[1], False) if kept[1] else None
    swaps = Swaps(link, on_disk, map_pages if streams is None else streams[0].allocate)
    homes.moved.clear()
    frozen = FrozenWeights(layers)
    frozen.order()
    stay = [outer_home, *(Home("weights", len(x), x) for x in own)]
    landing, grads_home = list[Tensor](), None
    if streams is not None:
        landing = memory("gradients on their way", 2, near)
        grads_home = Home("gradients outside of layers", len(outer_grads[0]), outer_grads[0])
    sums = Gradients(
        homes, link, units, grads_here, at_work, gradients, landing, grads_home, dtypes, rounded
    )
    served = stepped = WeightSlots(link, weights, slots_here)
    if streams is not None:
        stepped = WeightSlots(homes, weights, slots[:SLOTS])
    held = HeldUnits(units, served, stepped, frozen, held_outer)
    saved, delayed = [*stay, *chain.from_iterable(all_states)], None
    of_tile_steps = TileSteps(tiles, updater, len(units))
    if gradients is not None and sizes.delayed:
        saved += [*gradients, Home("gradients", len(outer_grads[1]), outer_grads[1])]
        after = NextWeights(homes, held.weights, later, slots[SLOTS:])
        waits = outer_grads[1][: 4 * units[-1].count].view(torch.float32)
        delayed = Delayed(held, sums, updater, after, waits, tiles, of_tile_steps)
    by_rows(model, sums.sum_of)
    logits = memory("logits", 1)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    head.begin(logits[0] if logits else none, sums.sum_of)
    parts = Parts(
        model,
        head,
        held,
        Boundaries(link, column, inputs, stages),
        Activations(kept[0], lambda i: i not in tiles.layers, swaps),
        sums,
        updater,
        Stepping(held, sums, updater, delayed, tiles, of_tile_steps),
        saved,
        device,
        Generators(device),
    )
    return Engine(parts, layers)


def _parts_of_moments(sizes: Sizes, memory: Sequence[Tensor]) -> list[FactoredPart | None]:
    """What of moments by rows and columns units are stepped with, and tiles, by their matrix."""
    whole = whole_shapes(sizes.tiles)
    shapes = [*(unit.shapes.values() for unit in sizes.units), *([x] for x in whole.values())]
    pairs = zip(shapes, memory, strict=True)
    moments = [FactoredMoments(x, place.view(torch.float32)) for x, place in pairs]
    count = len(sizes.units)
    parts = [
        FactoredPart(one, list(factored.runs(unit)))
        for one, unit in zip(moments, sizes.units, strict=False)
    ]
    of_matrix = dict(zip(whole, moments[count:], strict=True))
    of_tiles = [
        FactoredPart(of_matrix[tile.name], list(factored.runs(tile.unit, tile.rows.start)), False)
        for tile in sizes.tiles
    ]
    return [*parts, *of_tiles]


def _homes_of_tiles(
    homes: Homes, sizes: Sizes, placement: Placement
) -> tuple[list[TileHomes], list[list[Home]]]:
    """Of weights and gradients of each tile, and of its states."""
    of_tiles, states = [], []
    weights, gradients, in_memory = placement.tiles
    forms = sizes.forms[len(sizes.units) :]
    for j, (tile, form) in enumerate(zip(sizes.tiles, forms, strict=True)):
        unit, dtype = tile.unit, sizes.summed_in(tile)
        of_tiles.append(
            TileHomes(
                homes.home("weights", unit.nbytes, j in weights),
                homes.home("gradients", dtype.itemsize * unit.count, j in gradients),
                dtype,
                homes.home("weights", unit.nbytes, j in weights) if sizes.delayed else None,
            )
        )
        states.append([homes.home("states", n, j in in_memory) for n in form.of_pieces(unit)])
    return of_tiles, states
