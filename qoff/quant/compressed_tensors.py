"""Checkpoints of compressed-tensors (llm-compressor, vLLM) with integer weights alone (W4A16).

In its format "pack-quantized" a linear module of N outputs and K inputs has (compressed-tensors
`compressors/pack_quantized`)

    weight_packed     int32 [N, K * bits / 32]   codes, packed along K, lowest bits first
    weight_scale      float [N, G]
    weight_shape      integer [2]                N and K
    weight_zero_point int32 [N * bits / 32, G]   if asymmetric; packed along N (int8 [N, G] before
                                                 version 0.9, not packed)
    weight_g_idx      int32 [K]                  the group of each input, with actorder "group"

with w[n, k] = (code - zero) * scale. Codes and packed zero points are unsigned, 2**(bits - 1) more
than the signed values of that library.
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

_FORMAT = "pack-quantized"
_BITS = (2, 4, 8)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class CompressedTensors:
    """How a model of this format is stored: the bits that any of its modules has."""

    bits: tuple[int, ...]

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Read `quantization_config`.

        Raises UnsupportedModelError, naming the key, for floating-point or sparse weights,
        quantized activations, rotations, and widths or strategies without an implementation.
        """
        stored = settings.one_of("format", (_FORMAT, "mixed-precision"), None)
        if settings.values.get("transform_config"):
            raise settings.unsupported("transform_config", "none")
        settings.inner("sparsity_config").one_of("format", ("dense",), "dense")
        groups = config_groups(settings)
        return cls(tuple(sorted({_bits(group, stored) for group in groups})))

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        grouping = self._grouping(tensors, module)
        return None if grouping is None else grouping.info()

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[QTensor | Tensor]:
        grouping = self._grouping(tensors, module)
        assert grouping is not None
        (n, k), bits = grouping.shape, grouping.bits
        scales = checked_scales(tensors, f"{module}.weight_scale")
        zeros = _zeros(tensors, f"{module}.weight_zero_point", (n, scales.shape[1]), bits)

        def codes(part: slice) -> Tensor:
            words = tensors.read(f"{module}.weight_packed", part.start, part.stop)
            return unpack_bits(words, bits, k)

        return grouping.pieces(rows, codes, scales, zeros)

    def _grouping(self, tensors: StoredTensors, module: str) -> Grouping | None:
        name = f"{module}.weight_packed"
        if tensors.kind(name) is None:
            return None
        checked_shape(tensors, f"{module}.weight_shape", _INTEGERS, (2,))
        n, k = (int(size) for size in tensors.read(f"{module}.weight_shape"))
        _, words = checked_shape(tensors, name, (torch.int32,), (n, None))
        fitting = [bits for bits in self.bits if words == -(-k * bits // 32)]
        if not fitting:
            raise FormatError(
                f"{tensors.path}: tensor {name} has {words} columns for {k} inputs; "
                f"expected those of {' or '.join(map(str, self.bits))} bits"
            )
        _, groups = checked_shape(tensors, f"{module}.weight_scale", FLOATS, (n, None))
        if k % groups:
            raise FormatError(
                f"{tensors.path}: tensor {module}.weight_scale has {groups} groups, "
                f"which do not divide {k} inputs"
            )
        zeros = f"{module}.weight_zero_point"
        if (kind := tensors.kind(zeros)) is not None:
            rows = n if kind[0] == torch.int8 else -(-n * fitting[0] // 32)
            checked_shape(tensors, zeros, (torch.int32, torch.int8), (rows, groups))
        order = f"{module}.weight_g_idx"
        columns = column_groups(tensors, order, k, groups, k // groups)
        return Grouping((n, k), fitting[0], columns, f"actorder, tensor {order}")


def config_groups(settings: Settings) -> list[Settings]:
    """Return the groups of modules that a config has, at least one."""
    groups = settings.inner("config_groups")
    if not groups.values:
        raise settings.unsupported("config_groups", "an object with a group of modules")
    return [groups.inner(key) for key in groups.values]


def _bits(outer: Settings, stored: str) -> int:
    """Return the bits of one of the groups of modules that a config has."""
    outer.one_of("format", (_FORMAT,) if stored != _FORMAT else (_FORMAT, None), None)
    for name in ("input_activations", "output_activations"):
        if outer.values.get(name) is not None:
            raise outer.unsupported(name, "null (weights alone)")
    weights = outer.inner("weights")
    weights.one_of("type", ("int",), "int")
    weights.one_of("strategy", ("group", "channel"), None)
    return int(weights.one_of("num_bits", _BITS, None))


def _zeros(tensors: StoredTensors, name: str, shape: tuple[int, int], bits: int) -> Tensor:
    """Return unsigned zero points [N, G]."""
    offset = 1 << (bits - 1)
    kind = tensors.kind(name)
    if kind is None:
        return torch.tensor(offset).expand(shape)
    stored = tensors.read(name)
    if kind[0] == torch.int8:
        return stored.int() + offset
    return unpack_bits(stored.T.contiguous(), bits, shape[0]).T
