"""SIGTERM, SIGHUP and Ctrl-C end a command through its `finally` blocks, even if one try is lost.

A handler raises between two instructions of Python. Inside a callback from C, of numba's compiler
say, that exception is printed and dropped; so the handler remembers, and `check` raises again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HEARD_S = 0.025  # that compiled threads run without Python, which hears signals in between


class Handler:
    """Raises what a signal asks for; used as a context manager, not before the end of that.

    asked: the signal that has come, if one has.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.held = 0  # so many contexts

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.asked:
            return  # the shell and the system both send it when a terminal is closed
        self.asked = number
        if not self.held:
            self.check()

    def check(self) -> None:
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self.asked:
            raise SystemExit(128 + self.asked)

    def __enter__(self) -> None:
        self.held += 1

    def __exit__(self, *exception: object) -> None:
        self.held -= 1
        if not self.held and exception[0] is None:
            self.check()


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, with 143 and 129, and SIGINT KeyboardInterrupt.

    At the end at the latest. Does nothing for a program that handles SIGTERM, nor in threads, to
    which no signal comes; SIGHUP and SIGINT that are ignored, as below nohup, stay so.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    handler = Handler()
    usual = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }  # others are ignored, or the program's
    before = {number: old for number, old in usual.items() if signal.getsignal(number) is old}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    except Exception:
        handler.check()  # what broke may be of the callback that the first try was lost in
        raise
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    handler.check()


def check() -> None:
    """Raise what a signal asked for within `ending_by_signals`, if its first try was lost."""
    handler = _handler()
    if handler is not None:
        handler.check()


@contextmanager
def whole() -> Iterator[None]:
    """Let no signal end what happens here, a line of output say, before it is complete.

    Outside of `ending_by_signals` that is a SIGINT of which Python makes KeyboardInterrupt.
    """
    with holdable() as handler, handler:
        yield


@contextmanager
def holdable() -> Iterator[Handler]:
    """What holds signals back within its own contexts, as `whole` does, but at less cost each."""
    found: object = _handler()
    if found is None and threading.current_thread() is threading.main_thread():
        found = signal.getsignal(signal.SIGINT)
    if found is not signal.default_int_handler:
        yield found if isinstance(found, Handler) else Handler()
        return
    handler = Handler()
    signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _handler() -> Handler | None:
    """The handler in force, in the thread that signals come to."""
    found = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    return found if isinstance(found, Handler) and in_main else None
