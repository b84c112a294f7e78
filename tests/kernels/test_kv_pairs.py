"""Planes of packed codes: the inline assembly, emulated over all pairs of bytes, and plain ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from qoff.kernels.triton.attention.kv_pairs import raised_pairs
from qoff.kernels.triton.linear.planes import BYTES_F16, RAISED_F16

PAIRS = np.arange(1 << 16, dtype=np.uint16)  # an element: the byte of an even channel, then an odd
EVEN, ODD = PAIRS & 0xFF, PAIRS >> 8
EXPECTED = {
    4: (1024 + (EVEN & 15), 1024 + (ODD & 15), 1024 + (EVEN & 0xF0), 1024 + (ODD & 0xF0)),
    8: (1024 + EVEN, 1024 + ODD),
}


def _execute(source: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run shr.u32 and lop3.b32 of truth table 0xea, (a & b) | c, on arrays of uint32."""
    registers = dict(given)
    for statement in source.strip().strip("{}").split(";"):
        words = statement.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        op, target, *names = words
        values = [registers[n] if n in registers else np.uint32(int(n, 0)) for n in names]
        if op == "shr.u32":
            registers[target] = values[0] >> values[1]
        else:
            assert (op, values[3]) == ("lop3.b32", 0xEA)
            registers[target] = (values[0] & values[1]) | values[2]
    return registers


@pytest.mark.parametrize(("bits", "source"), [(4, RAISED_F16), (8, BYTES_F16)])
def test_assembly_over_all_pairs_of_bytes(bits: int, source: tl.constexpr) -> None:
    expected = EXPECTED[bits]
    for packed in (PAIRS, PAIRS[::-1].copy(), np.roll(PAIRS, 1)):
        found = _execute(source.value, {f"${len(expected)}": packed.view(np.uint32)})
        for i, plane in enumerate(expected):
            values = found[f"${i}"].view(np.float16)
            assert np.array_equal(values, plane[packed].astype(np.float16))


@triton.jit
def _planes_kernel(pairs, out, BITS: tl.constexpr, ASM: tl.constexpr):
    element = tl.arange(0, 65536)
    codes = tl.load(pairs + element)
    a, b, c, d = raised_pairs(codes, codes, BITS, ASM)
    tl.store(out + element, a)
    tl.store(out + 65536 + element, b)
    tl.store(out + 2 * 65536 + element, c)
    tl.store(out + 3 * 65536 + element, d)


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_operations_give_the_same(bits: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.empty(4, 1 << 16, dtype=torch.float16, device=device)
    _planes_kernel[(1,)](torch.from_numpy(PAIRS).to(device), out, BITS=bits, ASM=False)
    expected = EXPECTED[bits] if bits == 4 else EXPECTED[bits] * 2
    for plane, values in zip(out.cpu().numpy(), expected, strict=True):
        assert np.array_equal(plane, values.astype(np.float16))
