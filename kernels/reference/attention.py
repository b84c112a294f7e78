"""What the attention ops over the packed KV cache mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat

from .kv_blocks import dequantize_blocks, hadamard


def decode_attention(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    length: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    form: KVFormat,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    max_compressed: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One query per sequence, at its last cached token: output [S, Hq, D] and log-sum-exp [S, Hq].

    q [S, Hq, D]. pool uint8 [blocks, kv_heads, form.nbytes]; block_table int32 [S, max_blocks] is
    where tokens 64b..64b+63 of a sequence are; compressed, length int32 [S]: tokens in blocks, and
    all tokens. recent_k, recent_v [S, W, kv_heads, D]: token p of the others is in slot p % W.
    A key p counts when p > length - 1 - window, or always if window is 0. A score is
    scale * q.k, then soft_cap * tanh(score / soft_cap) where that is not 0. sinks float32 [Hq] are
    further scores without values. The log-sum-exp is float32, of natural base. Without any key the
    output is 0. max_compressed bounds `compressed`; only kernels need it.
    """
    outs = torch.zeros_like(q)
    lses = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for s in range(q.shape[0]):
        end = int(length[s])
        k, v = _cached(s, int(compressed[s]), end, pool, block_table, recent_k, recent_v, form)
        out, lse = _attend(
            q[s : s + 1], k, v, end - 1, scale, soft_cap, window, sinks, compute_dtype
        )
        outs[s], lses[s] = out[0], lse[0]
    return outs, lses


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_start: Tensor,
    start: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    form: KVFormat,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    max_rows: int | None = None,
    max_compressed: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Causal attention of new tokens: output [T, Hq, D] and log-sum-exp float32 [T, Hq].

    q [T, Hq, D], k and v [T, kv_heads, D] (rotated by RoPE): rows row_start[s]..row_start[s+1]-1
    (int32 [S + 1]) are the tokens of sequence s at positions start[s].. (int32 [S]). Older tokens
    are in blocks (positions below compressed[s]) or in the ring (compressed[s]..start[s]-1). The
    rest is as in `decode_attention`; max_rows bounds the rows of a sequence.
    """
    outs = torch.zeros_like(q)
    lses = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for s in range(start.shape[0]):
        rows = slice(int(row_start[s]), int(row_start[s + 1]))
        first = int(start[s])
        old_k, old_v = _cached(
            s, int(compressed[s]), first, pool, block_table, recent_k, recent_v, form
        )
        outs[rows], lses[rows] = _attend(
            q[rows],
            [*old_k, (k[rows], False)],
            torch.cat((old_v, v[rows].to(old_v.dtype))),
            first,
            scale,
            soft_cap,
            window,
            sinks,
            compute_dtype,
        )
    return outs, lses


def _cached(
    s: int,
    compressed: int,
    end: int,
    pool: Tensor,
    block_table: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    form: KVFormat,
) -> tuple[list[tuple[Tensor, bool]], Tensor]:
    """K of positions 0..end-1 in pieces [n, kv_heads, D], with whether one is rotated, and V."""
    records = pool[block_table[s, : compressed // BLOCK_TOKENS].long()]  # [B, kv_heads, nbytes]
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in dequantize_blocks(records, form))
    slots = torch.arange(compressed, end, device=pool.device) % recent_k.shape[1]
    ring_k, ring_v = recent_k[s, slots], recent_v[s, slots]
    return [(k, form.rotated), (ring_k, False)], torch.cat((v, ring_v.to(v.dtype)))


def _attend(
    q: Tensor,
    keys: list[tuple[Tensor, bool]],
    v: Tensor,
    first: int,
    scale: float,
    soft_cap: float,
    window: int,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Queries [n, Hq, D] at positions first.. over keys and values at positions 0..."""
    n, heads, dim = q.shape
    group = heads // v.shape[1]
    plain = q.to(dtype).unflatten(1, (-1, group))  # [n, kv_heads, group, D]
    parts = []
    for k, rotated in keys:
        turned = plain @ hadamard(dim, dtype).to(q.device) if rotated else plain
        parts.append(torch.einsum("nhgd,thd->nhgt", turned, k.to(dtype)))
    scores = torch.cat(parts, dim=-1) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(first, first + n, device=q.device)[:, None]
    key = torch.arange(v.shape[0], device=q.device)[None, :]
    seen = key <= position
    if window:
        seen = seen & (key > position - window)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    if sinks is not None:
        sink = sinks.to(dtype).view(-1, group, 1).expand(n, -1, -1, 1)
        scores = torch.cat((scores, sink), -1)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    out = torch.einsum("nhgt,thd->nhgd", p[..., : v.shape[0]], v.to(dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2).float()
