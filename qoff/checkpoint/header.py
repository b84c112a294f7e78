"""The header of a weight file: safetensors, padded to a block, with quantized weights described.

A safetensors file is 8 bytes of header length (little endian), a JSON header, and the tensors' data
without holes (https://github.com/huggingface/safetensors#format). The header maps names to dtype,
shape and offsets within the data; `__metadata__` maps strings to strings. Here
`__metadata__["qoff"]` is a JSON object that describes every quantized weight.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch

from qoff.errors import FormatError, OpError
from qoff.kernels.layout.packing import PACKINGS, packed_shapes
from qoff.kernels.layout.scales import SCALE_DTYPES
from qoff.schema import load_object, shown

from .layout import (
    ALIGNMENT,
    CODES,
    DTYPE_NAMES,
    DTYPES,
    SCALE_MIN,
    QuantEntry,
    TensorEntry,
    WeightEntry,
    tensors_of,
)

METADATA, METADATA_KEY = "__metadata__", "qoff"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_DIMENSIONS = 16
_FORMER = ("half32", "cpu16")  # packings of earlier versions, now split32 and rows16


def encode(weights: dict[str, WeightEntry]) -> bytes:
    """Return length and header for weights whose offsets count from the start of the data."""
    described = {
        e.name: {
            "shape": list(e.shape),
            "bits": e.bits,
            "group_size": e.group_size,
            "packing": e.packing,
            "packing_version": PACKINGS[e.packing],
        }
        for e in weights.values()
        if isinstance(e, QuantEntry)
    }
    header: dict[str, Any] = {METADATA: {METADATA_KEY: json.dumps(described)}}
    for entry in weights.values():
        for tensor in tensors_of(entry):
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [tensor.offset, tensor.offset + tensor.nbytes],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def read(path: Path) -> tuple[int, dict[str, WeightEntry]]:
    """Return where the data of a file starts, and its weights, in file order.

    Only the header is read, and nothing is believed of it before it was checked. Raises FormatError
    naming the file for whatever is not a weight file of this format, whole and without holes.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = header_text(file, size)
        start = 8 + len(text)
        header = _object(text, "the header is")
        if start % ALIGNMENT:
            raise ValueError(f"data starts at byte {start}, not at a multiple of {ALIGNMENT}")
        described = _described(header.pop(METADATA, None))
        tensors = [described_tensor(name, value, start) for name, value in header.items()]
        tensors.sort(key=lambda t: (t.offset, t.nbytes))
        _check_contiguous(tensors, start, size)
        return start, _weights(tensors, described)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error
    except ValueError as error:
        advice = "" if isinstance(error, _AdvisedError) else f"; {_AGAIN}"
        raise FormatError(f"{path}: {error}{advice}") from error


_AGAIN = "convert the model again, or fetch the file again"


class _AdvisedError(ValueError):
    """What is wrong, with other advice than `_AGAIN`."""


def _object(text: bytes | str, what: str) -> dict[str, Any]:
    try:
        return load_object(text)
    except ValueError as error:
        raise ValueError(f"{what} not a JSON object ({error})") from error


