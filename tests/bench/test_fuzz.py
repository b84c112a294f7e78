"""Some seconds of damaged inputs, and a fuzzer that finds what is wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from bench.fuzz.children import Finding, run_all
from qoff.errors import ArgumentError
from tests.programs import printed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_damaged_inputs_give_answers_or_errors_of_ours() -> None:
    """In a process of its own, which forks: no exception of others, no hang, no crash."""
    command = ("-m", "bench.fuzz", "--inputs", 500, "--seed", 7)
    # It takes five seconds on a machine that has nothing else to do.
    assert "; 0 faults" in printed(*command, cwd=ROOT, timeout=300)


def misbehaves(number: int) -> None:
    """One of what a child may do, by the number of the input."""
    if number == 3:
        raise ValueError("three")
    if number == 4:
        raise ArgumentError("refused")
    if number == 6:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 7:
        held = bytearray(540 << 20)
        held[:: 1 << 12] = b"x" * (len(held) >> 12)
    if number == 8:
        bytearray(1 << 40)


def test_what_goes_wrong_in_a_child_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(run_all(range(12), misbehaves))
    assert [one for one in found if isinstance(one, int)] == sorted(range(12))
    kinds = {one.number: one.kind for one in found if isinstance(one, Finding)}
    assert kinds == {
        3: "ValueError",
        6: "crash: SIGSEGV",
        7: "memory",
        8: "MemoryError",
    }


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.fuzz.children.SECONDS", 0.2)

    def hangs(number: int) -> None:
        while number == 1:
            pass

    start = time.process_time()
    found = [one for one in run_all(range(3), hangs) if isinstance(one, Finding)]
    assert [(one.number, one.kind.partition(":")[0]) for one in found] == [(1, "hang")]
    assert time.process_time() - start < 2
