"""JSON objects from files that nobody vouches for, and what their fields have to be."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from stat import S_ISREG
from typing import Any

from qoff.errors import FormatError

MAX_WHOLE = (1 << 31) - 1  # no size or token id of a model is larger
_MAX_DEPTH = 64  # of objects and arrays in each other
_SHOWN = 120  # characters of a value in a message


@dataclass(frozen=True)
class Kind:
    """What a value may be, as messages say it and as a test."""

    words: str
    allows: Callable[[object], bool]


Fields = Mapping[str, Kind]
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))


def whole(least: int, most: int = MAX_WHOLE, words: str = "") -> Kind:
    """A whole number from `least` to `most`; True is none."""
    return Kind(
        words or f"a whole number from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float, words: str) -> Kind:
    """A finite number from `least` to `most`; True is none."""
    return Kind(words, lambda value: is_number(value) and least <= value <= most)  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Whether a value is an int or a float that is finite as a float; True is none."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return -(2**1023) < value < 2**1023
    return isinstance(value, float) and math.isfinite(value)


def plain_int(value: object) -> object:
    """A whole number of another type, like NumPy's, as Python's; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return value
    return int(value)


def nothing_or(kind: Kind) -> Kind:
    """null, too."""
    return Kind(f"null or {kind.words}", lambda value: value is None or kind.allows(value))


def list_of(kind: Kind) -> Kind:
    """A list of such values."""
    return Kind(
        f"a list of {kind.words}",
        lambda value: isinstance(value, list) and all(map(kind.allows, value)),
    )


def either(*kinds: Kind) -> Kind:
    """Any of these."""
    return Kind(
        ", or ".join(kind.words for kind in kinds),
        lambda value: any(kind.allows(value) for kind in kinds),
    )


def object_of(fields: Fields) -> Kind:
    """An object of these fields and no others."""
    return Kind(
        f"an object of {', '.join(fields)}",
        lambda value: (
            isinstance(value, dict)
            and value.keys() == fields.keys()
            and first_wrong(value, fields) is None
        ),
    )


TOKEN_IDS = nothing_or(either(whole(-1), list_of(whole(-1))))
SPECIAL_TOKENS: Fields = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TOKEN_IDS)


def first_wrong(values: Mapping[str, Any], fields: Fields) -> str | None:
    """The name of a field that is there and not what it has to be."""
    return next(
        (k for k, kind in fields.items() if k in values and not kind.allows(values[k])), None
    )


def check(values: Mapping[str, Any], fields: Fields, path: Path) -> None:
    """Raise FormatError, naming file and field, for a field that is not what it has to be."""
    key = first_wrong(values, fields)
    if key is not None:
        raise FormatError(
            f"{path}: {key} is {shown(values[key])}; expected {fields[key].words}. Correct the file"
        )


def shown(value: object) -> str:
    """A value as messages show it: in one line, not a long one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_object(path: Path, advice: str = "get it again") -> dict[str, Any]:
    """Read a JSON object from a file. Raises FormatError, naming the file, where there is none."""
    try:
        if not S_ISREG(path.stat().st_mode):  # reading a pipe could block
            raise FormatError(f"{path}: is not a file; {advice}")
        return load_object(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except ValueError as error:
        raise FormatError(f"{path}: is not a JSON object ({error}); {advice}") from error


def replace_text(path: Path, text: str) -> None:
    """Write a file for `read_object`, which finds the old one or a whole one, whoever writes it.

    Raises OSError, which has the file's name also where the disk is full.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def json_text(value: Any, indent: int | None = None) -> str:
    """A document of JSON, which has no NaN or infinity: null stands for them."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [*map(_finite, value)] if isinstance(value, list | tuple) else value


def load_object(text: bytes | str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises ValueError saying why it is none.

    A name that occurs twice in an object is refused: two readers could take different values.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"but a {type(value).__name__}")
    if _deeper(value, _MAX_DEPTH):
        raise ValueError("not JSON: nested too deeply")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {shown(name)} occurs twice")
        result[name] = value
    return result


def _deeper(value: Any, levels: int) -> bool:
    """Whether objects and arrays lie in each other more than so many levels deep."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(part, levels - 1) for part in parts)
