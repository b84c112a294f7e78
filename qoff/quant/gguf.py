"""Weights of a GGUF file, block formats taken over code for code.

Blocks are 32 elements along K (`ggml-quants.c` of llama.cpp): Q4_0 is a half d and 16 bytes of
codes, w = d * (code - 8); Q4_1 is halves d and m and 16 bytes, w = d * code + m; Q8_0 is a half d
and 32 signed bytes, w = d * code. The nibble order of the 16 bytes is that of packing half32.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFEndian, GGUFReader, ReaderTensor
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from qoff.errors import FormatError
from qoff.kernels.qtensor import QTensor

GROUP_SIZE = 32
_DENSE = ("F32", "F16", "BF16")
_QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
_OFFSETS = {"Q4_0": 8, "Q8_0": 128}  # what is added to make codes unsigned


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
        except (
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            OSError,
            RecursionError,
        ) as error:
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

    def load(self, name: str) -> QTensor | Tensor:
        """Return one tensor, copied out of the file.

        Q4_0, Q4_1 and Q8_0 give a QTensor (half32, group 32) with the file's codes and exactly its
        values; scales are float32 where float16 cannot hold the minimum. F32, F16 and BF16 give a
        dense tensor of that dtype. Raises FormatError for another type, a tensor that is not there,
        or scales or values that are NaN or infinite.
        """
        kind, shape = self.tensor_type(name), self.shape(name)
        if kind not in _QUANTIZED + _DENSE:
            raise FormatError(
                f"{self.path}: tensor {name} has type {kind}; supported are "
                f"{', '.join(_QUANTIZED + _DENSE)}. Use a file of one of these types"
            )
        if kind in _QUANTIZED and (len(shape) != 2 or 0 in shape):
            raise FormatError(
                f"{self.path}: tensor {name} is {kind} with shape {shape}; "
                "only matrices are supported in a quantized type"
            )
        raw = self._find(name).data
        weight: QTensor | Tensor
        if kind in _DENSE:
            weight = values = _dense(raw, kind).view(shape)
        else:
            weight = _quantized(raw, kind, (shape[0], shape[1]))
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
        return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(raw.copy())


def _quantized(raw: NDArray[Any], kind: str, shape: tuple[int, int]) -> QTensor:
    """Return the QTensor of uint8 blocks [N, bytes of a row]."""
    n, k = shape
    blocks = torch.from_numpy(raw.reshape(n, k // GROUP_SIZE, -1).copy())
    code_bytes = 32 if kind == "Q8_0" else 16
    head = blocks[..., :-code_bytes].contiguous().view(torch.float16)  # [N, K/32, 1 or 2]
    codes = blocks[..., -code_bytes:].contiguous().view(n, -1)
    scale_min = head.transpose(0, 1).float()  # [K/32, N, 1 or 2]
    if kind == "Q8_0":
        codes ^= 128  # signed code + 128
    if kind in _OFFSETS:
        scale_min = torch.cat((scale_min, scale_min * -_OFFSETS[kind]), dim=2)
    narrow = scale_min.half()
    exact = bool(torch.equal(narrow.float(), scale_min))
    scale_min = (narrow if exact else scale_min).contiguous()
    return QTensor(codes, scale_min, shape, 4 if code_bytes == 16 else 8, GROUP_SIZE, "half32")
