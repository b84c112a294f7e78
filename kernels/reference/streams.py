"""What the ops of several streams of hidden states mean (Gemma 3n), in plain torch.

A row of hidden states is S streams of H numbers, one after the other. The first one is active: a
layer computes from it. Float32 inside, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qoff.kernels.layout.streams import StreamRouter

from .elementwise import rms_norm, wide
from .linear import activated, gate_and_up

TOGETHER = 256  # rows, in float32
_LEAST = 1e-5  # of a mean square that is divided by


def predict(hidden: Tensor, router: StreamRouter, mixing: Tensor, out: Tensor) -> Tensor:
    """Add a mixture of all streams to each, in place; out becomes the first of the sums.

    hidden: [M, S * H]; out: [M, H]; mixing: [S * S * S], which times the router's numbers for the
    first stream gives S x S factors, those of a sum one after the other.
    """
    count = router.streams
    for x, rows in _pieces(hidden, out):
        factors = _routed(x[:, : out.shape[1]], router) @ mixing.view(-1, count).T
        streams = wide(x).view(len(x), count, -1)
        streams = torch.baddbmm(streams, factors.view(-1, count, count), streams)
        x.copy_(streams.flatten(1))
        rows.copy_(streams[:, 0])
    return out


def correct(
    hidden: Tensor, found: Tensor, router: StreamRouter, mixing: Tensor, scale: Tensor
) -> Tensor:
    """Add to each stream a share of what a layer has found more than the first one, in place.

    hidden: [M, S * H], as `predict` leaves it; found: [M, H], which becomes the first stream times
    `scale`, [H]; mixing: [S * S], which times the router's numbers for it gives shares less one.
    """
    count = router.streams
    for x, rows in _pieces(hidden, found):
        shares = 1 + _routed(rows, router) @ mixing.view(count, count).T
        streams = wide(x).view(len(x), count, -1)
        more = wide(rows) - streams[:, 0]
        streams = torch.addcmul(streams, shares[:, :, None], more[:, None])
        x.copy_(streams.flatten(1))
        rows.copy_(streams[:, 0] * scale)
    return found


def matched(
    x: Tensor,
    like: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    sum_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return sum_scale * (x + residual), with rows of x made as large as those of `like`.

    All are [M, H]. Large is the root of the mean square, that of x at least the root of 1e-5.
    """
    y = wide(x)
    if like is not None:
        sizes = (wide(one).square().mean(1, keepdim=True) for one in (like, x))
        target, own = sizes
        y = y * (target.sqrt() / own.clamp(min=_LEAST).sqrt())
    if residual is not None:
        y = y + residual
    if sum_scale != 1:
        y = y * sum_scale
    return y.to(x.dtype, copy=y is x) if out is None else out.copy_(y)


def sparse_gate(
    z: Tensor, deviations: float, activation: str, *, out: Tensor | None = None
) -> Tensor:
    """Return activation(relu(gate - cut)) * up, [M, I].

    z: [M, 2 I], whose columns alternate 16 of gate, 16 of up. cut: the mean of a row of gate and
    so many standard deviations.
    """
    found = z.new_empty(len(z), z.shape[1] // 2) if out is None else out
    for x, rows in _pieces(z, found):
        gate, up = (wide(part).flatten(1) for part in gate_and_up(x))
        deviation, mean = torch.std_mean(gate, 1, correction=0, keepdim=True)
        gate = gate.sub(mean + deviations * deviation).relu_()
        rows.copy_(activated(activation, gate).mul_(up))
    return found


def _routed(x: Tensor, router: StreamRouter) -> Tensor:
    """The router's numbers for rows of x [M, H]: float32 [M, S]."""
    normed = rms_norm(wide(x), router.norm, router.eps) / x.shape[1]
    return torch.tanh(normed @ router.weight.view(-1, x.shape[1]).T.to(normed.dtype))


def _pieces(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(one.split(TOGETHER) for one in rows), strict=True)
