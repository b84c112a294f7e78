"""A Hugging Face model directory of floats, in safetensors files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from qoff.checkpoint.header import METADATA, described_tensor, header_text
from qoff.checkpoint.layout import CHAT_TEMPLATE, COMPANIONS, DTYPES, POOLING
from qoff.errors import FormatError
from qoff.quant import TensorInfo
from qoff.schema import load_object, read_object, shown

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ONE_BYTE = ("BOOL", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
_DTYPES = {
    **DTYPES,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    # Of these only the sizes count: they are refused where the tensor is wanted.
    **dict.fromkeys(_ONE_BYTE, torch.uint8),
    **dict.fromkeys(("I16", "U16"), torch.int16),
    "U32": torch.int32,
    **dict.fromkeys(("U64", "C64"), torch.int64),
}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def read(self, first: int, count: int) -> Tensor:
        """Read some of its bytes."""
        data = torch.empty(count, dtype=torch.uint8)
        with self.path.open("rb") as file:  # buffered: one plain read ends at 2 GiB
            file.seek(self.offset + first)
            found = file.readinto(data.numpy().data)
        if found != count:
            end = self.offset + first + found
            raise FormatError(f"{self.path}: ends at byte {end}, {count - found} bytes early")
        return data.view(self.dtype)


class SafetensorsSource:
    """A Hugging Face model directory; tensors are read a piece at a time.

    Raises FormatError for a directory without safetensors, an index that leads out of the directory
    or to files that are not there, and headers that do not fit their file.
    """

    tensor_names = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, _Stored] = {}
        if (path / _INDEX).is_file():
            self._open_sharded()
        elif (path / _SINGLE).is_file():
            self._tensors = _read_header(path / _SINGLE)
        elif len(only := sorted(path.glob("*.safetensors"))) == 1:  # as AutoGPTQ names it
            self._tensors = _read_header(only[0])
        else:
            pickled = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLED)
            found = f"found {pickled[0]}, which is pickled and never opened" if pickled else ""
            raise FormatError(
                f"{path}: no {_SINGLE} and no {_INDEX}; {found or 'expected one of them'}. "
                "Save the model with save_pretrained() of transformers, which writes safetensors"
            )

    def config(self) -> dict[str, Any]:
        return read_object(self.path / "config.json")

    def info(self, name: str) -> TensorInfo | None:
        if name not in self._tensors:
            return None
        stored = self._of_floats(name)
        if not stored.dtype.is_floating_point:
            raise FormatError(
                f"{self.path}: tensor {name} is not in floats (BF16, F16, F32 or F64); get the "
                "model again, or save it in BF16"
            )
        return TensorInfo(stored.shape, None)

    def chunks(self, name: str, rows: int) -> Iterator[Tensor]:
        count, *_ = self._tensors[name].shape or (1,)
        for start in range(0, count, rows):
            yield self.read(name, start, start + rows)

    def item(self, name: str, index: int) -> Tensor:
        return self.read(name, index, index + 1)[0]

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def whole(self, name: str) -> Tensor:
        """Read a tensor of floats, of any number of dimensions."""
        stored = self._of_floats(name)
        count = math.prod(stored.shape) * stored.dtype.itemsize
        return stored.read(0, count).view(stored.shape)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, None if there is none of this name."""
        stored = self._tensors.get(name)
        return None if stored is None else (stored.dtype, stored.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows start..stop-1 of a tensor, as far as there are so many; a scalar whole."""
        stored = self._tensors[name]
        if not stored.shape:
            return self.whole(name)
        rows = range(*slice(start, stop).indices(stored.shape[0]))
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        data = stored.read(start * row_bytes, len(rows) * row_bytes)
        return data.view(len(rows), *stored.shape[1:])

    def files(self) -> Mapping[str, bytes | Path]:
        paths = {name: self.path / name for name in COMPANIONS}
        paths[POOLING] = self.path / "1_Pooling" / "config.json"
        found: dict[str, bytes | Path] = {k: path for k, path in paths.items() if path.is_file()}
        if (template := self._processors_template(found)) is not None:
            found[CHAT_TEMPLATE] = template.encode()
        return found

    def _processors_template(self, found: Mapping[str, bytes | Path]) -> str | None:
        """The chat template of a model that sees, which its processor has and its tokenizer not."""
        file, own = self.path / "chat_template.json", self.path / "tokenizer_config.json"
        if CHAT_TEMPLATE in found or not file.is_file():
            return None
        if own.is_file() and read_object(own).get("chat_template"):
            return None
        template = read_object(file).get("chat_template")
        return template if isinstance(template, str) else None

    def _of_floats(self, name: str) -> _Stored:
        """A tensor that is no part of another. Raises FormatError for values without scales."""
        stored = self._tensors[name]
        if stored.dtype == torch.float8_e4m3fn:
            raise FormatError(
                f"{self.path}: tensor {name} is of 8-bit floats, and quantization_config in "
                "config.json says of no scales for it; get the model again, or one in BF16"
            )
        return stored

    def _open_sharded(self) -> None:
        index = self.path / _INDEX
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{index}: no weight_map; expected tensor names and their files")
        files: dict[str, Path] = {}
        for file in weight_map.values():
            if not isinstance(file, str) or file not in files:
                files[str(file)] = _inside(self.path, file, index)
        headers = {name: _read_header(path) for name, path in files.items()}
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise FormatError(
                    f"{self.path / file}: no tensor {shown(name)}, which {index} has there"
                )
            self._tensors[name] = headers[file][name]


def own_code(source: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the Python files of a model's directory, by name; a file has none."""
    return {path.name: path for path in sorted(Path(source).glob("*.py"))}


def _inside(directory: Path, file: object, index: Path) -> Path:
    """Return the path of a shard, which must be a plain file name in the directory of the index."""
    plain = isinstance(file, str) and PurePosixPath(file).name == file and file not in ("", "..")
    if not isinstance(file, str) or not plain or "\\" in file or not file.isprintable():
        raise FormatError(
            f"{index}: names the file {shown(file)}; expected a file name without a directory"
        )
    try:
        there = (directory / file).is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise FormatError(f"{directory / file}: no such file, but {index} names it; get it again")
    return directory / file


def _read_header(path: Path) -> dict[str, _Stored]:
    """Return the tensors of a safetensors file. Raises FormatError if they do not fit the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            text = header_text(file, size)
        described = load_object(text)
        described.pop(METADATA, None)
        start = 8 + len(text)
        return {name: _stored(path, name, entry, start, size) for name, entry in described.items()}
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FormatError(
            f"{path}: {error}; the file is damaged, truncated or not safetensors, get it again"
        ) from error


def _stored(path: Path, name: str, described: Any, start: int, size: int) -> _Stored:
    entry = described_tensor(name, described, start, _DTYPES)
    if entry.offset + entry.nbytes > size:
        end = entry.offset + entry.nbytes
        raise ValueError(f"tensor {shown(name)} ends at byte {end} of {size}")
    return _Stored(path, entry.dtype, entry.shape, entry.offset)
