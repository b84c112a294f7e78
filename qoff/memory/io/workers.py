"""Workers: daemon threads that take calls from one queue, and whose death is never silent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from qoff.errors import DiskReadError, DiskWriteError

from .slices import shorten_slices

T = TypeVar("T")


class Workers:
    """Threads that make calls in the order of submission and sleep in the kernel without any.

    A thread dies of what is no `Exception`. Then all of them stop, and every call that is queued or
    comes later ends with an `error`. Raises RuntimeError where the system has no more threads.
    """

    def __init__(
        self, threads: int, name: str, error: type[DiskReadError | DiskWriteError] = DiskReadError
    ) -> None:
        self._name = name
        self._error = error
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._refusal: Exception | None = None  # why no call is taken any more
        self._threads: list[threading.Thread] = []
        try:
            for i in range(threads):
                thread = threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether every thread is there; false in a process forked from the one that made them."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(
        self, call: Callable[[], T], urgent: bool = False, after: Sequence[Future[Any]] = ()
    ) -> Future[T]:
        """Queue a call, an urgent one before all that wait; its future has what comes of it.

        after: futures that have ended when it is queued; if one failed, the call fails with that.
        """
        future: Future[T] = Future()

        def queue(error: BaseException | None) -> None:
            with self._changed:
                error = error or self._refusal
                if error is None:
                    (self._calls.appendleft if urgent else self._calls.append)((call, future))
                    self._changed.notify()
            if error is not None:
                future.set_exception(error)

        when_all(after, queue)
        return future

    def close(self) -> None:
        """Fail the queued calls, wait for the running ones and join the threads."""
        self._stop(self._error(f"{self._name}: closed before it was done"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        shorten_slices()
        with torch.inference_mode():  # tensors made in it can be written to nowhere else
            while self._call_next():
                pass

    def _call_next(self) -> bool:
        """Wait for a call and make it; False when stopped."""
        with self._changed:
            while not self._calls and self._refusal is None:
                self._changed.wait()
            if self._refusal is not None:
                return False
            call, future = self._calls.popleft()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        except BaseException as cause:
            death = self._error(f"{self._name}: a thread died: {cause!r}")
            death.__cause__ = cause
            self._stop(death)
            if not future.done():  # else one of its callbacks failed
                future.set_exception(death)
            return False
        finally:
            del call, future  # or an error's traceback would keep the memory that was filled
        return True

    def _stop(self, error: Exception) -> None:
        with self._changed:
            self._refusal = self._refusal or error
            left = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
        for _, future in left:
            future.set_exception(error)


def when_all(futures: Sequence[Future[Any]], then: Callable[[BaseException | None], None]) -> None:
    """Call `then` when all futures have ended, with the error of the first that failed, if any."""
    left, error, guard = len(futures), None, threading.Lock()

    def ended(future: Future[Any]) -> None:
        nonlocal left, error
        with guard:
            error = error or future.exception()
            left -= 1
            if left:
                return
        then(error)

    for future in futures:
        future.add_done_callback(ended)
    if not futures:
        then(None)