def header_text(file: BinaryIO, size: int) -> bytes:
    """Read the header of a safetensors file of `size` bytes. Raises ValueError for its length."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise ValueError(
            f"claims a header of {length} bytes, but the file has {size} and a header at most "
            f"{MAX_HEADER}"
        )
    return file.read(length)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def described_tensor(
    name: str, value: Any, start: int, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> TensorEntry:
    """A tensor as a header's JSON describes it, of a file whose data starts at `start`.

    Raises ValueError for what no file could hold; what this one holds is not compared.
    """
    found = value if isinstance(value, dict) else {}
    dtype_name, shape, offsets = (found.get(k) for k in ("dtype", "shape", "data_offsets"))
    wrongly = f"tensor {shown(name)} is described wrongly"
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{wrongly}: shape and offsets must be whole numbers")
    dtype = dtypes.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        known = ", ".join(dtypes)
        raise ValueError(f"{wrongly}: its dtype is {shown(dtype_name)}, not one of {known}")
    # The sizes of an empty tensor could be anything: bound them as if it were not empty.
    if len(shape) > MAX_DIMENSIONS or math.prod(x for x in shape if x) >= 2**60:
        raise ValueError(f"tensor {name!r} has an impossible shape")
    wanted, nbytes = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    described = f"tensor {name!r} of {dtype}"
    if wanted != nbytes:
        raise ValueError(f"{described} {shape} takes {wanted} bytes, but its offsets span {nbytes}")
    if offsets[0] % dtype.itemsize:
        raise ValueError(
            f"{described} starts at byte {offsets[0]} of the data, not at a multiple of "
            f"{dtype.itemsize}"
        )
    return TensorEntry(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _check_contiguous(tensors: list[TensorEntry], start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise ValueError(
                f"tensor {tensor.name!r} starts at byte {tensor.offset} where {end} is expected: a "
                "hole or an overlap"
            )
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"has {size} bytes, but its header describes {end}")


def _described(metadata: Any) -> dict[str, Any]:
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise _AdvisedError(
            f"the header has no readable metadata {METADATA_KEY!r}; this is not a file of a qoff "
            "checkpoint: convert the model with qoff convert"
        )
    return _object(text, f"no readable metadata {METADATA_KEY!r}:")


def _weights(tensors: list[TensorEntry], described: dict[str, Any]) -> dict[str, WeightEntry]:
    by_name = {t.name: t for t in tensors}
    weights: dict[str, WeightEntry] = {}
    for tensor in tensors:
        suffix = next((x for x in (CODES, SCALE_MIN) if tensor.name.endswith(x)), "")
        owner = tensor.name.removesuffix(suffix)
        if not suffix:
            weights[owner] = tensor
        elif owner in by_name:
            raise ValueError(f"{owner!r} is there both whole and in parts")
        elif owner not in weights:
            weights[owner] = _quantized(owner, by_name, described.pop(owner, None))
    if described:
        raise ValueError(f"{min(described)!r} is described, but not there as a quantized weight")
    return weights


def _quantized(name: str, tensors: dict[str, TensorEntry], description: Any) -> QuantEntry:
    for part in (CODES, SCALE_MIN):
        if name + part not in tensors:
            raise ValueError(f"tensor {name + part!r} is missing")
    codes, scale_min = tensors[name + CODES], tensors[name + SCALE_MIN]
    found = description if isinstance(description, dict) else {}
    shape, packing = found.get("shape"), found.get("packing")
    numbers = [found.get(k) for k in ("bits", "group_size", "packing_version")]
    if not (
        isinstance(packing, str) and _are_sizes(numbers) and _are_sizes(shape) and len(shape) == 2
    ):
        raise ValueError(
            f"quantized weight {name!r} is not described: shape, bits, group_size and "
            "packing_version must be whole numbers, packing a name"
        )
    bits, group_size, version = numbers
    if PACKINGS.get(packing) != version:
        known = ", ".join(f"{p} version {v}" for p, v in PACKINGS.items())
        advice = "use a newer qoff or convert the model again"
        if packing in _FORMER:
            advice = "an earlier version wrote it, so convert the model again"
        raise _AdvisedError(
            f"{name!r} is packed as {packing!r} version {version}; this qoff reads {known}: "
            f"{advice}"
        )
    size = (shape[0], shape[1])
    try:
        expected = packed_shapes(size, bits, group_size, packing)
    except OpError as error:
        raise ValueError(f"{name!r}: {error}") from error
    if (codes.shape, scale_min.shape) != expected or codes.dtype != DTYPES["U8"]:
        raise ValueError(
            f"{name!r} {shape} in {bits} bits should have codes and scales {expected}, found "
            f"{codes.dtype} {codes.shape} and {scale_min.shape}"
        )
    if scale_min.dtype not in SCALE_DTYPES:
        raise ValueError(f"scales of {name!r} are {scale_min.dtype}, not uint8, float16 or float32")
    return QuantEntry(name, size, bits, group_size, packing, codes, scale_min)
