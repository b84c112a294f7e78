"""Tensors and metadata of a GGUF file, or of a model split into several, as one.

`gguf_blocks` has the types whose codes a QTensor can hold. The values of the others come as floats:
their groups have 16 elements, half of the smallest that a QTensor has, or their values are not
evenly spaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.errors import FormatError
from qoff.kernels.layout.qtensor import QTensor

from .gguf_blocks import BLOCK_TYPES, decode_rows, dequantized
from .gguf_header import BigEndianError, GGUFHeader, GGUFTensor
from .gguf_split import check_part, parts

DENSE = ("F32", "F16", "BF16")
TO_FLOATS = (
    *("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
)
QUANTIZED = (*BLOCK_TYPES, *TO_FLOATS)
_NUMBERS = {"F32": np.float32, "F16": np.float16}


class GGUFFile:
    """A GGUF file, memory-mapped: its metadata, and its tensors one at a time.

    One of several parts stands for all of them, with the metadata of the first. metadata: as in
    `GGUFHeader`. Raises FormatError, naming the file, if it is missing, damaged, truncated or
    big-endian, or if a part is.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"{self.path}: no such file; expected a GGUF file")
        self.metadata: Mapping[str, Any] = {}
        self._tensors: dict[str, tuple[NDArray[np.uint8], GGUFTensor]] = {}
        paths = parts(self.path)
        for number, part in enumerate(paths):
            data, header = _opened(part)
            check_part(part, header.metadata, number, len(paths))
            for name in header.tensors:
                if name in self._tensors:
                    raise FormatError(f"{part}: tensor {name} is in another part, too")
            self.metadata = self.metadata or header.metadata
            self._tensors |= {name: (data, one) for name, one in header.tensors.items()}

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, in file order."""
        return tuple(self._tensors)

    def tensor_type(self, name: str) -> str:
        """Return the GGML type of a tensor, such as "Q4_1". Raises FormatError if there is none."""
        return self._find(name)[1].kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, rows first. Raises FormatError if there is none."""
        return self._find(name)[1].shape

    def load(self, name: str, rows: Tensor | None = None) -> QTensor | Tensor:
        """Return one tensor, or some rows of it (int64, in that order), copied out of the file.

        The types of `gguf_blocks` give a QTensor (split32, group 32) with the file's codes and
        exactly its values; TO_FLOATS give their values in float32; F32, F16 and BF16 give a dense
        tensor of that dtype. Raises FormatError for another type, a tensor that is not there, or
        scales or values that are NaN or infinite.
        """
        kind, shape = self._kind(name), self.shape(name)
        if kind in QUANTIZED and len(shape) != 2:
            raise FormatError(
                f"{self.path}: tensor {name} is {kind} with shape {shape}; "
                "only matrices are supported in a quantized type"
            )
        raw = self._raw(name)
        return self._decoded(name, kind, raw.copy() if rows is None else raw[rows.numpy()])

    def item(self, name: str, index: int) -> QTensor | Tensor:
        """Return one matrix of a tensor of three dimensions, as `load` does."""
        kind = self._kind(name)
        return self._decoded(name, kind, self._raw(name)[index].copy())

    def _kind(self, name: str) -> str:
        """The type of a tensor. Raises FormatError for one that cannot be read."""
        kind, shape = self.tensor_type(name), self.shape(name)
        if kind not in QUANTIZED + DENSE:
            raise FormatError(
                f"{self.path}: tensor {name} has type {kind}; supported are "
                f"{', '.join(QUANTIZED + DENSE)}. Use a file of one of these types"
            )
        if kind in QUANTIZED and 0 in shape:
            raise FormatError(f"{self.path}: tensor {name} is {kind} with shape {shape}")
        return kind

    def _decoded(self, name: str, kind: str, raw: NDArray[Any]) -> QTensor | Tensor:
        """Rows as they lie in the file, of the shape [n, ...], as numbers."""
        weight: QTensor | Tensor
        if kind in DENSE:
            weight = values = _dense(raw, kind)
        elif kind in TO_FLOATS:
            weight = values = torch.from_numpy(dequantized(raw, kind))
        else:
            weight = decode_rows(torch.from_numpy(raw), kind)
            values = weight.scale_min
        if not bool(torch.isfinite(values).all()):
            raise FormatError(
                f"{self.path}: tensor {name} ({kind}) holds NaN or infinity; "
                "the file is damaged, get it again"
            )
        return weight

    def _raw(self, name: str) -> NDArray[Any]:
        """The bytes of a tensor in the file, or its values where they are numbers to numpy."""
        data, tensor = self._find(name)
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.kind in _NUMBERS:
            return raw.view(_NUMBERS[tensor.kind]).reshape(tensor.shape)
        if tensor.kind == "BF16":
            return raw.view(np.int16).reshape(tensor.shape)
        rows = math.prod(tensor.shape[:-1])
        return raw.reshape(*tensor.shape[:-1], tensor.nbytes // rows)

    def _find(self, name: str) -> tuple[NDArray[np.uint8], GGUFTensor]:
        if name not in self._tensors:
            raise FormatError(
                f"{self.path}: no tensor {name!r} among its {len(self._tensors)} tensors"
            )
        return self._tensors[name]


def _opened(path: Path) -> tuple[NDArray[np.uint8], GGUFHeader]:
    try:
        data = np.memmap(path, mode="r")
        return data, GGUFHeader.read(data)
    except BigEndianError as error:
        raise FormatError(
            f"{path}: big-endian GGUF; convert it with gguf-convert-endian"
        ) from error
    except (ValueError, OSError) as error:
        raise FormatError(
            f"{path}: cannot be read as GGUF: {error}; the file is damaged, truncated or "
            "of another format, get it again"
        ) from error


def _dense(raw: NDArray[Any], kind: str) -> Tensor:
    values = torch.from_numpy(raw)
    return values.view(torch.bfloat16) if kind == "BF16" else values
