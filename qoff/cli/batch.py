"""`qoff batch`: a file of prompts in, a line of JSON for each answer out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Never

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.llm import RoundStats
from qoff.engine.prompts import Chat
from qoff.errors import QoffError
from qoff.units import format_size

from .output import print_table

TERMINATED = 128 + signal.SIGTERM


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file ("-": standard input), one a line: text, a JSON string or {"prompt": ...}.

    Empty lines are skipped. Raises QoffError for a file that is not UTF-8, and, naming the line,
    for an object without a prompt.
    """
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise QoffError(f"{path}: is not UTF-8 text: {error}") from error
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [_prompt(line, number) for number, line in enumerate(lines, 1) if line]


def run(llm: LLM, prompts: Sequence[str], params: SamplingParams, raw: bool) -> dict[str, int]:
    """Print each answer when it is done, a line of JSON; returns how many ended for each reason."""
    ended: dict[str, int] = {}
    chats = not raw and llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
    wanted = [Chat([{"role": "user", "content": p}]) if chats else p for p in prompts]
    for answer in llm.stream(wanted, params):
        ended[answer.finish_reason] = ended.get(answer.finish_reason, 0) + 1
        print(json.dumps(_line(answer), ensure_ascii=False), flush=True)
    return ended


def print_stats(llm: LLM) -> None:
    """Print what each round waited for, and the plan's memory, on standard error."""
    print_table("rounds", [_row(i, r) for i, r in enumerate(llm.rounds)], _HEADER, stderr=True)
    rows = [
        (f"{tier}: {purpose}", format_size(nbytes))
        for tier, purposes in llm.memory_by_tier().items()
        for purpose, nbytes in purposes.items()
        if nbytes
    ]
    print_table("memory", rows, stderr=True)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that memory, files and threads are released."""

    def stop(number: int, frame: FrameType | None) -> Never:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_HEADER = ("round", "prompt tokens", "new tokens", "ms", "waited for weights", "KV", "activations")


def _row(number: int, r: RoundStats) -> tuple[str, ...]:
    waits = (r.weights_wait_s, r.kv_wait_s, r.activations_wait_s)
    return (
        str(number),
        str(r.read),
        str(r.generated),
        f"{r.seconds * 1e3:.1f}",
        *(f"{wait * 1e3:.1f}" for wait in waits),
    )


def _prompt(line: str, number: int) -> str:
    if line[0] not in '"{':
        return line
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError:
        return line  # text that only begins like JSON
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise QoffError(f'line {number} of the prompts is neither text nor {{"prompt": text}}')
    return value


def _line(answer: Completion) -> dict[str, Any]:
    """An answer without its prompt, of which only the number of tokens is told."""
    line = {key: value for key, value in asdict(answer).items() if value not in ("", None)}
    line.pop("prompt", None)
    return {**line, "prompt_tokens": len(line.pop("prompt_token_ids"))}
