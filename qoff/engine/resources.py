"""What has to be closed, and the links between the tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from qoff.memory.io.disk import DiskReader
from qoff.memory.io.link import Link


@dataclass(frozen=True)
class Links:
    """Simulated links, for what is moved between disk, host and device."""

    disk: Link | None = None
    host: Link | None = None

    def reader(self) -> DiskReader:
        """A reader behind the disk's link."""
        return DiskReader() if self.disk is None else DiskReader(preadv=self.disk.preadv)


class Closes(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=Closes)


class Resources:
    """What has to be closed, last opened first."""

    def __init__(self) -> None:
        self._all: list[Closes] = []

    def add(self, one: _T) -> _T:
        """Have it closed, too."""
        self._all.append(one)
        return one

    def close(self) -> None:
        """Close all; may be repeated."""
        while self._all:
            self._all.pop().close()
