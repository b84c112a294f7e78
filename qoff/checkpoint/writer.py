"""Writing a checkpoint so that it is either complete or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from qoff.errors import ConversionError, FormatError
from qoff.interrupts import check, ending_by_signals
from qoff.quant import QTensor
from qoff.units import format_size

from . import header
from .layout import (
    CODES,
    CONFIG_FILE,
    COPIED,
    DTYPE_NAMES,
    FORMAT_VERSION,
    INDEX_FILE,
    MTP_FILE,
    OUTER_FILE,
    QUANT_METHOD,
    SCALE_MIN,
    WEIGHT_FILE,
    QuantEntry,
    TensorEntry,
    WeightEntry,
    WeightFile,
    layer_file,
    tensors_of,
)
from .place import check_place
from .reader import Checkpoint
from .staging import parents, publish, staging

_PIECE = 8 << 20  # bytes hashed and written at a time
_ALIGNED = 16  # bytes, that weights start at multiples of: what a GPU reads at once


class CheckpointWriter:
    """Writes a checkpoint layer by layer into a hidden directory beside its place.

    `finish` moves the directory into place as its last step. Whatever ends the writing before (an
    exception, a signal, a full disk) removes the hidden directory; a process killed outright leaves
    it, `Checkpoint.open` does not take it for a checkpoint, and the next writer for the same place
    removes it. Use it as a context manager. Layers may be written by several threads.

    overwrite: replace a checkpoint that is there, at the end; never anything else, see
    `check_place`.
    expected_bytes: what the weights will take, to be refused at once where the disk has less free.

    Raises ConversionError when the place is taken, the disk is full, writing fails, or a weight
    cannot be stored.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, expected_bytes: int = 0
    ) -> None:
        self.path, self._overwrite, self._expected = Path(path), overwrite, expected_bytes
        self._checksums: dict[str, dict[str, Any]] = {}
        self._weight_map: dict[str, str] = {}
        self._total = 0
        self._copied: list[str] = []
        self._lock = threading.Lock()  # of the three above

    def __enter__(self) -> Self:
        with self._failures(), ExitStack() as stack:
            stack.enter_context(ending_by_signals())
            stack.enter_context(parents(self.path))
            self._folder = stack.enter_context(staging(self.path))
            check_place(self.path, self._overwrite)
            if _free(self.path) < self._expected:
                raise ConversionError(self._no_space())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        with self._failures():
            self._stack.__exit__(*failure)

    def write_layer(self, layer: int, weights: Mapping[str, QTensor | Tensor]) -> None:
        """Write the weights of a decoder layer, in their order, under their full names.

        But those come last whose bytes would leave others unaligned, of single values say.
        """
        self._write(layer_file(layer), weights)

    def write_outer(self, weights: Mapping[str, QTensor | Tensor]) -> None:
        """Write the weights outside of the layers."""
        self._write(OUTER_FILE, weights)

    def write_mtp(self, weights: Mapping[str, QTensor | Tensor]) -> None:
        """Write the weights of a layer for multi-token prediction."""
        self._write(MTP_FILE, weights)

    def copy_file(self, name: str, data: bytes | str | os.PathLike[str]) -> None:
        """Put a file (of the tokenizer, say) beside the weights: its bytes, or a path to copy."""
        plain = name.isprintable() and name != ".." and PurePosixPath(name).parts == (name,)
        if not plain or name in (CONFIG_FILE, INDEX_FILE) or WEIGHT_FILE.fullmatch(name):
            raise ConversionError(
                f"{self.path}: a file cannot be copied there as {name!r}; use a plain file name "
                "that the checkpoint itself does not"
            )
        self._write_bytes(name, data if isinstance(data, bytes) else _read(Path(data)))
        self._copied.append(name)

    def finish(self, config: Mapping[str, Any]) -> None:
        """Write config.json and the index, check the whole, and move it into place.

        config: that of Hugging Face; its `quantization_config` gets method and version.
        """
        own = {"quant_method": QUANT_METHOD, "version": FORMAT_VERSION}
        quantization = {**(config.get("quantization_config") or {}), **own}
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": self._weight_map,
            "checksums": self._checksums,
            COPIED: self._copied,
        }
        described = {**config, "quantization_config": quantization}
        for name, value in ((INDEX_FILE, index), (CONFIG_FILE, described)):
            self._write_bytes(name, json.dumps(value, indent=2).encode())
        try:
            Checkpoint.open(self._folder)
        except FormatError as error:
            what = str(error).replace(str(self._folder), str(self.path))
            raise ConversionError(f"{self.path}: this would not be a checkpoint: {what}") from error
        with self._failures():
            check_place(self.path, self._overwrite)
            publish(self._folder, self.path)

    def _write(self, name: str, weights: Mapping[str, QTensor | Tensor]) -> None:
        check()
        entries, tensors = _layout(weights)
        digest, nbytes = hashlib.sha256(), 0
        with self._failures(), self._new_file(name) as file:
            for piece in _pieces(header.encode(entries), tensors):
                digest.update(piece)
                file.write(piece)
                nbytes += len(piece)
        with self._lock:
            self._checksums[name] = {"sha256": digest.hexdigest(), "nbytes": nbytes}
            for entry in entries.values():
                for tensor in tensors_of(entry):
                    self._weight_map[tensor.name] = name
                    self._total += tensor.nbytes

    def _write_bytes(self, name: str, data: bytes) -> None:
        with self._failures(), self._new_file(name) as file:
            file.write(data)

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
            where = "" if error.filename is None else f"{error.filename}: "
            why = f"{where}{error.strerror or error}"
            raise ConversionError(
                f"{self.path}: cannot be written ({why}); fix that, or choose another place"
            ) from error

    def _no_space(self) -> str:
        free = format_size(_free(self.path))
        need = f"{format_size(self._expected)} needed, " if self._expected else ""
        return f"{self.path}: the disk is full ({need}{free} free); free some or write elsewhere"


