"""Checkpoints of 8-bit floats, dequantized: their values are not evenly spaced.

A linear module of N outputs and K inputs has `weight` float8_e4m3fn [N, K] and its scales, with
w[n, k] = weight[n, k] * scale. They are called

    weight_scale_inv   by `quant_method` "fp8" (transformers `integrations/finegrained_fp8.py`):
                       DeepSeek V3 and R1, Kimi K2, MiniMax M2, the FP8 models of Qwen 3
    weight_scale       by "fbgemm_fp8", and compressed-tensors' format "float-quantized"

and are for the whole matrix (one value), for each row ([N] or [N, 1]), or for each block of B x C
weights ([ceil(N / B), ceil(K / C)], 128 x 128 in DeepSeek's), in any float dtype or as E8M0, which
holds powers of two (`scale_fmt` "ue8m0"; the same bytes may be called uint8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .compressed_tensors import config_groups
from .stored import FLOATS, Settings, StoredTensors, TensorInfo, checked_scales, checked_shape

FLOAT_QUANTIZED = "float-quantized"  # of compressed-tensors
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_SCALES = (*FLOATS, _E8M0, torch.uint8)


@dataclass(frozen=True)
class FP8:
    """How a model of 8-bit floats is stored.

    scales: what follows a module's name. block: rows and columns that share a scale; None: scales
    are of rows or of whole matrices.
    """

    scales: str
    block: tuple[int, int] | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Read a `quantization_config` of "fp8". Raises UnsupportedModelError, naming the key."""
        settings.one_of("expert_dtype", ("fp8",), "fp8")
        settings.one_of("scale_fmt", ("float", "ue8m0", None), "float")
        key = "weight_block_size"
        whole = settings.values.get(key) is None
        return cls("weight_scale_inv", None if whole else _block(settings, key))

    @classmethod
    def from_compressed(cls, settings: Settings) -> Self:
        """Read one of compressed-tensors' format "float-quantized".

        Activations may be quantized there; here they are not. Raises UnsupportedModelError, naming
        the key, for other widths, strategies, and blocks of several sizes.
        """
        if settings.values.get("transform_config"):
            raise settings.unsupported("transform_config", "none")
        blocks = set()
        for group in config_groups(settings):
            group.one_of("format", (FLOAT_QUANTIZED, None), None)
            weights = group.inner("weights")
            weights.one_of("type", ("float",), "int")
            weights.one_of("num_bits", (8,), None)
            if weights.one_of("strategy", ("tensor", "channel", "block"), None) == "block":
                blocks.add(_block(weights, "block_structure"))
        if len(blocks) > 1:
            raise settings.unsupported("config_groups", "blocks of one size")
        return cls("weight_scale", blocks.pop() if blocks else None)

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        kind = tensors.kind(f"{module}.weight")
        if kind is None or kind[0] != _FP8:
            return None
        shape = checked_shape(tensors, f"{module}.weight", (_FP8,), (None, None))
        self._spread(tensors, module, shape)
        return TensorInfo(shape, None)

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[Tensor]:
        name = f"{module}.weight"
        n, k = checked_shape(tensors, name, (_FP8,), (None, None))
        down, across = self._spread(tensors, module, (n, k))
        scales = self._read(tensors, module).view(-(-n // down), -(-k // across))
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            each = scales[torch.arange(start, stop) // down]  # [rows, ceil(K / across)]
            each = each.repeat_interleave(across, 1)[:, :k] if each.shape[1] > 1 else each
            yield tensors.read(name, start, stop).float() * each

    def _spread(
        self, tensors: StoredTensors, module: str, shape: tuple[int, ...]
    ) -> tuple[int, int]:
        """Rows and columns that share a scale. Raises FormatError unless there are such scales."""
        n, k = shape
        name = f"{module}.{self.scales}"
        dtype, found = tensors.kind(name) or (None, None)
        if found is not None and dtype in _SCALES:
            if math.prod(found) == 1:
                return n, k
            if found in ((n,), (n, 1)):
                return 1, k
        down, across = self.block or (1, k)
        checked_shape(tensors, name, _SCALES, (-(-n // down), -(-k // across)))
        return down, across

    def _read(self, tensors: StoredTensors, module: str) -> Tensor:
        """The scales, float32. Raises FormatError for NaN and infinity."""
        name = f"{module}.{self.scales}"
        scales = tensors.read(name)
        scales = scales.view(_E8M0) if scales.dtype == torch.uint8 else scales
        return checked_scales(tensors, name, scales.float())


def _block(settings: Settings, key: str) -> tuple[int, int]:
    found: Any = settings.values.get(key)
    if not isinstance(found, list) or [type(x) for x in found] != [int, int] or min(found) < 1:
        raise settings.unsupported(key, "two whole numbers above 0")
    return found[0], found[1]
