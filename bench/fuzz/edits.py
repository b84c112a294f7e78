"""Edits of JSON, bytes and text, each drawn from one random generator."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass
from random import Random
from typing import Any

_INTS = (0, 1, -1, 2, 3, 7, 64, 255, 1000, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32,
         (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 31), -(1 << 63), 10**30, 10**400)  # fmt: skip
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e30, 1e308, math.inf, -math.inf, math.nan)
_TEXTS = ("", "a", "0", "nan", "\ud800", "\0", "a\nb", "../x", "/dev/zero", ".", "é" * 9,
          "x" * 5000, "silu", "default", "float16", "model.safetensors", "[PAD]", "{{",
          "%s")  # fmt: skip


def anything(random: Random, depth: int = 2) -> Any:
    """A JSON value, one that is likely to be handled wrongly."""
    kind = random.randrange(10 if depth else 7)
    if kind < 3:
        return random.choice(_INTS)
    if kind < 4:
        return random.choice(_FLOATS)
    if kind < 6:
        return random.choice(_TEXTS)
    if kind < 7:
        return random.choice((None, True, False))
    if kind < 8:
        return {
            random.choice(_TEXTS): anything(random, depth - 1) for _ in range(random.randrange(3))
        }
    if kind < 9:
        return [anything(random, depth - 1) for _ in range(random.randrange(4))]
    nested: Any = []
    for _ in range(random.choice((3, 70, 150))):
        nested = [nested]
    return nested


@dataclass(frozen=True)
class Document:
    """A JSON value, or the text that became of one."""

    value: Any

    def encoded(self) -> bytes:
        return self.value if isinstance(self.value, bytes) else json.dumps(self.value).encode()

    def edited(self, random: Random) -> Document:
        """This with one thing changed; once its text was, it stays text."""
        if isinstance(self.value, bytes) or random.random() < 0.15:
            return Document(edit_bytes(self.encoded(), random))
        value = pickle.loads(pickle.dumps(self.value))  # a deep copy, in a tenth of the time
        places = _places(value) if isinstance(value, dict | list) else []
        if not places:
            return Document(anything(random))
        holder, key = random.choice(places)
        way = random.randrange(8)
        if way == 0 and isinstance(holder, dict):
            holder[random.choice(_TEXTS)] = holder.pop(key)
        elif way == 1:
            del holder[key]
        elif way == 2:
            other, at = random.choice(places)
            if not isinstance(other[at], dict | list):
                holder[key] = other[at]
        elif way == 3 and isinstance(holder, list):
            holder.append(anything(random))
        elif way == 4 and type(holder[key]) is int:
            holder[key] += random.choice((-1, 1, 64, 1 << random.randrange(64)))
        elif way == 5:
            holder[key] = [holder[key]]
        else:
            holder[key] = anything(random)
        return Document(value)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key within a value."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        holder = left.pop()
        keys = range(len(holder)) if isinstance(holder, list) else holder
        found += [(holder, key) for key in keys]
        left += [x for key in keys if isinstance(x := holder[key], dict | list)]
    return found


def edit_bytes(data: bytes, random: Random, first: int = 1 << 62) -> bytes:
    """Bytes with one thing changed, in the first ones nine times of ten."""
    within = min(len(data), first if random.random() < 0.9 else len(data))
    at = random.randrange(within) if within else 0
    way, count = random.randrange(7), random.choice((1, 1, 2, 8, 100))
    if way == 0 and data:
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if way == 1:
        return data[:at] + random.randbytes(count) + data[at + count :]
    if way == 2:
        return data[:at] + random.randbytes(count) + data[at:]
    if way == 3:
        return data[:at] + data[at + count :]
    if way == 4:
        return data[:at] + data[at : at + count] * random.choice((2, 3, 50)) + data[at + count :]
    if way == 5:
        return data[:at]
    width = random.choice((4, 8))
    number = (random.choice(_INTS) & (1 << 8 * width) - 1).to_bytes(width, "little")
    return data[:at] + number + data[at + width :]


def edit_text(text: str, random: Random, pieces: tuple[str, ...]) -> str:
    """A text with one piece put in or taken out."""
    at = random.randrange(len(text) + 1)
    if random.random() < 0.6:
        return text[:at] + random.choice(pieces) + text[at:]
    return text[:at] + text[at + random.choice((1, 3, 10)) :]
