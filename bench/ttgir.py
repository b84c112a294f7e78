"""What Triton's GPU dialect (TTGIR) says of a kernel. Stdlib alone is imported here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Tiles of codes: bytes, or pairs of bytes. Nothing else is an integer of 8 or 16 bits.
_POINTERS = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<i(8|16)>")
_LOADS = ("tt.load", "ttg.async_copy_global_to_local")
_BUFFER = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<((?:\d+x)+)(\w+)")
_ENCODING = re.compile(r"#(\w+) = #(?:ttg|ttng)\.(\w+)")
_DOT_RESULT = re.compile(r"-> tensor<[^#>]*#(\w+)>")
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


@dataclass(frozen=True)
class Found:
    """Counts over one kernel, and bytes of one block."""

    code_bytes: int  # of tiles of codes that loads and asynchronous copies bring
    buffer_bytes: int  # of what asynchronous copies write to: all stages of the pipeline
    converts_in_loop: int  # changes of layout inside loops, through shared memory or not
    slow_dots: int  # products that are not done by tensor cores


def read(text: str) -> Found:
    """Return what the TTGIR of one kernel contains."""
    lines = text.splitlines()
    encodings = dict(_ENCODING.findall(text))
    code_bytes = converts = slow_dots = depth = 0
    loops: list[int] = []  # the depths that loops were opened at
    for line in lines:
        if any(f"{name} " in line for name in _LOADS):
            tiles = _POINTERS.findall(line)[:1]
            code_bytes += sum(_elements(shape) * int(bits) // 8 for shape, bits in tiles)
        converts += bool(loops) and "ttg.convert_layout" in line
        if "tt.dot " in line and (result := _DOT_RESULT.search(line)):
            slow_dots += encodings.get(result[1]) == "blocked"
        code = line.partition(" loc(")[0]
        opened, closed = code.count("{"), code.count("}")
        if re.search(r"\bscf\.(for|while)\b", code):
            loops.append(depth)
        depth += opened - closed
        while loops and depth <= loops[-1]:
            loops.pop()
    buffers = sum(_elements(shape) * _BYTES.get(kind, 0) for shape, kind in _BUFFER.findall(text))
    return Found(code_bytes, buffers, converts, slow_dots)


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.rstrip("x").split("x"))
