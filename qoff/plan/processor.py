"""What computes, a CPU or a GPU: seconds of products and attention, from curves that are measured.

`qoff.measure.processor` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from qoff.errors import ArgumentError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.packing import BITS
from qoff.kernels.layout.states import StateShape
from qoff.schema import is_number, shown

Array = npt.NDArray[np.float64]
Curve = tuple[tuple[float, float], ...]  # (x, y), ascending in x
Surface = tuple[tuple[float, Curve], ...]  # (tokens, a curve), ascending in tokens
_Form = TypeVar("_Form", Curve, Surface)
_MOST = 1e18  # of any rate
_NEEDED: Mapping[str, set[str]] = {
    "matmul": {"4", "16", "32"},
    "attention": {"4", "32"},
    **{name: set() for name in ("near", "narrow", "experts")},
}
_ROWS = (1, 16, 64, 256, 1024, 4096)  # of a processor that is described by two rates


@dataclass(frozen=True)
class Processor:
    """What computes: a GPU, or all cores of a CPU together.

    matmul: by the bits of a matrix, from rows of x to seconds for each weight; 16 and 32: of
    floats, as training has them. attention: by the bits of K and V, by tokens of a sequence, from
    queries of a KV head to seconds for each byte of K and V; 32: of those that are not packed.
    prompts: from tokens of a prompt to seconds for a query, a key, and a channel of one head.
    bytes_per_s: of its memory. call_s: seconds that each op adds. near: as matmul, of matrices that
    are still in the last cache, where a layer takes no more than `cache_bytes` of that. narrow: as
    matmul, of activations of 8 bits. experts: as matmul, of experts with so many rows each. Raises
    ArgumentError.
    """

    matmul: Mapping[str, Curve]
    attention: Mapping[str, Surface]
    prompts: Curve
    bytes_per_s: float
    call_s: float = 0.0
    near: Mapping[str, Curve] = field(default_factory=dict)
    cache_bytes: int = 0
    narrow: Mapping[str, Curve] = field(default_factory=dict)
    experts: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check("bytes_per_s", self.bytes_per_s)
        check("call_s", self.call_s, zero=True)
        check("cache_bytes", self.cache_bytes, zero=True)
        _check_curve("prompts", self.prompts)
        for name, needed in _NEEDED.items():
            curves = getattr(self, name)
            if not isinstance(curves, Mapping) or not curves.keys() >= needed:
                least = ", ".join(sorted(needed))
                raise ArgumentError(f"{name} is {shown(curves)}; expected curves for {least} bits")
            for bits, curve in curves.items():
                checked = _check_surface if name == "attention" else _check_curve
                checked(f"{name}[{bits!r}]", curve)

    @classmethod
    def of(cls, bytes_per_s: float, flops_per_s: float, call_s: float = 5e-6) -> Self:
        """A processor of which only the memory's rate and the arithmetic's are known."""
        check("bytes_per_s", bytes_per_s)
        check("flops_per_s", flops_per_s)
        matmul = {
            str(bits): tuple(
                (float(m), max((bits + scale) / 8 / bytes_per_s, 2 * m / flops_per_s))
                for m in _ROWS
            )
            for bits, scale in (*((bits, 0.5) for bits in BITS), (16, 0), (32, 0))
        }
        limited: Surface = ((1.0, ((1.0, 1 / bytes_per_s),)),)
        attention = dict.fromkeys(("4", "8", "32"), limited)
        return cls(matmul, attention, ((1.0, 4 / flops_per_s),), bytes_per_s, call_s)

    def slower(self, times: float) -> Self:
        """The same processor where everything takes so many times as long."""

        def curve(one: Curve) -> Curve:
            return tuple((x, y * times) for x, y in one)

        def longer(curves: Mapping[str, Curve]) -> dict[str, Curve]:
            return {bits: curve(one) for bits, one in curves.items()}

        return replace(
            self,
            matmul=longer(self.matmul),
            attention={
                bits: tuple((tokens, curve(one)) for tokens, one in surface)
                for bits, surface in self.attention.items()
            },
            prompts=curve(self.prompts),
            bytes_per_s=self.bytes_per_s / times,
            call_s=self.call_s * times,
            near=longer(self.near),
            narrow=longer(self.narrow),
            experts=longer(self.experts),
        )

    def matmul_s(self, bits: int, rows: Array, activation_bits: int = 16) -> Array:
        """Seconds for each weight that rows of x are multiplied with; x has so many rows.

        With activations of 8 bits as with 16 where that was not measured.
        """
        wide = _at(_nearest(self.matmul, bits), rows)
        if activation_bits > 8 or not self.narrow:
            return wide
        found: Array = np.minimum(wide, _at(_nearest(self.narrow, bits), rows))
        return found

    def near_s(self, bits: int, rows: Array, activation_bits: int = 16) -> Array:
        """The same of matrices that are in the last cache; as slow where that was not measured."""
        far = self.matmul_s(bits, rows, activation_bits)
        if not self.near:
            return far
        few = np.minimum(rows, _nearest(self.near, bits)[-1][0])
        part = _at(_nearest(self.near, bits), few) / self.matmul_s(4, few)
        found: Array = far * np.minimum(1.0, part)
        return found

    def experts_s(self, bits: int, rows: Array, activation_bits: int = 16) -> Array:
        """The same of experts, each for so many rows; as of others where that was not measured."""
        alone = self.matmul_s(bits, rows, activation_bits)
        if not self.experts:
            return alone
        some = np.minimum(rows, _nearest(self.experts, bits)[-1][0])
        found: Array = alone * _at(_nearest(self.experts, bits), some) / self.matmul_s(4, some)
        return found

    def states_s(self, shape: StateShape, rows: Array, sequences: Array) -> Array:
        """Seconds of a recurrent layer's op, of so many new tokens of these sequences.

        States are read and written once a pass; an element takes as much arithmetic of a token as
        two channels of attention to a key.
        """
        elements = math.prod(shape.memory_shape)
        arithmetic = 2 * elements * rows * self.prompt_s(np.asarray(1.0))
        found: Array = np.maximum(arithmetic, 2 * shape.state_bytes * sequences / self.bytes_per_s)
        return found

    def attention_s(self, form: KVFormat, queries: Array, tokens: Array) -> Array:
        """Seconds for each block of a KV head; queries: of it. tokens: packed ones of a sequence.

        K and V take their parts, latent V as if they had codes of their own. Codes of fewer bits
        than 4 take as long as those: they become these.
        """
        form = replace(form, k_bits=max(4, form.k_bits), v_bits=max(4, form.v_bits))
        of_keys, of_values = (
            _on(_nearest(self.attention, bits), queries, tokens)
            for bits in (form.k_bits, form.v_bits)
        )
        weighed = form.nbytes - form.v_codes
        if form.latent:  # in the same bytes
            weighed = form.nbytes * form.latent // form.head_dim
        found: Array = form.v_codes * of_keys + weighed * of_values
        return found

    def unpacked_s(self, queries: Array, tokens: Array) -> Array:
        """Seconds for each byte of K and V that are not packed, where a token attends to them."""
        return _on(self.attention["32"], queries, tokens)

    def prompt_s(self, tokens: Array) -> Array:
        """Seconds for a query, a key and a channel of one head, in a prompt of so many tokens."""
        return _at(self.prompts, np.minimum(tokens, self.prompts[-1][0]))


def _at(curve: Curve, x: Array) -> Array:
    """The values at x: linear between logarithms; before the first as there, beyond the last as x.

    With more rows than were measured, seconds grow with the rows.
    """
    found = np.exp(np.interp(np.log(np.maximum(x, 1e-9)), *_logarithms(curve)))
    grown: Array = found * np.maximum(1.0, x / curve[-1][0])
    return grown


@lru_cache(64)
def _logarithms(curve: Curve) -> tuple[Array, Array]:
    x, y = np.log(np.array(curve)).T
    return x, y


def _on(surface: Surface, x: Array, tokens: Array) -> Array:
    """The values at x and so many tokens: linear between logarithms; beyond the ends as there."""
    x, tokens = np.broadcast_arrays(np.asarray(x, float), np.asarray(tokens, float))
    lengths = np.log([length for length, _ in surface])
    at = np.interp(np.log(np.maximum(tokens, 1e-9)), lengths, np.arange(len(lengths)))
    each = np.log([_at(curve, x) for _, curve in surface])
    weights = np.maximum(0.0, 1 - np.abs(at - np.arange(len(each)).reshape(-1, *[1] * x.ndim)))
    found: Array = np.exp((each * weights).sum(0))
    return found


def _nearest(curves: Mapping[str, _Form], bits: int) -> _Form:
    """That of so many bits, or of the next more that there is one of; else of the most."""
    return curves[str(min(map(int, curves), key=lambda b: (b < bits, abs(b - bits))))]


def with_curves(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A processor's fields, its curves from lists of pairs. Raises ArgumentError for others."""
    given = dict(values)
    for curves in ("matmul", "near", "narrow", "experts"):
        given[curves] = _curves(given.get(curves, {}), f"{name}.{curves}", _curve)
    given["attention"] = _curves(given.get("attention"), f"{name}.attention", _surface)
    given["prompts"] = _curves({0: given.get("prompts")}, f"{name}.prompts", _curve)["0"]
    return given


