"""Codes are made wider by few operations where each of these is a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qoff.kernels.layout.widening import spread, widen_in_place

ROWS, COLUMNS, GROUP = 4096, 14336, 32


class Counting(TorchDispatchMode):
    """Counts torch's operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_a_gpu_starts_few_operations_for_a_matrix(bits: int) -> None:
    """Of each piece of 8 MiB, whatever the matrix is: a launch takes the host microseconds."""
    nbytes = ROWS * COLUMNS * (4 if bits < 4 else 8) // 8
    memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    scales = torch.empty(COLUMNS // GROUP, ROWS, 2, dtype=torch.float16, device="meta")
    pieces = -(-nbytes // (8 << 20))
    with Counting() as operations:
        spread(memory.view(ROWS, -1), scales, bits)
    assert operations.count <= 10 * pieces
    with Counting() as operations:
        widen_in_place(memory, nbytes, bits)
    assert operations.count <= 70 * pieces
