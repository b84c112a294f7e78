"""What of a training run lies where, and what that takes of each tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from qoff.errors import ArgumentError, BudgetError
from qoff.memory.arena import PAGE, round_up

from . import gpu_link
from .boundaries import STAGES, STAGES_WITHOUT_COLUMN
from .sizes import Sizes
from .slots import SLOTS
from .tiles import SLOTS as TILE_SLOTS
from .tiles import STEPPED, SUMS
from .updates import BUFFERS

TILES = tuple(1 << n for n in range(26, 19, -1))  # bytes of tiles, where units are too large
PARTS = "layers", "outside", "all"  # that have tiles, in the order in which they are tried
_GRADIENTS = 2  # of units at once: one is made while another is used


@dataclass(frozen=True)
class Placement:
    """Units whose weights, inputs, gradients and states are in host memory, by number.

    device, host, disk: bytes by purpose. tiles: those whose weights, gradients, states are there.
    near: units whose inputs are on the device, a GPU.
    """

    weights: frozenset[int]
    inputs: frozenset[int]
    gradients: frozenset[int]
    states: frozenset[int]
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    tiles: tuple[frozenset[int], ...] = ()
    near: frozenset[int] = frozenset()

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
    than host_memory. What is left of device_memory, if that is bounded, takes inputs of units.
    Raises BudgetError with the bytes wanted, ArgumentError where something goes
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
    tiles = iter(product(PARTS, TILES))
    while True:
        try:
            return sizes, placed(sizes, device_memory, host_memory, disk, apart)
        except BudgetError:  # of the device
            part, most = next(tiles, (None, 0))
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
    wanted = _wanted(column, sizes)
    near = frozenset[int]()
    inputs = wanted["inputs of units"]
    if apart and column and device_memory is not None:
        left = device_memory - sum(_on_device(column, sizes, wanted, apart, _always).values())
        count = min(len(inputs), max(0, left) // inputs[0])
        near = frozenset(range(len(inputs) - count, len(inputs)))
    on_device = sum(inputs[i] for i in near)
    for i in near:
        inputs[i] = 0
    always, if_parked = _in_host(sizes, wanted) if apart else ({}, {})
    left_of_host = None if host_memory is None else host_memory - sum(always.values())
    kept, host = _filled(wanted, left_of_host)
    if left_of_host is not None and host != {what: sum(each) for what, each in wanted.items()}:
        kept, host = _filled(wanted, left_of_host - sum(n for _, n in if_parked.values()))
    parked = {what: sum(each) - host[what] for what, each in wanted.items()}
    host |= always
    host |= {what: n * any(parked[x] for x in of) for what, (of, n) in if_parked.items()}
    device = _on_device(column, sizes, wanted, apart, lambda what: apart or bool(parked[what]))
    device["inputs of units"] = on_device
    total, to_disk = sum(device.values()), sum(parked.values())
    if device_memory is not None and total > device_memory:
        raise BudgetError(
            f"device memory: {device_memory:,} bytes are too few by {total - device_memory:,}: "
            f"{_listed(device)} take {total:,}; raise the bound to that, or train with fewer "
            "tokens or micro-batches"
        )
    if to_disk and not disk:
        raise ArgumentError(
            f"{_listed(parked)} go to disk, {to_disk:,} bytes; give a folder for the disk, or "
            f"raise the bound on host memory to {to_disk + sum(host.values()):,}"
        )
    weights, of_inputs, gradients, states, *of_tiles = kept.values()
    inner = frozenset(i for i in of_inputs if i not in near)
    return Placement(weights, inner, gradients, states, device, host, parked, tuple(of_tiles), near)


def _wanted(column: bool, sizes: Sizes) -> dict[str, list[int]]:
    """Bytes that have homes, by purpose, of each unit or tile, what moves most for them first."""
    units, copies = sizes.units, sizes.copies
    region = round_up(sizes.hidden, PAGE)
    pieces = [sum(f.of_pieces(u)) for f, u in zip(sizes.forms, sizes.stepped, strict=True)]
    kept_as = sizes.gradients.kept.itemsize
    return {
        "weights": [copies * _whole(unit.nbytes) for unit in units[:-1]],
        "inputs of units": [region * sizes.micro_batches] * (len(units) - column),
        "gradients": [_whole(kept_as * u.count) * sizes.keeps for u in units[:-1]],
        "states": pieces[: len(units)],
        "weights in tiles": [copies * _whole(tile.unit.nbytes) for tile in sizes.tiles],
        "gradients of tiles": _sums(sizes),
        "states of tiles": pieces[len(units) :],
    }


def _on_device(
    column: bool,
    sizes: Sizes,
    wanted: Mapping[str, Sequence[int]],
    apart: bool,
    moves: Callable[[str], bool],
) -> dict[str, int]:
    """Bytes of what a step works with. moves: whether any of a purpose does not lie there."""
    region, outer, dtypes = round_up(sizes.hidden, PAGE), sizes.units[-1], sizes.gradients
    at_work = max(_whole(dtypes.sums.itemsize * unit.count) for unit in sizes.units[:-1])
    elsewhere = apart or not sizes.keeps or moves("gradients")  # than at home
    slots = SLOTS * max(wanted["weights"])
    spills = moves("states") or moves("states of tiles")
    stages = STAGES if column else STAGES_WITHOUT_COLUMN
    tile, total = _tile(sizes), max(_sums(sizes), default=0)
    stepped = 0 if apart else STEPPED
    return {
        "weights outside of layers": _whole(outer.nbytes),
        "their gradients": (1 if apart else sizes.copies) * _whole(4 * outer.count),
        "weights that do not learn": sizes.frozen * apart,
        "slots of weights": slots // sizes.copies if apart else slots * moves("weights"),
        "gradients at work": at_work if dtypes.rounds else _GRADIENTS * at_work * elsewhere,
        "gradients on their way": _largest(sizes) * (dtypes.rounds and elsewhere),
        "moments by rows and columns": _moments(sizes) * (not apart),
        "states on their way": _states_on_way(sizes) * spills * (not apart),
        "tiles of weights": (TILE_SLOTS + stepped) * tile * moves("weights in tiles"),
        "tiles of gradients": (SUMS + stepped) * total * moves("gradients of tiles"),
        "hidden states": region * sizes.micro_batches * column,
        "logits": _whole(sizes.logits),
        "inputs on their way": stages * region * moves("inputs of units"),
    }


def _in_host(
    sizes: Sizes, wanted: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], dict[str, tuple[Sequence[str], int]]]:
    """Bytes of host memory beside a GPU that are there for what is stepped, and for the disk.

    The second: those that are where any of some purposes is on disk.
    """
    outer, tile, total = sizes.units[-1], _tile(sizes), max(_sums(sizes), default=0)
    longest = max(
        round_up(sizes.hidden, PAGE),
        *(max(wanted[what]) for what in ("weights", "gradients")),
        tile,
        total,
    )
    staging = gpu_link.BUFFERS * min(gpu_link.STAGING, longest)
    always = {
        "weights outside of layers": _whole(outer.nbytes),
        "their gradients": sizes.copies * _whole(4 * outer.count),
        "gradients on their way": _GRADIENTS * _largest(sizes),
        "moments by rows and columns": _moments(sizes),
    }
    if_parked: dict[str, tuple[Sequence[str], int]] = {
        "slots of weights": (("weights",), SLOTS * max(wanted["weights"])),
        "states on their way": (("states", "states of tiles"), _states_on_way(sizes)),
        "tiles of weights": (("weights in tiles",), STEPPED * tile),
        "tiles of gradients": (("gradients of tiles",), STEPPED * total),
    }
    if sizes.swaps:
        always["staging buffers"] = staging
    else:
        if_parked["staging buffers"] = tuple(wanted), staging
    return always, if_parked


def _sums(sizes: Sizes) -> list[int]:
    """Bytes of each tile's gradients."""
    return [_whole(sizes.summed_in(tile).itemsize * tile.unit.count) for tile in sizes.tiles]


def _tile(sizes: Sizes) -> int:
    """Bytes of the largest tile's weights."""
    return max((_whole(tile.unit.nbytes) for tile in sizes.tiles), default=0)


def _largest(sizes: Sizes) -> int:
    """Bytes of the largest layer's gradients as they are kept."""
    return max(_whole(sizes.gradients.kept.itemsize * u.count) for u in sizes.units[:-1])


def _moments(sizes: Sizes) -> int:
    return sum(_whole(4 * n) for n in sizes.factored)


def _states_on_way(sizes: Sizes) -> int:
    pairs = zip(sizes.forms, sizes.stepped, strict=True)
    return BUFFERS * max(nbytes for form, unit in pairs for nbytes in form.of_pieces(unit))


def _always(_: str) -> bool:
    return True


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


def _whole(nbytes: int) -> int:
    return round_up(nbytes, PAGE)


def _listed(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} ({nbytes:,})" for name, nbytes in rows.items() if nbytes)
