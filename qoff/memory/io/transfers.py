"""Transfers: the one interface to asynchrony.

The weight store says what shall lie where and waits for it; how the bytes travel is decided by the
implementations: `thread_transfers` with host threads, `cuda_transfers` with streams and events.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

from qoff.checkpoint import check_digest
from qoff.errors import DiskReadError
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import Image, Residency

from .disk import DiskReader

_WATCH_S = 1.0  # how often a waiting thread looks whether the reading ones still live

Mark = object  # a point in the order of computations; opaque, made by `recycle`


@dataclass(frozen=True)
class Arenas:
    """The memory of both tiers."""

    device: Arena
    host: Arena


class UnitRead(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when computations may use the weights. Raises what went wrong on the way."""

    def finish(self) -> None:
        """Return when the weights are there, for every thread and stream. Raises as `wait`."""

    def abandon(self) -> None:
        """Do no more of it than is already started; `wait` then raises DiskReadError."""

    def settle(self) -> None:
        """Return when nothing that this has not ordered before later uses of the memory is written.

        Then `recycle` may be called, whether it went well or not.
        """


class Transfers(Protocol):
    """Moves weights from files and host memory to the device, beside the computation."""

    host_staging: int  # buffers in host memory that it needs; see `plan_residency`

    @property
    def device(self) -> torch.device:
        """Where weights are brought."""

    @property
    def reader(self) -> DiskReader:
        """What reads the files; also for small reads straight into host memory."""

    @property
    def copied_bytes(self) -> int:
        """Bytes that `copy_unit` has brought from host memory to the device."""

    def open(self, residency: Residency, instrumentation: Instrumentation = PLAIN) -> Arenas:
        """Allocate what a residency calls for: the arenas, and staging memory in them.

        Raises BudgetError.
        """

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark | None) -> UnitRead:
        """Start filling device memory with an image, once the computations up to `after` are done.

        Units arrive in the order of the calls. With `verify`, an image that has its whole file in
        it is compared with the file's checksum (ChecksumError).
        """

    def load_host(self, image: Image, memory: Tensor, verify: bool) -> UnitRead:
        """Start filling host memory with an image, as it shall lie on the device."""

    def copy_unit(
        self, image: Image, source: Tensor, memory: Tensor, after: Mark | None
    ) -> UnitRead:
        """Start copying an image from host memory to the device, after `after`, in call order."""

    def recycle(self, memory: Tensor) -> Mark:
        """Mark the end of all use of `memory`, which now holds nothing."""

    def close(self) -> None:
        """Stop; transfers under way fail. Joins all threads."""


class Threads(Protocol):
    """What futures depend on."""

    @property
    def alive(self) -> bool: ...


def join(futures: Sequence[Future[None]], threads: Threads, image: Image) -> None:
    """Wait until all futures have ended. Raises DiskReadError when the threads are gone."""
    for future in futures:
        while not future.done():
            if wait([future], timeout=_WATCH_S).not_done and not threads.alive:
                path = image.file.path
                raise DiskReadError(f"{path}: the reading threads died or were forked away")


class FileDigest:
    """The checksum of a file whose whole data section passes by in a raw image, piece by piece.

    Reads the header from the file. Raises DiskReadError.
    """

    def __init__(self, reader: DiskReader, image: Image) -> None:
        assert image.data_at is not None
        self._file = image.file
        self._start = image.data_at
        self._stop = image.data_at + image.file.nbytes - image.file.data_start
        header = torch.empty(image.file.data_start, dtype=torch.uint8)
        reader.submit(image.file.path, 0, header, urgent=True).result()
        self._digest = sha256(header.numpy().data)

    def update(self, at: int, piece: Tensor) -> None:
        """Add the bytes of the raw image that start at `at`, where the last ones ended."""
        first, stop = max(self._start - at, 0), min(self._stop - at, len(piece))
        if first < stop:
            self._digest.update(piece[first:stop].numpy().data)

    def check(self) -> None:
        """Raise ChecksumError when this is not the file's checksum."""
        check_digest(self._file, self._digest.hexdigest())
