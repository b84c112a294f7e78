"""What of a training run lies where, and what that takes of each tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch

from qoff.errors import ArgumentError, BudgetError
from qoff.memory.arena import PAGE, round_up

from . import gpu_link
from .boundaries import STAGES, STAGES_WITHOUT_COLUMN
from .gradients import Dtypes
from .layout import FlatUnit, StateForm
from .slots import SLOTS
from .tiles import BUFFERS as TILE_GRADIENTS
from .tiles import SLOTS as TILE_SLOTS
from .tiles import Tile
from .updates import BUFFERS

TILES = tuple(1 << n for n in range(26, 19, -1))  # bytes of tiles, where units are too large
PARTS = "layers", "outside", "all"  # that have tiles, in the order in which they are tried
_GRADIENTS = 2  # of units at once: one is made while another is used


@dataclass(frozen=True)
class Sizes:
    """The units of a run, decoder layers first and what is outside of them last, and its batches.

    hidden: bytes of the hidden states of a micro-batch, at most. logits: bytes of those that are
    there at once, where head and loss are fused. clips: gradients of all units are
    kept until their norm is known. factored: elements of each unit's moments by rows and columns.
    delayed: gradients are kept until the next step, and weights lie twice. tiles: of linear layers
    that are larger than the device; their forms are behind those of the units. frozen: bytes that
    do not learn, nor stream, and have to be on a GPU. gradient: what layers' gradients are kept as.
    swaps: activations may go to disk.
    """

    units: Sequence[FlatUnit]
    forms: Sequence[StateForm]
    micro_batches: int
    hidden: int
    logits: int
    clips: bool
    factored: Sequence[int] = ()
    delayed: bool = False
    tiles: Sequence[Tile] = ()
    frozen: int = 0
    gradient: torch.dtype = torch.float32
    swaps: bool = False

    @property
    def gradients(self) -> Dtypes:
        """Those of one micro-batch are no sum; those of more are rounded once."""
        several = self.micro_batches > 1
        return Dtypes(torch.float32 if several else self.gradient, self.gradient)

    def summed_in(self, tile: Tile) -> torch.dtype:
        """What the gradients of a tile are: outside of layers several modules may add to them."""
        return self.gradients.sums if tile.layer < len(self.units) - 1 else torch.float32

    @property
    def stepped(self) -> list[FlatUnit]:
        """What has states, in the order of the forms."""
        return [*self.units, *(tile.unit for tile in self.tiles)]

    @property
    def keeps(self) -> bool:
        """Whether gradients of all units have homes."""
        return self.clips or self.delayed


@dataclass(frozen=True)
class Placement:
    """Units whose weights, inputs, gradients and states are in host memory, by number.

    device, host, disk: bytes by purpose. tiles: those whose weights, gradients, states are there.
    """

    weights: frozenset[int]
    inputs: frozenset[int]
    gradients: frozenset[int]
    states: frozenset[int]
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    tiles: tuple[frozenset[int], ...] = ()

    @property
    def totals(self) -> tuple[int, int, int]:
        """Bytes of device, host and disk."""
        device, host, disk = (sum(x.values()) for x in (self.device, self.host, self.disk))
        return device, host, disk


def placed(
    sizes: Sizes,
    device_memory: int | None,
    host_memory: int | None,
    disk: bool,
    apart: bool = False,
) -> Placement:
    """Fill host memory with what moves most for its bytes; the rest goes to disk.

    Weights are read twice a step and written once, so they come first; then units' inputs and
    gradients, and states last. Hidden states at work are on the device, unless that is too small
    for those of all micro-batches: then units read their inputs from where these are kept, and
    gradients of hidden states are kept there, too.

    apart: the device is a GPU with memory of its own, so all that is in host memory moves, and
    weights are stepped there, where gradients come to. What it needs there at least may be more
    than host_memory. Raises BudgetError with the bytes wanted, ArgumentError where something goes
    to disk and there is none.
    """
    *others, last = columns(sizes)
    for column in others:
        with suppress(BudgetError):
            return placed_with(column, sizes, device_memory, host_memory, disk, apart)
    return placed_with(last, sizes, device_memory, host_memory, disk, apart)


def fitted(
    sizes: Sizes,
    cut: Callable[[int, str], Sizes],
    device_memory: int | None,
    host_memory: int | None,
    disk: bool,
    apart: bool = False,
) -> tuple[Sizes, Placement]:
    """As `placed`, with sizes; where these are too large for the device, in tiles if they can be.

    cut: gives the sizes with matrices of more bytes cut into tiles of so many, in one of PARTS.
    """
    reasons = {
        "a GPU computes": apart,
        "updates are delayed, which keeps weights twice": sizes.delayed,
        "Adafactor's means are of whole rows and columns": bool(sizes.factored),
    }
    against = next((why for why, holds in reasons.items() if holds), None)
    tiles = iter(() if against else product(PARTS, TILES))
    while True:
        try:
            return sizes, placed(sizes, device_memory, host_memory, disk, apart)
        except BudgetError as error:  # of the device
            part, most = next(tiles, (None, 0))
            if against is not None:
                raise BudgetError(f"{error}; there are no tiles where {against}") from error
            if part is None:
                raise
            sizes = cut(most, part)


def columns(sizes: Sizes) -> tuple[bool, ...]:
    """Whether hidden states at work are on the device: what may be tried, the faster way first."""
    return (True, False) if sizes.micro_batches > STAGES_WITHOUT_COLUMN - STAGES else (True,)


def placed_with(
    column: bool,
    sizes: Sizes,
    device_memory: int | None,
    host_memory: int | None,
    disk: bool,
    apart: bool = False,
) -> Placement:
    """As `placed`. column: whether hidden states of all micro-batches at work are on the device."""
    units, layers = sizes.units, len(sizes.units) - 1
    region = round_up(sizes.hidden, PAGE)
    tiles = [tile.unit for tile in sizes.tiles]
    pieces = [form.of_pieces(u) for form, u in zip(sizes.forms, sizes.stepped, strict=True)]
    copies = 2 if sizes.delayed else 1
    dtypes = sizes.gradients
    summed, kept_as = dtypes.sums.itemsize, dtypes.kept.itemsize
    wanted = {
        "weights": [copies * _whole(unit.nbytes) for unit in units[:-1]],
        "inputs of units": [region * sizes.micro_batches] * (layers + (not column)),
        "gradients": [_whole(kept_as * u.count) * sizes.keeps for u in units[:-1]],
        "states": [sum(each) for each in pieces[: len(units)]],
        "weights in tiles": [_whole(tile.nbytes) for tile in tiles],
        "gradients of tiles": [
            _whole(sizes.summed_in(tile).itemsize * tile.unit.count) for tile in sizes.tiles
        ],
        "states of tiles": [sum(each) for each in pieces[len(units) :]],
    }
    piece = max(nbytes for each in pieces for nbytes in each)
    on_way = BUFFERS * piece
    largest = max(_whole(kept_as * unit.count) for unit in units[:-1])
    at_work = max(_whole(summed * unit.count) for unit in units[:-1])
    outer = units[-1]
    moments = sum(_whole(4 * n) for n in sizes.factored)
    slots = SLOTS * max(wanted["weights"])
    longest = max(region, *(max(wanted[what]) for what in ("weights", "gradients")))
    always, if_parked = dict[str, int](), dict[str, int]()
    if apart:
        always = {
            "weights outside of layers": _whole(outer.nbytes),
            "their gradients": copies * _whole(4 * outer.count),
            "gradients on their way": _GRADIENTS * largest,
            "moments by rows and columns": moments,
        }
        if_parked = {
            "slots of weights": slots,
            "states on their way": on_way,
        }
        staging = gpu_link.BUFFERS * min(gpu_link.STAGING, longest)
        (always if sizes.swaps else if_parked)["staging buffers"] = staging
    left = None if host_memory is None else host_memory - sum(always.values())
    kept, host = _filled(wanted, left)
    if left is not None and host != {what: sum(each) for what, each in wanted.items()}:
        kept, host = _filled(wanted, left - sum(if_parked.values()))
    parked = {what: sum(each) - host[what] for what, each in wanted.items()}
    elsewhere = apart or not sizes.keeps or bool(parked["gradients"])  # than at home
    spills = bool(parked["states"] + parked["states of tiles"])
    stages = STAGES if column else STAGES_WITHOUT_COLUMN
    if apart:
        if_parked["slots of weights"] *= bool(parked["weights"])
        if_parked["states on their way"] *= spills
        if not any(parked.values()):
            if_parked.pop("staging buffers", None)
    host |= always | if_parked
    device = {
        "weights outside of layers": _whole(outer.nbytes),
        "their gradients": (1 if apart else copies) * _whole(4 * outer.count),
        "weights that do not learn": sizes.frozen * apart,
        "slots of weights": slots // copies if apart else slots * bool(parked["weights"]),
        "gradients at work": at_work if dtypes.rounds else _GRADIENTS * at_work * elsewhere,
        "gradients on their way": largest * (dtypes.rounds and elsewhere),
        "moments by rows and columns": moments * (not apart),
        "states on their way": on_way * spills * (not apart),
        "tiles of weights": _at_once(TILE_SLOTS, wanted, parked, "weights in tiles"),
        "tiles of gradients": _at_once(TILE_GRADIENTS, wanted, parked, "gradients of tiles"),
        "hidden states": region * sizes.micro_batches * column,
        "logits": _whole(sizes.logits),
        "inputs on their way": stages * region * (apart or bool(parked["inputs of units"])),
    }
    total, to_disk = sum(device.values()), sum(parked.values())
    if device_memory is not None and total > device_memory:
        raise BudgetError(
            f"device memory: {device_memory:,} bytes are too few by {total - device_memory:,}: "
            f"{_listed(device)} take {total:,}; raise device_memory to that, or train with fewer "
            "tokens or micro-batches"
        )
    if to_disk and not disk:
        raise ArgumentError(
            f"{_listed(parked)} go to disk, {to_disk:,} bytes; say where with disk=, or raise "
            f"host_memory to {to_disk + sum(host.values()):,}"
        )
    weights, inputs, gradients, states, *of_tiles = kept.values()
    return Placement(weights, inputs, gradients, states, device, host, parked, tuple(of_tiles))


def _filled(
    wanted: Mapping[str, Sequence[int]], left: int | None
) -> tuple[dict[str, frozenset[int]], dict[str, int]]:
    """Numbers of those that fit into so many bytes, in their order, and their bytes."""
    kept, host = dict[str, frozenset[int]](), dict[str, int]()
    for what, each in wanted.items():
        chosen = set()
        for i, nbytes in enumerate(each):
            if left is None or nbytes <= left:
                chosen.add(i)
                left = None if left is None else left - nbytes
        kept[what] = frozenset(chosen)
        host[what] = sum(each[i] for i in chosen)
    return kept, host


def _at_once(count: int, wanted: dict[str, list[int]], parked: dict[str, int], what: str) -> int:
    """Bytes of `count` of the largest, where some are on disk."""
    return count * max(wanted[what]) if parked[what] else 0


def _whole(nbytes: int) -> int:
    return round_up(nbytes, PAGE)


def _listed(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} ({nbytes:,})" for name, nbytes in rows.items() if nbytes)
