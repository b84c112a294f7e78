"""The header of a GGUF file: metadata, and where each tensor lies.

The format is that of `docs/gguf.md` of ggml: after magic, version and two counts come the metadata
and the descriptions of tensors, then, aligned, the tensors' data. Every count and length is
compared with the bytes that are left before anything is made of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {  # by the type's number
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    _BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_NESTING = 4  # arrays in each other
_MAX_DIMENSIONS = 4  # ggml's own
_ALIGNMENT = "general.alignment"
_MAX_ALIGNMENT = 1 << 20
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes of an entry with an empty name


class BigEndianError(ValueError):
    """The file is in the other byte order."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in the file. shape: rows first."""

    name: str
    kind: str  # GGML's name of its type
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: bool, int, float, str, lists of str, and arrays of numbers, views of the file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def read(cls, data: NDArray[np.uint8]) -> GGUFHeader:
        """Read the header of a file's bytes. Raises ValueError saying what is wrong with it."""
        reader = _Reader(data)
        if (magic := reader.take(4)) != _MAGIC:
            raise ValueError(f"its magic is {magic!r}, not {_MAGIC!r}")
        version = reader.number("<I")
        if version & 0xFFFF == 0:
            raise BigEndianError("big-endian GGUF")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported: 2, 3")
        tensors, pairs = reader.number("<Q"), reader.number("<Q")
        reader.check("metadata keys", pairs, _LEAST_PAIR)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = reader.text()
            if name in metadata:
                raise ValueError(f"metadata key {name!r} occurs twice")
            metadata[name] = reader.value(reader.number("<I"))
        reader.check("tensors", tensors, _LEAST_TENSOR)
        described = [_Described.read(reader) for _ in range(tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"{_ALIGNMENT} is {alignment!r}")
        start = -(-reader.at // alignment) * alignment
        return cls(metadata, dict(_placed(described, start, len(data))))


@dataclass(frozen=True)
class _Described:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of the data

    @classmethod
    def read(cls, reader: _Reader) -> _Described:
        name, dimensions = reader.text(), reader.number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reader.number("<Q") for _ in range(dimensions))[::-1]
        return cls(name, shape, reader.number("<I"), reader.number("<Q"))


def _placed(described: list[_Described], start: int, size: int) -> Iterator[tuple[str, GGUFTensor]]:
    """The tensors, each within the file and of a whole number of blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {kind.value: kind for kind in GGMLQuantizationType}
    seen = set[str]()
    for one in described:
        what = f"tensor {one.name!r}"
        if one.name in seen:
            raise ValueError(f"{what} occurs twice")
        seen.add(one.name)
        if one.kind not in known:
            raise ValueError(f"{what} is of the unknown type {one.kind}")
        elements, block = GGML_QUANT_SIZES[known[one.kind]]
        # Empty tensors could have any other size: bound these as if it were not empty.
        if prod(n for n in one.shape if n) >= 1 << 60:
            raise ValueError(f"{what} has an impossible shape")
        if one.shape and one.shape[-1] % elements:
            raise ValueError(f"{what} has rows of {one.shape[-1]} in blocks of {elements}")
        nbytes = prod(one.shape) // elements * block
        end = start + one.offset + nbytes
        if end > size:
            raise ValueError(f"{what} ends at byte {end} of {size}")
        kind = known[one.kind].name
        yield one.name, GGUFTensor(one.name, kind, one.shape, start + one.offset, nbytes)


class _Reader:
    """Reads forward through bytes, never past their end."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._view = data.data
        self.at = 0

    def check(self, what: str, count: int, nbytes: int) -> int:
        """Raise ValueError unless `count` things of at least `nbytes` bytes can follow."""
        left = len(self._data) - self.at
        if count * nbytes > left:
            raise ValueError(
                f"it ends at byte {len(self._data)}: {count} {what} do not fit the {left} bytes "
                "that are left"
            )
        return count

    def take(self, count: int) -> bytes:
        self.check("bytes", count, 1)
        self.at += count
        return bytes(self._view[self.at - count : self.at])

    def number(self, kind: str) -> int:
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def text(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int, nesting: int = 0) -> Any:
        """A value of a type, by its number."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0].item()
        if kind != _ARRAY or nesting >= _MAX_NESTING:
            raise ValueError(f"metadata of type {kind}, {nesting} arrays deep")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            return self._numbers(inner, count)
        if inner == _STRING:
            return self._texts(count)
        self.check("arrays", count, 4 + 8)
        return [self.value(inner, nesting + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        self.check("numbers", count, dtype.itemsize)
        start, self.at = self.at, self.at + count * dtype.itemsize
        raw = self._data[start : self.at]
        return raw != 0 if kind == _BOOL else raw.view(dtype)

    def _texts(self, count: int) -> list[str]:
        """`count` texts; of a vocabulary there are hundreds of thousands."""
        self.check("texts", count, 8)
        view, at, end, found = self._view, self.at, len(self._data), []
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            stop = at + 8
            if stop <= end:
                stop += length_of(view, at)[0]
            if stop > end:
                raise ValueError(f"it ends at byte {end}: a text up to byte {stop} does not fit")
            found.append(str(view[at + 8 : stop], "utf-8"))
            at = stop
        self.at = at
        return found
