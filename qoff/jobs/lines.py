"""The lines of a file of requests, one after another, whatever its size."""

from __future__ import annotations

import hashlib
import json
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from qoff.errors import QoffError

MAX_LINE = 64 << 20  # bytes
_LOOKED_AT = 100  # lines that say which form the file has
_OPENAI = frozenset({"custom_id", "method", "url", "body"})


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class Line:
    """A line that is not empty. number: among these, from 0; at: in the file, from 1."""

    number: int
    at: int
    data: bytes | None  # without its end; None: longer than MAX_LINE


@dataclass(frozen=True)
class Overview:
    """What a file of requests is, found by reading it once."""

    sha256: str
    lines: int  # that are not empty
    openai: bool  # OpenAI's batch lines; otherwise prompts


def read_lines(file: BinaryIO, digest: Digest | None = None) -> Iterator[Line]:
    """The lines of a file that are not empty; `digest` is given every byte."""
    number = at = 0
    while data := file.readline(MAX_LINE + 1):
        at += 1
        whole: bytes | None = data
        while True:
            if digest is not None:
                digest.update(data)
            if data.endswith(b"\n") or len(data) <= MAX_LINE:
                break
            whole, data = None, file.readline(MAX_LINE + 1)
        if whole is not None:
            whole = whole.removesuffix(b"\n").removesuffix(b"\r")
            whole = whole.removeprefix(BOM_UTF8) if at == 1 else whole
        if whole != b"":
            yield Line(number, at, whole)
            number += 1


def overview(file: BinaryIO) -> Overview:
    """Read a file of requests to its end, once."""
    digest, count, openai = hashlib.sha256(), 0, False
    for line in read_lines(file, digest):
        count += 1
        openai = openai or (count <= _LOOKED_AT and is_openai(line))
    return Overview(digest.hexdigest(), count, openai)


def is_openai(line: Line) -> bool:
    """Whether a line is one of OpenAI's batch files, right or wrong."""
    if line.data is None or not line.data.startswith(b"{"):
        return False
    try:
        found: Any = json.loads(line.data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and len(_OPENAI & found.keys()) > 1


def prompt(line: Line) -> str:
    """The prompt of a line: text, a JSON string or {"prompt": ...}.

    Raises QoffError for what is not UTF-8, and for an object without a prompt.
    """
    if line.data is None:
        raise QoffError(f"the line is longer than {MAX_LINE} bytes")
    try:
        text = line.data.decode()
    except UnicodeDecodeError as error:
        raise QoffError(f"the line is not UTF-8 text: {error}") from error
    if text[0] not in '"{':
        return text
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text  # that only begins like JSON
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise QoffError('the line is neither text nor {"prompt": text}')
    return value


class IdSet:
    """Texts seen so far, as hashes of 64 bits in 12 to 24 bytes each.

    Of a million different texts two are taken for the same with a probability of 3e-8.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 10))
        self._count = 0

    def add(self, text: str) -> bool:
        """Whether the text is new."""
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        if not self._insert(int.from_bytes(digest) or 1):
            return False
        self._count += 1
        if self._count * 3 > len(self._slots) * 2:
            old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
            for key in filter(None, old):
                self._insert(key)
        return True

    def _insert(self, key: int) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        place = key & mask
        while slots[place]:
            if slots[place] == key:
                return False
            place = (place + 1) & mask
        slots[place] = key
        return True


class Bits:
    """A set of whole numbers from 0, in a bit each."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bytes):
            self._bytes.extend(bytes(max(1024, at + 1 - len(self._bytes))))
        self._bytes[at] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bytes) and bool(self._bytes[at] >> (number & 7) & 1)
