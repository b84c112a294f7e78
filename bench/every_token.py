"""Attention to keys and values that have all been packed, down to the token's own.

A real cache keeps the newest tokens unpacked, which hides some of what its form loses. To compare
forms, every block of 64 tokens of a window is packed and unpacked before anything attends to it;
the tokens left over are a block of their own. Caches of llama.cpp are simulated the same way. With
a window, each token attends to the newest tokens as they are, as with a real cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.ops import Ops, ops_for
from qoff.kernels.reference.elementwise import rms_norm, rope
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from qoff.kvcache import KVQuant
from qoff.memory.instrumentation import Instrumentation
from qoff.models.spec import DecoderSpec

GGML_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")

# K and V [tokens, kv_heads, D] of a sequence in a layer, to what is left of them.
Pair = tuple[Tensor, Tensor]
RoundTrip = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def every_token(
    checkpoint: Path,
    round_trip: RoundTrip,
    before_rope: bool,
    window: int | None,
) -> Instrumentation:
    """For a `Runtime` on the CPU: K and V of every token go through `round_trip`.

    window: newest tokens that each token sees as they are, as `KVQuant.window`; None: none.
    """
    layers = DecoderSpec.from_config(Checkpoint.open(checkpoint).config).num_layers
    ops = ops_for(torch.device("cpu"))
    return Instrumentation(ops=EveryTokenOps(ops, round_trip, layers, before_rope, window))


class EveryTokenOps:
    """The ops of a CPU, with attention to packed tokens alone.

    before_rope: K is packed before it is rotated. Windows must be read whole, through all `layers`
    in their order. window: see `every_token`; without sinks, soft caps and sliding windows then.
    """

    def __init__(
        self,
        ops: Ops,
        round_trip: RoundTrip,
        layers: int,
        before_rope: bool = False,
        window: int | None = None,
    ) -> None:
        self._ops, self._round_trip, self._layers = ops, round_trip, layers
        self._before_rope, self._window = before_rope, window
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
        chosen: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `Ops.attention`. Raises ArgumentError for a sequence that was started earlier."""
        if any(span.past for span in ragged.spans):
            raise ArgumentError("where every token is packed, a window has to be read at once")
        assert chosen is None
        layer = self._calls % self._layers
        self._calls += 1
        heads = qkv.unflatten(1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        q, k = (
            x if norm is None else rms_norm(x, norm, shape.norm_eps)
            for x, norm in ((q, q_norm), (k, k_norm))
        )
        if rotary is not None:
            q = rope(q, ragged.positions, *rotary)
        if rotary is not None and not self._before_rope:
            k = rope(k, ragged.positions, *rotary)
        exact = k, v
        pairs = [
            self._round_trip(k[s.start : s.start + s.count], v[s.start : s.start + s.count], layer)
            for s in ragged.spans
        ]
        k, v = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
        if rotary is not None and self._before_rope:
            k = rope(k, ragged.positions, *rotary)
            exact = rope(exact[0], ragged.positions, *rotary), exact[1]
        if self._window is not None:
            if sinks is not None or shape.soft_cap or shape.window is not None:
                raise ArgumentError("a window of unpacked tokens is for plain attention alone")
            found = self._in_use(q, exact, (k, v), shape.scale, ragged)
            return found if out is None else out.copy_(found)
        changed = torch.cat((q, k, v), dim=1).flatten(1)
        return self._ops.attention(changed, shape, cache, ragged, sinks=sinks, out=out)

    def choose(self, *_: Any, **__: Any) -> Tensor:
        """Raises ArgumentError: every token is to be attended to."""
        raise ArgumentError("attention to the tokens that an index chooses is not measured here")

    def _in_use(self, q: Tensor, exact: Pair, packed: Pair, scale: float, ragged: Ragged) -> Tensor:
        """Attention whose newest tokens are exact, [rows, heads * D]."""
        assert self._window is not None
        found = []
        for span in ragged.spans:
            at = slice(span.start, span.start + span.count)
            (k, v), (old_k, old_v) = ([x[at] for x in pair] for pair in (exact, packed))
            found.append(seen_as_they_are(q[at], k, v, old_k, old_v, self._window, scale))
        return torch.cat(found).flatten(1)


def seen_as_they_are(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed_k: Tensor,
    packed_v: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Causal attention of a sequence, [T, heads, D], whose newest keys and values are exact.

    A block of 64 tokens is packed once `window` tokens are behind it.
    """
    tokens, heads = q.shape[:2]
    k, v, packed_k, packed_v = (
        x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v, packed_k, packed_v)
    )
    at = torch.arange(tokens)
    behind = (at // BLOCK_TOKENS + 1) * BLOCK_TOKENS + window
    old = behind[None, :] <= at[:, None] + 1  # [queries, keys]
    scores = torch.where(
        old, torch.einsum("qhd,khd->hqk", q, packed_k), torch.einsum("qhd,khd->hqk", q, k)
    )
    scores = (scale * scores).masked_fill(at[None, :] > at[:, None], -torch.inf)
    part = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", part * old, packed_v) + torch.einsum(
        "hqk,khd->qhd", part * ~old, v
    )


def packed(quant: KVQuant) -> RoundTrip:
    """As qoff's blocks of 64 tokens; `window` and `sinks` are ignored."""

    def round_trip(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        form = quant.form(HeadShape(1, 1, k.shape[-1], 1.0), layer)
        if form is None:
            return k, v
        if not quant.values_rotated:
            return _in_blocks(k, v, form)
        k, v = _in_blocks(k, rotate_values(v), form)
        return k, rotate_values(v, back=True)

    return round_trip


def _in_blocks(k: Tensor, v: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    missing = -len(k) % BLOCK_TOKENS
    # The last token again does not widen the range of anything.
    blocks = [
        torch.cat((x, x[-1:].expand(missing, -1, -1))).unflatten(0, (-1, BLOCK_TOKENS))
        for x in (k, v)
    ]
    opening = (torch.arange(len(blocks[0])) == 0)[:, None]  # [blocks, 1], of all KV heads
    records = quantize_blocks(blocks[0].transpose(1, 2), blocks[1].transpose(1, 2), form, opening)
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in dequantize_blocks(records, form))
    return keys[: len(k)], values[: len(v)]


def ggml(name: str) -> RoundTrip:
    """As a cache of llama.cpp with `--cache-type-k` and `-v` of this type, by the package gguf.

    Raises ArgumentError for another type than those of GGML_TYPES.
    """
    if name not in GGML_TYPES:
        raise ArgumentError(f"no KV cache type of llama.cpp is {name!r}; {', '.join(GGML_TYPES)}")
    import gguf

    kind = gguf.GGMLQuantizationType[name.upper()]

    def kept(x: Tensor) -> Tensor:
        rows = x.float().contiguous().numpy()
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind))

    return lambda k, v, layer: (kept(k), kept(v))
