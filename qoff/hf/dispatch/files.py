"""Weights in files of safetensors or torch, whole or in shards, read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qoff.errors import ArgumentError, FormatError
from qoff.schema import read_object

_WHOLE = ("model.safetensors", "pytorch_model.bin")


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for."""

    def __init__(self, read: Mapping[str, Callable[[], Tensor]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def weights_in(checkpoint: str | PathLike[str]) -> LazyWeights:
    """The weights of a file, of an index of shards, or of a folder with one of these.

    Files are mapped into memory, and not read before that. Raises ArgumentError where there are no
    weights, FormatError for a file that cannot be read.
    """
    read: dict[str, Callable[[], Tensor]] = {}
    for file in _files(Path(checkpoint)):
        try:
            read |= _safetensors(file) if file.suffix == ".safetensors" else _torch(file)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise FormatError(f"{file}: cannot be read ({error}); get it again") from error
    return LazyWeights(read)


def _files(checkpoint: Path) -> list[Path]:
    if checkpoint.is_dir():
        indices = sorted(checkpoint.glob("*.index.json"))
        there = [checkpoint / name for name in _WHOLE if (checkpoint / name).is_file()]
        if not there and len(indices) != 1:
            raise ArgumentError(
                f"{checkpoint} has {len(indices)} files *.index.json and none of "
                f"{', '.join(_WHOLE)}; name the file with the weights"
            )
        checkpoint = (there or indices)[0]
    if not checkpoint.is_file():
        raise ArgumentError(f"{checkpoint} is not there; name a file with weights, or its folder")
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = read_object(checkpoint)
    shards = index.get("weight_map", index)
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise FormatError(f"{checkpoint}: is no index of names of weights and their files")
    return [checkpoint.parent / name for name in sorted(set(shards.values()))]


def _safetensors(file: Path) -> dict[str, Callable[[], Tensor]]:
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())

    def read(name: str) -> Tensor:
        with safe_open(file, "pt") as opened:
            found: Tensor = opened.get_tensor(name)
            return found

    return {name: lambda name=name: read(name) for name in names}  # type: ignore[misc]


def _torch(file: Path) -> dict[str, Callable[[], Tensor]]:
    """Of a file of torch.save; one that was written before torch 1.6 is read at once."""
    found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    return {name: lambda x=x: x for name, x in found.items()}  # type: ignore[misc]
