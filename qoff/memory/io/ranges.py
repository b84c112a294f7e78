"""Copying between files within the system: shared blocks where the file system can, else once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from torch import Tensor

_CHUNK = 1 << 20  # bytes on their way where the system does not copy by itself
_CANNOT = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def copy_range(source: int, start: int, target: int, place: int, nbytes: int) -> None:
    """Copy bytes between descriptors. Raises OSError, also where the source ends before."""
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, start + done, place + done)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            chunk = bytearray(min(_CHUNK, nbytes - done))
            count = os.preadv(source, [chunk], start + done)
            write_all(target, memoryview(chunk)[:count], place + done)
        done += _some(count)


def write_all(target: int, data: Tensor | memoryview, place: int) -> None:
    """Write bytes, of a tensor uint8 or others, at an offset. Raises OSError."""
    _all(os.pwritev, target, data, place)


def read_all(source: int, data: Tensor, place: int) -> None:
    """Fill a tensor uint8 from an offset. Raises OSError, also where the file ends before."""
    _all(os.preadv, source, data, place)


def _all(
    move: Callable[[int, list[memoryview], int], int], fd: int, data: Tensor | memoryview, at: int
) -> None:
    left = data.numpy().data if isinstance(data, Tensor) else data
    while left:
        count = _some(move(fd, [left], at))
        left, at = left[count:], at + count


def _some(count: int) -> int:
    if count == 0:
        raise OSError(errno.EIO, "the file ends too early")
    return count
