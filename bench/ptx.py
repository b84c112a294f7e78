"""What PTX says of a kernel: loads by argument and width, tensor cores, shared memory in loops.

An address is followed back through arithmetic to the pointer arguments it was made from (not
through loads: an entry of a block table is no address of the table). Stdlib alone is imported here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

WIDE = 16  # bytes of a 128-bit load

_REGISTER = re.compile(r"%[a-z]+\d+")
_STATEMENT = re.compile(r"(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s+(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$L__BB\w+):")
_TARGET = re.compile(r"\$L__BB\w+")
_PARAMETER = re.compile(r"_param_(\d+)")
_WIDTH = re.compile(r"\.[busf](8|16|32|64|128)\b")
_ASYNC_BYTES = re.compile(r",\s*(0x[0-9a-f]+|\d+)\s*,")
_TENSOR_CORES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
_NO_RESULT = ("st.", "bra", "bar", "cp.async", "red.", "ret", "membar", "fence", "stmatrix")


@dataclass(frozen=True)
class Instruction:
    """One statement. `writes` are the registers of its first operand, `reads` all others."""

    name: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Load:
    """A load from global memory, or an asynchronous copy from there, of one thread."""

    nbytes: int
    arguments: frozenset[int]  # positions of the pointers that the address comes from


@dataclass(frozen=True)
class Found:
    """What one kernel's PTX contains."""

    loads: tuple[Load, ...]
    tensor_cores: tuple[str, ...]  # the kinds of instructions
    from_shared: int  # `wgmma` whose left operand is in shared memory, not in registers
    shared_stores_in_loop: int  # in loops that contain no loop
    bytes_before_use: int  # most bytes of a thread's loads issued before one of them is used
    loop_instructions: int  # of a thread, in loops that contain no loop
    loop_bytes: int  # that these load

    def widths(self, arguments: Iterable[int]) -> Counter[int]:
        """How many loads of each width in bits come from one of the arguments."""
        wanted = frozenset(arguments)
        return Counter(8 * load.nbytes for load in self.loads if load.arguments & wanted)


def read(text: str) -> Found:
    """Return what the PTX of one kernel contains."""
    items = list(_statements(text))
    instructions = [item for item in items if isinstance(item, Instruction)]
    sources = _pointer_sources(instructions)
    kinds = {k for k in _TENSOR_CORES for i in instructions if i.name.startswith(k)}
    inside = [
        item
        for first, last in _innermost_loops(items)
        for item in items[first:last]
        if isinstance(item, Instruction)
    ]
    return Found(
        tuple(_loads(instructions, sources)),
        tuple(sorted(kinds)),
        sum(i.name.startswith("wgmma.mma_async") and i.text.count("{") < 2 for i in instructions),
        sum(map(_stores_shared, inside)),
        _bytes_before_use(instructions),
        len(inside),
        sum(map(_loaded_bytes, inside)),
    )


def _statements(text: str) -> Iterator[Instruction | str]:
    """Instructions and, as text, labels, in their order."""
    body = re.sub(r"//[^\n]*", "", text)
    for piece in re.split(r"[;\n]", body):
        piece = piece.strip().lstrip("{").strip()
        if label := _LABEL.match(piece):
            yield label[1]
        elif found := _STATEMENT.match(piece):
            yield _instruction(found[1], found[2], found[3])


def _instruction(guard: str | None, name: str, operands: str) -> Instruction:
    cut = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    first = "" if name.startswith(_NO_RESULT) else operands[: cut if cut > 0 else None]
    rest = operands[len(first) :] + (f" {guard}" if guard else "")
    return Instruction(
        name, tuple(_REGISTER.findall(first)), tuple(_REGISTER.findall(rest)), operands
    )


def _pointer_sources(instructions: Sequence[Instruction]) -> dict[str, frozenset[int]]:
    """The kernel's arguments that each register is computed from, but for loads from memory."""
    sources: dict[str, frozenset[int]] = {}
    changed = True
    while changed:
        changed = False
        for instruction in instructions:
            found: frozenset[int] = frozenset()
            if instruction.name.startswith("ld.param"):
                found = frozenset(int(n) for n in _PARAMETER.findall(instruction.text))
            elif not instruction.name.startswith(("ld.", "mma", "wgmma", "ldmatrix")):
                found = frozenset[int]().union(
                    *(sources.get(r, frozenset()) for r in instruction.reads)
                )
            for register in instruction.writes:
                before = sources.get(register, frozenset())
                if not found <= before:
                    sources[register] = before | found
                    changed = True
    return sources


def _loads(
    instructions: Sequence[Instruction], sources: dict[str, frozenset[int]]
) -> Iterator[Load]:
    for instruction in instructions:
        nbytes = _loaded_bytes(instruction)
        if not nbytes:
            continue
        # The address is the last bracket; the one before, of a copy, is where it goes.
        address = _REGISTER.findall(instruction.text[instruction.text.rfind("[") :])[:1]
        origin = frozenset[int]().union(*(sources.get(r, frozenset()) for r in address))
        yield Load(nbytes, origin)


def _loaded_bytes(instruction: Instruction) -> int:
    """Bytes that the instruction reads from global memory, 0 if it is no such load."""
    name = instruction.name
    if name.startswith("ld.global"):
        width = _WIDTH.search(name)
        assert width is not None, name
        return int(width[1]) // 8 * max(1, len(instruction.writes))
    if name.startswith(("cp.async.ca.shared", "cp.async.cg.shared")):
        size = _ASYNC_BYTES.search(instruction.text[instruction.text.rfind("]") :] + ",")
        assert size is not None, instruction.text
        return int(size[1], 0)
    return 0


def _innermost_loops(items: Sequence[Instruction | str]) -> list[tuple[int, int]]:
    """Ranges of items from a label to a later jump back to it, without those that contain one."""
    labels: dict[str, int] = {}
    loops = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            labels[item] = i
        elif item.name.startswith("bra"):
            loops += [(labels[t], i) for t in _TARGET.findall(item.text) if t in labels]
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def _stores_shared(instruction: Instruction) -> bool:
    return instruction.name.startswith(("st.shared", "stmatrix"))


def _bytes_before_use(instructions: Sequence[Instruction]) -> int:
    """Loads return in order: the use of one waits for it and for those before it."""
    waiting: list[tuple[frozenset[str], int]] = []
    most = 0
    for instruction in instructions:
        used = [i for i, (registers, _) in enumerate(waiting) if registers & {*instruction.reads}]
        if used:
            waiting = waiting[used[-1] + 1 :]
        if instruction.name.startswith("ld.global"):
            waiting.append((frozenset(instruction.writes), _loaded_bytes(instruction)))
            most = max(most, sum(nbytes for _, nbytes in waiting))
    return most
