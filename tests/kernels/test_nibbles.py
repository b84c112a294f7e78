"""Unpacking codes: the inline assembly, emulated over all bytes, and the plain operations."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from qoff.kernels.triton.linear import gemv, nibbles
from qoff.kernels.triton.linear.nibbles import byte_values, low_high

BYTES = np.arange(256, dtype=np.uint8)
CODES = torch.from_numpy(BYTES.copy())
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OFFSETS = {"fp16": 1024, "bf16": 128}


def halves(words, dtype):
    """The two floats that each uint32 holds, in the order of their addresses."""
    return torch.from_numpy(words.view(np.uint8).copy()).view(dtype)


def words(values):
    return values.contiguous().view(torch.uint8).numpy().view(np.uint32).copy()


def execute(source, registers):
    """Run the few PTX instructions in use on `registers`, a dictionary of uint32 arrays."""
    for statement in source.replace("{", "").replace("}", "").split(";"):
        text = statement.split("//")[0].strip()
        if not text or text.startswith(".reg"):
            continue
        op, _, operands = text.partition(" ")
        target, *names = [name.strip() for name in operands.split(",")]
        size = len(next(iter(registers.values())))
        inputs = [
            registers[n] if n in registers else np.full(size, int(n, 0), np.uint32) for n in names
        ]
        registers[target] = INSTRUCTIONS[op](*inputs)
    return registers


def prmt(a, b, selector):
    sources = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], axis=1)
    chosen = [sources[:, int(selector[0]) >> 4 * i & 7] for i in range(4)]
    return np.ascontiguousarray(np.stack(chosen, axis=1)).view(np.uint32)[:, 0]


def fma_bf16x2(a, b, c):
    x, y, z = (halves(v, torch.bfloat16).double() for v in (a, b, c))
    return words((x * y + z).to(torch.bfloat16))


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": prmt,
    "sub.f16x2": lambda a, b: words(halves(a, torch.float16) - halves(b, torch.float16)),
    "fma.rn.bf16x2": fma_bf16x2,
}


def emulated(source, outputs, dtype):
    """The values [256] of each pair of output registers for all bytes, four in a register."""
    source = source.value
    packed = BYTES.view(np.uint32).copy()
    registers = execute(source, {f"${outputs}": packed})
    tiles = []
    for i in range(0, outputs, 2):
        pair = np.stack([registers[f"${i}"], registers[f"${i + 1}"]], axis=1)
        tiles.append(halves(np.ascontiguousarray(pair).reshape(-1), dtype))
    return tiles


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_assembly_of_nibbles(kind, offset):
    source = getattr(
        nibbles, f"{'SPLIT' if offset else 'EXACT'}_{'F16' if kind == 'fp16' else 'BF16'}"
    )
    low, high = emulated(source, 4, TYPES[kind])
    shift = OFFSETS[kind] if offset else 0
    assert torch.equal(low.float(), (CODES & 15).float() + shift)
    assert torch.equal(high.float(), (CODES >> 4).float() + shift)


def test_assembly_of_bytes():
    assert torch.equal(emulated(nibbles.BYTES_F16, 2, torch.float16)[0].float(), CODES + 1024.0)
    assert torch.equal(emulated(nibbles.BYTES_BF16, 2, torch.bfloat16)[0].float(), CODES.float())


def test_assembly_of_ones():
    ones = torch.ones(256)
    assert torch.equal(emulated(gemv._ONES_F16, 2, torch.float16)[0].float(), ones)
    assert torch.equal(emulated(gemv._ONES_BF16, 2, torch.bfloat16)[0].float(), ones)


def test_the_emulation_covers_all_assembly():
    """A new instruction or a new string must come with its emulation."""
    used = set()
    for module in (nibbles, gemv):
        for value in vars(module).values():
            if isinstance(value, tl.constexpr) and isinstance(value.value, str):
                used |= set(
                    re.findall(r"\b[a-z]+(?:\.[a-z]+\d*)*\.(?:b32|u32|f16x2|bf16x2)\b", value.value)
                )
    assert used - {".reg"} <= set(INSTRUCTIONS), used


@triton.jit
def _unpack(codes, low, high, whole, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    index = tl.arange(0, 256)
    packed = tl.load(codes + index)
    first, second = low_high(packed, DTYPE, False, OFFSET)
    tl.store(low + index, first.to(tl.float32))
    tl.store(high + index, second.to(tl.float32))
    tl.store(whole + index, byte_values(packed, DTYPE, False).to(tl.float32))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_plain_operations(kind, offset):
    low, high, whole = (torch.empty(256) for _ in range(3))
    dtype = tl.float16 if kind == "fp16" else tl.bfloat16
    _unpack[(1,)](CODES, low, high, whole, DTYPE=dtype, OFFSET=offset)
    shift = OFFSETS[kind] if offset else 0
    assert torch.equal(low, (CODES & 15).float() + shift)
    assert torch.equal(high, (CODES >> 4).float() + shift)
    assert torch.equal(whole, CODES.float())
