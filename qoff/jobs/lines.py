"""The lines of a file of requests, one after another, whatever its size."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from array import array
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from qoff.errors import QoffError

MAX_LINE = 64 << 20  # bytes
_LOOKED_AT = 100  # lines that say which form the file has
_OPENAI = frozenset({"custom_id", "method", "url", "body"})
_BLANKS = b" \t"  # which JSON may begin with
_OBJECT = re.compile(r'[ \t]*\{[ \t]*"prompt"[ \t]*:')
_NO_TEXT = {  # by what it begins with
    b"\x1f\x8b": "compressed; decompress it first, with zcat for instance",
    b"\x28\xb5\x2f\xfd": "compressed; decompress it first, with zstdcat for instance",
    BOM_UTF16_LE: "UTF-16; convert it to UTF-8, with iconv for instance",
    BOM_UTF16_BE: "UTF-16; convert it to UTF-8, with iconv for instance",
}


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class Line:
    """A line that is not blank. number: among these, from 0; at: in the file, from 1."""

    number: int
    at: int
    data: bytes | None  # without its end; None: longer than MAX_LINE


@dataclass(frozen=True)
class Overview:
    """What a file of requests is, found by reading it once."""

    sha256: str
    nbytes: int
    lines: int  # that are not blank
    openai: bool  # OpenAI's batch lines; otherwise prompts


def read_lines(
    file: BinaryIO, digest: Digest | None = None, nbytes: int | None = None
) -> Iterator[Line]:
    """The lines of a file that are not blank; `digest` is given every byte.

    nbytes: where it ends, even if it has grown since. Raises QoffError for a file that is no text.
    """
    number = at = 0
    left = sys.maxsize if nbytes is None else nbytes
    while data := file.readline(min(left, MAX_LINE + 1)):
        at += 1
        if at == 1:
            _check_text(data)
        whole: bytes | None = data
        while True:
            left -= len(data)
            if digest is not None:
                digest.update(data)
            if data.endswith(b"\n") or len(data) <= MAX_LINE:
                break
            whole, data = None, file.readline(min(left, MAX_LINE + 1))
        if whole is not None:
            whole = whole.removesuffix(b"\n").removesuffix(b"\r")
            whole = whole.removeprefix(BOM_UTF8) if at == 1 else whole
        if whole is None or whole.strip():
            yield Line(number, at, whole)
            number += 1


def _check_text(start: bytes) -> None:
    """Raise QoffError for the start of a file whose lines would all be wrong."""
    for sign, what in _NO_TEXT.items():
        if start.startswith(sign):
            raise QoffError(f"the file of requests is {what}")


def overview(file: BinaryIO) -> Overview:
    """Read a file of requests to its end, once. Raises QoffError as `read_lines`."""
    digest, count, openai = hashlib.sha256(), 0, False
    for line in read_lines(file, digest):
        count += 1
        openai = openai or (count <= _LOOKED_AT and is_openai(line))
    return Overview(digest.hexdigest(), file.tell(), count, openai)


def as_seen(file: BinaryIO, seen: Overview) -> Iterator[Line]:
    """The lines of a file again. Raises QoffError at their end if it has changed meanwhile."""
    digest = hashlib.sha256()
    yield from read_lines(file, digest, seen.nbytes)
    if digest.hexdigest() != seen.sha256:
        raise QoffError(
            "the file of requests has changed while it was read, so answers may be of other lines; "
            "begin the job anew"
        )


def is_openai(line: Line) -> bool:
    """Whether a line is one of OpenAI's batch files, right or wrong."""
    if line.data is None or not line.data.lstrip(_BLANKS).startswith(b"{"):
        return False
    try:
        found: Any = json.loads(line.data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and len(_OPENAI & found.keys()) > 1


def prompt(line: Line) -> str:
    """The prompt of a line: text, a JSON string or {"prompt": ...}.

    Raises QoffError for what is not UTF-8, for an object without a prompt, and for a part of one.
    """
    if line.data is None:
        raise QoffError(f"the line is longer than {MAX_LINE} bytes")
    try:
        text = line.data.decode()
    except UnicodeDecodeError as error:
        raise QoffError(f"the line is not UTF-8 text: {error}") from error
    if text.lstrip(_BLANKS.decode())[:1] not in ('"', "{"):
        return text
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _OBJECT.match(text):
            raise QoffError(
                f'the line begins with {{"prompt": ..., but is no JSON: {error}'
            ) from error
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
