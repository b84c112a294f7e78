"""Models split into several GGUF files, as `llama-gguf-split` calls them: x-00001-of-00003.gguf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qoff.errors import FormatError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_COUNT, _NUMBER = "split.count", "split.no"
_PROJECTOR = "mmproj"  # begins the names of files with what makes tokens of images


def parts(path: Path) -> tuple[Path, ...]:
    """The files of the model that a file is of, in order: by its name, or itself alone.

    Raises FormatError, naming the first one, for parts that are not there.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise FormatError(f"{path}: is part {number} of {count} by its name")
    there = {one.name for one in path.parent.iterdir()}
    names = (f"{stem}-{i:05}-of-{count:05}{path.suffix}" for i in range(1, count + 1))
    found = []
    for name in names:
        if name not in there:
            raise FormatError(f"{path}: one of {count} files, of which {name} is not there")
        found.append(path.parent / name)
    return tuple(found)


def check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Raise FormatError unless a file is the part, counted from 0, that its name says it is."""
    known = metadata.get(_COUNT, 1), metadata.get(_NUMBER, 0)
    if known not in ((count, number), (0, 0)):
        raise FormatError(
            f"{path}: is part {known[1]!r} of {known[0]!r} by its metadata, counted from 0, but "
            f"{number} of {count} by its name; a model in parts needs the names that "
            "llama-gguf-split gives, like model-00001-of-00003.gguf"
        )


def in_directory(directory: Path) -> Path | None:
    """The GGUF file of a directory, or the first of its parts; None without one.

    Raises FormatError for several models.
    """
    files = sorted(p for p in directory.iterdir() if p.suffix.lower() == ".gguf")
    models = [p for p in files if not p.name.startswith(_PROJECTOR)]
    if not models:
        return None
    if len(models) > 1 and models != sorted(parts(models[0])):
        raise FormatError(
            f"{directory}: holds several GGUF files, {models[0].name} and {models[1].name} among "
            "them; name one of them"
        )
    return models[0]
