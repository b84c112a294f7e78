"""What is read: runs of bytes, and cut into pieces that ask for whole blocks of a file."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class Run(NamedTuple):
    """Neighbouring bytes that go from one place to another."""

    source: int
    dest: int
    nbytes: int


class Piece(NamedTuple):
    """A read of `wanted` bytes to a place, for which `asked` may be written."""

    offset: int
    place: int
    wanted: int
    asked: int


class Fill(NamedTuple):
    """What goes from a file into a slot, whose `words` and `turn` are as for `ReadList`.

    parts: offsets, and where the bytes go; what follows there up to a whole page may be written.
    """

    path: Path
    parts: Sequence[tuple[int, Tensor]]
    words: int
    turn: int


def whole_blocks(runs: Sequence[Run], chunk: int, unit: int) -> list[Piece] | None:
    """Runs as pieces of at most `chunk` bytes, in blocks of `unit`; places are relative.

    None where some of it has to go through other memory. What follows a run, up to a whole block,
    may be written, but for where other runs are.
    """
    found = list[Piece]()
    for run in runs:
        stop = run.dest + run.nbytes
        end = stop + -run.nbytes % unit
        if run.source % unit or run.dest % unit or any(stop <= r.dest < end for r in runs):
            return None
        found += pieces(*run, chunk, unit)
    return found


def pieces(offset: int, place: int, nbytes: int, chunk: int, unit: int) -> Iterator[Piece]:
    """Reads of at most `chunk` bytes, which ask for whole blocks of `unit` bytes."""
    for start, stop in split(offset, nbytes, chunk):
        yield Piece(offset + start, place + start, stop - start, -(-(stop - start) // unit) * unit)


def split(offset: int, nbytes: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Cut `nbytes` into pieces of at most `chunk`; all but the first begin at a page."""
    start = 0
    while start < nbytes:
        stop = min(nbytes, start + chunk - (offset + start) % mmap.PAGESIZE)
        yield start, stop
        start = stop
