"""`qoff convert`: what its options mean."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qoff.errors import QoffError
from qoff.quant import Format

_FORMAT = re.compile(r"(.+)=(\d+),(\d+)")


def formats_of(texts: Iterable[str]) -> dict[str, Format]:
    """Formats by pattern, of texts like "*.down_proj=8,64": bits and group size.

    Raises QoffError for another text, QuantizationError for a format that does not exist.
    """
    found = {}
    for text in texts:
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise QoffError(
                f"--weight {text!r} is not NAME=BITS,GROUP; write one like '*.down_proj=8,64'"
            )
        found[match[1]] = Format(int(match[2]), int(match[3]))
    return found
