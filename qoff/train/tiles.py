"""Matrices larger than the device: their weights come a few rows at a time, both ways.

Memory-centric tiling, as in ZeRO-Infinity (arXiv 2104.07857). A tile has weights, gradients and
states of its own, in host memory or on disk. It is read when its rows are multiplied by: forward,
forward again and backward, for each micro-batch. Gradients are summed where they lie, so those of
several micro-batches are float32.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .gradients import add_into, square
from .homes import Home, Homes
from .layout import FlatUnit

SLOTS = 3  # of weights: one is multiplied by, one is read, one is stepped
BUFFERS = 3  # of gradients: one is made, one is written, one is used for a step


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows of a linear layer or an embedding, or of both.

    layer: the one that it is in; how many there are for what is outside of them. modules: whose
    weight has the rows. unit: its only parameter is theirs.
    """

    layer: int
    modules: tuple[nn.Module, ...]
    name: str
    rows: slice
    unit: FlatUnit

    @property
    def count(self) -> int:
        """Of its rows."""
        return int(self.rows.stop - self.rows.start)

    def reads(self, layers: int, pieces: int) -> tuple[int, int]:
        """How often its weights are read for a micro-batch, forward and backward.

        In a layer once, and backward once more as that is computed again; those of a head twice for
        the loss and its gradients, of each piece of tokens, of an embedding once.
        """
        if self.layer < layers:
            return 1, 2
        return sum(2 * pieces if isinstance(m, nn.Linear) else 1 for m in self.modules), 0

    def sums(self, layers: int, pieces: int) -> int:
        """How often a micro-batch adds to its gradient."""
        if self.layer < layers:
            return 1
        return sum(pieces if isinstance(m, nn.Linear) else 1 for m in self.modules)

    @property
    def weight(self) -> nn.Parameter:
        """The whole matrix, which has no memory while it is in tiles."""
        found: Any = self.modules[0].weight
        return found


