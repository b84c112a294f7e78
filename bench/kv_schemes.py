"""Ways to pack K and V that `bench.kv_accuracy` compares: what each leaves of the two.

Those that qoff has go through its own blocks (`bench.every_token`); the others are
simulated here, on K or V of a layer, float32 [T, kv_heads, D], with scales and minima rounded to
float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.every_token import RoundTrip, ggml, packed
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.rotation import hadamard
from qoff.kvcache import KVQuant

DEFAULT = "4 and 4"
_STORED = 4.5  # bits a value: 4, and a scale and a minimum of 16 bits for 64 values
_FULL = 16.0  # bits of what stays as it is
Keep = Callable[[Tensor], Tensor]  # K or V: what is left of it
Fit = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]  # groups, dim, bits: scale and minimum


@dataclass(frozen=True)
class Scheme:
    """K and V of every layer, and what storing them takes. before_rope: K is packed unrotated."""

    name: str
    bits: float  # a value, of K and V on average, scales and minima included
    round_trip: RoundTrip
    before_rope: bool = False


def schemes() -> list[Scheme]:
    """All that are compared."""
    plain, token = per_channel(min_max), per_token(min_max)
    turned = per_token(min_max, rotated=True)
    own = packed(KVQuant())

    def ours(name: str, bits: float, quant: KVQuant) -> Scheme:
        return Scheme(name, bits, packed(quant))

    def keys(name: str, keep: Keep) -> Scheme:
        return Scheme(f"K alone{name}", (_STORED + _FULL) / 2, both(keep, exact))

    def values(name: str, keep: Keep) -> Scheme:
        return Scheme(f"V alone{name}", (_STORED + _FULL) / 2, both(exact, keep))

    def own_keys(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return own(k, v, layer)[0], v

    return [
        ours(DEFAULT, 4.5, KVQuant(4, 4)),
        ours("8 and 4", 6.5, KVQuant(8, 4)),
        ours("8 and 8", 8.5, KVQuant(8, 8)),
        ours("4 and 4, V as it is", 4.5, KVQuant(values_rotated=False)),
        Scheme("4 and 4, V as it is, first key like the others", 4.5, both(plain, token)),
        Scheme(
            "8 and 4, V as it is, first key like the others",
            6.5,
            both(per_channel(min_max, 8), token),
        ),
        Scheme("4 and 4, both per token, as they are", 4.5, both(token, token)),
        Scheme("4 and 4, both per token, rotated", 4.5, both(turned, turned)),
        Scheme("llama.cpp's q4_0", 4.5, ggml("q4_0")),
        values("", token),
        values(", least squares", per_token(least_squares)),
        values(", rotated", turned),
        values(", rotated, least squares", per_token(least_squares, rotated=True)),
        Scheme("K alone", (_STORED + _FULL) / 2, own_keys),
        Scheme("K alone, before RoPE", (_STORED + _FULL) / 2, own_keys, before_rope=True),
        keys(", first token like the others", plain),
        keys(", first token not packed", without_first(plain, 1)),
        keys(", least squares", per_channel(least_squares)),
        keys(", per token, rotated", turned),
    ]


def exact(x: Tensor) -> Tensor:
    """Nothing is lost."""
    return x


def both(keys: Keep, values: Keep) -> RoundTrip:
    """K and V apart, in every layer."""
    return lambda k, v, layer: (keys(k), values(v))


def per_channel(fit: Fit, bits: int = 4) -> Keep:
    """A scale and a minimum for each channel of a block."""

    def keep(x: Tensor) -> Tensor:
        missing = (
            -len(x) % BLOCK_TOKENS
        )  # the last token again does not widen the range of anything
        groups = torch.cat((x, x[-1:].expand(missing, -1, -1))).unflatten(0, (-1, BLOCK_TOKENS))
        return _rounded(groups, fit, 1, bits).flatten(0, 1)[: len(x)]

    return keep


def per_token(fit: Fit, bits: int = 4, rotated: bool = False) -> Keep:
    """A scale and a minimum for each token of a head. rotated: Hadamard along head_dim first."""

    def keep(x: Tensor) -> Tensor:
        if not rotated:
            return _rounded(x, fit, -1, bits)
        turn = hadamard(x.shape[-1])
        return _rounded(x @ turn, fit, -1, bits) @ turn

    return keep


def without_first(inner: Keep, tokens: int) -> Keep:
    """The first tokens of a sequence stay as they are, and are in no scale."""

    def keep(x: Tensor) -> Tensor:
        rest = torch.cat((x[tokens : tokens + 1].expand_as(x[:tokens]), x[tokens:]))
        return torch.cat((x[:tokens], inner(rest)[tokens:]))

    return keep


def min_max(groups: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """The least and the largest value of a group are its first and last level."""
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    return _stored((high - low) / (2**bits - 1), low)


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


def _stored(scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    return scale.half().float(), low.half().float()


def _codes(x: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    levels = (x - low) / torch.where(scale == 0, torch.inf, scale)
    return levels.round().clamp(0, 2**bits - 1)


def _rounded(groups: Tensor, fit: Fit, dim: int, bits: int) -> Tensor:
    scale, low = fit(groups, dim, bits)
    return _codes(groups, scale, low, bits) * scale + low
