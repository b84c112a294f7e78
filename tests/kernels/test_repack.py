"""Experts repacked for a GPU, bit for bit as one matrix is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.packing import BITS, GROUP_SIZES
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import SCALE_DTYPES
from qoff.kernels.repack import repack_experts
from tests.kernels.packed import quantized
from tests.triton_module import triton_module

launch = triton_module("moe.repack").repack_experts
COUNT = 2


def apart(matrices: list[QTensor]) -> QExperts:
    """A copy of them, codes and then scales of each, with other bytes between."""
    first = matrices[0]
    codes, scales = first.codes.nbytes, first.scale_min.nbytes
    at_scales = -(-codes // 16) * 16
    distance = at_scales + -(-scales // 16) * 16 + 64
    memory = torch.full((distance * len(matrices),), 0xFF, dtype=torch.uint8)
    placed = []
    for i, one in enumerate(matrices):
        at = memory[i * distance :]
        lies = at[:codes].view(one.codes.shape)
        scale_min = at[at_scales : at_scales + scales].view(one.scale_min.dtype)
        scale_min = scale_min.view(one.scale_min.shape)
        placed.append(
            replace(one, codes=lies.copy_(one.codes), scale_min=scale_min.copy_(one.scale_min))
        )
    return QExperts.of(placed)


def operands(
    shape: tuple[int, int], bits: int, group: int, scales: torch.dtype
) -> tuple[QExperts, QExperts, list[QTensor]]:
    """Experts of the CPU's packing, memory for the GPU's, and what belongs there."""
    matrices = [quantized(*shape, bits, group, scales) for _ in range(COUNT)]
    if scales != torch.uint8:  # of which no half is one
        matrices[0].scale_min.view(-1)[::6] = torch.finfo(scales).smallest_normal / 64
    wanted = [one.for_kernels("split32") for one in matrices]
    into = apart([replace(one, codes=torch.zeros_like(one.codes)) for one in wanted])
    return apart([one.to_packing("rows16") for one in matrices]), into, wanted


@pytest.mark.parametrize("scales", SCALE_DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("shape", "group"), [((37, 96), 32), ((16, 1280), 128), ((48, 64), 64)])
@pytest.mark.parametrize("repack", [repack_experts, launch], ids=["torch", "Triton"])
def test_every_bit_is_that_of_a_matrix_alone(repack, shape, group, bits, scales) -> None:
    assert group in GROUP_SIZES
    packed, into, wanted = operands(shape, bits, group, scales)
    repack(packed, into)
    for number, one in enumerate(wanted):
        there = into.expert(number)
        assert torch.equal(there.codes, one.codes)
        assert torch.equal(there.scale_min.view(torch.uint8), one.scale_min.view(torch.uint8))


def test_what_does_not_fit_is_refused() -> None:
    packed, into, _ = operands((16, 64), 3, 32, torch.float16)
    other, *_ = operands((32, 64), 3, 32, torch.float16)
    for given, place, message in (
        (other, into, "there is memory for"),
        (into, into, "from rows16 to split32"),
        (packed, replace(packed), "from rows16 to split32"),
    ):
        with pytest.raises(OpError, match=message):
            repack_experts(given, place)
    wide = apart([quantized(16, 64, 8, 32) for _ in range(COUNT)])
    with pytest.raises(OpError, match="are not read as 8"):
        repack_experts(packed, wide)
