"""Opening a checkpoint: the index and all headers are read and checked, no weight is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, Self

import torch
from torch import Tensor

from qoff.errors import DiskReadError, FormatError
from qoff.quant import QTensor
from qoff.schema import read_object

from . import header
from .layout import (
    CONFIG_FILE,
    FORMAT_VERSION,
    INDEX_FILE,
    MTP_FILE,
    OUTER_FILE,
    QUANT_METHOD,
    TensorEntry,
    WeightEntry,
    WeightFile,
    layer_file,
    tensors_of,
    view_weight,
)

_AGAIN = "convert the model again"
_ADVICE = f"is this a qoff checkpoint? If it is, {_AGAIN}"
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """A qoff checkpoint directory."""

    path: Path
    config: dict[str, Any]  # config.json
    layers: tuple[WeightFile, ...]
    outer: WeightFile  # embedding, final norm, head
    mtp: WeightFile | None = None  # a layer for multi-token prediction

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Read and check index and headers. Raises FormatError naming the file that is wrong."""
        folder = Path(path)
        config, index = read_config(folder), folder / INDEX_FILE
        found = read_object(index, _ADVICE)
        checksums, weight_map = found.get("checksums"), found.get("weight_map")
        if not isinstance(checksums, dict) or not isinstance(weight_map, dict):
            raise FormatError(f"{index}: has no checksums and weight_map; {_AGAIN}")
        for name in sorted({*checksums, *map(str, weight_map.values())}):
            _inside(folder, name)
        count = sum(name not in (OUTER_FILE, MTP_FILE) for name in checksums)
        named = [*(layer_file(i) for i in range(count)), OUTER_FILE]
        named += [MTP_FILE] if MTP_FILE in checksums else []
        files = {name: _weight_file(folder, name, checksums) for name in named}
        wanted = config.get("num_hidden_layers", count)
        if wanted != count:
            raise FormatError(
                f"{folder / CONFIG_FILE}: has num_hidden_layers {wanted!r}, but there are files of "
                f"{count} layers; {_AGAIN}"
            )
        outer, mtp = files.pop(OUTER_FILE), files.pop(MTP_FILE, None)
        checkpoint = cls(folder, config, tuple(files.values()), outer, mtp)
        there = checkpoint.weight_map
        for name in sorted({*there, *weight_map}):
            if there.get(name) != weight_map.get(name):
                raise FormatError(
                    f"{index}: has tensor {name!r} in {weight_map.get(name, 'no file')!r}, but it "
                    f"is in {there.get(name, 'no file')!r}; {_AGAIN}"
                )
        return checkpoint

    @property
    def files(self) -> tuple[WeightFile, ...]:
        """The files that the model is computed from: the layers in order, then the outer file."""
        return (*self.layers, self.outer)

    @property
    def all_files(self) -> tuple[WeightFile, ...]:
        """All files of weights."""
        return (*self.files, *(() if self.mtp is None else (self.mtp,)))

    @property
    def weight_map(self) -> dict[str, str]:
        """Return the name of the file that each tensor is in. Raises FormatError for two files."""
        there: dict[str, str] = {}
        for file in self.all_files:
            for tensor in (t for entry in file.weights.values() for t in tensors_of(entry)):
                if (first := there.setdefault(tensor.name, file.path.name)) != file.path.name:
                    raise FormatError(
                        f"{file.path}: tensor {tensor.name!r} is also in {first}; {_AGAIN}"
                    )
        return there


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a qoff checkpoint. Raises FormatError if the directory is none."""
    try:
        found = folder.is_dir()
    except OSError:  # a name that is too long, a parent that may not be searched
        found = False
    if not found:
        raise FormatError(f"{folder}: no such directory; convert a model first: qoff convert")
    path = folder / CONFIG_FILE
    config = read_object(path, _ADVICE)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        quantization = {}
    method, version = quantization.get("quant_method"), quantization.get("version")
    if method != QUANT_METHOD:
        raise FormatError(
            f"{path}: quant_method is {method!r}, not {QUANT_METHOD!r}; "
            "convert the model first: qoff convert"
        )
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: checkpoint version {version!r}; this qoff reads version {FORMAT_VERSION}: "
            f"use a newer qoff or {_AGAIN}"
        )
    if quantization.get("layout") == "state_dict":
        raise FormatError(
            f"{path}: layout is 'state_dict'; load it with AutoModelForCausalLM of transformers, "
            "or convert the original model"
        )
    return config


def _inside(folder: Path, name: str) -> None:
    """Refuse a file name from the index that leads out of the checkpoint.

    In a snapshot of the Hugging Face hub's cache, files are links to the blobs beside it.
    """
    plain = PurePosixPath(name).parts == (name,) and name != ".."
    try:
        root, target = folder.resolve(), (folder / name).resolve()
        homes = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
        inside = plain and any(target.is_relative_to(home) for home in homes)
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no name a file can have
        inside = False
    if not inside:
        raise FormatError(
            f"{folder / INDEX_FILE}: file {name!r} is not in the checkpoint's own directory; "
            f"copy the files there, or {_AGAIN}"
        )


def _weight_file(folder: Path, name: str, checksums: Mapping[str, Any]) -> WeightFile:
    path, index, found = folder / name, folder / INDEX_FILE, checksums.get(name)
    if found is None:
        raise FormatError(f"{index}: {name} is missing; {_AGAIN}")
    checksum = found if isinstance(found, dict) else {}
    sha256, nbytes = checksum.get("sha256"), checksum.get("nbytes")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256) or not isinstance(nbytes, int):
        raise FormatError(f"{index}: the checksum of {name} is damaged; {_AGAIN}")
    try:
        status = path.stat()
    except OSError as error:
        raise FormatError(f"{path}: {unread(error)}") from error
    if not S_ISREG(status.st_mode):
        raise FormatError(f"{path}: is not a file; fetch the file again")
    if status.st_size != nbytes:
        raise FormatError(
            f"{path}: has {status.st_size} bytes, the index says {nbytes}: truncated or replaced; "
            "fetch the file again"
        )
    start, weights = header.read(path)
    return WeightFile(path, start, nbytes, sha256, weights)


def read_weight(file: WeightFile, entry: WeightEntry) -> QTensor | Tensor:
    """Read one weight into fresh memory. Raises DiskReadError when the file comes up short."""

    def load(tensor: TensorEntry) -> Tensor:
        buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
        try:
            with file.path.open("rb") as source:  # buffered: one plain read ends at 2 GiB
                source.seek(tensor.offset)
                got = source.readinto(buffer.numpy().data)
        except OSError as error:
            raise DiskReadError(f"{file.path}: {unread(error)}") from error
        if got != tensor.nbytes:
            raise DiskReadError(
                f"{file.path}: {tensor.name!r} ends after {got} of {tensor.nbytes} bytes; "
                "fetch the file again"
            )
        return buffer

    return view_weight(entry, load)


def unread(error: OSError) -> str:
    """What a file that cannot be read is said to be."""
    return f"cannot be read ({error.strerror}); fetch the file again"
