"""The lines of a file that are not done as blocks of Ray Data, read in a process without torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from qoff.errors import QoffError
from qoff.jobs.lines import Bits, Overview, as_seen

COLUMN = "block"  # of datasets whose rows are pickled blocks


class LineSource(Datasource):
    """The lines of a file that are not done, `block` of them in a row, read on this machine."""

    supports_distributed_reads = False

    def __init__(self, path: Path, seen: Overview, job: str | None, done: Bits, block: int) -> None:
        """seen: what the file is; job: its name, if lines are OpenAI's."""
        super().__init__()
        self._path, self._seen, self._job = path, seen, job
        self._done, self._block = done, block

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One task, which reads as fast as its rows are taken."""
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(lambda: map(pickled, self._blocks()), unknown)]

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def _blocks(self) -> Iterator[list[Found] | Broken]:
        """Blocks of lines, the last one of which may be less; then what ended their reading."""
        block, broken = list[Found](), None
        try:
            with self._path.open("rb") as file:
                for found in self._left(as_seen(file, self._seen)):
                    block.append(found)
                    if len(block) == self._block:
                        yield block
                        block = []
        except QoffError as error:  # raised, it would end what computes the blocks before it
            broken = Broken(str(error))
        except OSError as error:
            broken = Broken(f"{self._path}: cannot be read ({error})")
        if block:
            yield block
        if broken is not None:
            yield broken

    def _left(self, lines: Iterator[Any]) -> Iterator[Found]:
        """What is not done; ids that occur twice are found here, where all lines are seen."""
        if self._job is None:
            yield from (Found(line, None) for line in lines if line.number not in self._done)
            return
        from qoff.jobs.requests import Bad, OpenAILines  # with torch

        frames = OpenAILines(self._job)
        for line in lines:
            if line.number in self._done:
                frames.skip(line)
                continue
            wrong = frames.check(line)
            yield Found(line, wrong.text if isinstance(wrong, Bad) else None)


@dataclass(frozen=True)
class Found:
    """A line, and what is said of it if it is no request."""

    line: Any
    wrong: bytes | None


@dataclass(frozen=True)
class Broken:
    """What is wrong with a file whose lines before that are to be answered."""

    why: str


def pickled(block: Any) -> pa.Table:
    """A row of COLUMN."""
    return pa.table({COLUMN: pa.array([pickle.dumps(block)], pa.large_binary())})
