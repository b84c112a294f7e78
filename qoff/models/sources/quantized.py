"""A model directory whose linear weights are quantized, by a method of `qoff.quant.schemes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.quant import CONFIG_FILES, CONFIG_KEYS, QTensor, Scheme, TensorInfo, read_scheme, stated
from qoff.quant.fp8 import FP8
from qoff.quant.mxfp4 import MXFP4
from qoff.schema import read_object

from .safetensors import SafetensorsSource

_WEIGHT = ".weight"


def open_quantized(tensors: SafetensorsSource) -> QuantizedSource | None:
    """Return the source for a directory whose config names a quantization, None without one.

    Raises UnsupportedModelError, naming file and key, for a quantization that cannot be read.
    """
    path = tensors.path / "config.json"
    config = read_object(path)
    if (found := stated(config)) is not None:
        where, what = found
        return QuantizedSource(tensors, read_scheme(what, f"{path}: {where}"))
    for name, method in CONFIG_FILES.items():
        if (file := tensors.path / name).is_file():
            return QuantizedSource(tensors, read_scheme(read_object(file), f"{file}: ", method))
    return None


class QuantizedSource:
    """A Hugging Face model directory with quantized linear weights.

    What its method did not quantize (embedding, norms, biases, modules left out) are floats.
    """

    tensor_names = None

    def __init__(self, tensors: SafetensorsSource, scheme: Scheme) -> None:
        self.path = tensors.path
        self._tensors = tensors
        self._scheme = scheme
        self._infos: dict[str, TensorInfo | None] = {}
        self._stacks: dict[str, TensorInfo | None] = {}

    def config(self) -> dict[str, Any]:
        config = self._tensors.config()
        return {key: value for key, value in config.items() if key not in CONFIG_KEYS}

    def info(self, name: str) -> TensorInfo | None:
        return self._quantized(name) or self._stack(name) or self._tensors.info(name)

    def chunks(self, name: str, rows: int) -> Iterator[Tensor | QTensor]:
        if self._quantized(name) is None:
            return self._tensors.chunks(name, rows)
        return self._scheme.pieces(self._tensors, name.removesuffix(_WEIGHT), rows)

    def item(self, name: str, index: int) -> Tensor:
        if isinstance(self._scheme, FP8 | MXFP4) and self._stack(name) is not None:
            return self._scheme.item(self._tensors, name, index)
        return self._tensors.item(name, index)

    @property
    def as_floats(self) -> bool:
        """Whether it can be read under the names of a model of floats, as `whole` does."""
        return isinstance(self._scheme, FP8)

    def names(self) -> list[str]:
        """The names of all tensors but scales."""
        names = self._tensors.names()
        beside = self._scheme.beside(self._tensors, names) if isinstance(self._scheme, FP8) else ()
        return [name for name in names if name not in beside]

    def whole(self, name: str) -> Tensor:
        """Read a tensor, of any number of dimensions; quantized ones in float32."""
        if (stack := self._stack(name)) is not None:
            return torch.stack([self.item(name, i) for i in range(stack.shape[0])])
        if (info := self._quantized(name)) is None:
            return self._tensors.whole(name)
        (found,) = self.chunks(name, info.shape[0])
        return found.dequantize() if isinstance(found, QTensor) else found

    def files(self) -> Mapping[str, bytes | Path]:
        return self._tensors.files()

    def _stack(self, name: str) -> TensorInfo | None:
        """Of a tensor of all experts."""
        if name not in self._stacks:
            found = None
            if isinstance(self._scheme, FP8 | MXFP4):
                found = self._scheme.stack(self._tensors, name)
            self._stacks[name] = found
        return self._stacks[name]

    def _quantized(self, name: str) -> TensorInfo | None:
        if not name.endswith(_WEIGHT):
            return None
        if name not in self._infos:
            self._infos[name] = self._scheme.info(self._tensors, name.removesuffix(_WEIGHT))
        return self._infos[name]
