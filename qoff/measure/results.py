"""Files of results: what was measured, on what machine, with which versions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from qoff.errors import FormatError
from qoff.schema import load_object

from .machine import machine, versions

_KEYS = ("bench", "date", "settings", "machine", "versions", "measured")


@dataclass(frozen=True)
class BenchResult:
    """What one run of a bench found, and under what circumstances.

    measured: nested by name; wherever a figure was sampled, `Samples.summary`. unit: of the samples
    whose names do not end in one ("_per_s", "_s") nor are under "seconds".
    """

    bench: str
    settings: Mapping[str, Any]
    measured: Mapping[str, Any]
    ratios: Mapping[str, Any] = field(default_factory=dict)
    bars: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    unit: str = ""
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    def content(self) -> dict[str, Any]:
        """All of it for JSON."""
        keys = (*_KEYS, "ratios", "bars", "notes", *(["unit"] if self.unit else ()))
        return {key: getattr(self, key) for key in keys}

    def text(self) -> str:
        """The JSON document, as it stands in a file."""
        return json.dumps(self.content(), indent=1) + "\n"

    def stem(self) -> str:
        """The usual name of its file: bench, processor or GPU, date."""
        return f"{self.bench}-{slug(processor_of(self.machine))}-{self.date}"

    def add_to(self, folder: Path) -> Path:
        """Write it to a new file in a folder, which is made if need be; returns the path.

        Files of the same day that are there stay; this one's name then ends in -2, -3, ...
        """
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = folder / f"{self.stem()}{'' if number == 1 else f'-{number}'}.json"
            try:
                with path.open("x") as file:
                    file.write(self.text())
            except FileExistsError:
                continue
            return path
        raise FormatError(f"{folder}: has 999 files {self.stem()}*.json; move some away")


class UnlikeResultError(FormatError):
    """A JSON document of another form than a `BenchResult`: without samples, say."""


def read_result(path: Path) -> BenchResult:
    """Read the file of a result. Raises FormatError for anything else, naming the file.

    UnlikeResultError, which is one, for a document of another form.
    """
    try:
        found = load_object(path.read_bytes())
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file; give one that a bench wrote") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}; give a JSON file that a bench wrote") from error
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise UnlikeResultError(
            f"{path}: is not a result of a bench that keeps its samples: it has no "
            f"{', '.join(missing)}; give a file of `qoff bench --save` or of bench/results"
        )
    for key, kind in (*((key, dict) for key in _KEYS[2:]), ("bench", str), ("date", str)):
        if not isinstance(found[key], kind):
            raise FormatError(
                f"{path}: its {key} is a {type(found[key]).__name__}, not a {kind.__name__}; "
                "measure again"
            )
    known = {field.name for field in fields(BenchResult)}
    return BenchResult(**{key: value for key, value in found.items() if key in known})


def processor_of(machine: Mapping[str, Any]) -> str:
    """The name of what computed, of a result's `machine`."""
    return str(machine.get("gpu") or machine.get("cpu") or "unknown")


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes, for a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
