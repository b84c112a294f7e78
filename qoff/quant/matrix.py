"""Quantizing whole matrices, a chunk of rows at a time, and how that is configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from qoff.budgets import OLDEST_GPU
from qoff.errors import OpError, QuantizationError
from qoff.kernels.layout.packing import (
    BITS,
    GROUP_SIZES,
    PACKINGS,
    ROW_BLOCK,
    pack_codes,
    pack_scale_min,
    packed_shapes,
)
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import COMPACT, SCALE_DTYPES
from qoff.kernels.layout.widening import read_bits
from qoff.kernels.reference.quantization import nearest_levels
from qoff.log import say_once

from .solvers import SOLVERS, SpanError, floats_of, solved

CALIBRATED = ("gptq",)  # solvers that need the inputs of a matrix
ROUTER_BITS = 8  # of small matrices that choose experts
_CHUNK = 1 << 17  # weights solved at a time: temporaries of half a MiB stay in cache
_MAX_CHUNK = 1 << 19  # a dozen float32 temporaries of this many weights are below 32 MiB
_COMPILED_CHUNK = 1 << 21  # the solver that the CPU's threads share leaves two or three
_GPU_CHUNK = 1 << 21  # below 128 MiB
logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Format:
    """How a matrix is stored: bits of its codes, and columns that share a scale and a minimum.

    Raises QuantizationError for a format that does not exist.
    """

    bits: int = 4
    group_size: int = 32

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"

    def holds(self, other: Format) -> bool:
        """Whether a matrix of another format can be had in this one without changing a value."""
        return self.bits >= other.bits and other.group_size % self.group_size == 0


@dataclass(frozen=True)
class QuantConfig:
    """How the weights of a model are quantized. Raises QuantizationError for a bad value.

    scale_dtype: of scale and minimum; uint8: compact ones, a byte each (`kernels.layout.scales`).
    weights: formats of some matrices, by a pattern (`fnmatch`) of their names in the checkpoint,
    like "model.layers.3.mlp.down_proj" or "*.o_proj"; of several that match, the last one counts.
    """

    bits: int = 4
    group_size: int = 32
    solver: str = "hqq"
    head_bits: int = 6  # of the embedding and the head
    packing: str = "split32"
    scale_dtype: torch.dtype = COMPACT
    weights: Mapping[str, Format] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check(self)

    def chosen(self, name: str) -> Format | None:
        """Return the format that `weights` gives a matrix of this name, None if it gives none."""
        found = [form for pattern, form in self.weights.items() if fnmatchcase(name, pattern)]
        return found[-1] if found else None

    @property
    def data_free(self) -> str:
        """The solver of matrices that no calibration is for."""
        return "hqq" if self.solver in CALIBRATED else self.solver


_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "bits": BITS,
    "head_bits": BITS,
    "group_size": GROUP_SIZES,
    "solver": (*SOLVERS, *CALIBRATED),
    "packing": tuple(PACKINGS),
    "scale_dtype": SCALE_DTYPES,
}


def _check(config: Format | QuantConfig) -> None:
    for name, value in vars(config).items():
        values = _ALLOWED.get(name, (value,))
        if value not in values:
            raise QuantizationError(
                f"{name} {value!r} is not supported; use one of {', '.join(map(str, values))}"
            )


def quantize(
    w: Tensor,
    bits: int = 4,
    group_size: int = 32,
    solver: str = "hqq",
    packing: str = "split32",
    scale_dtype: torch.dtype = COMPACT,
    row_chunk: int | None = None,
    name: str = "weight",
    device: torch.device | None = None,
) -> QTensor:
    """Quantize a matrix [N, K] of any float dtype; the result is where the matrix is.

    device: where it is computed; None: on the GPU if there is one, else where the matrix is. The
    result of "rtn" has the same bits on every device. Works in chunks of `row_chunk` rows (a
    multiple of 16; by default chosen for the device), with temporaries below 32 MiB on a CPU and
    below 128 MiB on a GPU; where a GPU has no room for them, a matrix on the CPU is computed there.
    `name` is what errors call the matrix. Raises QuantizationError for NaN, infinity, a format that
    does not exist, a group that does not divide K, or a range that `scale_dtype` cannot hold; where
    compact scales cannot, the matrix gets float16 or float32 ones, and a line says so.
    """
    if solver in CALIBRATED:
        raise QuantizationError(
            f"{name}: solver {solver!r} does not quantize a matrix without its inputs; "
            f"use one of {', '.join(SOLVERS)}"
        )
    config = QuantConfig(bits, group_size, solver, packing=packing, scale_dtype=scale_dtype)

    def solve(scales: torch.dtype) -> QTensor:
        how = replace(config, scale_dtype=scales)
        return computed(lambda place: _quantize(w, how, row_chunk, place), w.device, device, name)

    if w.ndim != 2 or not w.is_floating_point():
        raise QuantizationError(
            f"{name}: only a matrix of floats can be quantized, not {w.dtype} {tuple(w.shape)}"
        )
    try:
        return within_range(solve, scale_dtype, name)
    except (OpError, QuantizationError) as error:
        raise QuantizationError(f"{name}: {error}") from error


def quantize_as(
    form: Format, w: Tensor, quant: QuantConfig, name: str, scales: torch.dtype | None = None
) -> QTensor:
    """As `quantize`, without calibration; scales: by default those of `quant`, as all the rest."""
    scale_dtype = scales or quant.scale_dtype
    how = (form.bits, form.group_size, quant.data_free, quant.packing, scale_dtype)
    return quantize(w, *how, name=name)


def within_range(solve: Callable[[torch.dtype], Result], scales: torch.dtype, name: str) -> Result:
    """What `solve` returns for these scales, or for wider ones where compact ones overflow."""
    try:
        return solve(scales)
    except SpanError as error:
        say_once(logger, f"{name}: {error}, so its scales are stored as floats")
    try:
        return solve(torch.float16)
    except QuantizationError:  # beyond the range of these, too
        return solve(torch.float32)


def computed(
    compute: Callable[[torch.device], Result],
    home: torch.device,
    device: torch.device | None,
    name: str,
) -> Result:
    """What `compute` returns for `device`, or None: for a GPU if there is one, else for `home`.

    home: of a matrix. Where a GPU has no room or fails, a matrix that is not there is computed at
    home, and a line says so.
    """
    place = device
    try:
        place = place or _fastest(home)  # which asks the GPU
        return compute(place)
    except torch.OutOfMemoryError as error:
        if home.type == "cuda":
            raise
        logger.warning("%s: quantized on the CPU, as the GPU has no room: %s", name, error)
    except RuntimeError as error:
        if home.type == "cuda" or place == home or not torch.cuda.is_available():
            raise
        reason, _, _ = str(error).partition("\n")
        say_once(logger, f"quantized on the CPU, as the GPU fails: {reason}")
    return compute(home)


def _fastest(device: torch.device) -> torch.device:
    """A GPU that Triton compiles for, if there is one; else the device of the matrix."""
    if device.type == "cuda" or not torch.cuda.is_available():
        return device
    return torch.device("cuda") if torch.cuda.get_device_capability() >= OLDEST_GPU else device


def _has_kernel(config: QuantConfig, device: torch.device) -> bool:
    """Whether Triton does the same."""
    known = config.solver == "rtn" and config.scale_dtype != COMPACT
    known = known and read_bits(config.bits, "split32") == config.bits
    return known and device.type == "cuda" and find_spec("triton") is not None


@torch.no_grad()  # not inference_mode: the codes become buffers of trainable models
def _quantize(
    w: Tensor, config: QuantConfig, row_chunk: int | None, device: torch.device
) -> QTensor:
    """Quantize chunks of rows on a device."""
    n, k = w.shape
    bits, group_size, packing = config.bits, config.group_size, config.packing
    codes_shape, scale_min_shape = packed_shapes((n, k), bits, group_size, packing)
    codes = torch.empty(codes_shape, dtype=torch.uint8, device=w.device)
    scale_min = torch.empty(scale_min_shape, dtype=config.scale_dtype, device=w.device)
    chunk, most = _CHUNK, _MAX_CHUNK
    if device.type == "cuda":
        chunk = most = _GPU_CHUNK
    elif config.solver == "hqq":
        chunk = most = _COMPILED_CHUNK
    rows = max(1, min(row_chunk or chunk // k, most // k) // ROW_BLOCK) * ROW_BLOCK
    solve = _rounded if _has_kernel(config, device) else _solved
    for start in range(0, n, rows):
        found = solve(w[start : start + rows].to(device), config)
        if found.packing != packing:  # many small steps, which a GPU would not do faster
            here, scales = found.codes.to(w.device), found.scale_min.to(w.device)
            found = replace(found, codes=here, scale_min=scales).to_packing(packing)
        if packing == "split32":
            codes[start : start + rows] = found.codes
            scale_min[:, start : start + rows] = found.scale_min
        else:
            block = start // ROW_BLOCK
            codes[block : block + len(found.codes)] = found.codes
            scale_min[block : block + len(found.codes)] = found.scale_min
    return QTensor(codes, scale_min, (n, k), bits, group_size, packing)


def _solved(w: Tensor, config: QuantConfig) -> QTensor:
    """Quantize a few rows by the solver."""
    (n, k), bits, group, packing = w.shape, config.bits, config.group_size, config.packing
    groups = w.float().reshape(n, k // group, group)
    scale, minimum = solved(config.solver, groups, bits, config.scale_dtype)
    codes = nearest_levels(groups, *floats_of((scale, minimum), bits), bits).to(torch.uint8)
    packed = pack_codes(codes.view(n, k), bits, packing)
    return QTensor(packed, pack_scale_min(scale, minimum, packing), (n, k), bits, group, packing)


def _rounded(w: Tensor, config: QuantConfig) -> QTensor:
    """Round a few rows to nearest by the Triton kernel, which marks what it cannot as not finite.

    They stay in packing split32.
    """
    from qoff.kernels.triton.launch.gpu import Gpu
    from qoff.kernels.triton.linear.quantize import quantize as rtn

    taken = w.dtype in _KERNEL_DTYPES
    if w.dtype == torch.bfloat16 and Gpu.of(w.device).capability < 80:
        taken = False  # ops refuse it there
    w = (w if taken else w.float()).contiguous()
    found = rtn(w, config.bits, config.group_size, config.scale_dtype)
    if not bool(torch.isfinite(found.scale_min).all()):
        return _solved(w, config)  # raises with the reason
    return found
