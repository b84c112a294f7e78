"""A Hugging Face model directory of floats, in safetensors files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError
from qoff.quant import TensorInfo

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER = 100 << 20  # safetensors' own bound
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FormatError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(f"{path}: no such file; a model directory needs it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a {type(value).__name__}; expected an object")
    return value


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
        return read_json(self.path / "config.json")

    def info(self, name: str) -> TensorInfo | None:
        stored = self._tensors.get(name)
        return None if stored is None else TensorInfo(stored.shape, None)

    def chunks(self, name: str, rows: int) -> Iterator[Tensor]:
        for start in range(0, self._tensors[name].shape[0], rows):
            yield self.read(name, start, start + rows)

    def item(self, name: str, index: int) -> Tensor:
        return self.read(name, index, index + 1)[0]

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def whole(self, name: str) -> Tensor:
        """Read a tensor of floats, of any number of dimensions."""
        stored = self._tensors[name]
        count = math.prod(stored.shape) * stored.dtype.itemsize
        return stored.read(0, count).view(stored.shape)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, None if there is none of this name."""
        stored = self._tensors.get(name)
        return None if stored is None else (stored.dtype, stored.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows start..stop-1 of a tensor, as far as there are so many."""
        stored = self._tensors[name]
        rows = range(*slice(start, stop).indices(stored.shape[0]))
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        data = stored.read(start * row_bytes, len(rows) * row_bytes)
        return data.view(len(rows), *stored.shape[1:])

    def files(self) -> Mapping[str, bytes | Path]:
        return {name: self.path / name for name in COMPANIONS if (self.path / name).is_file()}

    def _open_sharded(self) -> None:
        index = self.path / _INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{index}: no weight_map; expected tensor names and their files")
        headers: dict[str, dict[str, _Stored]] = {}
        for name, file in weight_map.items():
            if file not in headers:
                headers[file] = _read_header(_inside(self.path, file, index))
            if name not in headers[file]:
                raise FormatError(
                    f"{self.path / file}: no tensor {name!r}, which {index} has there"
                )
            self._tensors[name] = headers[file][name]


def own_code(source: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the Python files of a model's directory, by name; a file has none."""
    return {path.name: path for path in sorted(Path(source).glob("*.py"))}


def _inside(directory: Path, file: object, index: Path) -> Path:
    """Return the path of a shard, which must be a plain file name in the directory of the index."""
    plain = isinstance(file, str) and PurePosixPath(file).name == file and file not in ("", "..")
    if not isinstance(file, str) or not plain or "\\" in file:
        raise FormatError(
            f"{index}: names the file {file!r}; expected a file name without a directory"
        )
    if not (directory / file).is_file():
        raise FormatError(f"{directory / file}: no such file, but {index} names it; get it again")
    return directory / file


def _read_header(path: Path) -> dict[str, _Stored]:
    """Return the tensors of a safetensors file. Raises FormatError if they do not fit the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise FormatError(
                    f"{path}: a header of {length} bytes in a file of {size}; "
                    "the file is truncated or not safetensors, get it again"
                )
            header = json.loads(file.read(length))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return {name: _stored(path, entry, 8 + length, size) for name, entry in entries}
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path}: header is not valid safetensors: {error}") from error


def _stored(path: Path, entry: Mapping[str, Any], data_start: int, size: int) -> _Stored:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(x, int) and x >= 0 for x in (*shape, start, end)):
        raise ValueError(f"shape {shape}, offsets {start}..{end}")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:  # noticed only if the tensor is wanted: buffers may be of any kind
        return _Stored(path, torch.uint8, shape, data_start + start)
    if end - start != math.prod(shape) * dtype.itemsize or data_start + end > size:
        raise ValueError(f"{entry['dtype']} {shape} at {start}..{end} of {size - data_start} bytes")
    return _Stored(path, dtype, shape, data_start + start)
