"""Pieces of dequantized matrices: which sizes are searched, and what is expected of each.

A piece is written and read again, by way of memory unless half of the L2 holds it. cuBLAS computes
its product in tiles, and the last round of these leaves processors idle.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.linear.scratch import ScratchConfig, rows_of_piece

TOKENS = 2048  # that go through an MLP together
_LEAST, _STEPS, _OCTAVES = 16 << 20, 4, 6  # 16 MiB to 1 GiB in steps of a fourth root of 2
_TILE = (128, 256)  # rows and tokens
# Of a weight, as a part of its product with a token: bench/device.md has it for a T4.
_MOVED, _UNMOVED = 225.0, 60.0
_LAUNCHES = 5e8  # multiplications that take about as long as a piece's launches


def sizes(n: int, k: int) -> Iterator[ScratchConfig]:
    """Those that cut W [N, K], and the least that does not."""
    rows = 0
    for i in range(_STEPS * _OCTAVES + 1):
        nbytes = int(_LEAST * 2 ** (i / _STEPS)) >> 20 << 20
        if rows_of_piece(n, k, nbytes) > rows:
            rows = rows_of_piece(n, k, nbytes)
            yield ScratchConfig(nbytes)


def expected(config: ScratchConfig, n: int, k: int, device: torch.device) -> float:
    """Time of a product over that of its multiplications alone; for comparing sizes."""
    l2 = 0
    if device.type == "cuda":
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return expected_on(config, n, k, Gpu.of(device).processors, l2)


def expected_on(config: ScratchConfig, n: int, k: int, processors: int, l2: int) -> float:
    """As `expected`, on a GPU with so many processors and bytes of L2."""
    piece, wanted, taken = rows_of_piece(n, k, config.nbytes), n * k * TOKENS, 0.0
    for start in range(0, n, piece):
        rows = min(piece, n - start)
        tiles = -(-rows // _TILE[0]) * -(-TOKENS // _TILE[1])
        taken += -(-tiles // processors) * processors * _TILE[0] * _TILE[1] * k
        taken += rows * k * (_UNMOVED if 4 * rows * k <= l2 else _MOVED) + _LAUNCHES
    return taken / wanted
