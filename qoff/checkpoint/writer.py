"""Writing a checkpoint so that it is either complete or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from qoff.errors import ConversionError
from qoff.quant import QTensor
from qoff.units import format_size

from . import header
from .layout import (
    CODES,
    CONFIG_FILE,
    FORMAT_VERSION,
    INDEX_FILE,
    OUTER_FILE,
    QUANT_METHOD,
    SCALE_MIN,
    QuantEntry,
    TensorEntry,
    WeightEntry,
    layer_file,
    tensors_of,
)

_PIECE = 8 << 20  # bytes hashed and written at a time


class CheckpointWriter:
    """Writes a checkpoint layer by layer into a hidden directory beside its place.

    `finish` moves the directory into place as its last step. Whatever ends the writing before (an
    exception, a signal, a full disk) removes the hidden directory; a process killed outright leaves
    it, `Checkpoint.open` does not take it for a checkpoint, and the next writer for the same place
    removes it. Use it as a context manager.

    Raises ConversionError when the place is taken (unless overwrite, which replaces it at the end),
    when the disk has less than `expected_bytes` free, or when writing fails.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, expected_bytes: int = 0
    ) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._prefix = f".{self.path.name}.qoff-"
        self._expected = expected_bytes
        self._checksums: dict[str, dict[str, Any]] = {}
        self._weight_map: dict[str, str] = {}
        self._total = 0
        self._finished = False
        if self.path.exists() and not overwrite:
            raise ConversionError(f"{self.path}: exists already; choose another or overwrite it")
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._check_space()
            self._folder = self.path.parent / f"{self._prefix}{os.getpid()}"
            self._folder.mkdir()

    def __enter__(self) -> Self:
        self._restore = _signals_as_exceptions()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if not self._finished:
            shutil.rmtree(self._folder, ignore_errors=True)

    def write_layer(self, layer: int, weights: Mapping[str, QTensor | Tensor]) -> None:
        """Write the weights of a decoder layer, in their order, under their full names."""
        self._write(layer_file(layer), weights)

    def write_outer(self, weights: Mapping[str, QTensor | Tensor]) -> None:
        """Write the weights outside of the layers."""
        self._write(OUTER_FILE, weights)

    def copy_file(self, name: str, data: bytes | str | os.PathLike[str]) -> None:
        """Put a file (of the tokenizer, say) beside the weights: its bytes, or a path to copy."""
        if Path(name).name != name:
            raise ConversionError(f"{name!r} is not the name of a file in the checkpoint")
        with self._failures():
            content = data if isinstance(data, bytes) else Path(data).read_bytes()
            with self._new_file(name) as file:
                file.write(content)

    def finish(self, config: Mapping[str, Any]) -> None:
        """Write config.json and the index, and move the checkpoint into place.

        config: that of Hugging Face; its `quantization_config` gets method and version.
        """
        quantization = {
            **config.get("quantization_config", {}),
            "quant_method": QUANT_METHOD,
            "version": FORMAT_VERSION,
        }
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": self._weight_map,
            "checksums": self._checksums,
        }
        with self._failures():
            for name, value in (
                (INDEX_FILE, index),
                (CONFIG_FILE, {**config, "quantization_config": quantization}),
            ):
                with self._new_file(name) as file:
                    file.write(json.dumps(value, indent=2).encode())
            _sync_directory(self._folder)
            self._move_into_place()
        self._finished = True

    def _write(self, name: str, weights: Mapping[str, QTensor | Tensor]) -> None:
        entries, tensors = _layout(weights)
        digest, nbytes = hashlib.sha256(), 0
        with self._failures(), self._new_file(name) as file:
            for piece in _pieces(header.encode(entries), tensors):
                digest.update(piece)
                file.write(piece)
                nbytes += len(piece)
        self._checksums[name] = {"sha256": digest.hexdigest(), "nbytes": nbytes}
        for entry in entries.values():
            for tensor in tensors_of(entry):
                self._weight_map[tensor.name] = name
                self._total += tensor.nbytes

    @contextmanager
    def _new_file(self, name: str) -> Iterator[BinaryIO]:
        with (self._folder / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn an OSError into a ConversionError that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConversionError(self._no_space()) from error
            raise ConversionError(f"{self.path}: cannot be written ({error})") from error

    def _check_space(self) -> None:
        if shutil.disk_usage(self.path.parent).free < self._expected:
            raise ConversionError(self._no_space())

    def _no_space(self) -> str:
        free = format_size(shutil.disk_usage(self.path.parent).free)
        need = f"{format_size(self._expected)} needed, " if self._expected else ""
        return f"{self.path}: the disk is full ({need}{free} free); free some or write elsewhere"

    def _remove_leftovers(self) -> None:
        """Remove what writers of this place that are not alive any more left behind."""
        for folder in self.path.parent.glob(f"{self._prefix}*"):
            process = folder.name.removeprefix(self._prefix)
            if not process.isdigit() or not _is_alive(int(process)):
                shutil.rmtree(folder, ignore_errors=True)

    def _move_into_place(self) -> None:
        if self.path.exists() and self._overwrite:
            old = self.path.parent / f"{self._prefix}old-{os.getpid()}"
            self.path.rename(old)
            self._folder.rename(self.path)
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink()
        elif self.path.exists():
            raise ConversionError(f"{self.path}: was created meanwhile; choose another place")
        else:
            self._folder.rename(self.path)
        _sync_directory(self.path.parent)


def _layout(
    weights: Mapping[str, QTensor | Tensor],
) -> tuple[dict[str, WeightEntry], list[Tensor]]:
    """Place weights one after the other; offsets count from the start of the data."""
    entries: dict[str, WeightEntry] = {}
    tensors: list[Tensor] = []
    offset = 0

    def place(name: str, tensor: Tensor) -> TensorEntry:
        nonlocal offset
        entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape), offset, tensor.nbytes)
        tensors.append(tensor)
        offset += tensor.nbytes
        return entry

    for name, weight in weights.items():
        if isinstance(weight, QTensor):
            entries[name] = QuantEntry(
                name,
                weight.shape,
                weight.bits,
                weight.group_size,
                weight.packing,
                place(name + CODES, weight.codes),
                place(name + SCALE_MIN, weight.scale_min),
            )
        else:
            entries[name] = place(name, weight)
    return entries, tensors


def _pieces(head: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(raw), _PIECE):
            yield raw[start : start + _PIECE].data


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _signals_as_exceptions() -> Any:
    """Let SIGTERM end the process through its `finally` blocks; returns what undoes that."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    return lambda: signal.signal(signal.SIGTERM, before)
