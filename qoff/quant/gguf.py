"""Tensors and metadata of a GGUF file, block formats taken over code for code.

`gguf_blocks` has the types whose codes a QTensor can hold. Q6_K is not one of them: its groups are
16 elements, half of the smallest that a QTensor has, so its values come as floats.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from qoff.errors import FormatError
from qoff.kernels.layout.qtensor import QTensor

from .gguf_blocks import BLOCK_TYPES, decode_rows

DENSE = ("F32", "F16", "BF16")
TO_FLOATS = ("Q6_K",)
QUANTIZED = (*BLOCK_TYPES, *TO_FLOATS)
_BROKEN = (ValueError, LookupError, TypeError, ArithmeticError, OSError, RecursionError)


class GGUFFile:
    """A GGUF file, memory-mapped: its metadata, and its tensors one at a time.

    Raises FormatError, naming the file, if it is missing, damaged, truncated or big-endian.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"{self.path}: no such file; expected a GGUF file")
        try:
            reader = _StrictReader(self.path)
            self.metadata: dict[str, Any] = {
                name: field.contents()
                for name, field in reader.fields.items()
                if not name.startswith("GGUF.")
            }
        except _BROKEN as error:
            raise FormatError(
                f"{self.path}: cannot be read as GGUF: {error}; the file is damaged, truncated or "
                "of another format, get it again"
            ) from error
        if reader.endianess == GGUFEndian.BIG:
            raise FormatError(f"{self.path}: big-endian GGUF; convert it with gguf-convert-endian")
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in reader.tensors}

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, in file order."""
        return tuple(self._tensors)

    def tensor_type(self, name: str) -> str:
        """Return the GGML type of a tensor, such as "Q4_1". Raises FormatError if there is none."""
        return str(self._find(name).tensor_type.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, rows first. Raises FormatError if there is none."""
        return tuple(int(size) for size in reversed(self._find(name).shape))

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
        raw = self._find(name).data
        raw = raw.copy() if rows is None else raw[rows.numpy()]
        weight: QTensor | Tensor
        if kind in DENSE:
            weight = values = _dense(raw, kind).view(-1, *shape[1:])
        elif kind in TO_FLOATS:
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

    def _find(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise FormatError(
                f"{self.path}: no tensor {name!r} among its {len(self._tensors)} tensors"
            )
        return self._tensors[name]


class _StrictReader(GGUFReader):
    """A reader that stops at the end of the file, where the original goes on with empty values."""

    def _get(
        self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Any = None
    ) -> NDArray[Any]:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if not 0 <= offset <= end <= len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, and byte {end} is wanted")
        return super()._get(offset, dtype, count, override_order)


def _dense(raw: NDArray[Any], kind: str) -> Tensor:
    if kind == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)
