"""What Triton's GPU dialect (TTGIR) says of a kernel. Stdlib alone is imported here."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Tiles of codes: bytes, or pairs of bytes. Of all else, compact scales alone are such integers.
_POINTERS = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<i(8|16)>")
_LOADS = ("tt.load", "ttg.async_copy_global_to_local")
_OPERATION = re.compile(r"\s*(%[\w#]+) = [\w.]+ (%[\w#]+)")
_CARRIED = re.compile(r"(%\w+) = (%[\w#]+)")  # by a loop
_BUFFER = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<((?:\d+x)+)(\w+)")
_ENCODING = re.compile(r"#(\w+) = #(?:ttg|ttng)\.(\w+)")
_DOT_RESULT = re.compile(r"-> tensor<[^#>]*#(\w+)>")
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


@dataclass(frozen=True)
class Found:
    """Counts over one kernel, and bytes of one block."""

    code_bytes: int  # of tiles of codes that loads and asynchronous copies bring
    waited_bytes: int  # of codes and compact scales that loads bring in loops: each is waited for
    buffer_bytes: int  # of what asynchronous copies write to: all stages of the pipeline
    converts_in_loop: int  # changes of layout inside loops, through shared memory or not
    slow_dots: int  # products that are not done by tensor cores


def read(text: str, scales: Collection[int] = ()) -> Found:
    """Return what the TTGIR of one kernel contains.

    scales: positions of the arguments that lead to scales; what is loaded from there is no code.
    """
    lines = text.splitlines()
    arguments, made_from = _arguments(lines), _made_from(lines)
    to_scales = {arguments[i] for i in scales}
    encodings = dict(_ENCODING.findall(text))
    code_bytes = waited_bytes = converts = slow_dots = depth = 0
    loops: list[int] = []  # the depths that loops were opened at
    for line in lines:
        if any(f"{name} " in line for name in _LOADS):
            tiles = _POINTERS.findall(line)[:1]
            nbytes = sum(_elements(shape) * int(bits) // 8 for shape, bits in tiles)
            if tiles and _origin(_address(line), made_from) not in to_scales:
                code_bytes += nbytes
            waited_bytes += nbytes * (bool(loops) and "tt.load " in line)
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
    return Found(code_bytes, waited_bytes, buffers, converts, slow_dots)


def _arguments(lines: Sequence[str]) -> list[str]:
    """The names of the kernel's arguments, in their order."""
    kernel = next(line for line in lines if "tt.func public" in line)
    return re.findall(r"(%\w+): ", kernel)


def _made_from(lines: Sequence[str]) -> dict[str, str]:
    """The first operand of what gives each value: for a pointer, the one that it is made from."""
    found: dict[str, str] = {}
    for line in lines:
        if "iter_args(" in line:
            result = line.split()[0].partition(":")[0]
            carried = _CARRIED.findall(line.partition("iter_args(")[2])
            for i, (name, first) in enumerate(carried):
                found |= {name: first, f"{result}#{i}": first}
        elif operation := _OPERATION.match(line):
            found[operation[1]] = operation[2]
    return found


def _address(line: str) -> str:
    """The first operand of a load or copy."""
    operation = _OPERATION.match(line)
    assert operation is not None, line
    return operation[2]


def _origin(value: str, made_from: dict[str, str]) -> str:
    while value in made_from:
        value = made_from[value]
    return value


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.rstrip("x").split("x"))
