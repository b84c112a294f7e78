"""JSON objects from files that nobody vouches for."""

from __future__ import annotations

import json
from typing import Any


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
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} occurs twice")
        result[name] = value
    return result
