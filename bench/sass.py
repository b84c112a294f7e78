"""What machine code shows that no source does, as `nvdisasm -c` prints it.

`wgmma` reads its left operand, where that is in registers, while later instructions run; a wait
(`WARPGROUP.DEPBAR`) says how many of the latest may still run. ptxas 12.8 keeps those registers as
they are up to the end of a loop's body, but not into its next round.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?(.+?)\s*;")
_PRODUCT = re.compile(r"[A-Z]GMMA\S* +R\d+, R(\d+), gdesc")
_ANY_PRODUCT = re.compile(r"[A-Z]GMMA\b")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_BRANCH = re.compile(r"BRA +`\((\.L_x_\d+)\)")
_WRITES = re.compile(r"(?!\w*SETP)(\S+) +(?:U?P\w, +)*R(\d+)\b")
_FULL_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")  # for all products
# What reads R1, the stack pointer, which a kernel's first instruction sets. PRMT may do so for
# bytes that nobody looks at.
_STACK_READ = re.compile(r"^\s*/\*\w+\*/\s+(?!\s|(?:@\S+ )?(?:PRMT |\S+ R1, .*c\[)).*\bR1\b", re.M)
_MEMORY = re.compile(r"(?:LD|ST|LDGSTS|LDG|STG|ATOM|ATOMG|RED|REDG|UBLKCP|UTMALDG|EXIT)\b")
_LEFT = 4  # registers of a left operand
_WIDTHS = {"64": 2, "128": 4, "WIDE": 2, "4": 4, "2": 2}  # by a part of an instruction's name


class Instruction(NamedTuple):
    address: str
    text: str


def overwritten(machine_code: str) -> int:
    """Instructions that write to a register which a `wgmma` under way may still read."""
    code, labels = parsed(machine_code)
    if not any(_PRODUCT.match(one.text) for one in code):
        return 0
    found = set(_overwriting(code))
    for body in loops(code, labels):
        if any(_ANY_PRODUCT.match(each.text) for each in body):
            found.update(_overwriting([*body, *body]))
    return len(found)


def full_waits(machine_code: str) -> int:
    """Waits for all `wgmma` under way. Two are needed, at the end of a loop's body and after it;
    where ptxas cannot follow the registers of accumulators it adds one to every product (its
    warning C7515)."""
    return len(_FULL_WAIT.findall(machine_code))


def unset_reads(machine_code: str) -> int:
    """Reads of the stack pointer by a kernel that has no stack.

    It is what ptxas puts where it has lost the register that was meant: an address from it leads
    anywhere.
    """
    return len(_STACK_READ.findall(machine_code))


def early(machine_code: str) -> int:
    """Accesses to global memory, and ends, before the wait for kernels that still run (`ACQBULK`).

    All of them where there is no wait.
    """
    found = 0
    for one in parsed(machine_code)[0]:
        if one.text.startswith("ACQBULK"):
            break
        found += bool(_MEMORY.match(one.text))
    return found


def parsed(machine_code: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and which of them labels stand before."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in machine_code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(Instruction(*instruction.groups()))
    return code, labels


def loops(code: list[Instruction], labels: Mapping[str, int]) -> Iterator[list[Instruction]]:
    """The instructions of each loop, up to the branch to its begin, in the order of these."""
    for end, one in enumerate(code):
        branch = _BRANCH.match(one.text)
        start = labels.get(branch[1], end) if branch else end
        if start < end:
            yield code[start : end + 1]


def _overwriting(code: Sequence[Instruction]) -> Iterator[str]:
    """Addresses of what overwrites a left operand, if these instructions run one by one."""
    reading: list[list[range]] = [[]]  # registers of each group of products, the oldest first
    for address, text in code:
        if _ANY_PRODUCT.match(text):
            if product := _PRODUCT.match(text):
                first = int(product[1])
                reading[-1].append(range(first, first + _LEFT))
            if "gsb0" in text:  # the last of its group
                reading.append([])
        elif wait := _WAIT.match(text):
            del reading[: max(0, len(reading) - 1 - int(wait[1], 16))]
        elif write := _WRITES.match(text):
            widths = [_WIDTHS.get(part, 1) for part in write[1].split(".")[1:]]
            first, last = int(write[2]), int(write[2]) + max(widths, default=1)
            held = (registers for group in reading for registers in group)
            if any(first < each.stop and each.start < last for each in held):
                yield address
