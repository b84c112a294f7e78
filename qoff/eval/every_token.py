"""Attention to keys and values that have all been packed, down to the token's own.

A real cache keeps the newest tokens unpacked, and hides some of what its form loses. To compare
forms, every block of 64 tokens of a window is packed and unpacked before anything attends to it,
and what is left over is a block of its own. Also a form that no real cache has: K before RoPE.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.heads import HeadShape
from qoff.kernels.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layer_cache import LayerCache
from qoff.kernels.ops import Ops
from qoff.kernels.ragged import Ragged
from qoff.kernels.reference_elementwise import rms_norm, rope
from qoff.kernels.reference_kv import quantize_blocks, unpack_blocks
from qoff.kvcache import KVQuant


class EveryTokenOps:
    """The ops of a CPU, with attention as the module says.

    quant: of which `window` and `sinks` are not looked at. before_rope: K is packed before it is
    rotated. Windows have to be read whole, and layers in their order.
    """

    def __init__(self, ops: Ops, quant: KVQuant, layers: int, before_rope: bool = False) -> None:
        self._ops, self._quant, self._layers = ops, quant, layers
        self._before_rope = before_rope
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(
        self,
        qkv: Tensor,
        shape: HeadShape,
        cache: LayerCache,
        ragged: Ragged,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `Ops.attention`. Raises ArgumentError where a sequence was begun before."""
        if any(span.past for span in ragged.spans):
            raise ArgumentError("where every token is packed, a window has to be read at once")
        form = self._quant.form(shape.head_dim, self._calls % self._layers)
        self._calls += 1
        heads = qkv.unflatten(1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        q, k = (
            x if norm is None else rms_norm(x, norm, shape.norm_eps)
            for x, norm in ((q, q_norm), (k, k_norm))
        )
        k_first, v = _round_trip(k, v, ragged, form)
        k = k_first if self._before_rope else k
        if rotary is not None:
            q, k = (rope(x, ragged.positions, *rotary) for x in (q, k))
        if not self._before_rope:
            k, _ = _round_trip(k, v, ragged, form)
        changed = torch.cat((q, k, v), dim=1).flatten(1)
        return self._ops.attention(changed, shape, cache, ragged, sinks=sinks, out=out)


def _round_trip(
    k: Tensor, v: Tensor, ragged: Ragged, form: KVFormat | None
) -> tuple[Tensor, Tensor]:
    """K and V [M, kv_heads, D] packed and unpacked, each sequence by itself."""
    if form is None:
        return k, v
    pairs = [
        _sequence(k[s.start : s.start + s.count], v[s.start : s.start + s.count], form)
        for s in ragged.spans
    ]
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def _sequence(k: Tensor, v: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    missing = -len(k) % BLOCK_TOKENS
    # The last token again does not widen the range of anything.
    blocks = [
        torch.cat((x, x[-1:].expand(missing, -1, -1))).unflatten(0, (-1, BLOCK_TOKENS))
        for x in (k, v)
    ]
    packed = quantize_blocks(blocks[0].transpose(1, 2), blocks[1].transpose(1, 2), form)
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in unpack_blocks(packed, form))
    return keys[: len(k)], values[: len(v)]
