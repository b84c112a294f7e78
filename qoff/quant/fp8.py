"""Checkpoints of 8-bit floats, dequantized: their values are not evenly spaced.

A linear module of N outputs and K inputs has `weight` float8_e4m3fn [N, K] and its scales, with
w[n, k] = weight[n, k] * scale. They are called

    weight_scale_inv   by `quant_method` "fp8" (transformers `integrations/finegrained_fp8.py`):
                       DeepSeek V3 and R1, Kimi K2, MiniMax M2, the FP8 models of Qwen 3; DeepSeek
                       V4 calls them scale, Mistral Large 4 qscale_weight
    weight_scale       by "fbgemm_fp8", and compressed-tensors' format "float-quantized"

and are for the whole matrix (one value), for each row ([N] or [N, 1]), or for each block of B x C
weights ([ceil(N / B), ceil(K / C)], 128 x 128 in DeepSeek's), in any float dtype or as E8M0, which
holds powers of two (`scale_fmt` "ue8m0"; the same bytes may be called uint8).

By `expert_dtype` "fp4" (DeepSeek V4) matrices of experts are 4-bit floats, E2M1 as in MXFP4:
`weight` int8 [N, K / 2], two values a byte, and the scales of 32 columns each, [N, K / 32].

All experts of a layer may be one tensor [E, N, K], or [E, K, N] as in Llama 4, whose scales are
called like `gate_up_proj_scale_inv` or `gate_up_proj.weight_scale`. There is one for each matrix
([E], [E, 1, 1]), for its gate and its up ([E, 2, 1]), for each row ([E, N, 1]) or column
([E, 1, K]), or for each block ([E, ceil(N / B), ceil(K / C)]).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from qoff.errors import FormatError

from .compressed_tensors import config_groups
from .mxfp4 import GROUP, e2m1
from .stored import (
    FLOATS,
    Settings,
    StoredTensors,
    TensorInfo,
    checked_kind,
    checked_scales,
    checked_shape,
    short,
)

FLOAT_QUANTIZED = "float-quantized"  # of compressed-tensors
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PAIRS = (torch.int8,)  # of 4-bit floats
# What scales may be called instead.
_OTHER_NAMES = {"weight_scale_inv": ("scale", "qscale_weight")}
_SCALES = (*FLOATS, _E8M0, torch.uint8)
_OF_INPUTS = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class FP8:
    """How a model of 8-bit floats is stored.

    scales: what follows a module's name. block: rows and columns that share a scale; None: scales
    are of rows or of whole matrices. columns: outputs of experts in one tensor are its columns.
    fp4: matrices may be 4-bit floats.
    """

    scales: str
    block: tuple[int, int] | None = None
    columns: bool = False
    fp4: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Read a `quantization_config` of "fp8". Raises UnsupportedModelError, naming the key."""
        fp4 = settings.one_of("expert_dtype", ("fp8", "fp4"), "fp8") == "fp4"
        settings.one_of("scale_fmt", ("float", "ue8m0", None), "float")
        key = "weight_block_size"
        whole = settings.values.get(key) is None
        return cls("weight_scale_inv", None if whole else _block(settings, key), fp4=fp4)

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
        if kind is None or not self._is_code(kind[0]) or len(kind[1]) == 3:
            return None
        if kind[0] != _FP8:
            return TensorInfo(self._checked_fp4(tensors, module), None)
        shape = checked_shape(tensors, f"{module}.weight", (_FP8,), (None, None))
        self._spread(tensors, module, shape)
        return TensorInfo(shape, None)

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[Tensor]:
        name = f"{module}.weight"
        if checked_kind(tensors, name)[0] != _FP8:
            yield from self._pieces_of_fp4(tensors, module, rows)
            return
        n, k = checked_shape(tensors, name, (_FP8,), (None, None))
        down, across = self._spread(tensors, module, (n, k))
        scales = _read(tensors, self._scales_of(tensors, name)).view(-(-n // down), -(-k // across))
        for start in range(0, n, rows):
            codes = tensors.read(name, start, min(start + rows, n))
            yield _values(codes, scales, down, across, start)

    def stack(self, tensors: StoredTensors, name: str) -> TensorInfo | None:
        """Describe experts of one tensor, [experts, rows, columns], None if these are no codes.

        Raises FormatError naming their scales where these are missing or of another shape.
        """
        kind = tensors.kind(name)
        if kind is None or kind[0] != _FP8 or len(kind[1]) != 3:
            return None
        self._spread_of_stack(tensors, name, kind[1])
        return TensorInfo(kind[1], None)

    def item(self, tensors: StoredTensors, name: str, index: int) -> Tensor:
        """One expert, float32 [rows, columns]. Raises FormatError for scales that are NaN."""
        experts, n, k = checked_shape(tensors, name, (_FP8,), (None, None, None))
        scales_name = self._scales_of(tensors, name)
        down, across = self._spread_of_stack(tensors, name, (experts, n, k))
        _, shape = checked_kind(tensors, scales_name)
        own = shape[0] // experts if math.prod(shape) > 1 else 0  # 0: one scale for all
        first, last = (index * own, (index + 1) * own) if own else (0, None)
        scales = _read(tensors, scales_name, first, last).view(-(-n // down), -(-k // across))
        return _values(tensors.read(name, index, index + 1)[0], scales, down, across)

    def beside(self, tensors: StoredTensors, names: Iterable[str]) -> set[str]:
        """Those of some tensors that are scales, of weights or of what these multiply."""
        found = set[str]()
        for name in names:
            if self._is_code(checked_kind(tensors, name)[0]):
                found.add(self._scales_of(tensors, name))
            elif name.endswith(_OF_INPUTS):
                found.add(name)
        return found

    def _scales_of(self, tensors: StoredTensors, name: str) -> str:
        """What the scales of a tensor are called; where there are none, what they should be."""
        stem = name.removesuffix(".weight")
        names = [f"{stem}.{one}" for one in (*_OTHER_NAMES.get(self.scales, ()), self.scales)]
        if stem == name:
            names += [f"{name}_{self.scales}", f"{name}_{self.scales.removeprefix('weight_')}"]
        return next((one for one in names if tensors.kind(one) is not None), names[-1])

    def _is_code(self, dtype: torch.dtype) -> bool:
        """Whether tensors of a dtype are codes, with scales."""
        return dtype == _FP8 or (self.fp4 and dtype in _PAIRS)

    def _checked_fp4(self, tensors: StoredTensors, module: str) -> tuple[int, int]:
        """Rows and columns of a matrix of 4-bit floats. Raises FormatError for other scales."""
        name = f"{module}.weight"
        n, pairs = checked_shape(tensors, name, _PAIRS, (None, None))
        scales = self._scales_of(tensors, name)
        checked_shape(tensors, scales, _SCALES, (n, -(-2 * pairs // GROUP)))
        return n, 2 * pairs

    def _pieces_of_fp4(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[Tensor]:
        name = f"{module}.weight"
        n, _ = self._checked_fp4(tensors, module)
        scales = self._scales_of(tensors, name)
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            values = e2m1(tensors.read(name, start, stop).view(torch.uint8))
            yield _values(values, _read(tensors, scales, start, stop), 1, GROUP)

    def _spread(
        self, tensors: StoredTensors, module: str, shape: tuple[int, ...]
    ) -> tuple[int, int]:
        """Rows and columns that share a scale. Raises FormatError unless there are such scales."""
        n, k = shape
        name = self._scales_of(tensors, f"{module}.weight")
        dtype, found = tensors.kind(name) or (None, None)
        if found is not None and dtype in _SCALES:
            if math.prod(found) == 1:
                return n, k
            if found in ((n,), (n, 1)):
                return 1, k
        down, across = self.block or (1, k)
        checked_shape(tensors, name, _SCALES, (-(-n // down), -(-k // across)))
        return down, across

    def _spread_of_stack(
        self, tensors: StoredTensors, name: str, shape: tuple[int, ...]
    ) -> tuple[int, int]:
        """The same of experts in one tensor, of each of them."""
        experts, n, k = shape
        scales = self._scales_of(tensors, name)
        dtype, found = checked_kind(tensors, scales)
        rows, columns = (1, k), (n, 1)
        known: dict[tuple[int, ...], tuple[int, int]] = {
            (experts, 1, 2): (n, -(-k // 2)),
            (experts, 2, 1): (-(-n // 2), k),
            (experts, k): columns,
            (experts, k, 1): columns,
            (experts, n): rows,
            (experts * n,): rows,
            (experts * n, 1): rows,
            (experts, n, 1): columns if self.columns and n == k else rows,
            (experts, 1, k): columns,
        }
        if n == k:
            del known[experts, n]  # it may be either
        if self.block is not None:
            down, across = self.block
            known[experts, -(-n // down), -(-k // across)] = self.block
        known |= dict.fromkeys(((experts,), (experts, 1), (experts, 1, 1)), (n, k))
        if dtype in _SCALES and (math.prod(found) == 1 or found in known):
            return known.get(found, (n, k))
        raise FormatError(
            f"{tensors.path}: tensor {scales} is {short(dtype)} {list(found)}; expected scales of "
            f"each matrix, row, column or block of {name} {list(shape)}"
        )


def _values(codes: Tensor, scales: Tensor, down: int, across: int, start: int = 0) -> Tensor:
    """Rows of a matrix from `start` on, float32; scales: those of blocks of `down` x `across`."""
    n, k = codes.shape
    each = scales[torch.arange(start, start + n) // down]  # [rows, ceil(K / across)]
    each = each.repeat_interleave(across, 1)[:, :k] if each.shape[1] > 1 else each
    return codes.float() * each


def _read(tensors: StoredTensors, name: str, start: int = 0, stop: int | None = None) -> Tensor:
    """Scales, float32. Raises FormatError for NaN and infinity."""
    scales = tensors.read(name, start, stop)
    scales = scales.view(_E8M0) if scales.dtype == torch.uint8 else scales
    return checked_scales(tensors, name, scales.float())


def _block(settings: Settings, key: str) -> tuple[int, int]:
    found: Any = settings.values.get(key)
    if not isinstance(found, list) or [type(x) for x in found] != [int, int] or min(found) < 1:
        raise settings.unsupported(key, "two whole numbers above 0")
    return found[0], found[1]
