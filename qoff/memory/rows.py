"""Rows of a weight: gathered from memory, or straight from its file when it is on disk only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from qoff.checkpoint import QuantEntry, TensorEntry, WeightEntry, WeightFile
from qoff.errors import OpError
from qoff.kernels.embedding import embedding, rows_of_each
from qoff.kernels.layout.packing import ROW_BLOCK
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.upload import on_device, pinned

from .io.disk import DiskReader
from .io.transfers import Transfers
from .load import FileChecks
from .plan import EMBEDDING, HEAD, LM_HEAD, PER_LAYER, Image, Tile, Unit, Weight

_NEAR = 4096  # bytes: pieces closer than this are read as one
ROWS = 256  # gathered together: what is read around them is not in proportion to the prompt


class Rows:
    """Rows of the weights of a file, from wherever they are.

    resident: those on the device. in_host: parts of tables in host memory, as in `rows_of_parts`.
    """

    def __init__(
        self,
        file: WeightFile,
        resident: Mapping[str, Weight],
        in_host: dict[str, list[tuple[int, Weight]]],
        transfers: Transfers,
        checks: FileChecks,
    ) -> None:
        self._file, self._resident, self.in_host = file, resident, in_host
        self._transfers, self._checks = transfers, checks

    def gather(self, name: str, ids: Tensor, scale: float, rows_each: int) -> Tensor:
        """See `WeightStore.gather_rows`."""
        entry, matrix = self._file.weights[name], self._resident.get(name)
        device = self._transfers.device
        if isinstance(matrix, QTensor) and device.type == "cpu":
            return embedding(ids, matrix, scale=scale, rows_each=rows_each)
        if rows_each > 1:
            ids = rows_of_each(ids, rows_each, entry.shape[0])
        if matrix is None:
            ids = ids.cpu()
        looked_at = ids.numel() and not ids.is_cuda
        if looked_at and not 0 <= int(ids.min()) <= int(ids.max()) < entry.shape[0]:
            raise OpError(
                f"{name} has rows 0 to {entry.shape[0] - 1}, "
                f"wanted {int(ids.min())} to {int(ids.max())}"
            )
        rows = torch.empty(len(ids), entry.shape[1], device=device)
        for some, out in zip(ids.split(ROWS), rows.split(ROWS), strict=True):
            if matrix is not None and len(some):
                out.copy_(rows_of(matrix, some, scale))
            elif len(some):
                found = self._from_elsewhere(name, some)
                found = found if scale == 1 else found.mul_(scale)
                out.copy_(pinned(found, device), non_blocking=True)
        return rows

    def _from_elsewhere(self, name: str, ids: Tensor) -> Tensor:
        """Rows that are not on the device, float32 in host memory."""
        entry = self._file.weights[name]
        found = torch.empty(len(ids), entry.shape[1])
        missing = rows_of_parts(self.in_host.get(name, ()), ids, found)
        if missing.any():
            self._checks.check(self._file)
            found[missing] = read_rows(self._transfers.reader, self._file, entry, ids[missing])
        return found


def tables_in_host(
    file: WeightFile, images: Mapping[Unit, Image], sources: Mapping[Unit, Tensor]
) -> dict[str, list[tuple[int, Weight]]]:
    """Parts of the tables of a file that are in host memory: first row, and rows."""
    parts: dict[str, list[tuple[int, Weight]]] = {EMBEDDING: [], PER_LAYER: []}
    for unit, memory in sources.items():
        views = images[unit].views(memory)
        if isinstance(unit, Tile):
            if unit.unit == HEAD and LM_HEAD not in file.weights:
                parts[EMBEDDING].append((unit.first_row, views[unit.name]))
        else:
            for table in parts.keys() & views.keys():
                parts[table].append((0, views[table]))
    return parts


def rows_of(weight: Weight, ids: Tensor, scale: float = 1.0) -> Tensor:
    """Rows `ids`, int64 [T], of a weight [N, K] in memory, times `scale`, as float32 [T, K]."""
    if isinstance(weight, Tensor):
        return weight[on_device(ids, weight.device)].float() * scale
    return embedding(ids, weight, scale=scale)


def rows_of_parts(parts: Iterable[tuple[int, Weight]], ids: Tensor, out: Tensor) -> Tensor:
    """Write to `out`, float32 [T, K], those rows `ids` of a weight that are in one of `parts`.

    A part is its first row and its rows. Returns a mask, bool [T], of the rows that are in none.
    """
    missing = torch.ones(len(ids), dtype=torch.bool)
    for first, part in parts:
        here = (ids >= first) & (ids < first + part.shape[0])
        if here.any():
            out[here] = rows_of(part, ids[here] - first)
            missing &= ~here
    return missing


def read_rows(reader: DiskReader, file: WeightFile, entry: WeightEntry, ids: Tensor) -> Tensor:
    """Rows `ids`, int64 [T], of a weight [N, K] on disk, as float32 [T, K].

    Reads the rows, or in packing rows16 the blocks of 16 rows, that are needed and little more.
    Raises DiskReadError.
    """
    wanted, place = torch.unique(ids, return_inverse=True)
    if isinstance(entry, TensorEntry):
        rows = _read_strips(reader, file, entry, wanted, 0)
        return rows.float()[place]
    if entry.packing == "split32":
        codes = _read_strips(reader, file, entry.codes, wanted, 0)
        scale_min = _read_strips(reader, file, entry.scale_min, wanted, 1)
        return _quantized(entry, codes, scale_min, len(wanted)).dequantize()[place]
    blocks, place_of_block = torch.unique(ids // ROW_BLOCK, return_inverse=True)
    codes = _read_strips(reader, file, entry.codes, blocks, 0)
    scale_min = _read_strips(reader, file, entry.scale_min, blocks, 0)
    near = _quantized(entry, codes, scale_min, len(blocks) * ROW_BLOCK)
    return rows_of(near, place_of_block * ROW_BLOCK + ids % ROW_BLOCK)


def _quantized(entry: QuantEntry, codes: Tensor, scale_min: Tensor, rows: int) -> QTensor:
    shape = (rows, entry.shape[1])
    return QTensor(codes, scale_min, shape, entry.bits, entry.group_size, entry.packing)


def _read_strips(
    reader: DiskReader, file: WeightFile, entry: TensorEntry, ids: Tensor, dim: int
) -> Tensor:
    """`tensor.index_select(dim, ids)` of a tensor on disk; `ids` ascending without repeats."""
    shape = tuple(entry.shape)
    width = math.prod(shape[dim + 1 :]) * entry.dtype.itemsize  # bytes of one piece
    starts = [
        entry.offset + (outer * shape[dim] + i) * width
        for outer in range(math.prod(shape[:dim]))
        for i in ids.tolist()
    ]
    pieces = _read_pieces(reader, file, starts, width)
    return pieces.view(entry.dtype).view(*shape[:dim], len(ids), *shape[dim + 1 :])


def _read_pieces(reader: DiskReader, file: WeightFile, starts: list[int], width: int) -> Tensor:
    """Pieces of `width` bytes at ascending `starts`, one after the other, uint8."""
    runs: list[list[int]] = []  # pieces that are read together
    for start in starts:
        if runs and start - (runs[-1][-1] + width) < _NEAR:
            runs[-1].append(start)
        else:
            runs.append([start])
    memory = [torch.empty(run[-1] + width - run[0], dtype=torch.uint8) for run in runs]
    parts = [(run[0], dest) for run, dest in zip(runs, memory, strict=True)]
    reader.clock.result(reader.submit_parts(file.path, parts, urgent=True))
    pieces = [
        dest[start - run[0] :][:width]
        for run, dest in zip(runs, memory, strict=True)
        for start in run
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
