"""What a gated short convolution means, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import LayerStates


def short_conv(
    bcx: Tensor,
    weight: Tensor,
    shape: ShortConvShape,
    states: LayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """c * convolution(b * x) of a layer's new tokens; the states are those after them.

    bcx: [M, shape.width], which may be overwritten. weight: float32 [taps * channels], tap by tap,
    the newest token's last. A sequence whose first new token has position 0 remembers nothing.
    Returns [M, shape.channels]. See `layout.short_conv`.
    """
    b, c, x = bcx.chunk(3, 1)
    inputs, found = b * x, list[Tensor]()
    kernel = weight.view(shape.taps, shape.channels).to(bcx.dtype)
    for first, count, slot in states.spans.tolist():
        new = inputs[first : first + count]
        fresh = int(ragged.positions[first]) == 0
        before = new.new_zeros(shape.conv_shape) if fresh else states.conv[slot].to(new.dtype)
        mixed, kept = convolved(before, new, kernel)
        states.conv[slot] = kept
        found.append(mixed)
    y = torch.cat(found) * c
    return y if out is None else out.copy_(y)


def convolved(before: Tensor, new: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """The causal convolution of each channel of the new tokens, and what the next ones need.

    before: [taps - 1, channels], what those before left. new: [T, channels]. kernel: [taps,
    channels], the newest token's last. Returns [T, channels] and one like `before`, detached.
    """
    seen = torch.cat((before, new))
    mixed = F.conv1d(seen.T[None], kernel.T[:, None], groups=len(kernel[0]))[0].T
    return mixed, seen[-len(before) :].detach()
