"""What the importers of quantized checkpoints read from: named tensors, checked before use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError
from qoff.kernels.layout.qtensor import QTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before its data is read.

    quantized: the format, bits and group size, that holds its values exactly; None: it has floats,
    and `obstacle` says why codes that are there cannot be taken over. anew: it comes as floats all
    the same, to be quantized to that format.
    """

    shape: tuple[int, ...]
    quantized: tuple[int, int] | None
    obstacle: str | None = None
    anew: bool = False


class StoredTensors(Protocol):
    """Tensors of a checkpoint by name."""

    path: Path

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, None if there is none of this name."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows start..stop-1 of a tensor that is there; a scalar whole."""


class Scheme(Protocol):
    """How a method of quantization stores the weights of a linear module."""

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        """Describe the weight [N, K] of a module, None if this scheme did not quantize it.

        Raises FormatError naming a tensor that is missing or does not fit the others.
        """

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[QTensor | Tensor]:
        """Read a weight that `info` describes in pieces of `rows` rows, a multiple of 16.

        Pieces are QTensors of the format that `info` gives, or float32. Raises FormatError for
        scales that are NaN or infinite.
        """


def checked_kind(tensors: StoredTensors, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a tensor. Raises FormatError, naming it, if it is missing."""
    kind = tensors.kind(name)
    if kind is None:
        raise FormatError(
            f"{tensors.path}: tensor {name} is missing; the model is incomplete, get it again"
        )
    return kind


def checked_shape(
    tensors: StoredTensors,
    name: str,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> tuple[int, ...]:
    """Return the shape of a tensor, in which sizes given as None may be anything above 0.

    Raises FormatError, naming the tensor, if it is missing or of another shape or dtype.
    """
    dtype, found = checked_kind(tensors, name)
    fits = len(found) == len(shape) and all(
        size == wanted or (wanted is None and size > 0)
        for size, wanted in zip(found, shape, strict=False)
    )
    if dtype not in dtypes or not fits:
        expected = " or ".join(short(x) for x in dtypes)
        sizes = ", ".join("any" if x is None else str(x) for x in shape)
        raise FormatError(
            f"{tensors.path}: tensor {name} is {short(dtype)} {list(found)}; "
            f"expected {expected} [{sizes}]"
        )
    return found


def column_groups(
    tensors: StoredTensors, name: str, columns: int, groups: int, group_size: int
) -> Tensor:
    """Return the group of each column, int64 [columns], of an optional int32 tensor `g_idx`.

    Without the tensor, or where it is -1 everywhere (not set), groups are `group_size` neighbours.
    Raises FormatError, naming the tensor, for groups that are not there.
    """
    order = torch.arange(columns) // group_size
    if tensors.kind(name) is None:
        return order
    checked_shape(tensors, name, (torch.int32, torch.int64), (columns,))
    found = tensors.read(name).long()
    if bool((found == -1).all()):
        return order
    if bad := found[(found < 0) | (found >= groups)].tolist():
        raise FormatError(
            f"{tensors.path}: tensor {name} holds group {bad[0]}; expected 0 to {groups - 1}"
        )
    return found


def checked_scales(tensors: StoredTensors, name: str, values: Tensor | None = None) -> Tensor:
    """Return scales: `values`, or those of a tensor. Raises FormatError for NaN and infinity."""
    scales = tensors.read(name) if values is None else values
    if not bool(torch.isfinite(scales).all()):
        raise FormatError(
            f"{tensors.path}: tensor {name} holds NaN or infinity; the model is damaged, "
            "get it again"
        )
    return scales


@dataclass(frozen=True)
class Settings:
    """The JSON object that describes a quantization, and where it stands, for errors."""

    where: str  # file and key
    values: Mapping[str, Any]

    def one_of(self, key: str, supported: Sequence[Any], default: Any) -> Any:
        """Return the value of a key. Raises UnsupportedModelError if it is not in `supported`."""
        value = self.values.get(key, default)
        if (type(value), value) not in [(type(x), x) for x in supported]:  # True is not 1
            raise self.unsupported(key, ", ".join(map(repr, supported)))
        return value

    def inner(self, key: str) -> Settings:
        """Return the object under a key, or an empty one. Raises UnsupportedModelError."""
        found = self.values.get(key) or {}
        if not isinstance(found, dict):
            raise self.unsupported(key, "an object")
        return Settings(f"{self.where}{key}.", found)

    def group_size(self, *keys: str) -> int:
        """Return the value of the first key there is, -1 (one group a row) or above 0."""
        key = next((key for key in keys if key in self.values), keys[0])
        value = self.values.get(key)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.unsupported(key, "-1 or a whole number above 0")
        return value

    def unsupported(self, key: str, supported: str) -> UnsupportedModelError:
        """Return the error for the value of a key."""
        return UnsupportedModelError(
            f"{self.where}{key} is {self.values.get(key)!r}; supported: {supported}"
        )


def short(dtype: torch.dtype) -> str:
    """What a dtype is called in messages."""
    return str(dtype).removeprefix("torch.")
