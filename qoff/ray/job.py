"""A job on a file, answered by many machines: this one reads, and keeps the journal."""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext
from ray.exceptions import RayError

from qoff.errors import ArgumentError, QoffError
from qoff.jobs.file import FileJob, Reading
from qoff.jobs.journal import BLOCK
from qoff.jobs.runner import Counts

from .ledger import Answers
from .processor import ProcessorConfig, answered
from .source import COLUMN, Broken, LineSource, pickled
from .worker import Opening, Worker

_OURS = re.compile(r"^qoff\.errors\.\w+: (.+)$", re.MULTILINE)  # in a traceback


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Ray, connected to a cluster; "local": one of this machine alone, which ends with it.

    Raises ArgumentError for a client's address, QoffError for a cluster that does not answer.
    """
    if "://" in address:
        raise ArgumentError(
            f"--ray {address}: the journal and the requests are read on a machine of the cluster; "
            "run the command there, with --ray auto"
        )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nobody is told what runs here
    logging.getLogger("ray").setLevel(logging.ERROR)
    for console in logging.getLogger("ray.data").handlers:
        if isinstance(console, logging.StreamHandler):  # tracebacks are in its file
            console.setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise QoffError(f"--ray {address}: {str(error).strip().splitlines()[0]}") from error
    try:
        with suppress(ValueError):  # of a thread, to which no signal comes
            signal.signal(signal.SIGTERM, handler)  # not Ray's
        yield
    finally:
        ray.shutdown()


def run(
    job: FileJob,
    config: ProcessorConfig,
    opening: Opening,
    noticed: Callable[[Counts], None],
    worker: type[LineWorker] | None = None,
) -> None:
    """Answer what is left of a job on the cluster that Ray is connected to. worker: a `LineWorker`.

    Raises what `FileJob.run` does, and QoffError for what ends the workers.
    """
    broken: Broken | None = None
    counts, sink, reading = Counts(), job.sink, job.reading
    counts.skipped = sink.completed + sink.failed
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # a row is a task of Ray, and they go out one by one
    of_openai = reading.job if reading.openai else None
    path, seen = job.requests, job.seen
    assert seen is not None
    source = LineSource(path, seen, of_openai, sink.done, min(config.batch_size, BLOCK))
    lines = ray.data.read_datasource(source, num_cpus=0, override_num_blocks=1)
    more = {"reading": reading}
    kind = worker or LineWorker
    found = answered(lines, kind, config, opening, batch_size=1, more=more, spare=0.0)
    with _in_a_line():
        for row in found.iter_rows():
            answers: Answers | Broken = pickle.loads(row[COLUMN])
            if isinstance(answers, Broken):
                broken = answers  # which may come before the answers of other workers
                continue
            if answers.numbers[0] in sink.done:
                continue  # of a task that Ray has repeated
            sink.write(answers.numbers, answers.output, answers.errors)
            counts.failed += len(answers.errors)
            counts.completed += len(answers.numbers) - len(answers.errors)
            counts.prompt_tokens += answers.prompt_tokens
            counts.tokens += answers.tokens
            noticed(counts)
    if broken is not None:
        raise QoffError(broken.why)


class LineWorker(Worker):
    """Answers blocks of a file's lines."""

    def __init__(self, opening: Opening, ledger: Any, reading: Reading) -> None:
        super().__init__(opening, ledger)
        self._reading = reading

    def __call__(self, table: pa.Table) -> pa.Table:
        (block,) = (pickle.loads(one.as_py()) for one in table[COLUMN])
        if isinstance(block, Broken):
            return table
        wrong = [(one.line.number, one.wrong) for one in block if one.wrong is not None]
        found = Answers([number for number, _ in wrong], [], [text for _, text in wrong])
        lines = [one.line for one in block if one.wrong is None]
        if lines:
            found.add(self.answer(lambda: self._reading.reader(self.llm), lines))
        return pickled(found)


@contextmanager
def _in_a_line() -> Iterator[None]:
    """What ends workers, without the traceback of another machine."""
    try:
        yield
    except QoffError:
        raise
    except RayError as error:
        ours = _OURS.findall(str(error))  # Ray adds advice of its own
        text = ours[-1] if ours else str(error).strip().splitlines()[-1]
        raise QoffError(f"the workers cannot go on: {text}") from error
