"""Matrices of low rank that are added to a packed one, as LoRA adapters have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # rows of the packed matrix that a block of `up` belongs to
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that factors are kept in
_RANKS = 4  # rows of `down` are computed together, and padded to a multiple


@dataclass(frozen=True)
class LowRank:
    """One adapter's part of a matrix [N, K]: `up @ down`.

    A matrix may be several parts, one below the other or in turn; each block of 16 rows is of one.
    down: [R, K], the lower factors of all parts, R a multiple of 4. up: [N / 16, r, 16], of each
    block of rows the upper factor, transposed; both of one of `DTYPES`. first: int64 [N / 16], the
    row of `down` that the first of the r numbers of a block comes of. times: float32 [N / 16],
    what the upper factor of a block is multiplied by.
    """

    down: Tensor
    up: Tensor
    first: Tensor
    times: Tensor

    @staticmethod
    def shapes(rows: int, columns: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of `down`, `up`, `first` and `times`; ranks: of the parts."""
        of_all = sum(ranks[:-1]) + max(ranks)  # blocks of the last part may read past its rank
        down = -(-of_all // _RANKS) * _RANKS
        blocks = rows // BLOCK
        return (down, columns), (blocks, max(ranks), BLOCK), (blocks,), (blocks,)


class LowRanks:
    """What each of several adapters adds to the same matrix; None: nothing.

    table: int64 [adapters, 7], addresses of down, up, first and times, R, r, and the place of the
    dtype in `DTYPES`; zeros where nothing is.
    """

    def __init__(self, each: Sequence[LowRank | None]) -> None:
        self.each = tuple(each)
        rows = [
            (
                *(part.data_ptr() for part in (x.down, x.up, x.first, x.times)),
                len(x.down),
                x.up.shape[1],
                DTYPES.index(x.down.dtype),
            )
            if x is not None
            else (0,) * 7
            for x in self.each
        ]
        self.table = torch.tensor(rows, dtype=torch.int64)

    @property
    def rank(self) -> int:
        """The most rows of any `down`."""
        return max((len(x.down) for x in self.each if x is not None), default=0)
