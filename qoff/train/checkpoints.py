"""Checkpoints of a run: a file of weights and states, and run.json, which says which it is."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qoff.checkpoint.staging import sync_directory
from qoff.errors import (
    ArgumentError,
    ChecksumError,
    DiskReadError,
    DiskWriteError,
    FormatError,
    io_errors,
)
from qoff.memory.io.ranges import read_all
from qoff.schema import (
    TEXT,
    Fields,
    Kind,
    check,
    nothing_or,
    number,
    object_of,
    read_object,
    whole,
)

from .delayed import Pending
from .generators import State
from .homes import Home, Homes
from .layout import FlatUnit
from .loss_scale import LossScale
from .optimizers import Optimizer

_HEADER, _VERSION = "run.json", 1
_ADVICE = "name a folder that training.save has written"
_PIECE = 8 << 20  # bytes that are read at once
_OF_GPU = 16  # bytes of a GPU's generator: seed and offset
_UNNAMED = "float32"  # gradients that wait, of older runs
_STATES = re.compile(r"step-[0-9]+-[0-9a-f]{8}\.state")
_LOSS_SCALE: Fields = {"value": number(1, 2.0**1000, "a number from 1"), "good": whole(0)}
_PENDING: Fields = {"step": whole(0), "scale": number(0, 2.0**1000, "a number from 0")}
_FIELDS: Fields = {
    "version": whole(1, 1, f"{_VERSION}, which this qoff reads"),
    "states": Kind(
        "the name of a file beside it",
        lambda x: isinstance(x, str) and _STATES.fullmatch(x) is not None,
    ),
    "sha256": nothing_or(TEXT),
    "steps": whole(0),
    "random": TEXT,
    "random_gpu": nothing_or(TEXT),
    "loss_scale": nothing_or(object_of(_LOSS_SCALE)),
    "pending": nothing_or(object_of(_PENDING)),
    "run": Kind("an object", lambda x: isinstance(x, dict)),
}
_NEEDED = "version", "states", "steps", "random", "run"  # the others are newer


@dataclass(frozen=True)
class Progress:
    """How far a run is. random: of generators. position: the caller's, in its data.

    loss_scale: of a run in float16. pending: of one whose updates are delayed.
    """

    steps: int
    random: State
    position: Any
    loss_scale: LossScale | None = None
    pending: Pending | None = None


def kind_of_run(
    units: Sequence[FlatUnit],
    optimizer: Optimizer,
    delayed: bool,
    tiles: Sequence[FlatUnit],
    gradient: torch.dtype,
    sums: Sequence[torch.dtype] = (),
) -> dict[str, Any]:
    """What a run and its checkpoint have in common: what learns, and the form of states.

    gradient: what those of layers are, sums: of each tile; they are in the checkpoint where updates
    are delayed.
    """
    weights = [
        [name, str(unit.dtype).removeprefix("torch."), list(shape)]
        for unit in units
        for name, shape in unit.shapes.items()
    ]
    found = {
        "optimizer": type(optimizer).__name__,
        "bits": optimizer.bits,
        "codes": "linear in roots" if optimizer.bits == 8 else None,
        "layers": len(units) - 1,
        "updates": "delayed" if delayed else None,
        "weights": weights,
        "tiles": [tile.path for tile in tiles] or None,
    }
    if delayed:
        found["gradients"] = str(gradient).removeprefix("torch.")
        if sums:
            found["gradients of tiles"] = [str(x).removeprefix("torch.") for x in sums]
    return found


def exists(folder: Path) -> bool:
    """Whether a checkpoint of a run is there."""
    return (folder / _HEADER).exists()


def position(folder: Path) -> Any:
    """That with which a checkpoint was saved. Raises FormatError for none that is whole."""
    return read_object(folder / _HEADER, _ADVICE).get("position")


def save(
    folder: Path, homes: Homes, kept: Sequence[Home], run: Mapping[str, Any], now: Progress
) -> None:
    """Write a checkpoint; the one that is there stays until the new one is whole.

    Each is a file of its own, and replacing run.json, which names it, is one operation of the file
    system. kept: homes, which are copied in this order. Raises DiskWriteError, ArgumentError for a
    position that JSON does not have.
    """
    states = f"step-{now.steps}-{secrets.token_hex(4)}.state"
    header = {
        "version": _VERSION,
        "states": states,
        "steps": now.steps,
        "random": _encoded(now.random[0]),
        "random_gpu": _encoded(now.random[1]) if len(now.random) > 1 else None,
        "position": now.position,
        "loss_scale": None if now.loss_scale is None else asdict(now.loss_scale),
        "pending": None if now.pending is None else asdict(now.pending),
        "run": run,
    }
    try:
        json.dumps(header, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"a position is what JSON can hold: {error}") from error
    with io_errors(folder, DiskWriteError, "the checkpoint that was there is as before"):
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FormatError):  # what a killed run was writing takes room
            named = read_object(folder / _HEADER, _ADVICE).get("states") if exists(folder) else ""
            if named is not None:
                _remove_states(folder, named)
        beside = folder / f"{_HEADER}.new"
        try:
            header["sha256"] = _write(folder / states, homes, kept)
            text = json.dumps(header, indent=1)
            with beside.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(folder / _HEADER)
        except BaseException:
            for path in (beside, folder / states):
                with suppress(OSError):
                    path.unlink()
            raise
    with io_errors(folder, DiskWriteError, f"the checkpoint of step {now.steps} is there"):
        sync_directory(folder)
    with suppress(OSError):  # then the next one does
        _remove_states(folder, states)


@contextmanager
def opened(
    folder: Path, kept: Sequence[Home], run: Mapping[str, Any]
) -> Iterator[tuple[int, Progress]]:
    """Give a checkpoint's file, to `restore` from, and how far it is, when it is of such a run.

    Raises FormatError, ChecksumError for a file that is not as it was written, DiskReadError,
    ArgumentError for a checkpoint of another run.
    """
    header = read_object(folder / _HEADER, _ADVICE)
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise FormatError(f"{folder / _HEADER}: {missing[0]} is missing: it is not whole")
    check(header, _FIELDS, folder / _HEADER)
    _check_run(header["run"], run, folder)
    random = _decoded(header["random"], folder, torch.get_rng_state().numel())
    states: State = (random,)
    if header.get("random_gpu") is not None:
        states += (_decoded(header["random_gpu"], folder, _OF_GPU),)
    path, wanted = folder / header["states"], sum(home.nbytes for home in kept)
    with io_errors(path, DiskReadError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd).st_size
            if found != wanted:
                raise FormatError(f"{path}: {found:,} bytes, not {wanted:,}: it is not whole")
            _check(fd, wanted, path, header.get("sha256"))
            scale, waits = header.get("loss_scale"), header.get("pending")
            known = None if scale is None else LossScale(**scale)
            pending = None if waits is None else Pending(**waits)
            yield fd, Progress(header["steps"], states, header.get("position"), known, pending)
        finally:
            os.close(fd)


def restore(fd: int, homes: Homes, kept: Sequence[Home]) -> None:
    """Copy all of a checkpoint's file to homes. Raises OSError."""
    at = 0
    for home in kept:
        homes.restore(home, fd, at)
        at += home.nbytes


