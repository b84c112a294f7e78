"""What a tokenizer takes of main memory, beside all that a plan counts: an estimate from its file.

It is an object of the `tokenizers` library, whose tables of strings are several times as large as
the text that they are read from.
"""

from __future__ import annotations

import re
from pathlib import Path

_FILE = "tokenizer.json"
_MODEL = re.compile(rb'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"')
_LOOKED_AT = 4 << 20  # bytes of a file before its vocabulary
# Bytes for each byte of the file: `python -m bench.planner --only tokenizers` measures them.
_TIMES = {b"BPE": 4.8, b"Unigram": 24.0}
_OTHER = 4.8


def tokenizer_bytes(checkpoint: Path) -> int:
    """Bytes that the tokenizer of a checkpoint's folder keeps, about; 0 where it has no such file.

    It may take up to 8 MiB more for words that it has seen.
    """
    try:
        with (checkpoint / _FILE).open("rb") as file:
            found = _MODEL.search(file.read(_LOOKED_AT))
            nbytes = file.seek(0, 2)
    except OSError:
        return 0
    return int(nbytes * _TIMES.get(found[1] if found else b"", _OTHER))