def cut(
    layer: int,
    own: Mapping[str, nn.Parameter],
    users: Mapping[int, tuple[nn.Module, ...]],
    most: int,
) -> tuple[dict[str, nn.Parameter], list[Tile]]:
    """Parameters of a layer that stay whole, and tiles of up to `most` bytes, or a row, of others.

    users: modules whose forward may be replaced, by the identity of their weight; of all that have
    it.
    """
    whole, tiles = dict[str, nn.Parameter](), list[Tile]()
    for name, p in own.items():
        modules = users.get(id(p))
        if modules is None or p.nbytes <= most:
            whole[name] = p
            continue
        rows = max(1, most // p[0].nbytes)
        for start in range(0, len(p), rows):
            part = nn.Parameter(p.data[start : start + rows])
            found = slice(start, start + len(part))
            unit = FlatUnit(f"{name}[{start}:{found.stop}]", {name: part})
            tiles.append(Tile(layer, modules, name, found, unit))
    return whole, tiles


@dataclass(frozen=True)
class TileHomes:
    """Where a tile's weights and gradients lie, and what gradients are."""

    weights: Home
    gradients: Home
    dtype: torch.dtype


class Tiles:
    """Brings tiles to who multiplies by them, and keeps sums of their gradients.

    slots, buffers: memory for tiles of weights and gradients on disk, SLOTS and BUFFERS of each, or
    none where all are in host memory. numbers: of the tiles of a module.
    """

    def __init__(
        self,
        homes: Homes,
        tiles: Sequence[Tile],
        places: Sequence[TileHomes],
        slots: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        self._homes, self.tiles, self.places = homes, list(tiles), list(places)
        self._slots, self._stepping = list(slots[: SLOTS - 1]), list(slots[SLOTS - 1 :])
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._writes: dict[int, Future[None]] = {}
        self._squares: dict[int, float] = {}  # of tiles that have gradients in this step
        self._taken: dict[int, Tensor] = {}
        self.layers: dict[int, list[int]] = {}
        self.numbers: dict[nn.Module, list[int]] = {}
        for j, tile in enumerate(self.tiles):
            self.layers.setdefault(tile.layer, []).append(j)
            for module in tile.modules:
                self.numbers.setdefault(module, []).append(j)

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._squares.clear()

    def weights(self, numbers: Sequence[int]) -> Generator[tuple[slice, Tensor]]:
        """Rows and weights of these tiles, each until the next. Raises DiskReadError.

        To be closed: else a read may be on its way to a slot that others use by then.
        """
        ahead: Future[None] | None = None
        try:
            for at, j in enumerate(numbers):
                read, ahead = ahead, None
                if at == 0:
                    read = self._read(j, 0)
                if read is not None:
                    read.result()
                if at + 1 < len(numbers):
                    ahead = self._read(numbers[at + 1], at + 1)
                yield self.tiles[j].rows, self._matrix(j, self._at(j, at))
        finally:
            if ahead is not None:
                ahead.exception()

    @contextmanager
    def gradient(self, j: int) -> Iterator[tuple[Tensor, bool]]:
        """Where the gradient of a tile is summed, [rows, K], and whether it has a sum."""
        home, begun = self.places[j].gradients, j in self._squares
        memory = home.memory
        if memory is None:
            write = self._writes.pop(j, None)
            memory = self._free.get()
            try:
                if write is not None:
                    write.result()
                if begun:
                    self._homes.read(home, memory[: home.nbytes]).result()
                yield self._sum(j, memory), begun
            except BaseException:
                self._free.put(memory)
                raise
            self._squares[j] = square(self._sum(j, memory))
            self._writes[j] = self._homes.write(
                home, memory[: home.nbytes], lambda: self._free.put(memory)
            )
        else:
            yield self._sum(j, memory), begun
            self._squares[j] = square(self._sum(j, memory))

    def add(self, j: int, of_y: Tensor, x: Tensor) -> None:
        """Add the gradient of a tile, of what it was given [M, K], and that of what it gave."""
        with self.gradient(j) as (total, begun):
            if begun:
                add_into(total, of_y.t() @ x)
            elif x.dtype == total.dtype:
                torch.mm(of_y.t(), x, out=total)
            else:
                total.copy_(of_y.t() @ x)

    @property
    def squares(self) -> float:
        """The sum of the squares of all gradients."""
        return math.fsum(self._squares.values())

    def fill(self, j: int) -> Tensor:
        """Move a tile's weights to their home, and take them from its layer; returns them, flat."""
        tile, home = self.tiles[j], self.places[j].weights
        memory = self._stepping[0] if home.memory is None else home.memory
        flat = tile.unit.flat(memory).zero_()
        weight = tile.weight
        self._matrix(j, memory).copy_(weight.data[tile.rows])
        if home.memory is None:
            self._homes.write(home, memory[: home.nbytes], lambda: None).result()
        tile.unit.bind(None)
        if tile.rows.stop == len(weight):
            weight.data = _NAN.to(flat.dtype).expand(weight.shape)
        return flat

    def to_step(self, j: int) -> Tensor:
        """A tile's weights, flat, in the thread that steps it. Raises DiskReadError."""
        home = self.places[j].weights
        if home.memory is not None:
            return self.tiles[j].unit.flat(home.memory)
        memory = self._stepping[0]
        self._homes.read(home, memory[: home.nbytes]).result()
        return self.tiles[j].unit.flat(memory)

    def gradients(self, j: int) -> Tensor:
        """A tile's gradients, flat, until `stepped`; in the same thread."""
        unit, home = self.tiles[j].unit, self.places[j].gradients
        memory = home.memory
        if memory is None:
            write = self._writes.pop(j, None)
            if write is not None:
                write.result()
            self._taken[j] = memory = self._free.get()
            if j in self._squares:
                self._homes.read(home, memory[: home.nbytes]).result()
        flat = self._flat(j, memory)
        if j not in self._squares:
            flat.zero_()
        for gap in unit.gaps(flat):
            gap.zero_()
        return flat

    def stepped(self, j: int) -> None:
        """A tile is stepped: write it. Raises DiskWriteError."""
        buffer, home = self._taken.pop(j, None), self.places[j].weights
        if buffer is not None:
            self._free.put(buffer)
        if home.memory is None:
            source = self._stepping[0][: home.nbytes]
            self._homes.write(home, source, lambda: None).result()

    def end(self) -> None:
        """Wait for what is being written, however the step has ended."""
        for write in self._writes.values():
            write.exception()
        self._writes.clear()

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Copies of the whole weights of a layer that lie in tiles, by name."""
        found: dict[str, Tensor] = {}
        for j in self.layers.get(layer, ()):
            tile = self.tiles[j]
            weight = tile.weight
            if tile.name not in found:
                found[tile.name] = torch.empty(weight.shape, dtype=weight.dtype)
            with closing(self.weights([j])) as parts:
                for rows, x in parts:
                    found[tile.name][rows] = x
        return found

    def _read(self, j: int, at: int) -> Future[None] | None:
        home = self.places[j].weights
        if home.memory is not None:
            return None
        return self._homes.read(home, self._at(j, at)[: home.nbytes])

    def _at(self, j: int, at: int) -> Tensor:
        memory = self.places[j].weights.memory
        return self._slots[at % len(self._slots)] if memory is None else memory

    def _matrix(self, j: int, memory: Tensor) -> Tensor:
        unit = self.tiles[j].unit
        return unit.views(unit.flat(memory))[self.tiles[j].name]

    def _sum(self, j: int, memory: Tensor) -> Tensor:
        tile = self.tiles[j]
        return tile.unit.views(self._flat(j, memory))[tile.name]

    def _flat(self, j: int, memory: Tensor) -> Tensor:
        dtype = self.places[j].dtype
        return memory[: dtype.itemsize * self.tiles[j].unit.count].view(dtype)


_NAN = torch.full((), float("nan"))