def _curve(points: Any) -> Curve:
    return tuple((x, y) for x, y in points)


def _surface(curves: Any) -> Surface:
    return tuple((x, _curve(points)) for x, points in curves)


def _curves(values: Any, name: str, made: Callable[[Any], _Form]) -> dict[str, _Form]:
    try:
        return {str(int(bits)): made(points) for bits, points in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is {shown(values)}; expected lists of pairs") from error


def check(name: str, value: object, zero: bool = False) -> None:
    if not is_number(value) or not 0 <= value <= _MOST or not (zero or value > 0):  # type: ignore[operator]
        least = "from 0 up" if zero else "above 0"
        raise ArgumentError(
            f"{name} is {shown(value)}; expected a number {least}, {_MOST:g} at most"
        )


def _check_curve(name: str, curve: object) -> None:
    if not isinstance(curve, tuple) or not curve:
        raise ArgumentError(f"{name} is {shown(curve)}; expected pairs of numbers")
    for x, y in curve:
        check(name, x)
        check(name, y)
    if any(a >= b for (a, _), (b, _) in pairwise(curve)):
        raise ArgumentError(f"{name} is {shown(curve)}; expected pairs in ascending order")


def _check_surface(name: str, surface: object) -> None:
    if not isinstance(surface, tuple) or not surface:
        raise ArgumentError(f"{name} is {shown(surface)}; expected tokens, each with a curve")
    for tokens, curve in surface:
        _check_curve(f"{name}[{tokens!r}]", curve)
    _check_curve(name, tuple((tokens, 1.0) for tokens, _ in surface))
