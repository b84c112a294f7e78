"""A form with one file, which is written to disk as it comes."""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from qoff.api.errors import ApiError

from .bodies import DISCARDED, too_slow

_PARTS, _FIELD = 16, 4096  # of a form, and bytes of one that is no file
_LEAST = 16 << 10  # bytes per second
_BESIDE = 64 << 10  # bytes of a form beside its file


@dataclass(frozen=True)
class Upload:
    """A file that was sent. name: what the client calls it; purpose: what it says it is for."""

    path: Path
    name: str
    purpose: str


class UploadForm:
    """The body of a request that uploads a file of up to `most` bytes into a folder.

    Raises ApiError for a request whose body is no form, and for a full disk.
    """

    def __init__(self, content_type: str, folder: Path, most: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(400, "a file comes as multipart/form-data")
        self._most, self._path = most, folder / secrets.token_hex(16)
        self._fields: dict[str, bytearray] = {}
        self._field: bytearray | None = None  # the present part, if it is not the file
        self._name: str | None = None  # of the file, as soon as it has begun
        self._head, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._parts = 0
        self._refused: ApiError | None = None
        self._whole = False  # its last boundary has come
        self._parser = self._new_parser(options[b"boundary"])
        try:
            self._file = self._path.open("xb")
        except OSError as error:
            raise disk_full(error) from error

    def _new_parser(self, boundary: bytes) -> MultipartParser:
        def end() -> None:
            self._whole = True

        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, i, j: self._head.extend(data[i:j]),
                    "on_header_value": lambda data, i, j: self._value.extend(data[i:j]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take,
                    "on_end": end,
                },
            )
        except FormParserError as error:
            raise ApiError(400, f"the form is wrong: {error}") from error

    async def read(self, request: Request, pause_s: float, keep: Callable[[int], None]) -> Upload:
        """The file. pause_s: between two pieces of the body, at most; keep: room for a piece.

        The body as a whole has as much time, and that of its bytes at a rate of `_LEAST`.

        Raises ApiError for a form that is too large, slow or wrong.
        """
        size, total = request.headers.get("content-length", ""), 0
        if size.isdecimal() and int(size) > self._most + _BESIDE:
            self.refuse(self._too_large())
        pieces, now = aiter(request.stream()), asyncio.get_running_loop().time
        start = now() + pause_s
        try:
            while True:
                async with asyncio.timeout_at(min(now() + pause_s, start + total / _LEAST)):
                    piece = await anext(pieces, None)
                if piece is None:
                    break
                total += len(piece)
                if total > self._most + _BESIDE:
                    self.refuse(self._too_large())
                if self._refused is None:
                    try:
                        keep(len(piece))
                        self._parser.write(piece)
                    except ApiError as error:
                        self.refuse(error)
                    except OSError as error:
                        self.refuse(disk_full(error))
                elif total > DISCARDED * self._most:
                    break
            if self._refused is not None:
                raise self._refused
            self._parser.finalize()
            if not self._whole:
                raise FormParserError("it ends before its last boundary")
            self._file.close()
        except FormParserError as error:
            raise ApiError(400, f"the form is wrong: {error}") from error
        except TimeoutError as error:
            raise too_slow() from error
        except OSError as error:
            raise disk_full(error) from error
        nbytes = self._path.stat().st_size
        if self._name is None or not nbytes:
            raise ApiError(400, "the form has to have a file that is not empty", param="file")
        if nbytes > self._most:
            raise self._too_large()
        purpose = self._fields.get("purpose", b"").decode(errors="replace")
        return Upload(self._path, self._name, purpose)

    def refuse(self, error: ApiError) -> None:
        """Keep nothing; the error is raised at the end: a client that writes does not see it."""
        self._refused = self._refused or error

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a file has {self._most} bytes at most", code="file_too_large",
                        headers={"Connection": "close"})  # fmt: skip

    def _begin(self) -> None:
        self._parts += 1
        self._disposition, self._field = b"", None
        if self._parts > _PARTS:
            raise FormParserError(f"it has more than {_PARTS} parts")

    def _end_header(self) -> None:
        if bytes(self._head).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._head.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"").decode(errors="replace")
        file_name = options.get(b"filename")
        if file_name is None:
            if name != "purpose":
                self.refuse(ApiError(400, f"{name[:100]!r} is not supported by this server",
                                     param=name[:100]))  # fmt: skip
            self._field = self._fields.setdefault(name, bytearray())
        elif name != "file" or self._name is not None:
            raise FormParserError("it has more than one file, or one that is not called file")
        else:
            self._name = file_name.decode(errors="replace")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._file.write(data[start:end])
        else:
            self._field += data[start:end]
            if len(self._field) > _FIELD:
                raise FormParserError(f"a field has more than {_FIELD} bytes")

    def close(self) -> None:
        """Remove what was not taken over."""
        with suppress(OSError):  # of a full disk, which has no room for the rest either
            self._file.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


def disk_full(error: OSError) -> ApiError:
    """What a client is told where the disk is full. Raises any other error of the system."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return ApiError(507, "the disk of this server is full", code="disk_full")
