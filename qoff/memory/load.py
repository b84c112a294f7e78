"""Loading: images in memory, and which files are as their checksums say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from qoff.checkpoint import FileCheck, KnownFiles, Stamp, WeightFile

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


class FileChecks:
    """The files of weights that are as their checksums say, until their stamps change.

    So a file that is changed in place while it is in use is compared again, and ends the run unless
    its bytes are the same. remembered: files that were read whole for the comparison, once and not
    in every process. Methods may be called from many threads.
    """

    def __init__(self, reader: DiskReader, remembered: KnownFiles) -> None:
        self._reader, self._remembered = reader, remembered
        self._known: dict[Path, Stamp | None] = {}

    def stamp(self, file: WeightFile) -> Stamp | None:
        """What a change of the file would change; None where it cannot be opened."""
        return self._reader.stamp(file.path)

    def known(self, file: WeightFile, stamp: Stamp | None) -> bool:
        """Whether the file was right when it had this stamp."""
        return file.path in self._known and self._known[file.path] == stamp

    def accept(self, file: WeightFile, stamp: Stamp | None) -> None:
        """Take a file with this stamp for right."""
        self._known[file.path] = stamp

    def passed(self, image: Image, stamp: Stamp | None) -> None:
        """An image was read of a file that had this stamp before, and checked if it holds it all.

        Raises as `check` does.
        """
        if image.data_at is not None:
            self.accept(image.file, stamp)
        elif not self.known(image.file, stamp):
            self.check(image.file)

    def check(self, file: WeightFile) -> None:
        """Compare a file with its checksum, unless known. Raises ChecksumError, DiskReadError."""
        stamp = self.stamp(file)
        if not self.known(file, stamp):
            if not self._remembered.holds(file, stamp):
                check_file(self._reader, file)
                self._remembered.add(file, stamp)
            self.accept(file, stamp)


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
        reader.clock.result(following)
        if i + 1 < len(pieces):
            following = reader.submit(file.path, *pieces[i + 1])
        check.update(piece.numpy())
    check.finish()
