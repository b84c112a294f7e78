"""Vector instructions of attention over one packed block, counted in the machine code.

Widening the block's scales to float32, once for all queries, comes on top.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from qoff.kernels.cpu.packed_attention import block_emit as emit
from qoff.kernels.cpu.packed_attention.fold import fold_queries
from qoff.kernels.cpu.packed_attention.softmax import find_weights
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat

_DOT = "vpdpbusd"
_SHUFFLE = re.compile(r"v(perm|punpck|unpck|shuf|pshuf|insert|extract|palign)")
_NO_ARITHMETIC = re.compile(r"v(mov|pbroadcast|zeroupper)|[^v]")
_CHANNELS = 64  # of a chunk of V
_TOKENS = 16  # whose scores are found together


@dataclass(frozen=True)
class BlockInstructions:
    """What `rows` queries of one KV head take per block of 4-bit codes."""

    record_bytes: int
    rows: int
    dots: int  # of bytes: vpdpbusd
    shuffles: int
    others: int  # masks, shifts, conversions; not loads, stores, broadcasts and moves
    beside: int  # what folds scales into queries, the softmax, and what rounds probabilities

    @property
    def bytes_per_cycle(self) -> float:
        """Bound of a core that starts one dot product and two vector instructions a cycle.

        A core of the Zen 4 generation does, with vectors of 64 bytes.
        """
        vectors = self.dots + self.shuffles + self.others + self.beside
        return self.record_bytes / max(self.dots, vectors / 2)

    def note(self, head_dim: int) -> str:
        """One line for a report."""
        return (
            f"D {head_dim}, {self.rows} queries: {self.record_bytes} bytes a block and KV head, "
            f"{self.dots} dots, {self.shuffles} shuffles, {self.others} other vector instructions "
            f"with them, {self.beside} for the queries and the softmax: at most "
            f"{self.bytes_per_cycle:.1f} bytes a cycle"
        )


def block_instructions(head_dim: int, rows: int) -> BlockInstructions | None:
    """Count them for head size 64 or 128; None on a processor without VNNI."""
    narrow = head_dim == 64
    kind = emit.NARROW if narrow else emit.NIBBLES
    total: Counter[str] = Counter()
    for first in range(0, rows, emit.ROWS):
        count = min(emit.ROWS, rows - first)
        scores = _scores(kind, count, 2 * count * _TOKENS * head_dim // 64)
        if not scores:
            return None
        calls = [(scores, BLOCK_TOKENS // _TOKENS), (_beside(count, head_dim), 1)]
        for upper in range(head_dim // _CHANNELS):
            calls.append((_values(kind, upper, count), 1))
        for classes, times in calls:
            for name, number in classes.items():
                total[name] += times * number
    names = ("dots", "shuffles", "others", "beside")
    return BlockInstructions(KVFormat(head_dim).nbytes, rows, *(total[name] for name in names))


@cache
def _scores(kind: int, rows: int, dots: int) -> dict[str, int]:
    def job(codes: int, ahead: int, query: int, out: int) -> None:
        emit.block_scores(kind, rows, codes, 64, ahead, 1, query, 64, out, 256)

    return _classes(_assembly(job), dots)


@cache
def _values(kind: int, upper: int, rows: int) -> dict[str, int]:
    def job(codes: int, ahead: int, weights: int, out: int) -> None:
        emit.block_weigh(kind, upper, rows, codes, 64, ahead, weights, out, out, out, out, 256)

    return _classes(_assembly(job), rows * BLOCK_TOKENS * _CHANNELS // 64)


@cache
def _beside(rows: int, head_dim: int) -> dict[str, int]:
    one, vectors, parts = np.float32(1), head_dim // 16, head_dim // _CHANNELS

    def job(query: int, block: int, state: int, out: int) -> None:
        fold_queries(rows, query, block, vectors, out, head_dim, state, one)
        find_weights(rows, parts, query, state, state, state, block, one, out)

    once, repeated = _straight_and_loop(_assembly(job))
    assert not repeated, "LLVM left a loop of so few turns: count its instructions by turns"
    return {"beside": sum(n for name, n in once.items() if not _NO_ARITHMETIC.match(name))}


def _assembly(job: Any) -> str:
    signature = types.void(*[types.int64] * 4)
    return numba.cfunc(signature, nopython=True)(job)._library.get_asm_str()


def _classes(assembly: str, dots: int) -> dict[str, int]:
    """Instructions that are executed, by class; nothing where dot products are no instruction.

    dots: how many of them are dot products, which tells how often the loop, if any, is run.
    """
    once, repeated = _straight_and_loop(assembly)
    if not once[_DOT] + repeated[_DOT]:
        return {}
    times = (dots - once[_DOT]) // repeated[_DOT] if repeated[_DOT] else 1
    counts = once.copy()
    for name, number in repeated.items():
        counts[name] += times * number
    assert counts[_DOT] == dots, f"{counts[_DOT]} dot products in the code, not {dots}"
    found: Counter[str] = Counter()
    for name, number in counts.items():
        if name == _DOT:
            found["dots"] += number
        elif _SHUFFLE.match(name):
            found["shuffles"] += number
        elif not _NO_ARITHMETIC.match(name):
            found["others"] += number
    return found


def _straight_and_loop(assembly: str) -> tuple[Counter[str], Counter[str]]:
    """Mnemonics of the first function outside and inside of its loop."""
    code: list[str] = []
    labels: dict[str, int] = {}
    begin = end = 0
    for line in assembly.partition(".Lfunc_end0:")[0].splitlines():
        if line.startswith(".LBB"):
            labels[line.partition(":")[0]] = len(code)
        elif re.match(r"\t[a-z]", line):
            mnemonic, _, operand = line.strip().partition("\t")
            code.append(mnemonic)
            if mnemonic.startswith("j") and operand in labels:
                assert not end, "two loops"
                begin, end = labels[operand], len(code)
    return Counter(code[:begin] + code[end:]), Counter(code[begin:end])
