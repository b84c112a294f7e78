"""Linear layers, experts and the head, computed on the packed weights they are bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import EXPERTS, HEAD, ChosenExperts, TiledMatrix
from qoff.memory.experts import ExpertWave, StreamedExperts
from qoff.memory.plan import LM_HEAD

from .current import by_tiles, current

Bound: TypeAlias = QTensor | Tensor | TiledMatrix


@dataclass(frozen=True)
class Multiply:
    """x @ W.T + bias by the op, which takes `dtype`."""

    ops: Ops
    dtype: torch.dtype

    def __call__(self, x: Tensor, matrix: Bound, bias: Tensor | None) -> Tensor:
        """x: [..., K], of any float dtype. Returns [..., N] in it."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count = matrix.shape[0]
        if isinstance(matrix, Tensor):
            added = None if bias is None else bias.to(x.dtype)
            out = nn.functional.linear(rows, matrix.to(x.dtype), added)
        elif isinstance(matrix, TiledMatrix):
            out = x.new_empty(len(rows), count)
            for tile, some in by_tiles(matrix):
                of_tile = slice(tile.first_row, tile.stop)
                out[:, of_tile] = self(rows, some, None if bias is None else bias[of_tile])
        else:
            out = self.ops.w4_linear(rows.to(self.dtype), matrix, bias=bias).to(x.dtype)
        return out.view(*x.shape[:-1], count)


def dense(matrix: Bound, dtype: torch.dtype) -> Tensor:
    """A matrix [N, K] in `dtype`, for code that looks into it."""
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if isinstance(matrix, TiledMatrix):
        return torch.cat([tile.dequantize().to(dtype) for _, tile in by_tiles(matrix)])
    return matrix.dequantize().to(dtype)


