"""Unpacking codes: the inline assembly, emulated over all bytes, and the plain operations."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from qoff.kernels.triton.linear import gemm, nibbles, planes
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


def fma_of(dtype):
    def fma(a, b, c):
        x, y, z = (halves(v, dtype).double() for v in (a, b, c))
        return words((x * y + z).to(dtype))

    return fma


def convert_to(dtype):
    def convert(high, low):
        floats = np.stack([low, high], axis=1).view(np.float32)
        return words(torch.from_numpy(floats).to(dtype))[:, 0]

    return convert


def lop3(a, b, c, table):
    assert table[0] == 0xEA
    return a & b | c


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": prmt,
    "sub.f16x2": lambda a, b: words(halves(a, torch.float16) - halves(b, torch.float16)),
    "add.f16x2": lambda a, b: words(halves(a, torch.float16) + halves(b, torch.float16)),
    "fma.rn.f16x2": fma_of(torch.float16),
    "fma.rn.bf16x2": fma_of(torch.bfloat16),
    "cvt.rn.f16x2.f32": convert_to(torch.float16),
    "cvt.rn.bf16x2.f32": convert_to(torch.bfloat16),
    "lop3.b32": lop3,
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


@pytest.mark.parametrize("kind", TYPES)
def test_assembly_of_planes(kind):
    """Even and odd bytes of every two, their nibbles, and ones."""
    dtype, suffix, offset = TYPES[kind], "F16" if kind == "fp16" else "BF16", OFFSETS[kind]
    both = np.arange(1 << 16, dtype=np.uint16)
    even, odd = both & 255, both >> 8
    whole = 1024 if kind == "fp16" else 0
    expected = {
        "NIBBLES": [v + offset for v in (even & 15, odd & 15, even >> 4, odd >> 4)],
        "BYTES": [even + whole, odd + whole],
        "ONES": [np.ones_like(both)],
    }
    if kind == "fp16":
        expected["RAISED"] = [v + 1024 for v in (even & 15, odd & 15, even & 240, odd & 240)]
    for name, tiles in expected.items():
        source = getattr(planes, f"{name}_{suffix}").value
        found = execute(source, {f"${len(tiles)}": both.view(np.uint32)})
        for i, tile in enumerate(tiles):
            values = np.broadcast_to(found[f"${i}"], 1 << 15)
            assert np.array_equal(halves(np.ascontiguousarray(values), dtype).float(), tile)


@pytest.mark.parametrize("kind", TYPES)
def test_assembly_of_weights(kind):
    """(code - centre) * factor + middle, rounded once, of every two bytes."""
    dtype, suffix = TYPES[kind], "F16" if kind == "fp16" else "BF16"
    both = torch.arange(1 << 16)
    factor, middle = torch.randn(2, 1 << 16)
    twice = getattr(gemm, f"_TWICE_{suffix}").value
    pairs = [execute(twice, {"$1": v.numpy().view(np.uint32)})["$0"] for v in (factor, middle)]
    factor, middle = (v.to(dtype).double()[:, None] for v in (factor, middle))
    bytes_ = torch.stack([both & 255, both >> 8], dim=1)
    for bits, codes in ((4, (bytes_ & 15, bytes_ >> 4)), (8, (bytes_,))):
        source = getattr(gemm, f"_{'NIBBLES' if bits == 4 else 'BYTES'}_{suffix}").value
        names = ("$2", "$3", "$4") if bits == 4 else ("$1", "$2", "$3")
        given = dict(zip(names, (both.numpy().astype(np.uint32), *pairs), strict=True))
        found = execute(source, given)
        for i, values in enumerate(codes):
            exact = (values.double() - 2 ** (bits - 1)) * factor + middle
            assert torch.equal(halves(found[f"${i}"], dtype), exact.to(dtype).flatten())


def test_the_emulation_covers_all_assembly():
    """A new instruction or a new string must come with its emulation."""
    used = set()
    for module in (nibbles, planes, gemm):
        for value in vars(module).values():
            if isinstance(value, tl.constexpr) and isinstance(value.value, str):
                statements = re.sub(r"//.*|[{}]", "", value.value).split(";")
                used |= {text.split()[0] for text in statements if text.strip()}
    waits = "wgmma.wait_group.sync.aligned"  # computes nothing
    assert used - {".reg", waits} <= set(INSTRUCTIONS), used


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
