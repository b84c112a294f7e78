"""The product with a dequantized matrix, which cuBLAS computes, and the memory for it.

A matrix is dequantized and multiplied a piece of rows at a time. Passes that follow each other with
the same weights find the first pieces where the first of them left these.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch import tuned

from .dequantize import dequantize_into
from .product import Epilogue, ended

PIECE_MIN = 64 << 20
_SHARE = 64  # of a GPU's memory: the down projection of 70B fits on a GPU of 32 GB
_TUNED_SHARE = 32  # at most, where another size was measured to be best
_ITEM = 2  # bytes of a dequantized weight


@dataclass(frozen=True)
class ScratchConfig:
    """Dequantize and multiply pieces of at most `nbytes` (at least 128 rows)."""

    nbytes: int = PIECE_MIN


def piece_bytes(device: torch.device, dtype: torch.dtype, bound: int | None = None) -> int:
    """Bytes of dequantized weights that are multiplied at once.

    On a GPU of which `bound` bytes may be used (None: all): what was measured to be fastest there,
    in a 32nd of them, otherwise a 64th of them, at least 64 MiB.
    """
    bound = usable(device, bound)
    entry = tuned.lookup("scratch", device, str(dtype)[6:])
    if entry is not None:
        return min(entry["nbytes"], max(PIECE_MIN, bound // _TUNED_SHARE))
    return max(PIECE_MIN, bound // _SHARE)


def usable(device: torch.device, bound: int | None) -> int:
    """The bytes of a GPU that may be used; None: all. Without a GPU 0."""
    if bound is None and device.type == "cuda":
        bound = torch.cuda.get_device_properties(device).total_memory
    return bound or 0


def rows_of_piece(n: int, k: int, piece: int) -> int:
    """Rows of W [N, K] that are dequantized together, in pieces of so many bytes."""
    return min(n, max(128, piece // (_ITEM * k) // 128 * 128))


class _Kept(NamedTuple):
    weight: QTensor  # so that no other one gets its id
    rows: Tensor
    start: int  # of its bytes


class Scratch:
    """Where matrices are dequantized.

    piece: bytes that are multiplied at once. held: bytes that are taken once, and hold what is kept
    and a piece of what is not; with 0 every product takes a piece and gives it back.

    From `keep` to `forget` matrices do not change: what is dequantized then is kept while there is
    room, and found by the next pass. Weights are known by their objects, as other ones come to the
    same addresses. Nothing waits: dequantizing and products are on one stream, where a product
    comes after what it reads and before what overwrites that. For the same reason weights may be
    given back once the last of their passes is launched, as without a scratch.
    """

    def __init__(self, piece: int = PIECE_MIN, held: int = 0) -> None:
        self.piece, self.held = piece, held
        self._memory: Tensor | None = None
        self._kept: dict[tuple[int, int], _Kept] = {}  # by matrix and first row, in memory's order
        self._used = 0  # bytes of these
        self._keeps = False
        self.uses = 0  # how often a place was asked for

    def keep(self) -> None:
        """Keep what is dequantized from now on: other passes may want it."""
        self._keeps = True

    def forget(self) -> None:
        """Keep nothing: weights are given back."""
        self._kept.clear()
        self._used, self._keeps = 0, False

    @property
    def key(self) -> Hashable:
        """What is kept, for recordings: what they dequantize, and where, depends on it."""
        return self._keeps, *self._kept

    def snapshot(self) -> object:
        """What is kept, to be said again by `restore` once a replay has done what led to it."""
        return dict(self._kept), self._used, self._keeps

    def restore(self, snapshot: Any) -> None:
        kept, self._used, self._keeps = snapshot
        self._kept = dict(kept)

    def release(self) -> None:
        """Give the memory back."""
        self.forget()
        self._memory = None

    def holds(self, nbytes: int) -> bool:
        """Whether pieces of so many bytes go to the memory that is held."""
        return nbytes <= self.held

    def place(self, weight: QTensor, start: int, stop: int, dtype: torch.dtype) -> _Place:
        """Where rows of a matrix are to be dequantized, or are already. The scratch `holds` them.

        The first piece that does not fit takes the place of the last ones that were kept, and so do
        all that follow.
        """
        self.uses += 1
        key = id(weight), start
        if key in self._kept:
            return _Place(self._kept[key].rows, True)
        columns = weight.shape[1]
        nbytes = (stop - start) * columns * _ITEM
        fits = self._used + nbytes <= self.held
        while self._used + nbytes > self.held:
            self._used = self._kept.popitem()[1].start
        first, self._keeps = self._used, self._keeps and fits
        memory = self._there(weight.device)[first : first + nbytes]
        rows = memory.view(dtype).view(stop - start, columns)
        if self._keeps:
            self._kept[key] = _Kept(weight, rows, first)
            self._used += nbytes
        return _Place(rows, False)

    def _there(self, device: torch.device) -> Tensor:
        if self._memory is None:
            with torch.inference_mode(False):  # it is written in that mode and outside of it
                self._memory = torch.empty(self.held, dtype=torch.uint8, device=device)
        return self._memory


class _Place(NamedTuple):
    rows: Tensor  # [stop - start, K]
    filled: bool


def through_scratch(
    x: Tensor, weight: QTensor, bias: Tensor | None, end: Epilogue, scratch: Scratch
) -> Tensor:
    """x @ W.T + bias by way of pieces of rows of W in the dtype of x, and what `end` says.

    The pieces, and so the bits of the result, do not depend on what is kept.
    """
    n, k = weight.shape
    codes, scale_min, bits, group = weight.codes, weight.scale_min, weight.bits, weight.group_size
    rows = rows_of_piece(n, k, scratch.piece)
    held = scratch.holds(rows * k * _ITEM)
    own = None if held else torch.empty(rows, k, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    for start in range(0, n, rows):
        stop, filled = min(start + rows, n), False
        if own is None:
            w, filled = scratch.place(weight, start, stop, x.dtype)
        else:
            w = own[: stop - start]
        if not filled:
            dequantize_into(codes[start:stop], scale_min[:, start:stop], bits, group, w)
        if bias is None:
            torch.mm(x, w.T, out=out[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, w.T, out=out[:, start:stop])
    return ended(out, end)
