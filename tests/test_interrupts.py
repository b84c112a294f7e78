"""Signals end a command at the end of a round at the latest, and cut no line."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qoff.checkpoint import CheckpointWriter
from qoff.engine import LLM
from qoff.errors import ConversionError
from qoff.interrupts import check, ending_by_signals, whole
from qoff.models.runtime import Runtime
from qoff.plan import Plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As in a terminal: a job in the background of a shell ignores SIGINT."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def lose(number: int) -> None:
    """Have a signal come while C calls back, as numba's compiler does, which drops exceptions."""
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()


ENDS = {
    signal.SIGTERM: SystemExit,
    signal.SIGHUP: SystemExit,
    signal.SIGINT: KeyboardInterrupt,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", ENDS)
def test_a_signal_that_a_callback_loses_is_raised_again(number: signal.Signals) -> None:
    reached: list[str] = []

    def looks() -> None:
        with ending_by_signals():
            lose(number)
            reached.append("the end of the callback")
            check()

    def looks_nowhere() -> None:
        with ending_by_signals():
            lose(number)

    def breaks() -> None:
        with ending_by_signals():
            lose(number)
            raise ConversionError("broken by the callback")

    for work in (looks, looks_nowhere, breaks):
        with pytest.raises(ENDS[number]) as ended:
            work()
        assert getattr(ended.value, "code", 128 + number) == 128 + number
    assert reached
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_rounds_passes_and_conversions_look(checkpoint: Path, tmp_path: Path) -> None:
    def answer() -> None:
        with LLM(checkpoint, Plan(context=40)) as llm:
            lose(signal.SIGTERM)
            llm.generate([[5, 6]])

    def forward() -> None:
        with Runtime(checkpoint) as runtime:
            lose(signal.SIGTERM)
            runtime.forward(None)  # type: ignore[arg-type]  # never looked at

    def write() -> None:
        with CheckpointWriter(tmp_path / "model") as writer:
            lose(signal.SIGTERM)
            writer.write_layer(0, {})

    works: list[Callable[[], None]] = [answer, forward, write]
    for work in works:
        with pytest.raises(SystemExit) as ended, ending_by_signals():
            work()
        assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_later_hang_up_does_not_cut_what_is_cleaned_up(first: signal.Signals) -> None:
    cleaned: list[bool] = []

    def hung_up() -> None:
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(signal.SIGHUP)
            cleaned.append(True)

    with pytest.raises(SystemExit), ending_by_signals():
        hung_up()
    assert cleaned


def test_a_program_that_handles_signals_keeps_its_handlers() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with ending_by_signals():
            assert signal.getsignal(signal.SIGTERM) is own
            with whole():
                check()
    finally:
        signal.signal(signal.SIGTERM, before)
    for number in (signal.SIGINT, signal.SIGHUP):  # nohup ignores the latter
        before = signal.signal(number, signal.SIG_IGN)
        try:
            with ending_by_signals():
                assert signal.getsignal(number) is signal.SIG_IGN
        finally:
            signal.signal(number, before)


def test_threads_are_left_alone() -> None:
    seen: list[object] = []

    def look() -> None:
        with ending_by_signals(), whole():
            check()
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


LINES = """
from qoff.interrupts import ending_by_signals
from qoff.cli.output import print_line
with ending_by_signals():
    while True:
        print_line('{"text": "' + 300000 * "x" + '"}')
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_printed_whole_or_not_at_all(unbuffered: str) -> None:
    """The pipe is full and the writer in the middle of a line when the signal comes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen([sys.executable, "-c", LINES], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    first = process.stdout.read(100_000)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    printed = first + process.stdout.read()
    assert process.wait(20) == 143
    assert len(printed) > 300_000
    assert printed.endswith(b"\n")
    for line in printed.splitlines():
        json.loads(line)
