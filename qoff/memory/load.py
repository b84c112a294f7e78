"""Loading: resident weights and sources in host memory, and the checksums that cannot wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from torch import Tensor

from qoff.checkpoint import WeightFile, check_digest

from .arena import Arena, map_pages
from .io.disk import DiskReader, ReadRequest
from .io.transfers import Transfers, UnitRead
from .plan import Image, Unit, Weight

_SCRATCH = 4 << 20  # bytes read ahead of the hash, given back after it


def load_resident(
    images: Iterable[Image], arena: Arena, transfers: Transfers, verify: bool
) -> dict[str, Weight]:
    """Read all images into `arena` and return their weights by name in the file.

    With `verify`, images that have their whole file in them are checked on the way. Raises
    ChecksumError, DiskReadError, BudgetError.
    """
    weights: dict[str, Weight] = {}
    reads: list[UnitRead] = []
    for image in images:
        memory = arena.alloc(image.nbytes, f"weights of {image.file.path.name}")
        reads.append(transfers.read_unit(image, memory, verify, None))
        weights.update(image.views(memory))
    for read in reads:
        read.finish()
    return weights


def load_sources(
    images: Mapping[Unit, Image], arena: Arena, transfers: Transfers, verify: bool
) -> dict[Unit, Tensor]:
    """Read all images into the host arena and return the memory of each.

    Raises as `load_resident` does.
    """
    sources: dict[Unit, Tensor] = {}
    reads: list[UnitRead] = []
    for unit, image in images.items():
        sources[unit] = arena.alloc(image.nbytes, f"weights of {image.file.path.name}")
        reads.append(transfers.load_host(image, sources[unit], verify))
    for read in reads:
        read.finish()
    return sources


def check_file(reader: DiskReader, file: WeightFile) -> None:
    """Read a whole file in pieces and compare its checksum with the index.

    Needs 4 MiB meanwhile. Raises ChecksumError or DiskReadError.
    """
    step = _SCRATCH // 2
    halves = map_pages(_SCRATCH).split(step)
    pending: list[tuple[ReadRequest, Tensor]] = []
    digest = sha256()
    for i, start in enumerate([*range(0, file.nbytes, step), file.nbytes]):
        if start < file.nbytes:
            piece = halves[i % 2][: min(step, file.nbytes - start)]
            pending.append((reader.submit(file.path, start, piece), piece))
        if i > 0:
            read, piece = pending.pop(0)
            read.result()
            digest.update(piece.numpy().data)
    check_digest(file, digest.hexdigest())