class QuantizedLinear(nn.Module):
    """Stands for a linear layer while `bound` and `bias` are set.

    transposed: the layer that it replaces keeps its weight as [K, N].
    """

    def __init__(self, replaced: nn.Module, multiply: Multiply, transposed: bool) -> None:
        super().__init__()
        shape = tuple(replaced.weight.shape)  # type: ignore[arg-type]  # of a linear layer
        self.out_features, self.in_features = shape[::-1] if transposed else shape
        self.bound: Bound | None = None
        self.bias: Tensor | None = None
        self._multiply, self._transposed = multiply, transposed

    @property
    def weight(self) -> Tensor:
        """The dense weight, as the replaced layer has it; computed anew each time."""
        assert self.bound is not None
        found = dense(self.bound, self._multiply.dtype)
        return found.T if self._transposed else found

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K]. Returns [..., N]."""
        assert self.bound is not None
        return self._multiply(x, self.bound, self.bias)


class QuantizedGroups(QuantizedLinear):
    """Stands for a linear layer with a matrix for each of `groups` groups of inputs."""

    def __init__(self, replaced: nn.Module, multiply: Multiply, groups: int) -> None:
        super().__init__(replaced, multiply, transposed=False)
        self._groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., groups, K]. Returns [..., groups, N / groups]."""
        assert self.bound is not None
        rows = self.out_features // self._groups
        if isinstance(self.bound, Tensor):  # of a model that is being converted
            own = self.bound.to(x.dtype).view(self._groups, rows, -1)
            found = torch.einsum("...gk,gnk->...gn", x, own)
            return found if self.bias is None else found + self.bias.view(self._groups, rows)
        out = x.new_empty(*x.shape[:-1], rows)
        for first, part in _parts(self.bound):
            start, stop = first, first + part.shape[0]
            for group in range(start // rows, -(-stop // rows)):
                top, end = max(start, group * rows), min(stop, (group + 1) * rows)
                some = part.rows(top - first, end - first)
                bias = None if self.bias is None else self.bias[top:end]
                here = slice(top - group * rows, end - group * rows)
                out[..., group, here] = self._multiply(x[..., group, :], some, bias)
        return out


def _parts(matrix: QTensor | TiledMatrix) -> Iterator[tuple[int, QTensor]]:
    """The parts of a matrix that are there at once, with the first row of each."""
    if isinstance(matrix, TiledMatrix):
        yield from ((tile.first_row, some) for tile, some in by_tiles(matrix))
    else:
        yield 0, matrix


def each_expert(
    module: Any,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Iterable[int],
    times: Callable[[str, Tensor, int], Tensor],
) -> Tensor:
    """What an experts module computes, one expert after another, with products from elsewhere.

    module: of transformers, without its matrices. hidden: [T, H]; topk_ids: int64 [T, k];
    topk_weights: [T, k]. experts: those that are asked for, chosen or not. times: of the name of a
    parameter, rows and an expert, the product with the matrix, bias included. Returns [T, H].
    """
    out = torch.zeros_like(hidden)
    for e in experts:
        token, weighted = _expert(module, hidden, topk_ids, topk_weights, e, times)
        out.index_add_(0, token, weighted)
    return out


def _expert(
    module: Any,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert: int,
    times: Callable[[str, Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """The tokens of an expert, and what it adds to each, [tokens, H]; see `each_expert`."""
    token, place = torch.where(topk_ids == expert)
    inner = times(first_of(module), hidden[token], expert)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    found = times("down_proj", inner, expert)
    if getattr(module, "has_post_expert_norm", False):  # transformers has it since 5.20
        found = module.post_expert_norm(found)
    weighted = found * topk_weights[token, place, None].to(found.dtype)
    return token, weighted.to(hidden.dtype)


def first_of(module: Any) -> str:
    """The parameter of an experts module that is multiplied by first."""
    return "gate_up_proj" if module.has_gate else "up_proj"


class QuantizedExperts:
    """The forward pass of an experts module while its matrices are bound.

    layer: that it is of. bound: by the name of the weight, the matrices of all experts in their
    order; or what stands for these where they come one by one.
    """

    def __init__(self, module: nn.Module, multiply: Multiply, layer: int) -> None:
        self.module: Any = module
        self._multiply, self._layer = multiply, layer
        self.bound: dict[str, list[Bound] | StreamedExperts] = {}

    def __call__(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """hidden: [T, H]; topk_ids: int64 [T, k]; topk_weights: [T, k]. Returns [T, H].

        Tiles come whatever was chosen.
        """
        bound = self.bound[first_of(self.module)]
        if isinstance(bound, StreamedExperts):
            return self._in_waves(hidden, topk_ids, topk_weights, bound.count)
        chosen = set(topk_ids.unique().tolist())
        experts = (
            e for e, matrix in enumerate(bound) if e in chosen or isinstance(matrix, TiledMatrix)
        )
        return each_expert(self.module, hidden, topk_ids, topk_weights, experts, self._times)

    def _in_waves(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: int
    ) -> Tensor:
        """With the experts that come, in whatever order, and are summed in their own."""
        added: dict[int, tuple[Tensor, Tensor]] = {}
        left = [n for n in topk_ids.unique().tolist() if n < count]
        while left:
            found = current().fetch(ChosenExperts(self._layer, tuple(left)))
            wave = cast(ExpertWave, found[EXPERTS])
            times = partial(self._times_of, wave)
            for n in left:
                if n in wave.numbers:
                    added[n] = _expert(self.module, hidden, topk_ids, topk_weights, n, times)
            left = [n for n in left if n not in wave.numbers]
        out = torch.zeros_like(hidden)
        for _, (token, weighted) in sorted(added.items()):
            out.index_add_(0, token, weighted)
        return out

    def _times_of(self, wave: ExpertWave, name: str, x: Tensor, expert: int) -> Tensor:
        matrices = wave.down if name == "down_proj" else wave.gate_up
        matrix = matrices.expert(int(wave.table[expert]))
        return self._multiply(x, matrix, self._bias(name, expert))

    def _times(self, name: str, x: Tensor, expert: int) -> Tensor:
        bound = self.bound[name]
        assert isinstance(bound, list)
        return self._multiply(x, bound[expert], self._bias(name, expert))

    def _bias(self, name: str, expert: int) -> Tensor | None:
        if not self.module.has_bias:
            return None
        bias: Tensor = getattr(self.module, f"{name}_bias")
        return bias[expert].contiguous()


class Head(nn.Module):
    """The head: fetches its weights when it is called, and computes only the logits wanted.

    Whatever the shape of its input [B, T, K], it returns [1, R, N].
    """

    def __init__(self, replaced: nn.Linear, multiply: Multiply) -> None:
        super().__init__()
        self.bias: Tensor | None = replaced.bias
        self.weight = torch.empty_like(replaced.weight, device="meta")  # some ask for its dtype
        self._multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, K]."""
        sequences, columns = current().logit_rows
        rows = x[sequences, columns]
        matrix = cast(Bound, current().fetch(HEAD)[LM_HEAD])
        return self._multiply(rows, matrix, self.bias)[None]
