"""Where a conversion reads from: a Hugging Face directory, quantized or not, or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from qoff.errors import FormatError
from qoff.models.families.family import TensorNames
from qoff.quant import QTensor, TensorInfo
from qoff.quant.gguf_split import in_directory

from .gguf_modules import GGUFModulesSource
from .quantized import QuantizedSource, open_quantized
from .safetensors import SafetensorsSource, own_code

__all__ = [
    "GGUFModulesSource",
    "ModulesSource",
    "QuantizedSource",
    "SafetensorsSource",
    "Source",
    "open_source",
    "own_code",
]

# What transformers' modules can be of.
ModulesSource = SafetensorsSource | GGUFModulesSource | QuantizedSource


class Source(Protocol):
    """A model to convert. What is wrong raises FormatError."""

    path: Path

    @property
    def tensor_names(self) -> TensorNames | None:
        """What it calls its tensors; None: as a Hugging Face checkpoint of its family does."""

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of the model."""

    def info(self, name: str) -> TensorInfo | None:
        """Describe a tensor, None if there is none of this name."""

    def chunks(self, name: str, rows: int) -> Iterator[Tensor | QTensor]:
        """Read a tensor in pieces of `rows` rows, a multiple of 16, in order; a scalar whole."""

    def item(self, name: str, index: int) -> Tensor | QTensor:
        """Read one matrix of a tensor of three dimensions."""

    def files(self) -> Mapping[str, bytes | Path]:
        """Return tokenizer files and `generation_config.json`, by name."""


def open_source(path: str | os.PathLike[str]) -> Source | GGUFModulesSource:
    """Open a directory with `config.json` and safetensors, or a `.gguf` file, headers only.

    One of the parts of a split GGUF model stands for all, and a directory for the model in it.

    Raises FormatError, naming the file, for anything else and for damaged headers, and
    UnsupportedModelError for weights quantized by a method that cannot be read.
    """
    where = Path(path)
    if where.is_dir():
        if not (where / "config.json").exists() and (model := in_directory(where)) is not None:
            return open_source(model)
        tensors = SafetensorsSource(where)
        return open_quantized(tensors) or tensors
    if not where.is_file():
        raise FormatError(f"{where}: no such file or directory; expected a model to convert")
    if where.suffix.lower() != ".gguf":
        raise FormatError(
            f"{where}: expected a .gguf file, or a directory with config.json and safetensors files"
        )
    from qoff.quant import GGUFFile

    from .gguf_architectures import ARCHITECTURES
    from .gguf_metadata import Metadata

    file = GGUFFile(where)
    metadata = Metadata(file)
    if metadata.architecture in ARCHITECTURES:
        from .gguf import GGUFSource

        return GGUFSource(file, metadata)
    return GGUFModulesSource(file, metadata)
