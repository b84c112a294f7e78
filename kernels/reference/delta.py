"""What the ops of Gated DeltaNet and KDA mean, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.kernels.layout.delta import L2_EPS, DeltaShape, DeltaWeights
from qoff.kernels.layout.panels import panels, whole
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates

from .elementwise import rms_norm, wide
from .short_conv import convolved


def delta(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: LayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Linear attention of a layer's new tokens; the states are those after them.

    qkv: [M, shape.channels], queries, keys and values; z: [M, shape.values]; b: [M, value_heads];
    a: [M, shape.decays]. All but z may be overwritten. A sequence whose first new token has
    position 0 remembers nothing. Returns [M, shape.values]. See `layout.delta`.
    """
    spans = [(slice(first, first + count), slot) for first, count, slot in states.spans.tolist()]
    found = torch.cat(
        [
            _sequence(qkv[rows], z[rows], b[rows], a[rows], weights, shape, states, slot,
                      fresh=int(ragged.positions[rows.start]) == 0)
            for rows, slot in spans
        ]
    )  # fmt: skip
    return found if out is None else out.copy_(found)


def gate(
    x: Tensor, by: Tensor, *, activation: str = "sigmoid", out: Tensor | None = None
) -> Tensor:
    """Return x * activation(by), rows [M, N] and those of their gates.

    by: [M, N], or [M, H] where each gate is of N / H neighbouring numbers. activation: one of
    `ending.GATES`: "sigmoid", "softplus", or "" for `by` itself.
    """
    if activation:
        by = by.sigmoid() if activation == "sigmoid" else F.softplus(by)
    found = (x.unflatten(1, (by.shape[1], -1)) * by[..., None]).flatten(1)
    return found if out is None else out.copy_(found)


def _sequence(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: LayerStates,
    slot: int,
    fresh: bool,
) -> Tensor:
    """New tokens of one sequence."""
    before = qkv.new_zeros(shape.conv_shape) if fresh else states.conv[slot].to(qkv.dtype)
    kernel = weights.conv.view(shape.taps, shape.channels).to(qkv.dtype)
    mixed, states.conv[slot] = convolved(before, qkv, kernel)
    query, key, value = F.silu(mixed).split([shape.keys, shape.keys, shape.values], 1)
    query, key = (_unit(x.unflatten(1, (shape.key_heads, -1)), shape) for x in (query, key))
    value = value.unflatten(1, (shape.value_heads, -1))
    found, memory = _recurrence(
        query * shape.key_dim**-0.5, key, value, _remaining(a, weights, shape),
        wide(b).sigmoid() * shape.learns, whole(states.memory[slot], fresh).to(query.dtype),
    )  # fmt: skip
    states.memory[slot] = panels(memory.detach(), shape.panel)
    found = rms_norm(found.to(qkv.dtype), weights.norm, shape.norm_eps)
    return found.flatten(1) * (z.sigmoid() if shape.by_channel else F.silu(z))


def _remaining(a: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """What states are multiplied by, of heads or of their channels, [T, value_heads, -1]."""
    far = (wide(a) + weights.dt_bias).unflatten(1, (shape.value_heads, -1))
    rate = weights.decay.exp()[:, None]
    if shape.floor:
        return (shape.floor * (rate * far).sigmoid()).exp()
    return (-rate * F.softplus(far)).exp()


def _unit(x: Tensor, shape: DeltaShape) -> Tensor:
    """Keys of length 1, for each value head, [T, value_heads, key_dim] in float32."""
    x = wide(x)
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
    return x.repeat_interleave(shape.value_heads // shape.key_heads, 1)


def _recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [T, heads, value_dim], and the states after them, [heads, key_dim, value_dim].

    decay: of heads, [T, heads, 1], or of the channels of their keys, [T, heads, key_dim].
    """
    found = []
    for q, k, v, g, b in zip(query, key, wide(value), decay, beta, strict=True):
        memory = memory * g[:, :, None]
        known = torch.einsum("hkv,hk->hv", memory, k)
        memory = memory + k[:, :, None] * ((v - known) * b[:, None])[:, None]
        found.append(torch.einsum("hkv,hk->hv", memory, q))
    return torch.stack(found), memory
