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

    q: [M, heads * query_dim]. kv: [M, latent + rope_dim], a token's latent before its norm and the
    channels of its key that RoPE rotates; those of queries and keys are in halves, as it has
    them. weight: [rows, latent], see `layout.latent`. Returns [M, (heads + 1) * head_dim].
    """
    keys, _ = _matrices(weight.dequantize(q.dtype), shape)
    parts = [shape.nope_dim, shape.rope_dim]
    nope, rope = q.unflatten(1, (shape.heads, -1)).split(parts, -1)
    queries = latent_heads(torch.einsum("mhp,hpl->mhl", nope, keys), rope)
    latent, rope = kv.split([shape.latent, shape.rope_dim], -1)
    key = latent_heads(rms_norm(latent, norm.weight, norm.eps), rope)
    found = torch.cat((queries.flatten(1), key), 1)
    return found if out is None else out.copy_(found)


def expand(x: Tensor, weight: QTensor, shape: LatentShape, *, out: Tensor | None = None) -> Tensor:
    """Values of each head, [M, heads * value_dim], from latents it found, x [M, heads * latent]."""
    _, values = _matrices(weight.dequantize(x.dtype), shape)
    found = torch.einsum("mhl,hvl->mhv", x.unflatten(1, (shape.heads, -1)), values).flatten(1)
    return found if out is None else out.copy_(found)


def _matrices(weight: Tensor, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """Of each head, those of keys [heads, nope_dim, latent], values [heads, value_dim, latent]."""
    parts = [shape.nope_dim, shape.value_dim]
    keys, values = weight.unflatten(0, (shape.heads, -1)).split(parts, 1)
    return keys, values