def _remove_states(folder: Path, kept: object) -> None:
    """Remove all states but those of this name. Raises OSError."""
    for path in folder.iterdir():
        if _STATES.fullmatch(path.name) and path.name != kept:
            path.unlink()


def _check(fd: int, nbytes: int, path: Path, sha256: str | None) -> None:
    """Raise ChecksumError for a file that is not as it was written. sha256: None in older runs."""
    found = None if sha256 is None else _sha256(fd, nbytes)
    if found != sha256:
        raise ChecksumError(
            f"{path}: SHA-256 is {found}, {_HEADER} says {sha256}: the file is damaged; go on from "
            "another checkpoint, or begin anew"
        )


def _sha256(fd: int, nbytes: int) -> str:
    """Of a file of so many bytes. Raises OSError."""
    digest, memory = hashlib.sha256(), torch.empty(min(_PIECE, nbytes), dtype=torch.uint8)
    for at in range(0, nbytes, _PIECE):
        piece = memory[: nbytes - at]
        read_all(fd, piece, at)
        digest.update(piece.numpy().data)
    return digest.hexdigest()


def _write(path: Path, homes: Homes, kept: Sequence[Home]) -> str:
    """Copy homes to a new file; its checksum."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at = 0
        for home in kept:
            homes.save(home, fd, at)
            at += home.nbytes
        found = _sha256(fd, at)
        os.fsync(fd)
        return found
    finally:
        os.close(fd)


def _encoded(random: torch.Tensor) -> str:
    return base64.b64encode(random.numpy().tobytes()).decode()


def _decoded(random: str, folder: Path, nbytes: int) -> torch.Tensor:
    try:
        found = base64.b64decode(random, validate=True)
    except ValueError:
        found = b""
    if len(found) != nbytes:
        raise FormatError(f"{folder / _HEADER}: random is no state of torch's generator")
    return torch.tensor(list(found), dtype=torch.uint8)


def _check_run(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    for name, value in wanted.items():
        theirs = found.get(name, _UNNAMED if name == "gradients" else None)
        if theirs == value:
            continue
        if isinstance(theirs, list) and isinstance(value, list):
            pairs = ((a, b) for a, b in zip(theirs, value, strict=False) if a != b)
            theirs, value = next(pairs, (len(theirs), len(value)))
        verb = "is" if name == "optimizer" else "are"
        raise ArgumentError(
            f"{folder} is a checkpoint of another run: its {name} {verb} {_said(theirs)}, here "
            f"{_said(value)}"
        )


def _said(value: Any) -> str:
    """A weight by its name, dtype and shape; anything else as it is."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
