"""Where a checkpoint may be written: so that nothing is lost but a checkpoint of qoff."""

from __future__ import annotations

import os
from pathlib import Path

from qoff.errors import ConversionError, FormatError
from qoff.schema import read_object

from .layout import (
    COMPANIONS,
    CONFIG_FILE,
    COPIED,
    INDEX_FILE,
    KV_SENSITIVITY_FILE,
    POOLING,
    WEIGHT_FILE,
)
from .reader import read_config

_OF_SYSTEMS = {".DS_Store", "Thumbs.db", "desktop.ini"}  # written into any folder that is shown


def check_place(path: Path, overwrite: bool = False) -> None:
    """Raise ConversionError where no checkpoint can be put.

    That is in no folder, and where anything is but an empty folder or, to overwrite, a checkpoint
    with nothing in its folder that qoff did not write. Files that file managers write count as
    none.
    """
    if not os.path.lexists(path):
        there = next(p for p in path.absolute().parents if os.path.lexists(p))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConversionError(
                f"{path}: cannot be written, as {there} is no folder that you may write to; "
                "choose another place"
            )
        return
    if path.is_dir() and not entries(path):
        return
    try:
        read_config(path)
    except FormatError as error:
        raise ConversionError(
            f"{path}: exists and is not a qoff checkpoint, so it is not overwritten ({error}); "
            "remove it, or choose another place"
        ) from error
    foreign = _foreign(path)
    if foreign is not None:
        raise ConversionError(
            f"{path}: holds {foreign!r}, which qoff did not write, so it is not overwritten; "
            "move that, or choose another place"
        )
    if not overwrite:
        raise ConversionError(
            f"{path}: exists already; choose another place, or pass overwrite=True (--overwrite)"
        )


def entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted, but for files that file managers write anywhere."""
    return sorted(p for p in folder.iterdir() if p.name not in _OF_SYSTEMS or not p.is_file())


def check_apart(path: Path, source: str | os.PathLike[str]) -> None:
    """Raise ConversionError for a checkpoint that would be written over, or into, its model."""
    model = Path(source)
    if not os.path.lexists(model):
        return
    there, place = model.resolve(), path.resolve()
    if there.is_relative_to(place):
        raise ConversionError(
            f"{path}: the model to convert, {source}, lies there, and would be lost; "
            "choose another place"
        )
    if place.is_relative_to(there):
        raise ConversionError(
            f"{path}: lies in the folder of the model to convert, {source}, which stays as it is; "
            "choose a place outside"
        )


def _foreign(checkpoint: Path) -> str | None:
    """The first file or folder in a checkpoint that qoff did not write there; None: there is none.

    The index names the files that were copied; in those of earlier versions it does not.
    """
    try:
        copied = read_object(checkpoint / INDEX_FILE).get(COPIED)
    except FormatError:  # damaged, and to be replaced
        copied = None
    own = {CONFIG_FILE, INDEX_FILE}
    own |= {*map(str, copied)} if isinstance(copied, list) else {*COMPANIONS, POOLING}
    for entry in entries(checkpoint):
        name = entry.name
        written = name in own or WEIGHT_FILE.fullmatch(name) or KV_SENSITIVITY_FILE in name
        if not written or entry.is_dir():
            return name
    return None
