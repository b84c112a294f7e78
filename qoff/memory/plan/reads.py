"""Reads of a file that bring it to memory: aligned to blocks of 4096 bytes, or of exact ranges."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.checkpoint import TensorEntry
from qoff.memory.arena import PAGE, round_up


@dataclass(frozen=True)
class FileRange:
    """One read: `nbytes` bytes at `offset` of the file go to `at` in the raw image."""

    offset: int
    nbytes: int
    at: int


def aligned_ranges(tensors: list[TensorEntry], file_bytes: int) -> tuple[FileRange, ...]:
    """Merge what touches, widened to pages; the end of the file ends the last range."""
    spans: list[list[int]] = []
    for t in sorted(tensors, key=lambda t: t.offset):
        start = t.offset // PAGE * PAGE
        stop = round_up(t.offset + t.nbytes, PAGE)
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], stop)
        else:
            spans.append([start, stop])
    ranges, at = [], 0
    for start, stop in spans:
        ranges.append(FileRange(start, min(stop, file_bytes) - start, at))
        at += stop - start
    return tuple(ranges)
