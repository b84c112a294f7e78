"""Tiles: ranges of rows in which a matrix larger than a slot streams (ZeRO-Infinity, section 5.3).

In packing rows16 the codes and the scales of a range of rows are each one range of the file. In
split32 the codes are, and the scales are one strip for each group of columns; the strips are read
to where they are used, without staging.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from qoff.checkpoint import QuantEntry, TensorEntry, WeightFile
from qoff.kernels.layout.packing import ROW_BLOCK, packed_shapes
from qoff.memory.arena import PAGE, round_up

from .image import Image, finish_image, image_of, place_raw, room_to_widen
from .reads import FileRange, aligned_ranges
from .units import Tile

TILE_ROWS = 32  # a tile has a multiple: two blocks of 16 rows, one of gate and one of up


def split_rows(entry: QuantEntry, packing: str, nbytes: int) -> int:
    """Rows of each tile of a matrix but the last: as few and as even tiles as fit `nbytes` each.

    At least `TILE_ROWS`, even if these take more.
    """
    blocks = -(-entry.shape[0] // TILE_ROWS)
    counts = range(1, blocks + 1)
    most = bisect_right(counts, nbytes, key=lambda n: slot_bytes(entry, packing, n * TILE_ROWS))
    tiles = -(-blocks // max(most, 1))
    return -(-blocks // tiles) * TILE_ROWS


def slot_bytes(entry: QuantEntry, packing: str, rows: int) -> int:
    """An upper bound of what `tile_image(...).nbytes` is for any tile of so many rows."""
    if packing == entry.packing:
        codes = _part_bytes(entry, packing, rows)[0]
        part = replace(entry, codes=replace(entry.codes, nbytes=codes))
        return read_bytes(entry, rows) + room_to_widen(part, packing)
    return round_up(sum(_part_bytes(entry, packing, rows)), PAGE)


def read_bytes(entry: QuantEntry, rows: int) -> int:
    """An upper bound of what `tile_image(...).raw_bytes` is for any tile of so many rows."""
    return sum(
        round_up(part, PAGE) + PAGE  # both ends of a range are widened to pages
        for part in _part_bytes(entry, entry.packing, rows)
    )


def tile_image(file: WeightFile, entry: QuantEntry, tile: Tile, packing: str) -> Image:
    """Lay out a tile of the matrix `entry` of `file`, under the tile's name."""
    if not _in_strips(entry, tile):
        return image_of(file, {tile.name: _rows_of(entry, tile)}, packing)
    span, raw = _read_in_strips(file, entry, tile, packing)
    strips = _strips(entry.scale_min, raw.scale_min, tile.first_row)
    return finish_image(file, (span, *strips), {tile.name: raw}, packing)


def bytes_of_tile(file: WeightFile, entry: QuantEntry, tile: Tile, packing: str) -> int:
    """What `tile_image(...).nbytes` is, without the reads: a strip for each group of columns."""
    if not _in_strips(entry, tile):
        return tile_image(file, entry, tile, packing).nbytes
    _, raw = _read_in_strips(file, entry, tile, packing)
    return place_raw({tile.name: raw}, packing)[2]


def _in_strips(entry: QuantEntry, tile: Tile) -> bool:
    """Whether the scales of a tile are more than one range of the file."""
    return tile.rows < entry.shape[0] and entry.packing != "rows16"


def _rows_of(entry: QuantEntry, tile: Tile) -> QuantEntry:
    """The entry of a tile that is a range of codes and one of scales, or of all rows."""
    if tile.rows == entry.shape[0]:
        return entry
    blocks = slice(tile.first_row // ROW_BLOCK, -(-tile.stop // ROW_BLOCK))
    codes, scale_min = (_slice(t, blocks) for t in (entry.codes, entry.scale_min))
    return replace(entry, shape=(tile.rows, entry.shape[1]), codes=codes, scale_min=scale_min)


def _read_in_strips(
    file: WeightFile, entry: QuantEntry, tile: Tile, packing: str
) -> tuple[FileRange, QuantEntry]:
    """The read of a tile's codes, and the tile as it lies when its scales have been read, too."""
    rows = tile.rows
    codes = _slice(entry.codes, slice(tile.first_row, tile.stop))
    (span,) = aligned_ranges([codes], file.nbytes)
    room = room_to_widen(replace(entry, codes=codes), packing)
    groups, n, pair = entry.scale_min.shape
    raw = replace(
        entry,
        shape=(rows, entry.shape[1]),
        codes=replace(codes, offset=room + codes.offset - span.offset),
        scale_min=replace(
            entry.scale_min,
            shape=(groups, rows, pair),
            offset=room + round_up(span.nbytes, PAGE),
            nbytes=entry.scale_min.nbytes // n * rows,
        ),
    )
    return replace(span, at=room), raw


def _part_bytes(entry: QuantEntry, packing: str, rows: int) -> tuple[int, int]:
    """Bytes of codes and of scales and minima of so many rows; those of rows16 in whole blocks."""
    shape = (min(rows, entry.shape[0]), entry.shape[1])
    codes, scale_min = packed_shapes(shape, entry.bits, entry.group_size, packing)
    itemsize = entry.scale_min.dtype.itemsize
    return math.prod(codes), math.prod(scale_min) * itemsize


def _slice(entry: TensorEntry, rows: slice) -> TensorEntry:
    """The entry of `tensor[rows]`."""
    width = entry.nbytes // entry.shape[0]
    count = rows.stop - rows.start
    return replace(
        entry,
        shape=(count, *entry.shape[1:]),
        offset=entry.offset + rows.start * width,
        nbytes=count * width,
    )


def _strips(scale_min: TensorEntry, place: TensorEntry, first: int) -> list[FileRange]:
    """Reads of `scale_min[:, first : first + rows]`, [K/g, N, 2], to their place [K/g, rows, 2]."""
    groups, n, pair = scale_min.shape
    item = pair * scale_min.dtype.itemsize
    width = place.shape[1] * item
    return [
        FileRange(
            scale_min.offset + (group * n + first) * item, width, place.offset + group * width
        )
        for group in range(groups)
    ]
