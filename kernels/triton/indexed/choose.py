"""Which tokens new ones attend to, by an index of keys, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.operands import require
from qoff.kernels.triton.latent.append import keep_latents, turn
from qoff.kernels.triton.launch.sizes import cdiv

from .scores import index_scores
from .select import index_select

_SCORES = 64 << 20  # bytes; scores of more rows than these hold come in parts


def chooses(cache: DeviceLayerCache, top: int) -> bool:
    """Whether some row of a pass may be at position `top` or later: rows then have lists.

    The same for all passes that share a recording. Raises OpError for tokens in host memory then.
    """
    found = most_tokens(cache.step, cache.recent_k.shape[1]) > top
    if found and cache.offloaded:
        raise OpError("an index chooses among tokens that a GPU has, or that come there")
    return found


def most_tokens(step: PassTables, ring: int) -> int:
    """An upper bound of a sequence's tokens. ring: slots of it."""
    packed = step.max_packed if step.max_ranked is None else step.max_ranked
    return packed + ring + (step.max_rows if step.max_rows > 1 else 0)


def choose(
    qk: Tensor,
    weights: Tensor,
    shape: IndexShape,
    cache: DeviceLayerCache,
    rotary: tuple[Tensor, Tensor] | None,
    out: Tensor | None,
) -> Tensor:
    """Append keys of an index to its cache, and choose tokens by it: see `reference.index.choose`.

    qk: float16 or bfloat16 [M, shape.width], written over, and weights [M, heads], the rows of the
    pass. out: contiguous int32 [M, top]. Rows at positions below `top` list all that they see; in a
    pass without later ones nothing is written. Raises OpError.
    """
    step, ring, device = cache.step, cache.recent_k, qk.device
    rows, dtype = len(step.positions), (ring.dtype,)
    require("qk", qk, dtype, (rows, shape.width), ring.device, rows_apart=True)
    require("weights", weights, dtype, (rows, shape.heads), ring.device, rows_apart=True)
    if cache.form.latent != shape.keys.latent or cache.form.head_dim != shape.dim:
        raise OpError(f"{shape} does not fit a cache of {cache.form}")
    if out is None:
        out = torch.empty(rows, shape.top, dtype=torch.int32, device=device)
    require("chosen", out, (torch.int32,), (rows, shape.top), ring.device)
    if step.order is not None:
        qk, weights = qk[step.order], weights[step.order]
    vectors = qk.unflatten(1, (-1, shape.dim))
    turn(vectors, cache, rotary, to_ring=step.max_rows <= 1)
    if chooses(cache, shape.top):
        most = _padded(most_tokens(step, ring.shape[1]))
        together = rows_together(rows, most)
        scores = torch.empty(together, most, dtype=torch.float32, device=device)
        for first in range(0, rows, together):
            some = range(first, min(first + together, rows))
            index_scores(vectors, weights, cache, shape, some, scores)
            index_select(scores, step.positions, step.order, some, out)
    keep_latents(vectors[:, shape.heads :], cache)
    return out


def _padded(tokens: int) -> int:
    return cdiv(tokens, BLOCK_TOKENS) * BLOCK_TOKENS


def rows_together(rows: int, most: int) -> int:
    """Rows, of so many, whose scores of up to `most` tokens are there at once."""
    return min(rows, max(1, _SCORES // (4 * most)))


def choose_bytes(tokens: int, longest: int, shape: IndexShape, dtype: torch.dtype) -> int:
    """The most bytes that `choose` allocates besides its result, as if it freed nothing.

    For up to `tokens` rows. longest: what `most_tokens` is at most.
    """
    rows = tokens * (shape.width + shape.heads) * dtype.itemsize  # in the order of the slots
    if longest <= shape.top:
        return rows
    most = _padded(longest)
    return rows + 4 * rows_together(tokens, most) * most
