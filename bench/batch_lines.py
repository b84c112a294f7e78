"""`python -m bench.batch_lines`: memory and time of a job on a large file of requests.

The job is that of `qoff batch`: OpenAI's lines, journal, block by block forced to disk. Its answers
come from an engine that computes nothing, so a million lines take minutes, and what grows with the
file shows. Half of the lines are answered in a second run, which finds the first one's answers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.harness import out_file
from qoff.engine import Completion
from qoff.jobs.journal import BLOCK, Journal, Places
from qoff.jobs.lines import overview, read_lines
from qoff.jobs.requests import OpenAIReader
from qoff.jobs.runner import Counts, Runner


class Instant:
    """An engine whose answers are there at once. tokenizer, adapters: what a request looks for."""

    adapters: tuple[str, ...] = ()

    class tokenizer:  # noqa: N801
        chat_template = None

    def get_default_sampling_params(self) -> Any:
        from qoff.engine import SamplingParams

        return SamplingParams()

    def submit(self, prompt: str, params: Any, call: Any, adapter: None) -> list[int]:
        call.grew(None, Completion(0, 0, prompt, (1,), "an answer", (1, 2), "stop"))
        return [1]

    def cancel(self, call: Any) -> None: ...

    def wake(self) -> None: ...


def line(number: int) -> str:
    body = {"prompt": f"the text of request {number}, which is not long", "max_tokens": 16}
    said = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps({**said, "body": body})


def run(folder: Path, path: Path, most: int, seen: list[tuple[int, int]]) -> int:
    """Answer up to about `most` lines more, noting (requests done, resident bytes); all done."""
    with path.open("rb") as file:
        says = {"requests": overview(file).sha256}
        file.seek(0)
        journal = Journal(Places(folder / "out.jsonl", folder / "errors.jsonl"), says)

        def noticed(counts: Counts) -> None:
            seen.append((journal.completed, psutil.Process().memory_info().rss))
            if counts.completed >= most:
                runner.stop()

        llm: Any = Instant()
        reader = OpenAIReader(llm, "model", journal.job)
        room = lambda mine: BLOCK - mine  # noqa: E731
        runner = Runner(llm, read_lines(file), reader, journal, room, noticed=noticed)
        runner.run()
        journal.close()
        if runner.error is not None:
            raise runner.error
    return journal.completed


def measure(folder: Path, lines: int) -> dict[str, Any]:
    """Answer a file of so many lines."""
    path, start = folder / "in.jsonl", time.perf_counter()
    with path.open("w") as file:
        file.writelines(line(i) + "\n" for i in range(lines))
    seen: list[tuple[int, int]] = []
    run(folder, path, lines // 2, seen)
    answered = run(folder, path, lines, seen)
    early = max(rss for done, rss in seen if done <= max(BLOCK, lines // 20))
    return {
        "lines": lines,
        "answered": answered,
        "seconds": round(time.perf_counter() - start, 1),
        "rss_early_MiB": round(early / (1 << 20), 1),
        "rss_most_MiB": round(max(rss for _, rss in seen) / (1 << 20), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the files are; default: a temporary one")
    parser.add_argument("--out", type=out_file, help="write the numbers there, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(Path(folder), given.lines)
    print(json.dumps(found, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
