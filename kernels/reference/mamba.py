"""What the op of Mamba 2 means, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.panels import panels, whole
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates

from .elementwise import wide
from .short_conv import convolved


def mamba(
    zxbcdt: Tensor,
    weights: MambaWeights,
    shape: MambaShape,
    states: LayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The mixer of a layer's new tokens, with its norm if any; the states are those after them.

    zxbcdt: [M, shape.width], which may be overwritten. A sequence whose first new token has
    position 0 remembers nothing. Returns [M, shape.values]. See `layout.mamba`.
    """
    found = torch.cat(
        [
            _sequence(zxbcdt[first : first + count], weights, shape, states, slot,
                      fresh=int(ragged.positions[first]) == 0)
            for first, count, slot in states.spans.tolist()
        ]
    )  # fmt: skip
    return found if out is None else out.copy_(found)


def _sequence(
    zxbcdt: Tensor,
    weights: MambaWeights,
    shape: MambaShape,
    states: LayerStates,
    slot: int,
    fresh: bool,
) -> Tensor:
    """New tokens of one sequence."""
    z, mixed, dt = zxbcdt.split([shape.values, shape.channels, shape.heads], 1)
    before = mixed.new_zeros(shape.conv_shape) if fresh else states.conv[slot].to(mixed.dtype)
    kernel = weights.conv.view(shape.taps, shape.channels).to(mixed.dtype)
    mixed, states.conv[slot] = convolved(before, mixed, kernel)
    z_factor, *factors, dt_factor = shape.factors
    all_of_b = shape.groups * shape.state
    sections = shape.values, all_of_b, all_of_b
    each = [part * by for part, by in zip(mixed.split(sections, 1), factors, strict=True)]
    mixed = torch.cat(each, 1)
    if weights.conv_bias is not None:
        mixed = mixed + weights.conv_bias.to(mixed.dtype)
    x, b, c = wide(F.silu(mixed)).split(sections, 1)
    x = x.unflatten(1, (shape.heads, -1))
    b, c = (one.unflatten(1, (shape.groups, -1)) for one in (b, c))
    b, c = (one.repeat_interleave(shape.heads // shape.groups, 1) for one in (b, c))
    step = F.softplus(wide(dt) * dt_factor + weights.dt_bias)
    decay = (-weights.decay.exp() * step).exp()
    y, memory = _recurrence(
        x * step[:, :, None], b, c, decay, whole(states.memory[slot], fresh).to(x.dtype)
    )
    states.memory[slot] = panels(memory.detach(), shape.panel)
    y = (y + weights.skip[:, None] * x).flatten(1) * F.silu(wide(z) * z_factor)
    if weights.norm is None:
        return y.to(zxbcdt.dtype)
    grouped = y.unflatten(1, (shape.groups, -1))
    inverse = torch.rsqrt((grouped * grouped).mean(-1, keepdim=True) + shape.norm_eps)
    return ((grouped * inverse).flatten(1) * weights.norm).to(zxbcdt.dtype)


def _recurrence(
    x: Tensor, b: Tensor, c: Tensor, decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [T, heads, head_dim], and the states after them, [heads, state, head_dim]."""
    found = []
    for xt, bt, ct, g in zip(x, b, c, decay, strict=True):
        memory = memory * g[:, None, None] + bt[:, :, None] * xt[:, None]
        found.append(torch.einsum("hsp,hs->hp", memory, ct))
    return torch.stack(found), memory
