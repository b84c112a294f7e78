"""Copies: in the order of the calls, every failure in the future of its copy, no hang."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch

from qoff.errors import DiskReadError
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.timeline import Timeline
from tests.links import Link, behind

TIMEOUT_S = 30


def test_copies_are_done_in_the_order_of_the_calls() -> None:
    a, b, c = torch.arange(4096), torch.zeros(4096, dtype=torch.int64), torch.ones(4096)
    with closing(Copies()) as copies:
        first = copies.submit([(b, a)], "host to device", "a to b")
        second = copies.submit([(c, b), (a, b)], "device to host", "b to c and a")
        second.result(TIMEOUT_S)
        assert first.done()
        assert torch.equal(c, torch.arange(4096.0))
        assert copies.bytes == a.nbytes * 3
        assert copies.alive
    assert not copies.alive


def test_what_fails_fails_alone() -> None:
    with closing(Copies()) as copies:
        wrong = copies.submit([(torch.zeros(2), torch.zeros(3))], "lane", "shapes differ")
        right = copies.call(lambda: None, 0, "lane", "nothing")
        with pytest.raises(ValueError, match="broadcast"):
            wrong.result(TIMEOUT_S)
        right.result(TIMEOUT_S)
        assert copies.alive


@pytest.mark.parametrize("death", [SystemExit(1), KeyboardInterrupt()])
def test_the_death_of_the_thread_fails_what_waits_and_what_comes(death: BaseException) -> None:
    gate = threading.Event()

    def die() -> None:
        gate.wait(TIMEOUT_S)
        raise death

    with closing(Copies()) as copies:
        futures = [copies.call(move, 0, "lane", "x") for move in (die, lambda: None)]
        gate.set()
        for future in futures:
            with pytest.raises(DiskReadError, match="died"):
                future.result(TIMEOUT_S)
        with pytest.raises(DiskReadError, match="died"):
            copies.submit([], "lane", "late").result(TIMEOUT_S)
        assert not copies.alive


def test_close_finishes_what_runs_fails_what_waits_and_closes_again() -> None:
    started, gate = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        gate.wait(TIMEOUT_S)

    copies = Copies()
    running, waiting = (copies.call(move, 0, "lane", "x") for move in (slow, lambda: None))
    assert started.wait(TIMEOUT_S)
    thread = threading.Thread(target=copies.close)
    thread.start()
    with pytest.raises(DiskReadError, match="closed"):
        waiting.result(TIMEOUT_S)
    gate.set()
    running.result(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    copies.close()
    with pytest.raises(DiskReadError, match="closed"):
        copies.submit([], "lane", "late").result(TIMEOUT_S)


def test_copies_take_as_long_as_the_link_says_and_are_noted() -> None:
    timeline, source = Timeline(), torch.zeros(1 << 16, dtype=torch.uint8)
    hooks = behind(host=Link(source.nbytes / 0.05), hooks=Instrumentation(timeline))
    with closing(Copies(instrumentation=hooks)) as copies:
        start = time.perf_counter()
        futures = [
            copies.submit([(torch.empty_like(source), source)], "lane", "x") for _ in range(3)
        ]
        for future in futures:
            future.result(TIMEOUT_S)
        assert time.perf_counter() - start >= 0.15
    assert [(x.lane, x.nbytes) for x in timeline.intervals] == [("lane", source.nbytes)] * 3
    assert all(x.stop - x.start >= 0.05 for x in timeline.intervals)


def test_a_copy_waits_for_its_reads_and_others_do_not_wait_for_it() -> None:
    read, failed = Future[None](), Future[None]()
    memory, source = torch.zeros(2, 4), torch.ones(4)
    with closing(Copies()) as copies:
        late = copies.call(lambda: copies.copy([(memory[0], source)]), 16, "", "", [read])
        never = copies.call(lambda: copies.copy([(memory[0], source)]), 16, "", "", [read, failed])
        copies.submit([(memory[1], source)], "", "").result(20)
        assert memory.tolist() == [[0] * 4, [1] * 4]
        assert not late.done()
        read.set_result(None)
        late.result(20)
        failed.set_exception(DiskReadError("no disk"))
        with pytest.raises(DiskReadError, match="no disk"):
            never.result(20)
        assert memory.tolist() == [[1] * 4, [1] * 4]
        assert copies.bytes == 32


def test_jobs_copy_rows_and_are_counted_where_nobody_watches() -> None:
    a, b = torch.arange(40.0).view(5, 8), torch.full((6, 8), -1.0)
    with closing(Copies()) as copies:
        assert copies.unwatched
        copies.job(b[:5, 1:5], a[:, 4:])
        assert torch.equal(b[:5, 1:5], a[:, 4:])
        assert (b[:, 5:] == -1).all()
        table = torch.tensor([[5, 0], [1, 4], [-1, -1], [0, 3]])
        copies.job(b, a, table)
        assert torch.equal(b[[5, 1]], a[[0, 4]])
        assert torch.equal(b[0, 1:5], a[0, 4:])  # what is behind the end of the table is not done
        assert copies.bytes == 4 * (5 * 4 + 2 * 8)
        assert copies.busy_s > 0
    for watched in (Instrumentation(timeline=Timeline()), behind(host=Link(1e9))):
        with closing(Copies(instrumentation=watched)) as copies:
            assert not copies.unwatched
