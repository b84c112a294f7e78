"""GPTQ checkpoints of AutoGPTQ and GPTQModel.

A linear module of N outputs and K inputs has (AutoGPTQ `nn_modules/qlinear/qlinear_cuda_old.py`,
GPTQModel `nn_modules/qlinear/__init__.py`)

    qweight int32 [K * bits / 32, N]   codes, packed along K, lowest bits first
    qzeros  int32 [G, N * bits / 32]   zero points, packed along N; less one in format "gptq"
    scales  float16 [G, N]
    g_idx   int32 [K]                  the group of each input; k // group_size without act-order

with w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n], g = g_idx[k].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from qoff.errors import FormatError
from qoff.kernels.layout.qtensor import QTensor

from .grouped import Grouping, unpack_bits
from .stored import (
    FLOATS,
    Settings,
    StoredTensors,
    TensorInfo,
    checked_scales,
    checked_shape,
    column_groups,
)

_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GPTQ:
    """How a GPTQ model is stored; bits and group size are None where they differ by module."""

    bits: int | None
    group_size: int | None
    zero_offset: int  # what is added to stored zero points

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Read `quantization_config` or `quantize_config.json`.

        Raises UnsupportedModelError, naming the key, for other bits or another storage format.
        """
        key = "format" if "checkpoint_format" not in settings.values else "checkpoint_format"
        stored = settings.one_of(key, ("gptq", "gptq_v2"), "gptq")
        settings.one_of("is_marlin_format", (False, None), False)
        settings.one_of("pack_dtype", ("int32",), "int32")
        bits, group_size = settings.one_of("bits", _BITS, None), settings.group_size("group_size")
        offset = 1 if stored == "gptq" else 0
        if settings.values.get("dynamic"):  # modules with their own bits and groups
            return cls(None, None, offset)
        return cls(bits, group_size, offset)

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        grouping = self._grouping(tensors, module)
        return None if grouping is None else grouping.info()

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[QTensor | Tensor]:
        grouping = self._grouping(tensors, module)
        assert grouping is not None
        (n, k), bits = grouping.shape, grouping.bits
        words = tensors.read(f"{module}.qweight")
        return grouping.pieces(
            rows,
            lambda part: unpack_bits(words[:, part].T.contiguous(), bits, k),
            checked_scales(tensors, f"{module}.scales").T,
            self._zeros(tensors.read(f"{module}.qzeros"), bits, n),
        )

    def _grouping(self, tensors: StoredTensors, module: str) -> Grouping | None:
        name = f"{module}.qweight"
        if tensors.kind(name) is None:
            return None
        length, n = checked_shape(tensors, name, (torch.int32,), (None, None))
        groups, _ = checked_shape(tensors, f"{module}.scales", FLOATS, (None, n))
        bits = self.bits or self._bits_of(tensors, module, groups, n)
        checked_shape(tensors, f"{module}.qzeros", (torch.int32,), (groups, -(-n * bits // 32)))
        k, rest = divmod(length * 32, bits)
        if rest:
            raise FormatError(
                f"{tensors.path}: tensor {name} has {length} rows of 32 bits, "
                f"which are no whole number of {bits}-bit codes"
            )
        size = -(-k // groups) if self.group_size is None else self.group_size
        size = k if size == -1 else size
        if groups != -(-k // size):
            raise FormatError(
                f"{tensors.path}: tensor {module}.scales has {groups} groups; expected "
                f"{-(-k // size)} for {k} inputs of group_size {size}"
            )
        order = f"{module}.g_idx"
        columns = column_groups(tensors, order, k, groups, size)
        return Grouping((n, k), bits, columns, f"desc_act, tensor {order}")

    def _zeros(self, words: Tensor, bits: int, n: int) -> Tensor:
        """Return zero points, uint8 [N, G].

        GPTQModel takes the one off whole words, in which a zero point of 0 borrows from the next:
        adding it to whole words undoes that. Codes of 3 bits go across words and have it one by
        one, as in AutoGPTQ.
        """
        if 32 % bits == 0:
            ones = sum(1 << place for place in range(0, 32, bits))
            return unpack_bits(words + ones * self.zero_offset, bits, n).T
        return ((unpack_bits(words, bits, n) + self.zero_offset) & ((1 << bits) - 1)).T

    def _bits_of(self, tensors: StoredTensors, module: str, groups: int, n: int) -> int:
        name = f"{module}.qzeros"
        _, words = checked_shape(tensors, name, (torch.int32,), (groups, None))
        for bits in _BITS:
            if words == -(-n * bits // 32):
                return bits
        raise FormatError(
            f"{tensors.path}: tensor {name} has {words} columns for {n} outputs, which is not "
            f"that of {', '.join(map(str, _BITS))} bits"
        )
