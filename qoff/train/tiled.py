"""Modules whose weights lie in tiles: linear layers, embeddings, and a head with its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .embedding import EmbeddingRows, add_rows
from .gradients import add_into
from .tiles import Tiles


def replace(tiles: Tiles) -> None:
    """Take the places of the forwards of all modules with tiles."""
    for module, numbers in tiles.numbers.items():
        if isinstance(module, nn.Embedding):
            TiledEmbedding(module, tiles, numbers)
        else:
            assert isinstance(module, nn.Linear)
            TiledLinear(module, tiles, numbers)


def tileable(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, tuple[nn.Module, ...]]:
    """By identity, the weights that may lie in tiles, with the modules that have them.

    Embeddings inside of these layers stay whole: `TiledEmbedding` learns only in the pass of a
    model, and layers are computed beside it.
    """
    within = {id(m) for layer in layers for m in layer.modules() if isinstance(m, nn.Embedding)}
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                found.setdefault(id(p), []).append(module)
    return {
        key: tuple(modules)
        for key, modules in found.items()
        if all(_is_plain(m) and id(m.weight) == key and id(m) not in within for m in modules)
    }


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
    return type(module) is nn.Linear


class TiledEmbedding(EmbeddingRows):
    """Takes the place of the forward of an embedding."""

    def __init__(self, module: nn.Embedding, tiles: Tiles, numbers: Sequence[int]) -> None:
        super().__init__(module, _no_sum)
        self._tiles, self._numbers = tiles, numbers

    def rows(self, ids: Tensor) -> Tensor:
        """Their values. Raises IndexError, DiskReadError."""
        flat, count = ids.reshape(-1), self._module.num_embeddings
        if not bool(((flat >= 0) & (flat < count)).all()):
            raise IndexError(f"token ids are not all from 0 to {count - 1}")
        found = flat.new_empty(len(flat), self._module.embedding_dim, dtype=self._dtype)
        with closing(self._tiles.weights(self._numbers)) as parts:
            for rows, w in parts:
                here, at = _within(flat, rows)
                found[here] = w[at]
        return found.view(*ids.shape, -1)

    def add_flat(self, ids: Tensor, given: Tensor) -> None:
        for j in self._numbers:
            here, at = _within(ids, self._tiles.tiles[j].rows)
            with self._tiles.gradient(j) as (total, begun):
                if not begun:
                    total.zero_()
                add_rows(total, at, given[here].to(total.dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return self._module.weight.dtype


class TiledLinear:
    """Takes the place of the forward of a linear layer whose weights lie in tiles."""

    def __init__(self, module: nn.Linear, tiles: Tiles, numbers: Sequence[int]) -> None:
        self.tiles, self.numbers, self.module = tiles, numbers, module
        module.forward = self  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.module.in_features)
        if torch.is_grad_enabled():
            learns = rows if rows.requires_grad else rows.detach().requires_grad_()
            y: Tensor = _Tiled.apply(learns, self)
        else:
            y = self.forward(rows)
        if self.module.bias is not None:
            y = y + self.module.bias
        return y.view(*x.shape[:-1], -1)

    @property
    def most_rows(self) -> int:
        """Of a tile."""
        return max(self.tiles.tiles[j].count for j in self.numbers)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, K] to [M, N]."""
        y = x.new_empty(len(x), self.module.out_features)
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
        of_x = torch.zeros(x.shape, device=x.device)
        with closing(linear.tiles.weights(linear.numbers)) as parts:
            for j, (rows, w) in zip(linear.numbers, parts, strict=True):
                part = grad[:, rows]
                add_into(of_x, part @ w)
                linear.tiles.add(j, part, x)
        return of_x.to(x.dtype), None


def loss_of_tiles(
    linear: TiledLinear,
    x: Tensor,
    wanted: Tensor,
    factor: float,
    learns: bool,
    memory: Tensor,
    sum_of: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropies of hidden states [n, K], summed, times `factor`; gradients where it learns.

    wanted: labels [n]. Each tile is read for the sums of exponentials, with what was the largest
    logit so far, and once more for gradients. memory: float32, for the logits of one tile. sum_of:
    where the bias' gradient is summed. Raises DiskReadError, DiskWriteError.
    """
    tiles, numbers, bias = linear.tiles, linear.numbers, linear.module.bias

    def logits_of(rows: slice, w: Tensor) -> Tensor:
        found = memory[: len(x) * len(w)].view(len(x), len(w))
        if w.dtype == torch.float32:
            torch.mm(x, w.t(), out=found)
        else:
            found.copy_(x @ w.t())
        return found if bias is None else found.add_(bias[rows])

    largest = torch.full((len(x), 1), -torch.inf, device=x.device)
    sums, picked = torch.zeros_like(largest), torch.zeros_like(largest)
    with closing(tiles.weights(numbers)) as parts:
        for rows, w in parts:
            logits = logits_of(rows, w)
            here, at = _within(wanted, rows)
            picked[here, 0] = logits[here, at]
            most = torch.maximum(largest, logits.amax(1, keepdim=True))
            sums *= (largest - most).exp_()
            sums += logits.sub_(most).exp_().sum(1, keepdim=True)
            largest = most
    whole = sums.log_().add_(largest)
    loss = (whole - picked).sum() * factor
    if not learns:
        return loss, None
    of_x = torch.zeros(x.shape, device=x.device)
    with closing(tiles.weights(numbers)) as parts:
        for j, (rows, w) in zip(numbers, parts, strict=True):
            given = logits_of(rows, w).sub_(whole).exp_().mul_(factor)
            here, at = _within(wanted, rows)
            given[here, at] -= factor
            if bias is not None and bias.requires_grad:
                sum_of(bias)[rows] += given.sum(0)
            narrow = given.to(w.dtype)
            add_into(of_x, narrow @ w)
            tiles.add(j, narrow, x)
    return loss, of_x.to(x.dtype)


def _within(ids: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Where ids [n] are of these rows, and of which of them."""
    here = ((ids >= rows.start) & (ids < rows.stop)).nonzero()[:, 0]
    return here, ids[here] - rows.start


def _no_sum(_: Tensor) -> Tensor:
    raise AssertionError("tiles have sums of their own")
