"""Random quantized matrices, and writers of the layouts that others store them in.

The writers follow what each format's page or reference code says, bit for bit, with numpy's bit
strings, and share nothing with the importers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.quant import QTensor, Scheme

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that each nibble of a word is of
# GGUF: bytes of a block, elements, and where its float16 numbers are
GGUF_LAYOUTS = {
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
    "Q2_K": (84, 256, (80, 82)),
    "Q3_K": (110, 256, (108,)),
    "IQ1_S": (50, 256, (0,)),
    "IQ2_XXS": (66, 256, (0,)),
    "IQ2_XS": (74, 256, (0,)),
    "IQ2_S": (82, 256, (0,)),
    "IQ3_XXS": (98, 256, (0,)),
    "IQ3_S": (110, 256, (0,)),
    "IQ4_NL": (18, 32, (0,)),
    "IQ4_XS": (136, 256, (0,)),
    "TQ1_0": (54, 256, (52,)),
    "TQ2_0": (66, 256, (64,)),
}


@dataclass
class Matrix:
    """Codes [N, K] of `bits` bits, scales and zero points [N, G], the group of each column [K]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def value(self) -> Tensor:
        """The matrix, float32; exact for scales of 16 bits."""
        centered = self.codes - self.zeros[:, self.groups]
        return (centered.double() * self.scales[:, self.groups].double()).float()


def random_matrix(
    n: int,
    k: int,
    bits: int = 4,
    group: int = 32,
    *,
    sym: bool = False,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Matrix:
    """A random matrix; `shuffled` assigns columns to groups in no order, as act-order does."""
    groups = torch.arange(k) // (k if group == -1 else group)
    if shuffled:
        groups = groups[torch.randperm(k)]
    count = int(groups.max()) + 1
    zeros = torch.randint(1 << bits, (n, count))
    return Matrix(
        torch.randint(1 << bits, (n, k)),
        (torch.rand(n, count) * 0.02 + 0.001).to(dtype),
        torch.full_like(zeros, 1 << (bits - 1)) if sym else zeros,
        groups,
        bits,
    )


def bit_strings(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes [R, C] as int32 [R, ceil(C * bits / 32)], lowest bit first."""
    planes = (codes.numpy()[..., None] >> np.arange(bits)) & 1
    string = planes.astype(np.uint8).reshape(len(codes), -1)
    string = np.pad(string, ((0, 0), (0, -string.shape[1] % 32)))
    return torch.from_numpy(np.packbits(string, axis=1, bitorder="little").view("<i4").copy())


def gptq(matrix: Matrix, version: int = 1) -> dict[str, Tensor]:
    """AutoGPTQ's layout; version 1 stores zero points less one, borrowing inside a word."""
    qzeros = bit_strings(matrix.zeros.T, matrix.bits)
    if version == 1 and 32 % matrix.bits == 0:
        qzeros -= sum(1 << i for i in range(0, 32, matrix.bits))
    elif version == 1:
        qzeros = bit_strings((matrix.zeros.T - 1) & ((1 << matrix.bits) - 1), matrix.bits)
    return {
        "qweight": bit_strings(matrix.codes, matrix.bits).T.contiguous(),
        "qzeros": qzeros.contiguous(),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": matrix.groups.int(),
    }


def awq(matrix: Matrix) -> dict[str, Tensor]:
    """AutoAWQ's layout "gemm"."""

    def packed(outputs: Tensor) -> Tensor:
        return bit_strings(outputs.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)

    return {
        "qweight": packed(matrix.codes.T),
        "qzeros": packed(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }


def compressed(matrix: Matrix, *, sym: bool, shuffled: bool = False) -> dict[str, Tensor]:
    """The layout "pack-quantized" of compressed-tensors."""
    tensors = {
        "weight_packed": bit_strings(matrix.codes, matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = bit_strings(matrix.zeros.T, matrix.bits).T.contiguous()
    if shuffled:
        tensors["weight_g_idx"] = matrix.groups.int()
    return tensors


def bnb4(
    n: int, k: int, *, kind: str = "nf4", block: int = 64, nested: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """A random 4-bit matrix of bitsandbytes, and its values."""
    codes, values = torch.randint(16, (n * k,)), torch.rand(16).sort().values * 2 - 1
    blocks = -(-n * k // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    if nested:
        scale_codes, scale_values = torch.randint(256, (blocks,)), torch.rand(256) - 0.5
        outer = torch.rand(-(-blocks // 256))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.75}
        absmax = torch.stack([scale_values[c] * outer[i // 256] for i, c in enumerate(scale_codes)])
        absmax += 0.75
        scales = {
            "absmax": scale_codes.to(torch.uint8),
            "nested_absmax": outer,
            "nested_quant_map": scale_values,
        }
    else:
        absmax = torch.rand(blocks)
        scales = {"absmax": absmax}
    packed = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors = {f"weight.{name}": x for name, x in scales.items()} | {
        "weight": packed,
        "weight.quant_map": values,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
    }
    return tensors, (values[codes] * absmax.repeat_interleave(block)[: n * k]).view(n, k)


def bnb8(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """A random LLM.int8 matrix, and its values."""
    codes, scales = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n)
    value = codes.float() * (scales / 127)[:, None]
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0).byte()}, value


def gguf_blocks(kind: str, n: int, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random rows of blocks uint8 [n, bytes], with scales as of a model."""
    nbytes, _, halves = GGUF_LAYOUTS[kind]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (n, blocks, nbytes), np.uint8)
    for place in halves:
        numbers = random.normal(0, 0.01, (n, blocks, 1)).astype(np.float16)
        raw[:, :, place : place + 2] = numbers.view(np.uint8)
    return raw.reshape(n, -1)


class Tensors:
    """Tensors in memory as an importer reads them; "m" is the module's name."""

    path = Path("model")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {f"m.{name}": x for name, x in tensors.items()}

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        found = self.tensors.get(name)
        return None if found is None else (found.dtype, tuple(found.shape))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        found = self.tensors[name]
        return (found[start:stop] if found.shape else found).clone()


def pieces(scheme: Scheme, tensors: dict[str, Tensor], rows: int = 16) -> list[QTensor | Tensor]:
    """The pieces of the module's weight."""
    return list(scheme.pieces(Tensors(tensors), "m", rows))


def joined(found: list[QTensor | Tensor]) -> Tensor:
    """The matrix that pieces make, float32."""
    return torch.cat([x.dequantize() if isinstance(x, QTensor) else x for x in found])
