"""Checkpoints of bitsandbytes, dequantized: its 4-bit values are not evenly spaced.

4 bits (bitsandbytes `functional.py`, `QuantState.as_dict` and `dequantize_4bit`): the elements of
the matrix [N, K] row by row, two a byte, the first in the high nibble, in

    weight                                uint8 [N * K / 2, 1] (or the same bytes in another dtype)
    weight.quant_map                      float32 [16], the value of each code
    weight.absmax                         a scale for each block of `blocksize` elements
    weight.quant_state.bitsandbytes__nf4  (or __fp4) JSON as uint8: shape, blocksize, ...

With double quantization absmax is uint8 and stands for nested_quant_map[absmax] * nested_absmax of
its block of `nested_blocksize`, plus `nested_offset`.

8 bits (LLM.int8): `weight` int8 [N, K] and `SCB` float32 [N]; w = weight * SCB / 127.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from qoff.errors import FormatError

from .stored import FLOATS, StoredTensors, TensorInfo, checked_scales, checked_shape

_KINDS = ("nf4", "fp4")
_CODES = 16
_MAX_BLOCK = 4096  # the largest that the library makes


class BitsAndBytes:
    """How a model of bitsandbytes is stored: each tensor says it itself."""

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        name = f"{module}.weight"
        kind = tensors.kind(name)
        if kind is None:
            return None
        if (state := _State.read(tensors, name)) is not None:
            return TensorInfo(state.shape, None)
        if kind[0] == torch.int8:
            n, _ = checked_shape(tensors, name, (torch.int8,), (None, None))
            checked_shape(tensors, f"{module}.SCB", (torch.float32,), (n,))
            return TensorInfo(kind[1], None)
        if not kind[0].is_floating_point:
            raise FormatError(
                f"{tensors.path}: tensor {name}.quant_state.bitsandbytes__nf4 (or __fp4) is "
                f"missing, and {name} is no float; the model is incomplete, get it again"
            )
        return None

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[Tensor]:
        name = f"{module}.weight"
        state = _State.read(tensors, name)
        if state is not None:
            yield from state.pieces(tensors, name, rows)
            return
        scales = checked_scales(tensors, f"{module}.SCB") / 127
        for start in range(0, len(scales), rows):
            part = slice(start, min(start + rows, len(scales)))
            yield tensors.read(name, part.start, part.stop).float() * scales[part, None]


@dataclass(frozen=True)
class _State:
    """A matrix of 4-bit codes. `nested` is the size of blocks of scales, 0 for plain scales."""

    shape: tuple[int, int]
    block: int
    nested: int
    offset: float  # added to nested scales

    @classmethod
    def read(cls, tensors: StoredTensors, name: str) -> Self | None:
        """Read what a tensor says of itself; None if it has no 4-bit codes."""
        keys = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in _KINDS]
        key = next((key for key in keys if tensors.kind(key) is not None), None)
        if key is None:
            return None
        try:
            values = json.loads(tensors.read(key).numpy().tobytes())
            n, k = (_whole(size) for size in values["shape"])
            block = _whole(values["blocksize"], _MAX_BLOCK)
            is_nested = tensors.kind(f"{name}.nested_absmax") is not None
            nested = _whole(values["nested_blocksize"]) if is_nested else 0
            offset = float(values["nested_offset"]) if is_nested else 0.0
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise FormatError(
                f"{tensors.path}: tensor {key} does not describe a matrix: "
                f"{type(error).__name__} {error}"
            ) from error
        state = cls((n, k), block, nested, offset)
        state._check(tensors, name)
        return state

    def _check(self, tensors: StoredTensors, name: str) -> None:
        n, k = self.shape
        dtype, shape = tensors.kind(name) or (torch.uint8, ())
        found = torch.Size(shape).numel() * dtype.itemsize
        if len(shape) != 2 or shape[1] != 1 or k % 2 or found != n * k // 2:
            raise FormatError(
                f"{tensors.path}: tensor {name} is {found} bytes of shape {list(shape)}; expected "
                f"{n * k // 2} of shape [any, 1] for a 4-bit matrix {[n, k]}"
            )
        blocks = -(-n * k // self.block)
        checked_shape(tensors, f"{name}.quant_map", (torch.float32,), (_CODES,))
        checked_shape(
            tensors, f"{name}.absmax", (torch.uint8,) if self.nested else FLOATS, (blocks,)
        )
        if self.nested:
            outer = -(-blocks // self.nested)
            checked_shape(tensors, f"{name}.nested_absmax", FLOATS, (outer,))
            checked_shape(tensors, f"{name}.nested_quant_map", FLOATS, (256,))

    def pieces(self, tensors: StoredTensors, name: str, rows: int) -> Iterator[Tensor]:
        n, k = self.shape
        absmax = checked_scales(tensors, f"{name}.absmax", self._absmax(tensors, name))
        values = tensors.read(f"{name}.quant_map")
        itemsize = (tensors.kind(name) or (torch.uint8, ()))[0].itemsize
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            first, last = (row * k // 2 // itemsize for row in (start, stop))
            packed = tensors.read(name, first, last).view(torch.uint8).flatten()
            codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten().int()
            block, skipped = divmod(start * k, self.block)
            scales = absmax[block : -(-stop * k // self.block)].repeat_interleave(self.block)
            scales = scales[skipped : skipped + len(codes)]
            yield values[codes].mul_(scales).view(-1, k)

    def _absmax(self, tensors: StoredTensors, name: str) -> Tensor:
        """The scale of each block, float32."""
        absmax = tensors.read(f"{name}.absmax")
        if not self.nested:
            return absmax.float()
        outer, values = (
            tensors.read(f"{name}.nested_{x}").float() for x in ("absmax", "quant_map")
        )
        return values[absmax.int()] * outer[torch.arange(len(absmax)) // self.nested] + self.offset


def _whole(value: Any, most: int = 1 << 31) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{value!r} where a whole number from 1 to {most} is expected")
    return value
