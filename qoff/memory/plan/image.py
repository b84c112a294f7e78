"""Image: how weights of one file lie in a piece of memory, and how they get there.

The wanted tensors are merged into maximal runs of the file; each run, widened to blocks of 4096
bytes, is one aligned read, and the runs follow each other in memory ("raw"), some bytes later where
a GPU's experts would not start at multiples of 16 bytes. Weights are views into that memory. Where
the memory shall hold another packing than the file, the raw image is staged elsewhere and the
weights are repacked, one after the other, into their places ("placed"). Codes that kernels read in
more bits than the file has are widened in their places: they are read to the end of the memory that
they take then. Experts are at equal distances in memory: where pages of the file do not have them
like that, they are read one by one, exactly their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

from torch import Tensor

from qoff.checkpoint import (
    QuantEntry,
    TensorEntry,
    WeightEntry,
    WeightFile,
    tensors_of,
    view_weight,
)
from qoff.kernels.layout.packing import packed_shapes
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.widening import read_bits, spread, widen_in_place
from qoff.memory.arena import PAGE, round_up

from .reads import FileRange, aligned_ranges
from .uneven import read_one_by_one, uneven_experts, wide_bytes
from .units import is_expert

Weight = QTensor | Tensor
_ALIGN = 64  # bytes, of the parts of a repacked weight: a cache line
_GPU_READ = 16  # bytes, at multiples of which a GPU wants experts to start


@dataclass(frozen=True, eq=False)
class Image:
    """Some weights of a file in memory; offsets in `raw` and `placed` count from its start."""

    file: WeightFile
    ranges: tuple[FileRange, ...]
    raw: Mapping[str, WeightEntry]  # as read; `raw_bytes` in all
    raw_bytes: int
    placed: Mapping[str, WeightEntry]  # as used; `nbytes` in all
    nbytes: int

    @property
    def label(self) -> str:
        """What timelines call it."""
        stem = self.file.path.stem.removeprefix("model-")
        return f"{stem} {next(iter(self.raw))}" if len(self.raw) == 1 else stem

    @property
    def repacked(self) -> bool:
        """Whether the weights go through staging memory of `raw_bytes`."""
        return self.placed is not self.raw and not self.widened

    @cached_property
    def bytes_read(self) -> int:
        """Of the file."""
        return sum(one.nbytes for one in self.ranges)

    @cached_property
    def widened(self) -> bool:
        """Whether codes are widened in their places, by `widen`, when all has been read."""
        return any(True for _ in self._widened())

    @property
    def data_at(self) -> int | None:
        """Where the file's data section starts in the raw image; None if not all of it is there."""
        if len(self.ranges) != 1 or self.widened:
            return None
        only, start = self.ranges[0], self.file.data_start
        whole = only.offset <= start and only.offset + only.nbytes == self.file.nbytes
        return only.at + start - only.offset if whole else None

    def views(self, memory: Tensor) -> dict[str, Weight]:
        """The weights by their names in the image, as views into `memory`."""
        return {name: view(entry, memory) for name, entry in self.placed.items()}

    def widen(self, memory: Tensor) -> None:
        """Widen the codes of an image that is `widened`, in the memory that it was read to."""
        for raw, placed in self._widened():
            stop = raw.codes.offset + raw.codes.nbytes
            codes = memory[placed.codes.offset : stop]
            widen_in_place(codes, placed.codes.nbytes, raw.bits)
            matrix = view(placed, memory)
            assert isinstance(matrix, QTensor)
            spread(matrix.codes, matrix.scale_min, raw.bits)

    def _widened(self) -> Iterator[tuple[QuantEntry, QuantEntry]]:
        """Matrices as they are read and as they lie then, where their bits differ."""
        for name, placed in self.placed.items():
            raw = self.raw[name]
            if not isinstance(raw, QuantEntry) or not isinstance(placed, QuantEntry):
                continue
            if raw.bits != placed.bits:
                yield raw, placed


def view(entry: WeightEntry, memory: Tensor) -> Weight:
    """The weight whose tensors lie at their entries' offsets in `memory`, without a copy."""
    return view_weight(entry, lambda t: memory[t.offset : t.offset + t.nbytes])


def make_image(file: WeightFile, names: Iterable[str], packing: str | None) -> Image:
    """Lay out the weights `names` of `file`, quantized ones as kernels of `packing` read them.

    Without a packing as they lie in the file.
    """
    kept = set(names)
    wanted = {name: entry for name, entry in file.weights.items() if name in kept}
    return image_of(file, wanted, packing)


def image_of(file: WeightFile, wanted: Mapping[str, WeightEntry], packing: str | None) -> Image:
    """Lay out entries that describe weights of `file`, or parts of them, as they lie there."""
    uneven = uneven_experts(wanted, packing)
    others = {name: entry for name, entry in wanted.items() if name not in uneven}
    wide = {name: e.codes for name, e in others.items() if _widens(e, packing)}
    tensors = [t for e in others.values() for t in tensors_of(e)]
    together = [t for t in tensors if t not in wide.values()]
    ranges = aligned_ranges(together, file.nbytes)
    lead = _lead(others, packing)
    if lead:
        stop = max(t.offset + t.nbytes for t in together)
        ranges = tuple(
            FileRange(r.offset, min(r.nbytes, stop - r.offset), r.at + lead) for r in ranges
        )
    apart = list[FileRange]()
    for name, codes in wide.items():
        (span,) = aligned_ranges([codes], file.nbytes)
        at = _end((*ranges, *apart)) + room_to_widen(others[name], packing)
        apart.append(replace(span, at=at))
        wide[name] = replace(codes, offset=at + codes.offset - span.offset)
    raw = {name: _shift(entry, ranges, wide.get(name)) for name, entry in others.items()}
    exact, places = read_one_by_one(uneven, _end((*ranges, *apart)))
    raw = {name: places.get(name) or raw[name] for name in wanted}
    return finish_image(file, (*ranges, *apart, *exact), raw, packing)


