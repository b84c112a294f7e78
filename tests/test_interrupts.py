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
from qoff.interrupts import TERMINATED, check, ending_by_signals, whole
from qoff.models.runtime import Runtime
from qoff.plan import Plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As in a terminal: a job in the background of a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def lose(number: int) -> None:
    """Have a signal come while C calls back, as numba's compiler does, which drops exceptions."""
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()


ENDS = {signal.SIGTERM: SystemExit, signal.SIGINT: KeyboardInterrupt}


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
        with pytest.raises(ENDS[number]):
            work()
    assert reached
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
        assert ended.value.code == TERMINATED == 143
    assert list(tmp_path.iterdir()) == []


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
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_by_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


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
    assert process.wait(20) == TERMINATED
    assert len(printed) > 300_000
    assert printed.endswith(b"\n")
    for line in printed.splitlines():
        json.loads(line)
