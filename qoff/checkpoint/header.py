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
from pathlib import Path
from typing import Any, BinaryIO

from qoff.errors import FormatError, OpError
from qoff.kernels.packing import PACKINGS, packed_shapes

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
MAX_HEADER = 100 << 20  # bytes; the limit of the safetensors library


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
            text = _header_text(path, file, size)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error
    header = _parse(path, text)
    start = 8 + len(text)
    if start % ALIGNMENT:
        raise FormatError(
            f"{path}: data starts at byte {start}, not at a multiple of {ALIGNMENT}; {_AGAIN}"
        )
    metadata = header.pop(METADATA, None)
    tensors = [_tensor(path, name, value, start) for name, value in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_contiguous(path, tensors, start, size)
    return start, _weights(path, tensors, _described(path, metadata))


_AGAIN = "convert the model again, or fetch the file again"


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise FormatError(
            f"{path}: claims a header of {length} bytes, but the file has {size}; {_AGAIN}"
        )
    return file.read(length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON ({error}); {_AGAIN}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object; {_AGAIN}")
    return header


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


def _tensor(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    try:
        dtype, shape, offsets = DTYPES[value["dtype"]], value["shape"], value["data_offsets"]
        if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2):
            raise ValueError("shape or offsets are not whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path}: tensor {name!r} is described wrongly ({error!r}); {_AGAIN}"
        ) from error
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise FormatError(
            f"{path}: tensor {name!r} of {dtype} {shape} takes "
            f"{math.prod(shape) * dtype.itemsize} bytes, but its offsets span {nbytes}; {_AGAIN}"
        )
    return TensorEntry(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _check_contiguous(path: Path, tensors: list[TensorEntry], start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise FormatError(
                f"{path}: tensor {tensor.name!r} starts at byte {tensor.offset} where "
                f"{end} is expected: a hole or an overlap; {_AGAIN}"
            )
        if tensor.offset % tensor.dtype.itemsize:
            raise FormatError(
                f"{path}: tensor {tensor.name!r} of {tensor.dtype} starts at byte {tensor.offset}, "
                f"not at a multiple of {tensor.dtype.itemsize}; {_AGAIN}"
            )
        end += tensor.nbytes
    if end != size:
        raise FormatError(f"{path}: has {size} bytes, but its header describes {end}; {_AGAIN}")


def _described(path: Path, metadata: Any) -> dict[str, Any]:
    try:
        found = json.loads(metadata[METADATA_KEY], object_pairs_hook=_no_duplicates)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: the header has no readable metadata {METADATA_KEY!r}; "
            "this is no file of a qoff checkpoint: convert the model with qoff convert"
        ) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: metadata {METADATA_KEY!r} is not a JSON object; {_AGAIN}")
    return found


def _weights(
    path: Path, tensors: list[TensorEntry], described: dict[str, Any]
) -> dict[str, WeightEntry]:
    by_name = {t.name: t for t in tensors}
    weights: dict[str, WeightEntry] = {}
    for tensor in tensors:
        owner = tensor.name.removesuffix(CODES).removesuffix(SCALE_MIN)
        if owner == tensor.name:
            weights[tensor.name] = tensor
        elif owner not in weights:
            weights[owner] = _quantized(path, owner, by_name, described)
    if missing := described.keys() - weights.keys():
        raise FormatError(f"{path}: {min(missing)!r} is described, but not there; {_AGAIN}")
    return weights


def _quantized(
    path: Path, name: str, tensors: dict[str, TensorEntry], described: dict[str, Any]
) -> QuantEntry:
    for part in (CODES, SCALE_MIN):
        if name + part not in tensors:
            raise FormatError(f"{path}: tensor {name + part!r} is missing; {_AGAIN}")
    codes, scale_min = tensors[name + CODES], tensors[name + SCALE_MIN]
    try:
        found = described[name]
        (n, k), bits, group_size = found["shape"], found["bits"], found["group_size"]
        packing, version = found["packing"], found["packing_version"]
        if not (_is_sizes([n, k, bits, group_size]) and isinstance(packing, str)):
            raise ValueError("shape, bits and group_size must be whole numbers, packing a name")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path}: quantized weight {name!r} is not described ({error!r}); {_AGAIN}"
        ) from error
    if PACKINGS.get(packing) != version:
        known = ", ".join(f"{p} version {v}" for p, v in PACKINGS.items())
        raise FormatError(
            f"{path}: {name!r} is packed as {packing} version {version}; this qoff reads {known}: "
            "use a newer qoff or convert the model again"
        )
    try:
        expected = packed_shapes((n, k), bits, group_size, packing)
    except OpError as error:
        raise FormatError(f"{path}: {name!r}: {error}; {_AGAIN}") from error
    if (codes.shape, scale_min.shape) != expected or codes.dtype != DTYPES["U8"]:
        raise FormatError(
            f"{path}: {name!r} [{n}, {k}] in {bits} bits should have codes and scales "
            f"{expected}, found {codes.shape}, {scale_min.shape}; {_AGAIN}"
        )
    if scale_min.dtype not in (DTYPES["F16"], DTYPES["F32"]):
        raise FormatError(
            f"{path}: scales of {name!r} are {scale_min.dtype}, not float16 or float32; {_AGAIN}"
        )
    return QuantEntry(name, (n, k), bits, group_size, packing, codes, scale_min)