def unwritten(path: Path, weights: Mapping[str, QTensor | Tensor]) -> WeightFile:
    """The file that weights would make, their data unseen: they may be on the meta device.

    Raises ConversionError for a weight that cannot be stored.
    """
    entries, tensors = _layout(weights)
    start = len(header.encode(entries))

    def moved(t: TensorEntry) -> TensorEntry:
        return replace(t, offset=start + t.offset)

    for name, entry in entries.items():
        if isinstance(entry, TensorEntry):
            entries[name] = moved(entry)
        else:
            codes, scale_min = moved(entry.codes), moved(entry.scale_min)
            entries[name] = replace(entry, codes=codes, scale_min=scale_min)
    return WeightFile(path, start, start + sum(t.nbytes for t in tensors), "", entries)


def _free(place: Path) -> int:
    there = next(p for p in place.absolute().parents if p.exists())
    return shutil.disk_usage(there).free


def _layout(
    weights: Mapping[str, QTensor | Tensor],
) -> tuple[dict[str, WeightEntry], list[Tensor]]:
    """Place weights one after the other; offsets count from the start of the data.

    There can be no holes, so the few weights whose bytes are no multiple of `_ALIGNED` come last:
    all others, and so all that a GPU reads much of, start at one.
    """
    entries: dict[str, WeightEntry] = {}
    tensors: list[Tensor] = []
    end = 0

    def place(name: str, tensor: Tensor) -> TensorEntry:
        nonlocal end
        offset, dtype = end, tensor.dtype
        if dtype not in DTYPE_NAMES:
            known = ", ".join(map(str, DTYPE_NAMES))
            raise ConversionError(f"{name!r} is {dtype}; a checkpoint holds {known}")
        tensors.append(tensor)
        end += tensor.nbytes
        return TensorEntry(name, dtype, tuple(tensor.shape), offset, tensor.nbytes)

    for name, w in sorted(weights.items(), key=lambda item: -_keeps_aligned(item[1])):
        reserved = name in ("", header.METADATA) or name.endswith((CODES, SCALE_MIN))
        if reserved or not name.isprintable():
            raise ConversionError(f"{name!r} is reserved by the format; store it by another name")
        if isinstance(w, QTensor):
            parts = place(name + CODES, w.codes), place(name + SCALE_MIN, w.scale_min)
            entries[name] = QuantEntry(name, w.shape, w.bits, w.group_size, w.packing, *parts)
        else:
            entries[name] = place(name, w)
    return entries, tensors


def _keeps_aligned(weight: QTensor | Tensor) -> int:
    """What its bytes are a multiple of, up to `_ALIGNED`: never less than an element has."""
    parts = (weight.codes, weight.scale_min) if isinstance(weight, QTensor) else (weight,)
    return math.gcd(_ALIGNED, *(part.nbytes for part in parts))


def _pieces(head: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(raw), _PIECE):
            yield raw[start : start + _PIECE].cpu().numpy().data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(
            f"{path}: cannot be read ({error.strerror}); it belongs to the checkpoint, get it again"
        ) from error
