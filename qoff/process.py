"""What a forked process may use: its parent's memory and files, but not its threads; garbage."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from qoff.errors import ArgumentError


class Opener:
    """The process that opened something with threads, or a GPU. what: how an error calls it."""

    def __init__(self, what: str, on_gpu: bool = False) -> None:
        self._what, self._on_gpu, self._pid = what, on_gpu, os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether this is that process, and not one forked from it."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise ArgumentError in a forked process. Takes no lock: a lost thread may have it."""
        if self.is_this:
            return
        said = f"{self._what} was opened by process {self._pid}"
        if self._on_gpu:
            raise ArgumentError(
                f"{said}, and CUDA works in no process that is forked from it: start processes "
                "with multiprocessing's method 'spawn', and open one in each"
            )
        raise ArgumentError(f"{said}, and its threads are there: open one in each process")


class ForkLock:
    """A lock that a forked process has afresh, whoever held it in the parent; reentrant."""

    def __init__(self) -> None:
        self._of_process: dict[int, Any] = {}

    def __enter__(self) -> None:
        mine = self._of_process.get(os.getpid())
        if mine is None:
            mine = self._of_process.setdefault(os.getpid(), threading.RLock())
        mine.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        mine = self._of_process.get(os.getpid())
        if mine is not None:  # else forked while it was held
            mine.release()


def only_here(close: Callable[[], object]) -> Callable[[], None]:
    """A call of `close` that does nothing in a forked process, whose exit would wait for locks."""
    opener = Opener("")

    def call() -> None:
        if opener.is_this:
            close()

    return call


def before_exit(method: Callable[[], object]) -> None:
    """Call a method when the interpreter exits, before finalizers do, if its object is there yet.

    Not in a forked process.
    """
    weak, opener = weakref.WeakMethod(method), Opener("")

    def call() -> None:
        found = weak()
        if found is not None and opener.is_this:
            found()

    atexit.register(call)
    weakref.finalize(method.__self__, atexit.unregister, call).atexit = False  # type: ignore[attr-defined]


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which runs no finalizers meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
