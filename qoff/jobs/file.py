"""A job on a file of requests: what it depends on, and its run from the first line to the last."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Self

from qoff.checkpoint.layout import KV_SENSITIVITY_FILE
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, DiskWriteError, QoffError, io_errors
from qoff.interrupts import whole
from qoff.plan import Plan
from qoff.standard_output import write_out

from .journal import Journal, Places
from .lines import Bits, Line, Overview, as_seen, is_openai, overview, read_lines
from .requests import OpenAIReader, PromptReader, Reader
from .runner import Counts, Runner

_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class Asked:
    """What is wanted. model: its name in OpenAI's lines; params: of prompts."""

    requests: Path  # "-": standard input
    output: Path | None  # None: standard output
    errors: Path | None  # None: beside the output
    model: str
    params: SamplingParams
    plain: bool  # whether `params` are what nobody asked for
    raw: bool  # prompts are not put into the chat template
    keep_order: bool
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders by name


@dataclass(frozen=True)
class Reading:
    """How lines of a job become requests. job: its name; the rest as in `Asked`."""

    openai: bool
    model: str
    params: SamplingParams
    raw: bool
    job: str

    def reader(self, llm: LLM) -> Reader:
        """What makes requests for a model."""
        if self.openai:
            where = "this batch (--served-model-name gives its model another name)"
            return OpenAIReader(llm, self.model, self.job, where=where)
        chats = llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
        return PromptReader(self.params, chats and not self.raw, self.job)


