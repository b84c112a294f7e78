"""An actor of Ray with a `qoff.LLM`: blocks of requests in, their answers out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray

from qoff.budgets import resolve_device
from qoff.engine import LLM
from qoff.errors import QoffError
from qoff.hf.checkpoints import find_checkpoint
from qoff.jobs.file import adapters_say, fingerprint
from qoff.jobs.lines import Bits, Line
from qoff.jobs.requests import Bad, Reader
from qoff.jobs.runner import OF_MACHINE, Runner

from .ledger import MOST, Answers, groups


@dataclass(frozen=True)
class Opening:
    """The model of a worker. options: of `qoff.LLM`; wanted: its fingerprint, if it is known.

    adapters: what `adapters_say` of them. part: of its machine's main memory, where nothing bounds
    it. A relative `cache_dir` is one of this process's folder: workers run in others.
    """

    model: str
    options: dict[str, Any]
    wanted: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    part: float = 1.0

    def __post_init__(self) -> None:
        folder = self.options.get("cache_dir")
        if folder is not None:
            options = {**self.options, "cache_dir": Path(folder).resolve()}
            object.__setattr__(self, "options", options)


class Worker:
    """Answers blocks of requests. ledger: of the run, where deaths are known.

    The first block raises the errors of `qoff.LLM`, and QoffError for another model than the one
    wanted: of those that end its beginning, Ray prints the traceback.
    """

    def __init__(self, opening: Opening, ledger: Any) -> None:
        self._opened: LLM | QoffError
        try:
            self._opened = open_llm(opening)
        except QoffError as error:
            self._opened = error
        self._ledger = ledger
        self._model = _Shared()
        self._here = threading.local()  # two threads answer a block each, so places are never empty

    @property
    def llm(self) -> LLM:
        """Raises the error for which it could not be opened."""
        if isinstance(self._opened, QoffError):
            raise self._opened
        return self._opened

    def answer(self, new_reader: Callable[[], Reader], lines: Sequence[Line]) -> Answers:
        """The answers to a block. A request that ends this process again and again is an error."""
        key = self._key()
        by_number = {line.number: line for line in lines}
        known = ray.get(self._ledger.open.remote(key))
        found, left = known.kept, by_number.keys() - set(known.kept.numbers)
        for group in groups(sorted(left), known.begun):
            times, reader = known.begun[group[0]], new_reader()
            chosen = [by_number[number] for number in group]
            if times >= MOST:
                answers = _given_up(reader, chosen)
            else:
                with self._model.held(alone=times > 0):
                    ray.get(self._ledger.begin.remote(key, group))
                    answers = self._run(reader, chosen, key)
            if times:
                ray.get(self._ledger.keep.remote(key, answers))
            found.add(answers)
        ray.get(self._ledger.close.remote(key))
        return found

    def _key(self) -> tuple[str, int]:
        """The name of a block, the same when Ray repeats its task."""
        task, here = ray.get_runtime_context().get_task_id() or "", self._here
        if task != getattr(here, "task", None):
            here.task, here.numbers = task, count()
        return task, next(here.numbers)

    def _run(self, reader: Reader, lines: list[Line], key: tuple[str, int]) -> Answers:
        sink, places = _Kept(), self.llm.plan.batches * self.llm.plan.batch_size
        room = lambda mine: max(0, 2 * places - mine)  # noqa: E731
        runner = Runner(self.llm, iter(lines), reader, sink, room)
        runner.start()
        try:
            self.llm.work(runner.ended.is_set)
        finally:
            runner.stop()
        if isinstance(runner.error, OF_MACHINE):
            # Another machine, or this one later, is to answer; Ray starts the worker again.
            text = f"{ray.util.get_node_ip_address()}: {runner.error}"
            ray.get(self._ledger.fault.remote(key, [line.number for line in lines], text))
            print(text, file=sys.stderr, flush=True)
            os._exit(1)
        if runner.error is not None:
            raise runner.error
        sink.answers.prompt_tokens = runner.counts.prompt_tokens
        sink.answers.tokens = runner.counts.tokens
        return sink.answers


class _Shared:
    """Who has a model: blocks together, or one alone, beside which no innocent one can die."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alone = False
        self._holders = 0

    @contextmanager
    def held(self, alone: bool) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = alone  # from now on nobody joins
            self._changed.wait_for(lambda: not (alone and self._holders))
            self._holders += 1
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._alone = self._alone and not alone
                self._changed.notify_all()


class _Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.done, self.answers = Bits(), Answers()

    def write(self, numbers: list[int], output: list[bytes], errors: list[bytes]) -> None:
        self.answers.add(Answers(numbers, output, errors))


def _given_up(reader: Reader, lines: Sequence[Line]) -> Answers:
    """What is said of requests that ended their process each time."""
    error = QoffError(f"the process that answered this ended, {MOST} times")
    read = {line.number: reader.read(line) for line in lines}
    told = [one.text if isinstance(one, Bad) else one.failed(error) for one in read.values()]
    return Answers([*read], [], told)


def open_llm(opening: Opening) -> LLM:
    """The model, on this worker's part of its machine, as the planner divides that."""
    options = dict(opening.options)
    names = ("cache_dir", "revision", "trust_remote_code")
    device = resolve_device(options.get("device", "auto"))
    found = {name: options[name] for name in names if name in options}
    path = find_checkpoint(opening.model, for_cpu=device.type == "cpu", **found)
    here = ray.util.get_node_ip_address()
    if opening.wanted is not None and fingerprint(Path(path)) != opening.wanted:
        raise QoffError(f"{path} on {here} is another model")
    if opening.adapters and adapters_say(options["adapters"]) != opening.adapters:
        raise QoffError(f"adapters on {here} are others than where the job was started")
    return LLM(path, **options, _share=opening.part)
