"""How the weights of a unit lie in flat memory, and the optimizer's states beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qoff.errors import UnsupportedModelError
from qoff.kernels.cpu.optim.scratch import BLOCK
from qoff.kernels.cpu.optim.update import Moments
from qoff.memory.arena import PAGE, round_up

from .optimizers import Optimizer

PIECE = 1 << 20  # weights whose states are read, changed and written together
_LINE = 16  # weights: every tensor begins at a cache line
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FlatUnit:
    """Parameters of a unit that learn, one behind the other.

    parameters: by the name in the model. starts: where each begins. count: of elements, with what
    lies between them.
    """

    def __init__(self, path: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises UnsupportedModelError for other dtypes than float32 and the halves, or several."""
        self.path, self.parameters = path, dict(parameters)
        dtypes = {p.dtype for p in parameters.values()}
        if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
            names = ", ".join(sorted(str(x).removeprefix("torch.") for x in dtypes))
            raise UnsupportedModelError(
                f"{path}: weights that learn are {names}; they can be float32, bfloat16 or "
                "float16, all of a layer the same: load the model with dtype=torch.float32"
            )
        self.dtype = dtypes.pop() if dtypes else torch.float32
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self.starts: dict[str, int] = {}
        end = 0
        for name, p in parameters.items():
            self.starts[name] = end
            end += round_up(p.numel(), _LINE)
        self.count = round_up(end, PAGE)
        # What is read, changed and written together: where each begins and ends.
        self.pieces = [(a, min(self.count, a + PIECE)) for a in range(0, self.count, PIECE)]
        self._nothing = torch.full((), float("nan"), dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self.count * self.dtype.itemsize

    def flat(self, memory: Tensor) -> Tensor:
        """Memory uint8 as weights [count]."""
        return memory[: self.nbytes].view(self.dtype)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The part of each parameter in a flat tensor [count]."""
        return {
            name: flat[start : start + self.shapes[name].numel()].view(self.shapes[name])
            for name, start in self.starts.items()
        }

    def gaps(self, flat: Tensor) -> Iterator[Tensor]:
        """The parts of a flat tensor [count] between parameters, and behind the last."""
        starts = [*self.starts.values(), self.count]
        for shape, start, stop in zip(self.shapes.values(), starts, starts[1:], strict=False):
            yield flat[start + shape.numel() : stop]

    def on(self, device: torch.device) -> None:
        """Have parameters that lie in no memory be of this device."""
        self._nothing = self._nothing.to(device)

    def bind(self, flat: Tensor | None) -> None:
        """Have the parameters lie in flat memory; in none, they are NaN."""
        if flat is None:
            for p in self.parameters.values():
                p.grad = None
                p.data = self._nothing.expand(p.shape)
            return
        for name, x in self.views(flat).items():
            self.parameters[name].data = x


@dataclass(frozen=True)
class StateForm:
    """The states of a piece of a unit: a float32 master of narrower weights, and moments."""

    narrow: bool
    coded: bool
    second: bool
    first: bool = True

    @classmethod
    def of(cls, unit: FlatUnit, optimizer: Optimizer) -> StateForm:
        narrow = unit.dtype != torch.float32
        return cls(narrow, optimizer.bits == 8, optimizer.second, not optimizer.factored)

    def nbytes(self, count: int) -> int:
        """Bytes that `count` weights take, in whole pages."""
        return round_up(sum(self._parts(count)), PAGE)

    def of_pieces(self, unit: FlatUnit) -> list[int]:
        """Bytes of each piece of a unit."""
        return [self.nbytes(stop - start) for start, stop in unit.pieces]

    def view(self, memory: Tensor, count: int) -> tuple[Tensor | None, Moments]:
        """The master, float32 [count] if there is one, and the moments, in memory uint8."""
        parts = memory[: sum(self._parts(count))].split(self._parts(count))
        master, first, second, of_first, of_second = parts
        wide = [x.view(torch.float32) for x in (master, of_first, of_second)]
        return (wide[0] if self.narrow else None), Moments(
            first.view(torch.int8 if self.coded else torch.float32),
            second.view(torch.uint8 if self.coded else torch.float32) if self.second else None,
            wide[1] if self.coded else None,
            wide[2] if self.coded and self.second else None,
        )

    def begin(self, memory: Tensor, weights: Tensor) -> None:
        """Write the states before the first step."""
        memory.zero_()
        master, _ = self.view(memory, len(weights))
        if master is not None:
            master.copy_(weights)

    def _parts(self, count: int) -> list[int]:
        each, scales = (1, 4 * count // BLOCK) if self.coded else (4, 0)
        return [
            4 * count * self.narrow,
            each * count * self.first,
            each * count * self.second,
            scales * self.first,
            scales * self.second,
        ]
