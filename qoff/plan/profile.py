"""What a machine can do: rates of its links and processors, and the memory that can be used.

`qoff.measure.profile` measures it; a file or a few rates describe a machine that is not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from qoff.errors import ArgumentError, FormatError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.schema import is_number, read_object, shown

VERSION = 2
Array = npt.NDArray[np.float64]
Curve = tuple[tuple[float, float], ...]  # (x, y), ascending in x
_MOST = 1e18  # of any rate
_ROWS = (1, 16, 64, 256, 1024, 4096)  # of a processor that is described by two rates


@dataclass(frozen=True)
class Link:
    """bytes_per_s: of large requests, several in flight. request_s: seconds that each request adds.

    cpu_s_per_byte, cpu_s_per_request: seconds of one core that a byte, and a request whatever its
    size, take from what is computed on the CPU: threads are woken, and interrupt others.
    Raises ArgumentError for what is no rate.
    """

    bytes_per_s: float
    request_s: float = 0.0
    cpu_s_per_byte: float = 0.0
    cpu_s_per_request: float = 0.0

    def __post_init__(self) -> None:
        _check("bytes_per_s", self.bytes_per_s)
        _check("request_s", self.request_s, zero=True)
        _check("cpu_s_per_byte", self.cpu_s_per_byte, zero=True)
        _check("cpu_s_per_request", self.cpu_s_per_request, zero=True)

    def seconds(self, nbytes: float, requests: float) -> float:
        """Seconds that the link is busy."""
        return nbytes / self.bytes_per_s + requests * self.request_s


@dataclass(frozen=True)
class Processor:
    """What computes: a GPU, or all cores of a CPU together.

    matmul: by the bits of a matrix, from rows of x to seconds for each weight; 16 and 32: of
    floats, as training has them. attention: by the
    bits of K and V, from queries of a KV head to seconds for each byte of packed K and V.
    prompt_s: seconds for a query, a key, and a channel of one head, where prompts are read.
    bytes_per_s: of its memory. call_s: seconds that each op adds. near: as matmul, of matrices that
    are still in the last cache, where a layer takes no more than `cache_bytes` of that. Raises
    ArgumentError.
    """

    matmul: Mapping[str, Curve]
    attention: Mapping[str, Curve]
    prompt_s: float
    bytes_per_s: float
    call_s: float = 0.0
    near: Mapping[str, Curve] = field(default_factory=dict)
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_s", "bytes_per_s"):
            _check(name, getattr(self, name))
        _check("call_s", self.call_s, zero=True)
        _check("cache_bytes", self.cache_bytes, zero=True)
        for bits, curve in self.near.items():
            _check_curve(f"near[{bits!r}]", curve)
        for name in ("matmul", "attention"):
            curves = getattr(self, name)
            if not isinstance(curves, Mapping) or "4" not in curves:
                raise ArgumentError(f"{name} is {shown(curves)}; expected curves by bits, with '4'")
            for bits, curve in curves.items():
                _check_curve(f"{name}[{bits!r}]", curve)

    @classmethod
    def of(cls, bytes_per_s: float, flops_per_s: float, call_s: float = 5e-6) -> Self:
        """A processor of which only the memory's rate and the arithmetic's are known."""
        _check("bytes_per_s", bytes_per_s)
        _check("flops_per_s", flops_per_s)
        matmul = {
            str(bits): tuple(
                (float(m), max((bits + scale) / 8 / bytes_per_s, 2 * m / flops_per_s))
                for m in _ROWS
            )
            for bits, scale in ((4, 0.5), (6, 0.5), (8, 0.5), (16, 0), (32, 0))
        }
        attention = {str(bits): ((1.0, 1 / bytes_per_s),) for bits in (4, 8)}
        return cls(matmul, attention, 4 / flops_per_s, bytes_per_s, call_s)

    def slower(self, times: float) -> Self:
        """The same processor where everything takes so many times as long."""

        def longer(curves: Mapping[str, Curve]) -> dict[str, Curve]:
            return {bits: tuple((x, y * times) for x, y in c) for bits, c in curves.items()}

        return type(self)(
            longer(self.matmul),
            longer(self.attention),
            self.prompt_s * times,
            self.bytes_per_s / times,
            self.call_s * times,
            longer(self.near),
            self.cache_bytes,
        )

    def matmul_s(self, bits: int, rows: Array) -> Array:
        """Seconds for each weight that rows of x are multiplied with; x has so many rows."""
        return _at(_nearest(self.matmul, bits), rows)

    def near_s(self, bits: int, rows: Array) -> Array:
        """The same of matrices that are in the last cache; as slow where that was not measured."""
        far = self.matmul_s(bits, rows)
        if not self.near:
            return far
        few = np.minimum(rows, _nearest(self.near, bits)[-1][0])
        part = _at(_nearest(self.near, bits), few) / self.matmul_s(4, few)
        found: Array = far * np.minimum(1.0, part)
        return found

    def attention_s(self, form: KVFormat, group: Array) -> Array:
        """Seconds for each block of a KV head; group: queries of it.

        K and V take their parts, latent V as if they had codes of their own. Codes of fewer bits
        than 4 take as long as those: they become these.
        """
        form = replace(form, k_bits=max(4, form.k_bits), v_bits=max(4, form.v_bits))
        keys = form.v_codes * _at(_nearest(self.attention, form.k_bits), group)
        weighed = form.nbytes - form.v_codes
        if form.latent:  # in the same bytes
            weighed = form.nbytes * form.latent // form.head_dim
        values = weighed * _at(_nearest(self.attention, form.v_bits), group)
        found: Array = keys + values
        return found


@dataclass(frozen=True)
class MachineProfile:
    """A machine. device: what computes; host: the CPU beside a GPU.

    cores: those that compute. usable: bytes by tier that can be used, a reserve left. On a CPU
    device and host are one memory: the bytes of the host are what of it is not the device's.
    notes: what was assumed. Raises ArgumentError for what no machine has.
    """

    name: str
    on_gpu: bool
    cores: int
    device: Processor
    host: Processor
    disk_read: Link
    disk_write: Link
    to_device: Link
    from_device: Link
    usable: Mapping[str, int]
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    version: int = field(default=VERSION)

    def __post_init__(self) -> None:
        if type(self.cores) is not int or not 1 <= self.cores <= 1 << 16:
            raise ArgumentError(f"cores is {shown(self.cores)}; expected a whole number from 1")
        for tier in (DEVICE, HOST, DISK):
            value = self.usable.get(tier)
            if type(value) is not int or not 0 <= value < 1 << 60:
                raise ArgumentError(
                    f"usable[{tier!r}] is {shown(value)}; expected a number of bytes"
                )

    def with_memory(self, **usable: int | None) -> Self:
        """The same machine with other memory on some tiers."""
        changed = {tier: nbytes for tier, nbytes in usable.items() if nbytes is not None}
        return replace(self, usable={**self.usable, **changed})

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file of `text`. Raises FormatError, naming file and field, for any other."""
        found = read_object(path, "measure the machine again (qoff env --measure)")
        try:
            return cls.of_values(found)
        except ArgumentError as error:
            raise FormatError(
                f"{path}: {error}; correct it, or measure again (qoff env --measure)"
            ) from error

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        """From a JSON object. Raises ArgumentError naming what is missing, wrong or too much."""
        if values.get("version") != VERSION:
            raise ArgumentError(f"version is {shown(values.get('version'))}, not {VERSION}")
        given = dict(values)
        for name, kind in _PARTS.items():
            given[name] = _made(kind, given.get(name), name)
        for name in ("name", "fingerprint"):
            if not isinstance(given.get(name, ""), str):
                raise ArgumentError(f"{name} is {shown(given[name])}; expected text")
        if type(given.get("on_gpu")) is not bool:
            raise ArgumentError(f"on_gpu is {shown(given.get('on_gpu'))}; expected true or false")
        if not isinstance(given.get("usable"), dict):
            raise ArgumentError(f"usable is {shown(given.get('usable'))}; expected bytes by tier")
        notes = given.get("notes") or ()
        if not isinstance(notes, list | tuple):
            raise ArgumentError(f"notes is {shown(notes)}; expected a list of texts")
        given["notes"] = tuple(map(str, notes))
        return _known(cls, given, "the profile")


