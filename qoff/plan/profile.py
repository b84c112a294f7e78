"""What a machine can do: rates of its links and processors, and the memory that can be used.

`qoff.measure.profile` measures it; a file or a few rates describe a machine that is not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from qoff.errors import ArgumentError, FormatError
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.schema import read_object, shown

from .processor import Processor, check, with_curves

VERSION = 6
IN_FLIGHT = 2  # requests at a time while a link is measured, as slots are


@dataclass(frozen=True)
class Link:
    """bytes_per_s: of large requests, `IN_FLIGHT` of them. request_s: seconds that each of as many
    adds.

    cpu_s_per_byte, cpu_s_per_request: seconds of one core that a byte, and a request whatever its
    size, take from what is computed on the CPU: threads are woken, and interrupt others.
    alone_s: of a small request while no other is under way; 0: as `request_s`.
    Raises ArgumentError for what is no rate.
    """

    bytes_per_s: float
    request_s: float = 0.0
    cpu_s_per_byte: float = 0.0
    cpu_s_per_request: float = 0.0
    alone_s: float = 0.0

    def __post_init__(self) -> None:
        check("bytes_per_s", self.bytes_per_s)
        check("request_s", self.request_s, zero=True)
        check("cpu_s_per_byte", self.cpu_s_per_byte, zero=True)
        check("cpu_s_per_request", self.cpu_s_per_request, zero=True)
        check("alone_s", self.alone_s, zero=True)

    @property
    def small_s(self) -> float:
        """Seconds of a small request while no other is under way."""
        return self.alone_s or self.request_s


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

    def with_link(self, to_device: float, from_device: float) -> Self:
        """With other rates, in bytes/s, between host and device.

        Host memory is written and read beside what they move: it has three times as much at least.
        """
        least = 3 * max(to_device, from_device)
        return replace(
            self,
            to_device=replace(self.to_device, bytes_per_s=to_device),
            from_device=replace(self.from_device, bytes_per_s=from_device),
            host=replace(self.host, bytes_per_s=max(self.host.bytes_per_s, least)),
        )

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
            raise ArgumentError(
                f"it has version {shown(values.get('version'))}, and this qoff needs {VERSION}"
            )
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


def typical(profiles: Sequence[MachineProfile]) -> MachineProfile:
    """The last of some measurements of a machine, with the median of all of them for each rate."""
    values = [asdict(one) for one in profiles]
    rates = {name: _median([one[name] for one in values]) for name in _PARTS}
    return MachineProfile.of_values({**values[-1], **rates})


def _median(values: Sequence[Any]) -> Any:
    """Of numbers, or of what has numbers in the same places."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _median([one[key] for one in values]) for key in first}
    if isinstance(first, Sequence):
        return [_median(some) for some in zip(*values, strict=True)]
    return median(values)


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
    given = with_curves(values, name) if kind is Processor else dict(values)
    try:
        return _known(kind, given, name)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from error


def _known(kind: Any, given: dict[str, Any], name: str) -> Any:
    unknown = given.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ArgumentError(f"{name} has no {min(unknown)!r}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ArgumentError(f"{name} is incomplete: {error}") from error
