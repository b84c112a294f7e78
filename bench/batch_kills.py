"""Batch jobs that are killed at random moments: nothing lost, nothing twice, the same answers.

    python -m bench.batch_kills --kills 200 --seed 1

A child process runs a job on a tiny random model, and is killed: by SIGKILL from outside, or by
itself in the middle of a write, before or after one is forced to disk. Another goes on, until the
job is done; then the next job begins. After each kill, what was on disk before is still there, and
at most one block of answers that were computed is not; at the end of a job its answers are those
of a run that nobody interrupted.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Bar, Report, arguments
from bench.random_model import write_random_checkpoint
from bench.stress import TINY
from qoff.engine import LLM, SamplingParams
from qoff.jobs.file import Asked, FileJob
from qoff.jobs.journal import BLOCK, Journal
from qoff.jobs.runner import Runner
from qoff.plan import Plan

PLAN = Plan(batch_size=16, context=128)
_WAYS = ("outside", "torn write", "before fsync", "after fsync")


def write_model(path: Path) -> None:
    """A tiny checkpoint with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    write_random_checkpoint(path, TINY)
    letters = ["<unk>", *bytes_to_unicode().values()]
    vocab = {token: i for i, token in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(path)


def write_requests(path: Path, seed: int, count: int) -> None:
    """OpenAI's lines; some are wrong, and some cannot be answered."""
    draw, lines = random.Random(seed), list[str]()
    for i in range(count):
        prompt = "".join(draw.choices("abcdefgh ", k=draw.randrange(1, 40)))
        body = {"prompt": prompt, "max_tokens": draw.randrange(1, 24), "seed": i, "temperature": 1}
        line = {"custom_id": f"request {i}", "method": "POST", "url": "/v1/completions"}
        if i % 50 == 7:
            body["prompt"] = "x" * 500  # longer than the context
        lines.append("{torn" if i % 50 == 11 else json.dumps({**line, "body": body}))
    path.write_text("\n".join(lines) + "\n")


def run_job(folder: Path, checkpoint: Path, output: Path) -> int:
    """Run or go on with a job; how many requests failed."""
    asked = Asked(
        folder / "requests.jsonl", output, None, "tiny", SamplingParams(), True, False, False
    )
    with FileJob(asked, checkpoint, PLAN, overwrite=False) as job:
        if job.left:
            with LLM(checkpoint, PLAN) as llm:
                job.run(llm, lambda _: None)
        return job.finish()


def answers(output: Path) -> dict[str, Any]:
    """What a job has answered by now, by the number of the request; torn lines are left out.

    Raises AssertionError for one that is there twice.
    """
    found: dict[str, Any] = {}
    for path in (output, output.with_suffix(".errors.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"}\n"):
                continue
            said = json.loads(line)
            number = said["id"].rpartition("_")[2]
            assert number not in found, f"request {number} was answered twice"
            found[number] = (said["custom_id"], _lasting(said["response"]), said["error"])
    return found


def _lasting(response: Any) -> Any:
    """A response without what is drawn for each anew."""
    if response is None or response["status_code"] != 200:
        return None if response is None else response["body"]
    return response["body"]["choices"], response["body"]["usage"]


class Children:
    """Children that are killed. shared: how many answers the present one has computed."""

    def __init__(self, checkpoint: Path, requests: int, draw: random.Random) -> None:
        self._checkpoint, self._requests, self._draw = checkpoint, requests, draw
        self._shared = mmap.mmap(-1, 8)
        self._lasts_s = 2.0  # a child that nobody kills, lately
        self.kills: Counter[str] = Counter()

    def run(self, folder: Path, output: Path) -> bool:
        """Run a child, which is killed or ends; whether the job is done."""
        return self._child(folder, output, self._draw.choice(_WAYS))

    def finish(self, folder: Path, output: Path) -> None:
        """Let a child run to its end."""
        assert self._child(folder, output, ""), "a child that nobody killed did not end"

    def _child(self, folder: Path, output: Path, way: str) -> bool:
        before = answers(output)
        after_s = self._draw.uniform(0, self._lasts_s)
        nth = self._draw.randrange(1, 2 + self._requests // BLOCK)
        sys.stdout.flush()
        self._shared[:8] = bytes(8)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self._counted()
                if way in _WAYS[1:]:
                    _killed_in_write(way, nth, self._draw.random())
                run_job(folder, self._checkpoint, output)
                status = 0
            finally:
                os._exit(status)
        if way == "outside":
            time.sleep(after_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        self._check(before, answers(output))
        if os.WIFSIGNALED(status):
            self.kills[way] += 1
            return False
        assert status == 0, f"a child ended with status {status}"
        self._lasts_s = time.monotonic() - start
        return True

    def _counted(self) -> None:
        add = Runner._add

        def counted(runner: Runner, *given: Any) -> None:
            (count,) = struct.unpack("q", self._shared[:8])
            self._shared[:8] = struct.pack("q", count + 1)
            add(runner, *given)

        patched: Any = Runner
        patched._add = counted

    def _check(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Nothing that was on disk is lost, and of what was computed at most a block."""
        (computed,) = struct.unpack("q", self._shared[:8])
        assert all(after.get(number) == one for number, one in before.items()), "answers were lost"
        redone = len(before) + computed - len(after)
        assert 0 <= redone <= BLOCK, f"{redone} answers are to be computed again"


def _killed_in_write(way: str, nth: int, part: float) -> None:
    """Have this process kill itself in the n-th block that it writes."""
    append: Callable[..., None] = Journal._append
    left = iter(range(nth, 0, -1))

    def append_or_die(journal: Journal, path: Path, data: bytes) -> None:
        if next(left, 0) > 1:
            append(journal, path, data)
            return
        cut = data[: int(part * len(data))] if way == "torn write" else data
        if way == "after fsync":
            append(journal, path, data)
        else:
            with path.open("ab") as file:
                file.write(cut)
        os.kill(os.getpid(), signal.SIGKILL)

    patched: Any = Journal
    patched._append = append_or_die


def run(folder: Path, kills: int, requests: int, seed: int) -> tuple[Counter[str], int]:
    """Kills by their way, and how many jobs were done. Raises AssertionError for what is wrong."""
    for name in ("qoff.kernels.cpu.ops", "qoff.api.requests"):
        importlib.import_module(name)  # once, and not in every child
    draw, jobs = random.Random(seed), 0
    checkpoint = folder / "tiny"
    write_model(checkpoint)
    children = Children(checkpoint, requests, draw)
    write_requests(folder / "requests.jsonl", seed, requests)
    whole = folder / "whole.jsonl"
    children.finish(folder, whole)
    assert len(answers(whole)) == requests, "a request has no answer"
    while children.kills.total() < kills:
        output = folder / f"job{jobs}.jsonl"
        while not children.run(folder, output):
            pass
        assert answers(output) == answers(whole), "the answers differ"
        jobs += 1
    return children.kills, jobs


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments(
        __doc__,
        argv,
        kills=(int, 200, "processes to kill"),
        requests=(int, 600, "of a job"),
        seed=(int, 0, "of all that is drawn"),
    )
    kills, requests = (3, 80) if given.quick else (given.kills, given.requests)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, jobs = run(Path(folder), kills, requests, given.seed)
    report = Report(
        "batch_kills",
        {"kills": kills, "requests": requests, "seed": given.seed},
        f"{jobs} jobs of {requests} requests, {time.perf_counter() - start:.0f} s",
        ("killed", "times"),
        [(way, str(counts[way])) for way in _WAYS],
        {**{way: float(counts[way]) for way in _WAYS}, "jobs": float(jobs)},
        bars=[Bar("kills survived", kills, float(counts.total()))],
    )
    report.publish(given.out)


if __name__ == "__main__":
    main()
