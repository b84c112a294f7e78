"""Linear layers larger than the device: their weights come a few rows at a time, both ways.

Memory-centric tiling, as in ZeRO-Infinity (arXiv 2104.07857). A tile has weights, gradients and
states of its own, in host memory or on disk. It is read when its rows are multiplied by: forward,
forward again and backward, for each micro-batch. Gradients are summed where they lie.
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
from torch.autograd.function import once_differentiable

from .gradients import add_into, square
from .homes import Home, Homes
from .layout import FlatUnit

SLOTS = 3  # of weights: one is multiplied by, one is read, one is stepped
BUFFERS = 3  # of gradients: one is made, one is written, one is used for a step


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows of a linear layer. layer: the one that it is in. unit: its only parameter is theirs."""

    layer: int
    module: nn.Linear
    name: str
    rows: slice
    unit: FlatUnit


def cut(
    layer: int, own: Mapping[str, nn.Parameter], linears: Mapping[int, nn.Linear], most: int
) -> tuple[dict[str, nn.Parameter], list[Tile]]:
    """Parameters of a layer that stay whole, and tiles of up to `most` bytes, or a row, of others.

    linears: those whose forward may be replaced, by the identity of their weight.
    """
    whole, tiles = dict[str, nn.Parameter](), list[Tile]()
    for name, p in own.items():
        module = linears.get(id(p))
        if module is None or p.nbytes <= most:
            whole[name] = p
            continue
        rows = max(1, most // p[0].nbytes)
        for start in range(0, len(p), rows):
            part = nn.Parameter(p.data[start : start + rows])
            found = slice(start, start + len(part))
            unit = FlatUnit(f"{name}[{start}:{found.stop}]", {name: part})
            tiles.append(Tile(layer, module, name, found, unit))
    return whole, tiles


@dataclass(frozen=True)
class TileHomes:
    """Where a tile's weights and gradients lie."""

    weights: Home
    gradients: Home


class Tiles:
    """Brings tiles to who multiplies by them, and keeps sums of their gradients.

    slots, buffers: memory for tiles of weights and gradients on disk, SLOTS and BUFFERS of each, or
    none where all are in host memory.
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
        of_modules: dict[nn.Linear, list[int]] = {}
        for j, tile in enumerate(self.tiles):
            self.layers.setdefault(tile.layer, []).append(j)
            of_modules.setdefault(tile.module, []).append(j)
        for module, numbers in of_modules.items():
            TiledLinear(module, self, numbers)

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
        """Where the gradient of a tile is summed, float32 [rows, K], and whether it has a sum."""
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

    @property
    def squares(self) -> float:
        """The sum of the squares of all gradients."""
        return math.fsum(self._squares.values())

    def fill(self, j: int) -> Tensor:
        """Move a tile's weights to their home, and take them from its layer; returns them, flat."""
        tile, home = self.tiles[j], self.places[j].weights
        memory = self._stepping[0] if home.memory is None else home.memory
        flat = tile.unit.flat(memory).zero_()
        self._matrix(j, memory).copy_(tile.module.weight.data[tile.rows])
        if home.memory is None:
            self._homes.write(home, memory[: home.nbytes], lambda: None).result()
        tile.unit.bind(None)
        if tile.rows.stop == tile.module.out_features:
            tile.module.weight.data = _NAN.to(flat.dtype).expand(tile.module.weight.shape)
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
        flat = memory[: 4 * unit.count].view(torch.float32)
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
            weight = tile.module.weight
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
        return tile.unit.views(memory[: 4 * tile.unit.count].view(torch.float32))[tile.name]


_NAN = torch.full((), float("nan"))


class TiledLinear:
    """Takes the place of the forward of a linear layer whose weights lie in tiles."""

    def __init__(self, module: nn.Linear, tiles: Tiles, numbers: Sequence[int]) -> None:
        self.tiles, self.numbers, self._module = tiles, numbers, module
        module.forward = self  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._module.in_features)
        if torch.is_grad_enabled():
            learns = rows if rows.requires_grad else rows.detach().requires_grad_()
            y: Tensor = _Tiled.apply(learns, self)
        else:
            y = self.forward(rows)
        if self._module.bias is not None:
            y = y + self._module.bias
        return y.view(*x.shape[:-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, K] to [M, N]."""
        y = x.new_empty(len(x), self._module.out_features)
        with closing(self.tiles.weights(self.numbers)) as parts:
            for rows, w in parts:
                y[:, rows] = x @ w.t()
        return y


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: TiledLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        return linear.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), linear = ctx.saved_tensors, ctx.linear
        of_x = torch.zeros(x.shape)
        with closing(linear.tiles.weights(linear.numbers)) as parts:
            for j, (rows, w) in zip(linear.numbers, parts, strict=True):
                part = grad[:, rows]
                add_into(of_x, part @ w)
                with linear.tiles.gradient(j) as (total, begun):
                    if begun:
                        add_into(total, part.t() @ x)
                    elif x.dtype == torch.float32:
                        torch.mm(part.t(), x, out=total)
                    else:
                        total.copy_(part.t() @ x)
        return of_x.to(x.dtype), None
