"""Ways to compress K and V that `bench.kv_accuracy` compares: what each leaves of the two.

Each takes K after RoPE (or V) of a layer, float32 [B, kv_heads, T, D] with T a multiple of 64, and
returns what attention would see. Those that qoff has go through its own packing; the others are
simulated, with scales and minima rounded to float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.eval.every_token import ggml_values
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference.kv_blocks import hadamard, quantize_blocks, unpack_blocks
from qoff.kernels.triton.attention.rotation import rotate_values

Keep = Callable[[int, Tensor], Tensor]  # layer, K or V: what is left of it
Fit = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]  # groups, dim, bits: scale and minimum


@dataclass(frozen=True)
class Scheme:
    """K and V of every layer, and what storing them takes."""

    name: str
    bits: float  # a value, of K and V on average, scales and minima included
    keys: Keep
    values: Keep


def exact(_layer: int, x: Tensor) -> Tensor:
    """Nothing is lost."""
    return x


def packed_keys(form: KVFormat, opening: bool = True) -> Keep:
    """K in qoff's records. opening: the first block is packed as one that begins a sequence."""

    def keep(_layer: int, x: Tensor) -> Tensor:
        blocks = x.unflatten(2, (-1, BLOCK_TOKENS))
        first = (torch.arange(blocks.shape[2]) == 0) & opening
        records = quantize_blocks(blocks, torch.zeros_like(blocks), form, first)
        return unpack_blocks(records, form)[0].flatten(2, 3)

    return keep


def packed_values(form: KVFormat, rotated: bool = True) -> Keep:
    """V in qoff's records, rotated before and back after."""

    def keep(_layer: int, x: Tensor) -> Tensor:
        blocks = (rotate_values(x) if rotated else x).unflatten(2, (-1, BLOCK_TOKENS))
        kept = unpack_blocks(quantize_blocks(torch.zeros_like(blocks), blocks, form), form)[1]
        return rotate_values(kept.flatten(2, 3), back=True) if rotated else kept.flatten(2, 3)

    return keep


