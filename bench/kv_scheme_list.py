"""The schemes that `bench.kv_accuracy` compares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from bench.kv_schemes import (
    Keep,
    Scheme,
    before_rope,
    clipped,
    exact,
    least_squares,
    min_max,
    packed_keys,
    packed_values,
    per_channel,
    per_token,
    q4_0,
    towards,
    without_first,
)
from qoff.kernels.layout.kv_format import KVFormat

Rotary = tuple[Tensor, Tensor]  # cos and sin of a window's positions, [T, D / 2]
HEAD_DIM = 64  # of the demo model
DEFAULT = "4 and 4"
_PARAMETERS = 32 / 64  # bits a value: a scale and a minimum of 16 bits for 64 values
FULL = 16.0  # bits of what stays as it is


def schemes(means: Mapping[int, Tensor], rotary: Rotary) -> list[Scheme]:
    """All of them. means: of queries, as `kv_schemes.towards` takes them; without: fewer."""
    return [*_both(), *_values(), *_keys(rotary), *(_with_means(means) if means else ())]


def _both() -> list[Scheme]:
    four, eight, mixed = KVFormat(HEAD_DIM), KVFormat(HEAD_DIM, 8, 8), KVFormat(HEAD_DIM, 8, 4)
    token = KVFormat(HEAD_DIM, k_form="token")
    rotated = KVFormat(HEAD_DIM, k_form="token", rotated=True)

    def own(name: str, form: KVFormat, opening: bool = True, turned: bool = True) -> Scheme:
        keys, values = packed_keys(form, opening), packed_values(form, turned)
        return Scheme(name, form.bits_per_value, keys, values)

    return [
        own(DEFAULT, four),
        own("8 and 4", mixed),
        own("8 and 8", eight),
        own("4 and 4, V as it is", four, turned=False),
        own("4 and 4, V as it is, first key like the others", four, False, False),
        own("8 and 4, V as it is, first key like the others", mixed, False, False),
        own("4 and 4, both per token, as they are", token, False, False),
        own("4 and 4, both per token, rotated", rotated),
        Scheme("llama.cpp's q4_0", 4.5, q4_0, q4_0),
    ]


def _alone(name: str, bits: float, keys: Keep = exact, values: Keep = exact) -> Scheme:
    return Scheme(name, (bits + FULL) / 2, keys, values)


def _values() -> list[Scheme]:
    stored = 4 + _PARAMETERS
    return [
        _alone("V alone", stored, values=per_token(min_max)),
        _alone("V alone, least squares", stored, values=per_token(least_squares)),
        _alone("V alone, clipped", stored, values=per_token(clipped)),
        _alone("V alone, rotated", stored, values=per_token(min_max, rotated=True)),
        _alone(
            "V alone, rotated, least squares", stored, values=per_token(least_squares, rotated=True)
        ),
        _alone("V alone, per channel", stored, values=per_channel(min_max)),
    ]


def _keys(rotary: Rotary) -> list[Scheme]:
    stored = 4 + _PARAMETERS
    plain = per_channel(min_max)
    own = packed_keys(KVFormat(HEAD_DIM))
    alone = partial(_alone, bits=stored)
    return [
        alone("K alone", keys=own),
        alone("K alone, first token like the others", keys=plain),
        alone("K alone, first token not packed", keys=without_first(plain, 1)),
        alone("K alone, 16 tokens not packed", keys=without_first(plain, 16)),
        alone("K alone, least squares", keys=per_channel(least_squares)),
        alone("K alone, clipped", keys=per_channel(clipped)),
        alone("K alone, before RoPE", keys=before_rope(own, *rotary)),
        _alone("K alone, groups of 32", 5, keys=per_channel(min_max, tokens=32)),
        alone("K alone, per token, rotated", keys=per_token(min_max, rotated=True)),
        alone("K alone, q4_0", keys=q4_0),
    ]


def _with_means(means: Mapping[int, Tensor]) -> list[Scheme]:
    stored = 4 + _PARAMETERS
    values = packed_values(KVFormat(HEAD_DIM))
    return [
        _alone("K alone, towards the mean query", stored, keys=towards(means)),
        Scheme("4 and 4, K towards the mean query", stored, towards(means), values),
    ]
