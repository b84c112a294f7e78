"""Runs of a job: the engine is kept full, and what breaks harms no other request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from qoff.engine import Completion, SamplingParams
from qoff.errors import ClosedError, DiskReadError, QoffError
from qoff.jobs.journal import Journal, Places
from qoff.jobs.lines import read_lines
from qoff.jobs.requests import PromptReader
from qoff.jobs.runner import Runner

from .test_file_jobs import PARAMS, read


class Instant:
    """An `LLM` that answers at once."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(
        self, prompt: str, params: SamplingParams, call: Any, adapter: None = None
    ) -> list[int]:
        self.submitted += 1
        call.grew(None, Completion(0, 0, prompt, (1,), "text", (1,), "stop"))
        return [1]

    def cancel(self, call: Any) -> None: ...

    def wake(self) -> None: ...


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path, lines = tmp_path / "in", 30_000
    with path.open("w") as file:
        file.writelines(f"prompt number {i} of many, some text long\n" for i in range(lines))
    journal = Journal(Places(tmp_path / "out", tmp_path / "errors"), {})
    llm: Any = Instant()
    seen: list[int] = []  # resident bytes after each block
    with path.open("rb") as file:
        runner = Runner(
            llm, read_lines(file), PromptReader(PARAMS, False, journal.job), journal,
            lambda mine: 8 - mine, block=1000,
            noticed=lambda _: seen.append(psutil.Process().memory_info().rss),
        )  # fmt: skip
        runner.start()
        assert runner.ended.wait(60)
    journal.close()
    assert runner.error is None
    assert (journal.completed, llm.submitted) == (lines, lines)
    assert max(seen[5:]) - seen[4] < 4 << 20


class Stubborn(Instant):
    """Its rounds fail while two requests are in them, or whenever `poison` is."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error, self._calls = error, list[tuple[str, Any]]()
        self._lock = threading.Lock()

    def submit(
        self, prompt: str, params: SamplingParams, call: Any, adapter: None = None
    ) -> list[int]:
        with self._lock:
            self._calls.append((prompt, call))
        return [1]

    def cancel(self, call: Any) -> None:
        with self._lock:
            self._calls = [one for one in self._calls if one[1] is not call]

    def round(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        if any(prompt == "poison" for prompt, _ in calls):
            for _, call in calls:
                call.failed(self._error)
            return
        for text, call in calls:
            call.grew(None, Completion(0, 0, text, (1,), "text", (1,), "stop"))


@pytest.mark.parametrize("of_machine", [False, True])
def test_a_request_that_breaks_rounds_harms_no_other(of_machine: bool, tmp_path: Path) -> None:
    error = DiskReadError("the disk is broken") if of_machine else RuntimeError("a broken round")
    runner = ran(tmp_path, Stubborn(error), "one\ntwo\npoison\nthree\nfour\n")
    if of_machine:
        assert isinstance(runner.error, DiskReadError)
    else:
        assert runner.error is None
        assert sorted(one["index"] for one in read(tmp_path / "out")) == [0, 1, 3, 4]
        (wrong,) = read(tmp_path / "errors")
        assert (wrong["index"], wrong["error"]) == (2, "a broken round")


@contextmanager
def opened(
    tmp_path: Path,
    llm: Any,
    prompts: str,
    room: Callable[[int], int],
    params: SamplingParams = PARAMS,
    **more: Any,
) -> Iterator[Runner]:
    """A runner that has not begun."""
    (tmp_path / "in").write_text(prompts)
    journal = Journal(Places(tmp_path / "out", tmp_path / "errors"), {})
    with closing(journal), (tmp_path / "in").open("rb") as file:
        reader = PromptReader(params, False, journal.job)
        yield Runner(llm, read_lines(file), reader, journal, room, **more)


def ran(tmp_path: Path, llm: Any, prompts: str) -> Runner:
    """A runner that has ended. llm: has rounds, if it needs them."""
    with opened(tmp_path, llm, prompts, lambda n: 3 - n) as runner:
        runner.start()
        end = time.monotonic() + 20
        while not runner.ended.wait(0.002) and time.monotonic() < end:
            if isinstance(llm, Stubborn):
                llm.round()
        runner.stop()
    return runner


@pytest.mark.parametrize("error", [ClosedError("closed"), QoffError("no process can be started")])
def test_faults_of_the_machine_are_not_of_requests(error: QoffError, tmp_path: Path) -> None:
    class Refusing(Instant):
        def submit(
            self, prompt: str, params: SamplingParams, call: Any, adapter: None = None
        ) -> list[int]:
            raise error

    runner = ran(tmp_path, Refusing(), "one\ntwo\n")
    assert runner.error is error
    assert not (tmp_path / "errors").exists()


def test_an_error_of_cuda_is_of_no_request(tmp_path: Path) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert ran(tmp_path, Stubborn(error), "poison\n").error is error
    assert not (tmp_path / "errors").exists()


def test_a_job_ends_where_all_requests_break_their_rounds(tmp_path: Path) -> None:
    error = RuntimeError("the device is gone")
    assert ran(tmp_path, Stubborn(error), "poison\n" * 9).error is error
    assert len(read(tmp_path / "errors")) == 2


def test_a_request_waits_until_there_is_room_for_all_its_answers(tmp_path: Path) -> None:
    """It is not submitted for places that clients need, only to be withdrawn at once."""
    llm, room = Stubborn(RuntimeError()), 1
    three = SamplingParams(n=3)
    with opened(tmp_path, llm, "one\n", lambda n: room - n, three, most=4) as runner:
        assert runner._feed()
        assert llm._calls == []
        room = 3
        assert runner._feed()
    assert len(llm._calls) == 1


def test_requests_give_way_and_come_back(tmp_path: Path) -> None:
    """Where there is no room any more, the youngest give up their places."""
    llm, room = Stubborn(RuntimeError()), 4
    prompts = "".join(f"{i}\n" for i in range(6))
    with opened(tmp_path, llm, prompts, lambda mine: room - mine) as runner:
        runner.start()
        for wanted in (4, 1, 3):
            room = wanted
            runner.poke()
            while runner.in_flight != wanted:
                assert not runner.ended.wait(0.001)
            assert [prompt for prompt, _ in llm._calls] == [str(i) for i in range(wanted)]
        while not runner.ended.wait(0.002):
            llm.round()
    assert sorted(one["index"] for one in read(tmp_path / "out")) == [*range(6)]
