"""How many loads from memory a round of a loop waits for in series, by a model of one warp.

Instructions of a warp start in their order, each when its operands are there. The loads in series
are what a round takes longer with slow memory than with memory that answers at once, in units of
that memory's latency. A loop that is to hide its loads has none; what other warps hide is not seen.
Registers that a load fills without waiting (asynchronous copies to shared memory) count as there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.sass import loops, parsed

_Operands = tuple[str, list[str], list[str]]

_LATENCIES = {  # clocks, of Hopper; 5 for others
    "LDSM": 33,
    "LDS": 29,
    "HMMA": 33,
    "SHFL": 24,
    "MUFU": 20,
    "S2R": 20,
    "R2UR": 20,
}
_GLOBAL = re.compile(r"LDG?\.")
_SLOW = 1000  # clocks of slow memory
_SHORTEST = 40  # instructions of a loop that is worth a line
_ROUNDS = 3  # until what a round leaves to the next is always the same
_REGISTER = re.compile(r"(?<![\w.])(U?R|U?P)(\d+)(\.64)?")
_WRITES_NONE = re.compile(r"ST|RED|BRA|BAR|EXIT|LDGSTS|UBLKPF|NOP|DEPBAR")


def waits(machine_code: str) -> list[float]:
    """Of each loop, as `nvdisasm -c` prints it, in the order in which they end."""
    bodies = [body for body in loops(*parsed(machine_code)) if len(body) >= _SHORTEST]
    read = ([_operands(one.text) for one in body] for body in bodies)
    return [(_clocks(body, _SLOW) - _clocks(body, 0)) / _SLOW for body in read]


def _clocks(body: Sequence[_Operands], memory: int) -> int:
    """Of a round of a loop, with loads from memory of that latency."""
    ready: dict[str, int] = {}
    now = last = 0
    for _ in range(_ROUNDS):
        last = now
        for name, written, read in body:
            now = max(now, *(ready.get(register, 0) for register in read)) if read else now
            latency = memory if _GLOBAL.match(name) else _LATENCIES.get(name.split(".")[0], 5)
            ready |= dict.fromkeys(written, now + latency)
            now += 1
    return now - last


def _operands(text: str) -> _Operands:
    """An instruction's name, and the registers that it writes and reads."""
    name, _, rest = text.partition(" ")
    operands = rest.strip().split(", ")
    wide = 4 if re.search(r"\.128|HMMA|LDSM", name) else 2 if re.search(r"\.64|\.WIDE", name) else 1
    written: list[str] = []
    if not _WRITES_NONE.match(name):
        target = _REGISTER.match(operands[0])
        written = _registers(target, wide) if target else []
        operands = operands[1:]
    read: list[str] = []
    for i, operand in enumerate(operands):
        for found in _REGISTER.finditer(operand):
            several = (4, 2, 4)[min(i, 2)] if name.startswith("HMMA") else 2 if found[3] else 1
            stored = wide if name.startswith("ST") and "[" not in operand else 1
            read += _registers(found, max(several, stored))
    return name, written, read


def _registers(first: re.Match[str], count: int) -> list[str]:
    return [f"{first[1]}{int(first[2]) + i}" for i in range(count)]