def room_to_widen(entry: WeightEntry, packing: str | None) -> int:
    """Bytes that are left free before codes, which take these too when they have been widened."""
    if not _widens(entry, packing):
        return 0
    return round_up(wide_bytes(entry) - entry.codes.nbytes, PAGE)


def _end(ranges: Iterable[FileRange]) -> int:
    return round_up(max((r.at + r.nbytes for r in ranges), default=0), PAGE)


def _lead(wanted: Mapping[str, WeightEntry], packing: str | None) -> int:
    """Bytes by which all of an image is moved so that experts start where a GPU reads them.

    0 but for files of earlier versions, which may have some single values before them.
    """
    experts = (e for name, e in wanted.items() if is_expert(name) and isinstance(e, QuantEntry))
    first = next(experts, None)
    if first is None or not packing == first.packing == "split32":
        return 0
    lead = -first.scale_min.offset % _GPU_READ
    element = max(t.dtype.itemsize for e in wanted.values() for t in tensors_of(e))
    return 0 if lead % element else lead


def _widens(entry: WeightEntry, packing: str | None) -> TypeGuard[QuantEntry]:
    if not isinstance(entry, QuantEntry) or entry.packing != packing:
        return False
    return read_bits(entry.bits, entry.packing) != entry.bits


def finish_image(
    file: WeightFile,
    ranges: tuple[FileRange, ...],
    raw: Mapping[str, WeightEntry],
    packing: str | None,
) -> Image:
    """The image of weights that are read as `raw` says, quantized ones as `packing` reads them.

    Before codes that are widened there is the `room_to_widen`.
    """
    raw_bytes, placed, nbytes = place_raw(raw, packing)
    return Image(file, ranges, raw, raw_bytes, placed, nbytes)


def place_raw(
    raw: Mapping[str, WeightEntry], packing: str | None
) -> tuple[int, Mapping[str, WeightEntry], int]:
    """Of an image whose weights are read as `raw` says: `raw_bytes`, `placed` and `nbytes`."""
    ends = (t.offset + t.nbytes for entry in raw.values() for t in tensors_of(entry))
    raw_bytes = round_up(max(ends), PAGE)
    stay = packing is None or all(
        isinstance(e, TensorEntry) or e.packing == packing for e in raw.values()
    )
    if stay:
        wide = {name: _widened(entry) for name, entry in raw.items() if _widens(entry, packing)}
        return raw_bytes, {**raw, **wide} if wide else raw, raw_bytes
    assert packing is not None
    return (raw_bytes, *_place(raw, packing))


def _shift(
    entry: WeightEntry, ranges: tuple[FileRange, ...], codes: TensorEntry | None = None
) -> WeightEntry:
    """The entry with offsets in the raw image instead of in the file; codes: where those lie."""

    def moved(t: TensorEntry) -> TensorEntry:
        home = next(r for r in reversed(ranges) if r.offset <= t.offset)
        return replace(t, offset=home.at + t.offset - home.offset)

    if isinstance(entry, TensorEntry):
        return moved(entry)
    return replace(entry, codes=codes or moved(entry.codes), scale_min=moved(entry.scale_min))


def _widened(entry: QuantEntry) -> QuantEntry:
    """The entry with its codes widened where they lie: from the room before them on."""
    bits = read_bits(entry.bits, entry.packing)
    shape, _ = packed_shapes(entry.shape, bits, entry.group_size, entry.packing)
    nbytes = math.prod(shape)
    start = (entry.codes.offset + entry.codes.nbytes - nbytes) // _ALIGN * _ALIGN
    codes = replace(entry.codes, shape=shape, offset=start, nbytes=nbytes)
    return replace(entry, bits=bits, codes=codes)


def _place(raw: Mapping[str, WeightEntry], packing: str) -> tuple[dict[str, WeightEntry], int]:
    """One weight after the other, quantized ones in `packing`."""
    at = 0

    def put(t: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
        nonlocal at
        placed = replace(t, shape=shape, offset=at, nbytes=math.prod(shape) * t.dtype.itemsize)
        at = round_up(at + placed.nbytes, _ALIGN)
        return placed

    placed: dict[str, WeightEntry] = {}
    for name, entry in raw.items():
        if isinstance(entry, QuantEntry):
            codes, scale_min = packed_shapes(entry.shape, entry.bits, entry.group_size, packing)
            placed[name] = replace(
                entry,
                packing=packing,
                codes=put(entry.codes, codes),
                scale_min=put(entry.scale_min, scale_min),
            )
        else:
            placed[name] = put(entry, tuple(entry.shape))
    return placed, round_up(at, PAGE)
