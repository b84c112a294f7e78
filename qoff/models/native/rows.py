"""Which rows of a pass go on to its logits."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from qoff.kernels.upload import on_device


def kept(logit_rows: Tensor | None, count: int) -> list[int] | None:
    """The rows of `count` that the last layer goes on with after attention; None: all.

    A row at least, so that each pass waits for the same parts of the weights.
    """
    if logit_rows is None or 2 * max(1, len(logit_rows)) > count:
        return None
    rows = logit_rows.tolist() or [0]
    return rows if all(row < later for row, later in pairwise(rows)) else None


def taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """A copy of some rows of x, whose memory others use while a head streams; None: x itself."""
    return x if rows is None else x.index_select(0, on_device(rows, x.device))
