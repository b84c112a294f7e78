"""What has to be closed."""

from __future__ import annotations

from typing import Protocol, TypeVar


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
