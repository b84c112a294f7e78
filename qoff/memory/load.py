"""Loading: images in memory, and the checksums of files that cannot wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from qoff.checkpoint import FileCheck, WeightFile

from .arena import Arena, map_pages
from .io.disk import DiskReader
from .io.transfers import UnitRead
from .plan import Image

_PIECE = 2 << 20  # bytes; one is hashed while another is read


def load(
    images: Iterable[Image], arena: Arena, start: Callable[[Image, Tensor], UnitRead]
) -> list[Tensor]:
    """Have `start` read all images into an arena; the memory of each, when all are there.

    Raises ChecksumError, DiskReadError, BudgetError.
    """
    parts, reads = [], []
    for image in images:
        parts.append(arena.alloc(image.nbytes, f"weights of {image.file.path.name}"))
        reads.append(start(image, parts[-1]))
    for read in reads:
        read.finish()
    return parts


def check_file(reader: DiskReader, file: WeightFile) -> None:
    """Read a whole file in pieces; compare its checksum with the index, look for NaN and infinity.

    Needs 4 MiB meanwhile. Raises ChecksumError, FormatError or DiskReadError.
    """
    buffers = map_pages(2 * _PIECE).split(_PIECE)
    pieces = [
        (start, buffers[i % 2][: file.nbytes - start])
        for i, start in enumerate(range(0, file.nbytes, _PIECE))
    ]
    check = FileCheck(file)
    following = reader.submit(file.path, *pieces[0])
    for i, (_, piece) in enumerate(pieces):
        following.result()
        if i + 1 < len(pieces):
            following = reader.submit(file.path, *pieces[i + 1])
        check.update(piece.numpy())
    check.finish()
