"""Sizes in bytes and counts, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from qoff.errors import QoffError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Parse "24MiB", "8GB", "1.5g", "512k" or a number of bytes: bytes, rounded down.

    KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB, TB and bare letters powers of 1000.
    Raises QoffError for anything else.
    """
    if isinstance(text, int):
        if text < 0:
            raise QoffError(f"a size cannot be negative: {text}; give a number of bytes from 0 up")
        return text
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise QoffError(f"{text!r} is not a size; write it like 24MiB, 8GB, 1.5GiB or 1048576")
    base = 1024 if match[3] else 1000
    return int(Fraction(match[1]) * base ** _UNITS[match[2].lower()])


def counted(count: int, one: str, many: str = "") -> str:
    """Write a number of things: "1 layer", "2 layers"; many: what two are called, if not so."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def format_size(nbytes: int) -> str:
    """Write a number of bytes with one decimal and a binary unit: "24.0 MiB"."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if round(abs(value), 1) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
