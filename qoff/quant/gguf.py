"""Tensors and metadata of a GGUF file, block formats taken over code for code.

`gguf_blocks` has the types whose codes a QTensor can hold. Q6_K is not one of them: its groups are
16 elements, half of the smallest that a QTensor has, so its values come as floats.
"""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.errors import FormatError
from qoff.kernels.layout.qtensor import QTensor

from .gguf_blocks import BLOCK_TYPES, decode_rows
from .gguf_header import BigEndianError, GGUFHeader, GGUFTensor

DENSE = ("F32", "F16", "BF16")
TO_FLOATS = ("Q6_K",)
QUANTIZED = (*BLOCK_TYPES, *TO_FLOATS)
_NUMBERS = {"F32": np.float32, "F16": np.float16}


class GGUFFile:
    """A GGUF file, memory-mapped: its metadata, and its tensors one at a time.

    metadata: as in `GGUFHeader`. Raises FormatError, naming the file, if it is missing, damaged,
    truncated or big-endian.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"{self.path}: no such file; expected a GGUF file")
        try:
            self._data = np.memmap(self.path, mode="r")
            header = GGUFHeader.read(self._data)
        except BigEndianError as error:
            raise FormatError(
                f"{self.path}: big-endian GGUF; convert it with gguf-convert-endian"
            ) from error
        except (ValueError, OSError) as error:
            raise FormatError(
                f"{self.path}: cannot be read as GGUF: {error}; the file is damaged, truncated or "
                "of another format, get it again"
            ) from error
        self.metadata, self._tensors = header.metadata, header.tensors

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, in file order."""
        return tuple(self._tensors)

    def tensor_type(self, name: str) -> str:
        """Return the GGML type of a tensor, such as "Q4_1". Raises FormatError if there is none."""
        return self._find(name).kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, rows first. Raises FormatError if there is none."""
        return self._find(name).shape

    def load(self, name: str, rows: Tensor | None = None) -> QTensor | Tensor:
        """Return one tensor, or some rows of it (int64, in that order), copied out of the file.

        The types of `gguf_blocks` give a QTensor (split32, group 32) with the file's codes and
        exactly its values; Q6_K gives its values in float32; F32, F16 and BF16 give a dense tensor
        of that dtype. Raises FormatError for another type, a tensor that is not there, or scales or
        values that are NaN or infinite.
        """
        kind, shape = self.tensor_type(name), self.shape(name)
        if kind not in QUANTIZED + DENSE:
            raise FormatError(
                f"{self.path}: tensor {name} has type {kind}; supported are "
                f"{', '.join(QUANTIZED + DENSE)}. Use a file of one of these types"
            )
        if kind in QUANTIZED and (len(shape) != 2 or 0 in shape):
            raise FormatError(
                f"{self.path}: tensor {name} is {kind} with shape {shape}; "
                "only matrices are supported in a quantized type"
            )
        raw = self._raw(self._find(name))
        raw = raw.copy() if rows is None else raw[rows.numpy()]
        weight: QTensor | Tensor
        if kind in DENSE:
            weight = values = _dense(raw, kind).view(-1, *shape[1:])
        elif kind in TO_FLOATS:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(invalid="ignore"):  # infinite scales, which are found below
                weight = values = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))
        else:
            weight = decode_rows(torch.from_numpy(raw), kind)
            values = weight.scale_min
        if not bool(torch.isfinite(values).all()):
            raise FormatError(
                f"{self.path}: tensor {name} ({kind}) holds NaN or infinity; "
                "the file is damaged, get it again"
            )
        return weight

    def _raw(self, tensor: GGUFTensor) -> NDArray[Any]:
        """The bytes of a tensor in the file, or its values where they are numbers to numpy."""
        raw = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        rows = math.prod(tensor.shape[:-1])
        if tensor.kind in _NUMBERS:
            return raw.view(_NUMBERS[tensor.kind]).reshape(tensor.shape)
        return raw.reshape(*tensor.shape[:-1], tensor.nbytes // rows if rows else 0)

    def _find(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise FormatError(
                f"{self.path}: no tensor {name!r} among its {len(self._tensors)} tensors"
            )
        return self._tensors[name]


def _dense(raw: NDArray[Any], kind: str) -> Tensor:
    if kind == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)