def _at(curve: Curve, x: Array) -> Array:
    """The values at x: linear between logarithms; before the first as there, beyond the last as x.

    With more rows than were measured, seconds grow with the rows.
    """
    points = np.log(np.array(curve))
    found = np.exp(np.interp(np.log(np.maximum(x, 1e-9)), points[:, 0], points[:, 1]))
    grown: Array = found * np.maximum(1.0, x / curve[-1][0])
    return grown


def _nearest(curves: Mapping[str, Curve], bits: int) -> Curve:
    """The curve of so many bits, or of the next more that there is one of; else of the most."""
    return curves[str(min(map(int, curves), key=lambda b: (b < bits, abs(b - bits))))]


_PARTS = {
    "device": Processor,
    "host": Processor,
    "disk_read": Link,
    "disk_write": Link,
    "to_device": Link,
    "from_device": Link,
}


def _made(kind: type, values: Any, name: str) -> Any:
    if not isinstance(values, dict):
        raise ArgumentError(f"{name} is {shown(values)}; expected an object")
    given = dict(values)
    if kind is Processor:
        for curves in ("matmul", "attention", "near"):
            given[curves] = _curves(given.get(curves, {}), f"{name}.{curves}")
    try:
        return _known(kind, given, name)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from error


def _curves(values: Any, name: str) -> dict[str, Curve]:
    try:
        return {str(int(bits)): tuple((x, y) for x, y in points) for bits, points in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is {shown(values)}; expected lists of pairs") from error


def _known(kind: Any, given: dict[str, Any], name: str) -> Any:
    unknown = given.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ArgumentError(f"{name} has no {min(unknown)!r}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ArgumentError(f"{name} is incomplete: {error}") from error


def _check(name: str, value: object, zero: bool = False) -> None:
    if not is_number(value) or not 0 <= value <= _MOST or not (zero or value > 0):  # type: ignore[operator]
        least = "from 0 up" if zero else "above 0"
        raise ArgumentError(f"{name} is {shown(value)}; expected a number {least}")


def _check_curve(name: str, curve: object) -> None:
    if not isinstance(curve, tuple) or not curve:
        raise ArgumentError(f"{name} is {shown(curve)}; expected pairs of numbers")
    for x, y in curve:
        _check(name, x)
        _check(name, y)
    if any(a >= b for (a, _), (b, _) in pairwise(curve)):
        raise ArgumentError(f"{name} is {shown(curve)}; expected pairs in ascending order")
