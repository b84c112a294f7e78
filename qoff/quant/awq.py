"""AWQ checkpoints of AutoAWQ, version "gemm".

A linear module of N outputs and K inputs has (AutoAWQ `modules/linear/gemm.py`)

    qweight int32 [K, N / 8]   codes of 4 bits, packed along N
    qzeros  int32 [G, N / 8]   zero points, packed along N
    scales  float16 [G, N]

with w[n, k] = (code[k, n] - zero[g, n]) * scale[g, n], g = k // group_size. From its lowest bits on
a word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from qoff.errors import FormatError
from qoff.kernels.layout.qtensor import QTensor

from .grouped import Grouping
from .stored import FLOATS, Settings, StoredTensors, TensorInfo, checked_scales, checked_shape

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of its word each of eight outputs is


@dataclass(frozen=True)
class AWQ:
    """How an AWQ model is stored."""

    group_size: int  # -1: one group a row

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Read `quantization_config`, or `quant_config.json` of older versions.

        Raises UnsupportedModelError, naming the key, for another version or another width.
        """
        settings.one_of("version", ("gemm", "GEMM"), "gemm")
        settings.one_of("bits" if "bits" in settings.values else "w_bit", (_BITS,), None)
        settings.one_of("zero_point", (True,), True)
        return cls(settings.group_size("group_size", "q_group_size"))

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        grouping = self._grouping(tensors, module)
        return None if grouping is None else grouping.info()

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[QTensor | Tensor]:
        grouping = self._grouping(tensors, module)
        assert grouping is not None
        words = tensors.read(f"{module}.qweight")
        return grouping.pieces(
            rows,
            lambda part: _outputs(words[:, part.start // 8 : part.stop // 8]),
            checked_scales(tensors, f"{module}.scales").T,
            _outputs(tensors.read(f"{module}.qzeros")),
        )

    def _grouping(self, tensors: StoredTensors, module: str) -> Grouping | None:
        name = f"{module}.qweight"
        if tensors.kind(name) is None:
            return None
        k, words = checked_shape(tensors, name, (torch.int32,), (None, None))
        n, size = words * 8, k if self.group_size == -1 else self.group_size
        if k % size:
            raise FormatError(
                f"{tensors.path}: tensor {name} has {k} inputs; expected a multiple of "
                f"group_size {size}"
            )
        checked_shape(tensors, f"{module}.scales", FLOATS, (k // size, n))
        checked_shape(tensors, f"{module}.qzeros", (torch.int32,), (k // size, words))
        return Grouping((n, k), _BITS, torch.arange(k) // size)


def _outputs(words: Tensor) -> Tensor:
    """Unpack int32 [R, N / 8] into uint8 [N, R]."""
    out = torch.empty(words.shape[1], len(_PLACES), words.shape[0], dtype=torch.uint8)
    for output, place in enumerate(_PLACES):
        out[:, output] = ((words >> (_BITS * place)) & 15).T
    return out.flatten(0, 1)
