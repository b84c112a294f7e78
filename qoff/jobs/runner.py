"""Keeps an engine full with the requests of a job, and writes its answers.

A thread reads, submits and writes; rounds are computed by whoever calls `LLM.work`. Of a file of
any size only a window of requests is in memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from qoff.api.errors import ApiError
from qoff.engine import LLM, Completion
from qoff.engine.calls import Call
from qoff.engine.prompts import prompt_list
from qoff.engine.request import Sequence
from qoff.errors import (
    ArgumentError,
    ClosedError,
    DiskReadError,
    DiskWriteError,
    FormatError,
    QoffError,
)
from qoff.system_memory import gpu_failed

from .journal import BLOCK
from .lines import Bits, Line
from .requests import Bad, Reader, Request

_LOOK_S = 0.25  # between looks for room that others have left
_HELD_S = 1.0  # answers wait so long for others of their block
_ALIKE = 3  # requests in a row that fail alone in the same way: it is not their fault
OF_MACHINE = (DiskReadError, DiskWriteError, FormatError)  # errors that are of no request


class Sink(Protocol):
    """Where answers go: a `Journal`, say."""

    done: Bits  # requests that were answered before

    def write(self, numbers: list[int], output: list[bytes], errors: list[bytes]) -> None: ...


class Counts:
    """What a run of a job has done."""

    def __init__(self) -> None:
        self.completed = self.failed = self.skipped = 0  # requests; those answered before
        self.prompt_tokens = self.tokens = 0  # of prompts and of answers
        self.started = time.perf_counter()

    @property
    def ended(self) -> int:
        """Requests answered or failed in this run."""
        return self.completed + self.failed


class Runner:
    """Runs the requests of a job.

    room: for how many answers there is room beside those given in flight; below 0: so many are to
    give up their places, and are asked for again later. most: answers of a request. block: requests
    whose answers are written together, at most. noticed: called by the thread after each block.
    left: requests that are to be answered; None where nobody knows.
    A request whose round fails is computed once more, alone; `error` is what ends the job: faults
    of the machine, among them the third request in a row that fails alone in the same way.
    """

    def __init__(
        self,
        llm: LLM,
        lines: Iterator[Line],
        reader: Reader,
        sink: Sink,
        room: Callable[[int], int],
        *,
        most: int | None = None,
        block: int = BLOCK,
        noticed: Callable[[Counts], None] = lambda _: None,
        left: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._llm, self._left, self._reader = llm, lines, reader
        self._sink, self._room, self._most = sink, room, most
        self._block, self._noticed, self._unanswered = block, noticed, left
        self.counts = Counts()
        self.error: BaseException | None = None
        self.ended = threading.Event()  # no more will be written
        self._stopped = self._torn = False
        self._news = threading.Event()
        self._running: list[_Asked] = []  # in the order in which they were submitted
        self._again: deque[_Asked] = deque()
        self._finished: deque[_Asked] = deque()  # by threads that compute rounds
        self._alike = 0  # requests that failed alone, the last ones, by errors of one type:
        self._broken: type[BaseException] | None = None
        self._held: tuple[list[int], list[bytes], list[bytes]] = [], [], []
        self._oldest = 0.0  # when the first of these came
        self._thread = threading.Thread(target=self.run, name="qoff-job")

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is done, and give up the rest; waits for it where `start` began it."""
        self._stopped = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()

    def poke(self) -> None:
        """Look at once whether there is room."""
        self._news.set()

    @property
    def in_flight(self) -> int:
        """Answers that are asked for."""
        return sum(one.count for one in self._running)

    @property
    def follows(self) -> float:
        """Requests that the engine was not asked for yet; inf where nobody knows."""
        left = self._unanswered()
        asked = len(self._running) + len(self._held[0])
        return math.inf if left is None else max(0, left - asked)

    def run(self) -> None:
        """Answer what is left in this thread, until the end or `stop`."""
        try:
            self._work()
        except BaseException as error:
            self.error = error
        try:
            self._stopped = True
            for one in self._running:
                self._llm.cancel(one)
            if not self._torn:
                self._take()
                self._write()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.ended.set()
            self._llm.wake()

    def _work(self) -> None:
        more = True
        while (more or self._running or self._again) and not self._stopped:
            self._give_way()
            more = self._feed() if more or self._again else False
            self._news.wait(_LOOK_S)
            self._news.clear()
            self._take()
            if self._held[0] and time.perf_counter() - self._oldest > _HELD_S:
                self._write()

    def _give_way(self) -> None:
        """Take back the youngest requests, of these first those that wait, where there is none."""
        wanted = -self._room(self.in_flight)
        while wanted > 0 and self._running:
            one = next((x for x in reversed(self._running) if not x.begun), self._running[-1])
            wanted -= one.count
            self._leave(one)
            self._again.appendleft(one.again())

    def _leave(self, one: _Asked) -> None:
        self._running.remove(one)
        one.gone = True
        self._llm.cancel(one)

    def _feed(self) -> bool:
        """Submit what there is room for; whether there is more to read."""
        while not self._stopped:
            free = self._room(self.in_flight)
            if free <= 0:
                return True
            one = self._again.popleft() if self._again else self._next()
            if one is None:
                return False
            alone = one.again_alone or any(other.again_alone for other in self._running)
            never = self._most is not None and one.count > self._most  # which `_submit` says
            # Alone and on nobody else's cost, a request may wait for some of its own places.
            wide = one.count > free and (self._running or self._most is not None)
            if (wide and not never) or (self._running and alone):
                self._again.appendleft(one)
                return True
            self._submit(one)
        return True

    def _next(self) -> _Asked | None:
        """The next request that is to be answered."""
        for line in self._left:
            if self._stopped:
                return None
            if line.number in self._sink.done:
                self._reader.skip(line)
                self.counts.skipped += 1
                continue
            found = self._reader.read(line)
            if not isinstance(found, Bad):
                return _Asked(found, self)
            self._add(line.number, [], found.text)
        return None

    def _submit(self, one: _Asked) -> None:
        self._running.append(one)
        try:
            if not 0 < one.count <= (self._most or one.count):
                raise ArgumentError(
                    f"the request is for {one.count} answers; ask for 1 to {self._most or 'many'}"
                )
            asked = one.request
            lengths = self._llm.submit(asked.prompts, asked.params, one, asked.adapter)
            one.prompt_tokens = sum(lengths)
        except (ArgumentError, ApiError) as error:
            if isinstance(error, ClosedError):
                raise
            self._running.remove(one)
            self._add(one.request.line.number, [], one.request.failed(error))

    def finished(self, one: _Asked) -> None:
        """A request has its answers, or an error; any thread may say so."""
        self._finished.append(one)
        self._news.set()

    def _take(self) -> None:
        """Turn what is finished into lines."""
        while self._finished:
            one = self._finished.popleft()
            if one.gone:
                continue
            one.gone = True
            self._running.remove(one)
            if one.error is None:
                self._answered(one)
            else:
                self._failed(one, one.error)

    def _answered(self, one: _Asked) -> None:
        answers = sorted(one.done, key=lambda answer: (answer.index, answer.sample))
        number = one.request.line.number
        try:
            lines = one.request.answered(answers, one.prompt_tokens)
        except (ApiError, QoffError) as error:
            self._add(number, [], one.request.failed(error))
            return
        self._alike = 0
        self.counts.prompt_tokens += one.prompt_tokens
        self.counts.tokens += sum(len(answer.token_ids) for answer in answers)
        self._add(number, lines, None)

    def _failed(self, one: _Asked, error: BaseException) -> None:
        """A round has failed: what is at fault is the machine, or one of those that were in it."""
        if self._stopped:
            return
        if isinstance(error, OF_MACHINE) or not isinstance(error, Exception) or gpu_failed(error):
            raise error
        if one.again_alone:
            self._alike = self._alike + 1 if type(error) is self._broken else 1
            self._broken = type(error)
            if self._alike >= _ALIKE:
                raise error
            self._add(one.request.line.number, [], one.request.failed(error))
        else:
            self._again.append(one.again(alone=True))

    def _add(self, number: int, output: list[bytes], error: bytes | None) -> None:
        numbers, lines, errors = self._held
        if not numbers:
            self._oldest = time.perf_counter()
        numbers.append(number)
        lines += output
        errors += [] if error is None else [error]
        if len(numbers) >= self._block:
            self._write()

    def _write(self) -> None:
        (numbers, output, errors), self._held = self._held, ([], [], [])
        if numbers:
            self._torn = True  # unless it succeeds; what follows half a line would be lost
            self._sink.write(numbers, output, errors)
            self._torn = False
            self.counts.failed += len(errors)
            self.counts.completed += len(numbers) - len(errors)
            self._noticed(self.counts)


class _Asked(Call):
    """A request on its way through the engine."""

    background = True

    def __init__(self, request: Request, runner: Runner, again_alone: bool = False) -> None:
        super().__init__()
        self.request, self._runner, self.again_alone = request, runner, again_alone
        self.count = len(prompt_list(request.prompts)) * request.params.n
        self.prompt_tokens = 0
        self.begun = self.gone = False  # whether it is in a batch; whether nobody waits any more

    @property
    def follows(self) -> float:  # type: ignore[override]
        return self._runner.follows

    def again(self, alone: bool = False) -> _Asked:
        """The same once more."""
        return _Asked(self.request, self._runner, alone or self.again_alone)

    def grew(self, sequence: Sequence, answer: Completion | None) -> None:
        super().grew(sequence, answer)
        self.begun = True
        if len(self.done) == self.count:
            self._runner.finished(self)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._runner.finished(self)
