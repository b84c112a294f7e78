"""Types of GGUF: values exactly those of the gguf package, codes as stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from qoff.errors import FormatError
from qoff.kernels.layout.packing import unpack_codes
from qoff.quant import GGUFFile, QTensor
from qoff.quant.gguf_blocks import BLOCK_TYPES
from tests.quant.packed_matrices import GGUF_LAYOUTS, gguf_blocks


def write(path: Path, tensors: dict[str, tuple[NDArray[Any], Type]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def codes_of(kind: str, block: NDArray[np.uint8]) -> list[int]:
    """The unsigned codes of one block, element by element, after the comments of ggml-common.h."""
    b = [int(x) for x in block]
    if kind in ("Q5_0", "Q5_1"):
        head = 2 if kind == "Q5_0" else 4
        high = int.from_bytes(bytes(b[head : head + 4]), "little")
        nibbles = b[head + 4 :]
        low = [nibbles[j % 16] >> (4 * (j // 16)) & 15 for j in range(32)]
        return [low[j] + 16 * (high >> j & 1) for j in range(32)]
    nibbles = b[-128:]
    out = []
    for j in range(256):
        sub, place = divmod(j, 32)
        code = nibbles[sub // 2 * 32 + place] >> (4 * (sub % 2)) & 15
        if kind == "Q5_K":
            code += 16 * (b[16 + place] >> sub & 1)
        out.append(code)
    return out


@pytest.mark.parametrize("kind", GGUF_LAYOUTS)
@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (7, 3), (33, 2)])
def test_values_are_exactly_those_of_the_file(
    kind: str, n: int, blocks: int, tmp_path: Path
) -> None:
    raw = gguf_blocks(kind, n, blocks)
    file = GGUFFile(write(tmp_path / "m.gguf", {"w": (raw, Type[kind])}))
    expected = torch.from_numpy(gguf.quants.dequantize(raw, Type[kind]))
    found = file.load("w")
    assert found.shape == expected.shape == (n, blocks * GGUF_LAYOUTS[kind][1])
    values = found.dequantize() if isinstance(found, QTensor) else found
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)
    assert isinstance(found, QTensor) == (kind in BLOCK_TYPES)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q4_K", "Q5_K"])
def test_codes_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    raw = gguf_blocks(kind, 5, 2)
    found = GGUFFile(write(tmp_path / "m.gguf", {"w": (raw, Type[kind])})).load("w")
    assert isinstance(found, QTensor)
    assert (found.bits, found.group_size) == (4 if kind == "Q4_K" else 5, 32)
    codes = unpack_codes(found.codes, found.shape, found.bits, found.packing)
    wanted = [[c for block in np.split(row, 2) for c in codes_of(kind, block)] for row in raw]
    assert codes.tolist() == wanted


def test_six_bit_scales_of_a_k_block(tmp_path: Path) -> None:
    """Each of the eight scales and minima at its extremes, the others at 0."""
    for index in range(16):
        values = [0] * 16  # eight scales, eight minima
        values[index] = 63
        sc, mn = values[:8], values[8:]
        packed = [sc[i] | (sc[i + 4] >> 4) << 6 for i in range(4)]
        packed += [mn[i] | (mn[i + 4] >> 4) << 6 for i in range(4)]
        packed += [(sc[i + 4] & 15) | (mn[i + 4] & 15) << 4 for i in range(4)]
        head = np.array([0.5, 0.25], np.float16).view(np.uint8)
        raw = np.concatenate((head, np.array(packed + [0] * 128, np.uint8)))[None]
        found = GGUFFile(write(tmp_path / "m.gguf", {"w": (raw, Type.Q4_K)})).load("w")
        assert isinstance(found, QTensor)
        scale, minimum = found.scale_min[:, 0].float().unbind(1)
        assert scale.tolist() == [0.5 * x for x in sc]
        assert minimum.tolist() == [-0.25 * x for x in mn]


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32", "BF16", *GGUF_LAYOUTS])
def test_rows_are_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    if kind in GGUF_LAYOUTS:
        raw = gguf_blocks(kind, 20, 2)
    else:
        raw = gguf.quants.quantize(np.random.randn(20, 64).astype(np.float32), Type[kind])
    file = GGUFFile(write(tmp_path / "m.gguf", {"w": (raw, Type[kind])}))
    rows = torch.randperm(20)[:7]
    whole, some = file.load("w"), file.load("w", rows)
    both = [x.dequantize() if isinstance(x, QTensor) else x for x in (whole, some)]
    assert torch.equal(both[0][rows], both[1])


@pytest.mark.parametrize("kind", GGUF_LAYOUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_numbers_are_refused_by_name(
    kind: str, bad: float, tmp_path: Path
) -> None:
    raw = gguf_blocks(kind, 3, 2)
    place = GGUF_LAYOUTS[kind][2][-1]
    raw[1, place : place + 2] = np.array([bad], np.float16).view(np.uint8)
    file = GGUFFile(write(tmp_path / "m.gguf", {"blk.w": (raw, Type[kind])}))
    with pytest.raises(FormatError, match=rf"m\.gguf: tensor blk\.w \({kind}\) holds NaN"):
        file.load("blk.w")
