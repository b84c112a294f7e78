"""Experts that pages of their file do not have at equal distances, as kernels want them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from qoff.checkpoint import QuantEntry, WeightEntry, tensors_of
from qoff.kernels.layout.widening import read_bits
from qoff.memory.arena import PAGE, round_up

from .reads import FileRange
from .units import expert_matrix

_ALIGN = 64  # bytes, of the parts of an expert: a cache line


def uneven_experts(wanted: Mapping[str, WeightEntry], packing: str | None) -> dict[str, QuantEntry]:
    """All experts, in their order, if an image by pages would not have them at equal distances.

    Nothing of a file that is repacked: its weights are then placed one after the other.
    """
    experts = {
        name: entry
        for name, entry in sorted(wanted.items(), key=lambda one: _place(one[0]))
        if expert_matrix(name) is not None
        and isinstance(entry, QuantEntry)
        and entry.packing == packing
    }
    matrices: dict[str, list[QuantEntry]] = {}
    for name, entry in experts.items():
        found = expert_matrix(name)
        assert found is not None
        matrices.setdefault(found[1], []).append(entry)
    distances = {
        other.offset - one.offset
        for entries in matrices.values()
        for pair in pairwise(entries)
        for one, other in zip(*map(tensors_of, pair), strict=True)
    }
    step = PAGE if any(wide_bytes(e) != e.codes.nbytes for e in experts.values()) else 1
    even = len(distances) < 2 and all(one > 0 and one % step == 0 for one in distances)
    return {} if even else experts


def wide_bytes(entry: QuantEntry) -> int:
    """Of its codes in as many bits as kernels read."""
    return entry.codes.nbytes * read_bits(entry.bits, entry.packing) // entry.bits


def read_one_by_one(
    experts: Mapping[str, QuantEntry], at: int
) -> tuple[list[FileRange], dict[str, QuantEntry]]:
    """Reads of experts to places one behind the other, from `at` on, and how they lie there.

    Codes that are widened are read to the end of the memory that they take then.
    """
    ranges, raw = list[FileRange](), dict[str, QuantEntry]()
    for name, entry in experts.items():
        stop = round_up(at, _ALIGN) + wide_bytes(entry)
        codes = replace(entry.codes, offset=stop - entry.codes.nbytes)
        scale_min = replace(entry.scale_min, offset=round_up(stop, _ALIGN))
        raw[name] = replace(entry, codes=codes, scale_min=scale_min)
        parts = zip(tensors_of(entry), tensors_of(raw[name]), strict=True)
        ranges += (FileRange(t.offset, t.nbytes, place.offset) for t, place in parts)
        at = scale_min.offset + scale_min.nbytes
    return ranges, raw


def _place(name: str) -> tuple[int, str]:
    """By which experts are sorted, and the matrices of one."""
    return (expert_matrix(name) or (0, ""))[0], name