def min_max(groups: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """The least and the largest value of a group are its first and last level."""
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    return _stored((high - low) / (2**bits - 1), low)


def anchored(groups: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Those of qoff's blocks: the first token of the first block is kept to float16."""
    form = KVFormat(groups.shape[-1], bits)
    opening = torch.arange(groups.shape[2]) == 0
    assert dim == -2, "a scale per channel"
    parts = form.views(quantize_blocks(groups, torch.zeros_like(groups), form, opening))
    return parts[1].float()[..., None, :], parts[2].float()[..., None, :]


def least_squares(groups: Tensor, dim: int, bits: int, rounds: int = 2) -> tuple[Tensor, Tensor]:
    """From min and max, scale and minimum are fitted to the codes, and codes to them, in turn."""
    scale, low = min_max(groups, dim, bits)
    for _ in range(rounds):
        codes = _codes(groups, scale, low, bits)
        means = codes.mean(dim, keepdim=True), groups.mean(dim, keepdim=True)
        apart = codes - means[0]
        spread = apart.square().sum(dim, keepdim=True)
        slope = (apart * (groups - means[1])).sum(dim, keepdim=True) / spread
        scale = torch.where(spread > 0, slope, scale)
        scale, low = _stored(scale, means[1] - scale * means[0])
    return scale, low


def clipped(groups: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """The range around the middle, from 80 to 100 % of it all, with the least squared error."""
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best = min_max(groups, dim, bits)
    least = _error(groups, *best, dim, bits)
    for part in (0.97, 0.94, 0.91, 0.88, 0.85, 0.8):
        found = _stored(2 * half * part / (2**bits - 1), middle - half * part)
        error = _error(groups, *found, dim, bits)
        best = (
            torch.where(error < least, found[0], best[0]),
            torch.where(error < least, found[1], best[1]),
        )
        least = torch.minimum(error, least)
    return best


def per_channel(fit: Fit, bits: int = 4, tokens: int = BLOCK_TOKENS) -> Keep:
    """A scale and a minimum for each channel of `tokens` tokens."""

    def keep(_layer: int, x: Tensor) -> Tensor:
        return _rounded(x.unflatten(2, (-1, tokens)), fit, -2, bits).flatten(2, 3)

    return keep


def per_token(fit: Fit, bits: int = 4, rotated: bool = False) -> Keep:
    """A scale and a minimum for each token of a head. rotated: Hadamard along head_dim first."""

    def keep(_layer: int, x: Tensor) -> Tensor:
        if not rotated:
            return _rounded(x, fit, -1, bits)
        turn = hadamard(x.shape[-1])
        return _rounded(x @ turn, fit, -1, bits) @ turn

    return keep


def q4_0(_layer: int, x: Tensor) -> Tensor:
    """llama.cpp's cache type: 32 channels of a token, the largest by amount is code -8."""
    return ggml_values(x, "q4_0")


def before_rope(inner: Keep, cos: Tensor, sin: Tensor) -> Keep:
    """`inner` sees keys as they were before they were turned by cos and sin [T, D / 2]."""

    def keep(layer: int, x: Tensor) -> Tensor:
        return _turned(inner(layer, _turned(x, cos, -sin)), cos, sin)

    return keep


def without_first(inner: Keep, tokens: int) -> Keep:
    """The first tokens of a sequence stay as they are, and are in no scale."""

    def keep(layer: int, x: Tensor) -> Tensor:
        first = x[:, :, :tokens]
        rest = torch.cat((x[:, :, tokens : tokens + 1].expand_as(first), x[:, :, tokens:]), 2)
        return torch.cat((first, inner(layer, rest)[:, :, tokens:]), 2)

    return keep


def towards(means: Mapping[int, Tensor], fit: Fit = anchored, bits: int = 4) -> Keep:
    """Per channel, with the errors of a token's channels chosen to cancel under the mean query.

    means: of each layer, [kv_heads, D]. Channel after channel is rounded; what a token's score with
    the mean query m is off by then, r, moves the channels to come by r * m_c / (ridge + the sum of
    their m**2), which minimizes r**2 + ridge * the squared errors; ridge: the mean of m**2.
    """

    def keep(layer: int, x: Tensor) -> Tensor:
        blocks = x.unflatten(2, (-1, BLOCK_TOKENS))  # [B, kv_heads, n, 64, D]
        scale, low = (p.movedim(-1, 0) for p in fit(blocks, -2, bits))  # [D, B, kv_heads, n, 1]
        columns = blocks.movedim(-1, 0)
        mean = means[layer].T[:, :, None, None]  # [D, kv_heads, 1, 1]
        rest = mean.square().flip(0).cumsum(0).flip(0) + mean.square().mean(0)
        off, kept = torch.zeros_like(columns[0]), torch.empty_like(columns)
        for c, column in enumerate(columns):
            codes = _codes(column - off * mean[c] / rest[c], scale[c], low[c], bits)
            kept[c] = codes * scale[c] + low[c]
            off += mean[c] * (kept[c] - column)
        return kept.movedim(0, -1).flatten(2, 3)

    return keep


def _stored(scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    return scale.half().float(), low.half().float()


def _codes(x: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    levels = (x - low) / torch.where(scale == 0, torch.inf, scale)
    return levels.round().clamp(0, 2**bits - 1)


def _rounded(groups: Tensor, fit: Fit, dim: int, bits: int) -> Tensor:
    scale, low = fit(groups, dim, bits)
    return _codes(groups, scale, low, bits) * scale + low


def _error(groups: Tensor, scale: Tensor, low: Tensor, dim: int, bits: int) -> Tensor:
    off = _codes(groups, scale, low, bits) * scale + low - groups
    return off.square().sum(dim, keepdim=True)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
