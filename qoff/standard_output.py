"""Standard output, all of what is written there, whatever has taken its place."""

from __future__ import annotations

import sys


def write_out(data: bytes, encoding: str = "utf-8") -> None:
    """Write text there that is encoded so. Raises OSError where it cannot be written."""
    out = sys.stdout
    out.flush()
    buffer = getattr(out, "buffer", None)
    if buffer is None:  # a notebook's, or a StringIO: they take text alone
        out.write(data.decode(encoding))
        out.flush()
        return
    left = memoryview(data)
    while left:  # with PYTHONUNBUFFERED, one call may write a part, and a signal cuts it
        left = left[buffer.write(left) :]
    buffer.flush()