class FileJob:
    """A job on a file. checkpoint: of the model; plan: None for the default one.

    Raises ArgumentError for what does not go together, QoffError for files that cannot be read, and
    what `Journal` does. A context manager.
    """

    def __init__(
        self, asked: Asked, checkpoint: Path, plan: Plan | None, *, overwrite: bool
    ) -> None:
        self._asked, self._ends = asked, ExitStack()
        if asked.output is None and asked.keep_order:
            raise ArgumentError("--keep-order needs a file for the answers: -o FILE")
        self.total: int | None = None  # requests; None: nobody knows
        self.seen: Overview | None = None  # of a file that is there as a whole
        self.sink: Journal | _Printed = _Printed()
        self._lines: Iterator[Line]
        try:
            file = self._opened()
            if asked.output is None and _is_printed_to(file):
                raise ArgumentError(
                    "standard output is the file of requests; name another file for the answers, "
                    "with -o"
                )
            if asked.output is None and (str(asked.requests) == "-" or not file.seekable()):
                self._lines = read_lines(file)
                first = list(islice(self._lines, 1))
                self._openai = any(map(is_openai, first))
                self._lines = chain(first, self._lines)
                self._check_options()
            else:
                self.seen = seen = overview(file)
                file.seek(0)
                self.total, self._openai, self._lines = seen.lines, seen.openai, as_seen(file, seen)
                self._check_options()
                if asked.output is not None:
                    says = self._says(seen.sha256, checkpoint, plan or Plan())
                    self.sink = self._journal(asked.output, says, overwrite, seen.lines)
        except BaseException:
            self._ends.close()
            raise

    @property
    def left(self) -> int | None:
        """Requests that are to be answered; None: nobody knows."""
        done = self.sink.completed + self.sink.failed
        return None if self.total is None else self.total - done

    @property
    def nothing_left(self) -> str:
        """What to say where there is nothing to answer."""
        asked, sink, again = self._asked, self.sink, ""
        if not self.total:
            return f"{asked.requests}: has no requests"
        if isinstance(sink, Journal) and sink.failed:
            again = f"; {sink.failed} failed: delete {sink.places.errors} to try them again"
        return f"{asked.output}: nothing is left to do{again}; --overwrite begins anew"

    @property
    def requests(self) -> Path:
        """The file of requests, absolute. Raises ArgumentError for standard input and pipes."""
        if not self._asked.requests.is_file():
            raise ArgumentError("requests for many machines are in a file, not standard input")
        return self._asked.requests.resolve()

    @property
    def reading(self) -> Reading:
        """How its lines become requests. Raises QoffError where pydantic is missing for them."""
        if self._openai:
            _need_pydantic()
        asked = self._asked
        return Reading(self._openai, asked.model, asked.params, asked.raw, self.sink.job)

    def run(self, llm: LLM, noticed: Callable[[Counts], None]) -> None:
        """Answer what is left; `noticed` is called, by another thread, after each block."""
        runner = Runner(
            llm,
            self._lines,
            self.reading.reader(llm),
            self.sink,
            lambda mine: max(0, 2 * llm.plan.batches * llm.plan.batch_size - mine),
            block=self.sink.block,
            noticed=noticed,
            left=lambda: self.left,
        )
        try:
            runner.start()
            llm.work(runner.ended.is_set)
        finally:
            with whole():
                runner.stop()
        if runner.error is not None:
            raise runner.error

    def finish(self) -> int:
        """Bring the answers into order, if that was asked for; how many requests have failed."""
        if self._asked.keep_order and isinstance(self.sink, Journal):
            self.sink.sort()
        return self.sink.failed

    def _opened(self) -> BinaryIO:
        """The file of requests; a pipe's in a copy, where the job may have to go on."""
        asked = self._asked
        if str(asked.requests) == "-":
            file: BinaryIO = sys.stdin.buffer
        else:
            try:
                file = self._ends.enter_context(asked.requests.open("rb"))
            except OSError as error:
                raise QoffError(f"{asked.requests}: cannot be read: {error.strerror}") from error
            if file.seekable():
                return file
        if asked.output is None:
            return file
        with io_errors(asked.output.parent, DiskWriteError):
            copy = self._ends.enter_context(tempfile.TemporaryFile(dir=asked.output.parent))  # noqa: SIM115
            shutil.copyfileobj(file, copy)
            copy.seek(0)
        return copy

    def _journal(
        self, output: Path, says: dict[str, Any], overwrite: bool, requests: int
    ) -> Journal:
        stem = str(output).removesuffix(".jsonl")  # another suffix may tell two outputs apart
        errors = self._asked.errors or Path(f"{stem}.errors.jsonl")
        for path in (output, errors):
            if path.exists() and not path.is_file():  # a job that begins would delete it
                raise ArgumentError(
                    f"{path}: is no regular file; answers and errors are read again when the job "
                    "goes on. Name files, or leave out -o to print them"
                )
        places = Places(_linked(output), _linked(errors))
        used = [self._asked.requests, output, errors, places.header, places.sorting]
        if len({path.resolve() for path in used}) < len(used):
            raise ArgumentError("requests, answers and errors need a file each")
        samples = 1 if self._openai else self._asked.params.n
        journal = Journal(places, says, overwrite=overwrite, samples=samples, requests=requests)
        self._ends.callback(journal.close)
        return journal

    def _says(self, digest: str, checkpoint: Path, plan: Plan) -> dict[str, Any]:
        """What the answers depend on."""
        asked = self._asked
        says = {"model": fingerprint(checkpoint), "requests": digest, **cache_says(plan)}
        says["adapters"] = adapters_say(asked.adapters)  # {}, too: a job that had some had others
        if self._openai:
            return {**says, "name": asked.model}
        return {**says, "raw": asked.raw, "parameters": asdict(asked.params)}

    def _check_options(self) -> None:
        if self._openai and (self._asked.raw or not self._asked.plain):
            raise ArgumentError(
                "OpenAI's lines say themselves how they are answered; leave out --raw and the "
                "options of sampling"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.close()


class _Printed:
    """Answers and errors as lines on standard output, each when it is there."""

    block, job = 1, "0"

    def __init__(self) -> None:
        self.done = Bits()
        self.completed = self.failed = 0

    def write(self, numbers: list[int], output: list[bytes], errors: list[bytes]) -> None:
        try:
            for line in [*output, *errors]:
                write_out(line)
        except BrokenPipeError:  # who reads has seen enough
            raise
        except OSError as error:
            raise DiskWriteError(f"standard output: {error.strerror}") from error
        for number in numbers:
            self.done.add(number)
        self.failed += len(errors)
        self.completed += len(numbers) - len(errors)


def fingerprint(checkpoint: Path) -> str:
    """What a checkpoint is: a hash of its checksums, config and tokenizer, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if KV_SENSITIVITY_FILE in path.name:  # or that file while it is written
            continue
        if path.is_file() and path.suffix != _WEIGHTS:  # the index has their checksums
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def adapters_say(folders: Mapping[str, str | PathLike[str]]) -> dict[str, str]:
    """What adapters are: hashes of their contents, by name."""
    return {name: _content(Path(folder)) for name, folder in folders.items()}


def _content(folder: Path) -> str:
    """A hash of all files of an adapter, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("adapter_*")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def cache_says(plan: Plan) -> dict[str, Any]:
    """What of a plan answers depend on."""
    return {
        "kv": asdict(plan.kv),
        "activation_bits": plan.activation_bits,
        "context": plan.context,
    }


def _linked(path: Path) -> Path:
    """The file that a link leads to; the link itself would be replaced.

    A job that began beside the link goes on there.
    """
    begun = Places(path, path).header.exists()
    return path.resolve() if path.is_symlink() and not begun else path


def _is_printed_to(file: BinaryIO) -> bool:
    """Whether standard output goes to this file, which would grow while it is read."""
    try:
        one, other = os.fstat(file.fileno()), os.fstat(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # one of them is no file of the system
        return False
    return stat.S_ISREG(one.st_mode) and os.path.samestat(one, other)


def _need_pydantic() -> None:
    try:
        import pydantic  # noqa: F401
    except ModuleNotFoundError as error:
        raise QoffError(
            f"OpenAI's lines need {error.name}, which is not installed; pip install 'qoff[serve]'"
        ) from error
