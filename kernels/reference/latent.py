"""What the ops of multi-head latent attention mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.heads import latent_heads
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.qtensor import QTensor

from .elementwise import rms_norm


def absorb(
    q: Tensor,
    kv: Tensor,
    weight: QTensor,
    norm: Norm,
    shape: LatentShape,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """What attention to latents is given: queries of all heads, then one key.

    q: [M, heads * query_dim]. kv: [M, latent + turning], a token's latent before its norm and the
    channels of its key that turn; those of queries and keys are in halves, as RoPE has them.
    weight: [rows, latent], see `layout.latent`. Returns [M, (heads + 1) * head_dim].
    """
    keys, _ = _matrices(weight.dequantize(q.dtype), shape)
    plain, turning = q.unflatten(1, (shape.heads, -1)).split([shape.plain, shape.turning], -1)
    queries = latent_heads(torch.einsum("mhp,hpl->mhl", plain, keys), turning)
    latent, turning = kv.split([shape.latent, shape.turning], -1)
    key = latent_heads(rms_norm(latent, norm.weight, norm.eps), turning)
    found = torch.cat((queries.flatten(1), key), 1)
    return found if out is None else out.copy_(found)


def expand(x: Tensor, weight: QTensor, shape: LatentShape, *, out: Tensor | None = None) -> Tensor:
    """Values of each head from the latents it found, x [M, heads * latent]: [M, heads * values]."""
    _, values = _matrices(weight.dequantize(x.dtype), shape)
    found = torch.einsum("mhl,hvl->mhv", x.unflatten(1, (shape.heads, -1)), values).flatten(1)
    return found if out is None else out.copy_(found)


def _matrices(weight: Tensor, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """Of each head, those of keys [heads, plain, latent] and values [heads, values, latent]."""
    keys, values = weight.unflatten(0, (shape.heads, -1)).split([shape.plain, shape.values], 1)
    return keys, values
