"""Matrices larger than the device: their weights come a few rows at a time, both ways.

Memory-centric tiling, as in ZeRO-Infinity (arXiv 2104.07857). A tile has weights, gradients and
states of its own, in host memory or on disk. It is read when its rows are multiplied by: forward,
forward again and backward, for each micro-batch. Gradients are summed where they lie, so those of
several micro-batches are float32; on a GPU, sums come there and go back.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cuts import Tile
from .gradients import add_into, nothing, queue_of, squares
from .homes import Home, Homes, Link, Read

SLOTS = 2  # of weights to multiply by: one is, one is read
SUMS = 2  # of gradients: one is made, one is written
STEPPED = 1  # whose weights and gradients are on their way to a step


@dataclass(frozen=True)
class TileHomes:
    """Where a tile's weights and gradients lie, and what gradients are.

    later: where weights are made while the present ones are computed with, if updates are delayed.
    """

    weights: Home
    gradients: Home
    dtype: torch.dtype
    later: Home | None = None


@dataclass(frozen=True)
class TileMemory:
    """For tiles that do not lie where they are used; of each none, where all do.

    weights: SLOTS to multiply by. sums: SUMS of gradients. stepped, landed: STEPPED of weights and
    of gradients, where they are stepped: on a GPU, in host memory.
    """

    weights: Sequence[Tensor] = ()
    sums: Sequence[Tensor] = ()
    stepped: Sequence[Tensor] = ()
    landed: Sequence[Tensor] = ()


class Tiles:
    """Brings tiles to who multiplies by them, and keeps sums of their gradients.

    link: between homes and what computes. numbers: of the tiles of a module.
    """

    def __init__(
        self,
        homes: Homes,
        link: Link,
        tiles: Sequence[Tile],
        places: Sequence[TileHomes],
        memory: TileMemory,
        device: torch.device,
    ) -> None:
        """device: computes."""
        self._homes, self._link, self._device = homes, link, device
        self.tiles, self.places = list(tiles), list(places)
        self._present = [place.weights for place in places]
        self._later = [place.later for place in places if place.later is not None]
        self._slots, self._stepped = memory.weights, memory.stepped
        self._free, self._landed = (queue_of(x) for x in (memory.sums, memory.landed))
        self._writes: dict[int, Future[None]] = {}
        self._squares: dict[int, list[Tensor]] = {}  # of tiles that have gradients in this step
        self._taken: dict[int, Tensor] = {}
        self.layers: dict[int, list[int]] = {}
        self.numbers: dict[nn.Module, list[int]] = {}
        for j, tile in enumerate(self.tiles):
            self.layers.setdefault(tile.layer, []).append(j)
            for module in tile.modules:
                self.numbers.setdefault(module, []).append(j)

    @property
    def kept(self) -> list[Home]:
        """Homes of weights, and of gradients where they wait for the next step."""
        waiting = [place.gradients for place in self.places] if self._later else []
        return [*self._present, *waiting]

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._squares.clear()

    def weights(self, numbers: Sequence[int]) -> Generator[tuple[slice, Tensor]]:
        """Rows and weights of these tiles, each until the next. Raises DiskReadError.

        To be closed: else a read may be on its way to a slot that others use by then.
        """
        ahead: Read | None = None
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
        memory = self._link.here(home)
        if memory is not None:
            yield self._sum(j, memory), begun
            self._squares[j] = squares(self._sum(j, memory))
            return
        write = self._writes.pop(j, None)
        memory = self._free.get()
        source = memory[: home.nbytes]
        try:
            if write is not None:
                write.result()
            if begun:
                self._link.read(home, source).result()
            yield self._sum(j, memory), begun
            self._squares[j] = squares(self._sum(j, memory))
        except BaseException:
            self._free.put(memory)
            raise
        self._writes[j] = self._link.write(home, source, lambda: self._free.put(memory))

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
        return math.fsum(float(x) for parts in self._squares.values() for x in parts)

    def keep(self) -> None:
        """Have all gradients wait at home for the next step. Raises DiskWriteError."""
        for j in range(len(self.tiles)):
            if j not in self._squares:
                with self.gradient(j) as (total, _):
                    total.zero_()
        for write in self._writes.values():
            write.result()

    def fill(self, j: int) -> Tensor:
        """Move a tile's weights to their home, and take them from its layer; returns them, flat."""
        tile, home = self.tiles[j], self._present[j]
        memory = self._stepped[0] if home.memory is None else home.memory
        flat = tile.unit.flat(memory).zero_()
        weight = tile.weight
        self._matrix(j, memory).copy_(weight.data[tile.rows])
        if home.memory is None:
            self._homes.write(home, memory[: home.nbytes], nothing).result()
        tile.unit.on(self._device)
        tile.unit.bind(None)
        if tile.rows.stop == len(weight):
            poison = torch.full((), float("nan"), dtype=flat.dtype, device=self._device)
            weight.data = poison.expand(weight.shape)
        return flat

    def to_step(self, j: int) -> Tensor:
        """A tile's weights, flat, in the thread that steps it. Raises DiskReadError."""
        memory = self._present[j].memory
        later = self._later[j].memory if self._later else None
        if later is not None and memory is not None:
            memory = later.copy_(memory)
        return self.tiles[j].unit.flat(self._from_disk(j) if memory is None else memory)

    def gradients(self, j: int) -> Tensor:
        """A tile's gradients, flat, until `give_back`; in the same thread. Raises DiskReadError."""
        unit, home = self.tiles[j].unit, self.places[j].gradients
        write = self._writes.pop(j, None)
        if write is not None:
            write.result()
        memory, found = home.memory, bool(self._later) or j in self._squares
        if memory is None:
            self._taken[j] = memory = self._landed.get()
            if found:
                self._homes.read(home, memory[: home.nbytes]).result()
        flat = self._flat(j, memory)
        if not found:
            flat.zero_()
        for gap in unit.gaps(flat):
            gap.zero_()
        return flat

    def give_back(self, j: int) -> None:
        """The memory of a tile's gradients is free."""
        buffer = self._taken.pop(j, None)
        if buffer is not None:
            self._landed.put(buffer)

    def stepped(self, j: int) -> None:
        """A tile is stepped: write it. Raises DiskWriteError."""
        self.give_back(j)
        home = self._later[j] if self._later else self._present[j]
        if home.memory is None:
            self._homes.write(home, self._stepped[0][: home.nbytes], nothing).result()

    def turn(self) -> None:
        """The weights that were made later are the present ones."""
        if self._later:
            self._present, self._later = self._later, self._present

    def end(self) -> None:
        """Wait for what is being written, however the step has ended."""
        for write in self._writes.values():
            write.exception()
        self._writes.clear()

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Copies of the whole weights of a layer that lie in tiles, by name; outside of steps."""
        found: dict[str, Tensor] = {}
        for tile, rows in self.each(layer):
            weight = tile.weight
            if tile.name not in found:
                found[tile.name] = torch.empty(weight.shape, dtype=weight.dtype)
            found[tile.name][tile.rows] = rows
        return found

    def each(self, layer: int) -> Iterator[tuple[Tile, Tensor]]:
        """The tiles of a layer with their weights, which stay until the next; outside of steps."""
        for j in self.layers.get(layer, ()):
            memory = self._present[j].memory
            yield self.tiles[j], self._matrix(j, self._from_disk(j) if memory is None else memory)

    def _from_disk(self, j: int) -> Tensor:
        memory, home = self._stepped[0], self._present[j]
        self._homes.read(home, memory[: home.nbytes]).result()
        return memory

    def _read(self, j: int, at: int) -> Read | None:
        home = self._present[j]
        if self._link.here(home) is not None:
            return None
        return self._link.read(home, self._at(j, at)[: home.nbytes])

    def _at(self, j: int, at: int) -> Tensor:
        memory = self._link.here(self._present[j])
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
