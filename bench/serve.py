"""Clients of a server: tokens per second, time to the first token, time between tokens.

Starts `qoff serve` on the demo model (`--model` for another), or asks a server that runs already
(`--url`, for peers). Of 1, 4 and 16 clients each asks for `--requests` texts in a row, 128 words in
and 32 tokens out, in streams. The clients are on the same machine, and take some of its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

from qoff.errors import QoffError

from .demo import fetch_checkpoint
from .harness import Report, arguments

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "question", "work", "government", "night",
    "point",
)  # fmt: skip
_IN, _OUT = 128, 32


@dataclass(frozen=True)
class Stream:
    """What one request has seen: when it was sent, when pieces came, and how many tokens."""

    sent: float
    came: tuple[float, ...]
    tokens: int


async def ask(url: str, model: str, prompt: str) -> Stream:
    """One request on a connection of its own. Raises QoffError for an answer that is an error."""
    place = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": _OUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    sent, came, tokens = time.perf_counter(), list[float](), 0
    head = (
        f"POST {place.path}/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
    )
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readline()
    async for line in reader:
        if line.startswith(b"data: {"):
            said = json.loads(line[6:])
            if said.get("choices"):
                came.append(time.perf_counter())
            if said.get("usage"):
                tokens = said["usage"]["completion_tokens"]
    writer.close()
    if b" 200 " not in status or not came:
        raise QoffError(f"{url}: {status.decode().strip()}")
    return Stream(sent, tuple(came), tokens)


async def load(url: str, model: str, clients: int, requests: int) -> tuple[list[Stream], float]:
    """So many clients that each ask again as soon as they are answered; and the seconds of all."""
    chance = random.Random(clients)

    async def one() -> list[Stream]:
        prompts = [" ".join(chance.choices(_WORDS, k=_IN)) for _ in range(requests)]
        return [await ask(url, model, prompt) for prompt in prompts]

    start = time.perf_counter()
    found = await asyncio.gather(*(one() for _ in range(clients)))
    return [stream for mine in found for stream in mine], time.perf_counter() - start


def summary(streams: Sequence[Stream], seconds: float) -> dict[str, float]:
    """Tokens per second of all together; milliseconds at the median and the 99th percentile."""
    first = [(one.came[0] - one.sent) * 1e3 for one in streams]
    between = [(b - a) * 1e3 for one in streams for a, b in pairwise(one.came)]
    return {
        "tok/s": sum(one.tokens for one in streams) / seconds,
        "ttft_p50_ms": _part(first, 50),
        "ttft_p99_ms": _part(first, 99),
        "itl_p50_ms": _part(between, 50),
        "itl_p99_ms": _part(between, 99),
    }


def _part(values: list[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`qoff serve` in a process of its own; its URL and the model's name there."""
    command = [sys.executable, "-m", "qoff", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if '"ready"' in line:
                said = json.loads(line)
                yield said["url"] + "/v1", said["model"]
                return
        raise QoffError(f"qoff serve has ended: {''.join(lines[-3:])}")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait()


@contextmanager
def running(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The server to ask."""
    if args.url:
        yield args.url.rstrip("/"), args.model or "default"
        return
    with served(args.model or str(fetch_checkpoint()), args.options.split()) as found:
        yield found


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(
        __doc__,
        argv,
        model=(str, "", "checkpoint, or with --url the model's name there"),
        url=(str, "", "a server that runs, like http://127.0.0.1:8080/v1"),
        options=(str, "--batch-size 16 --context 512", "of qoff serve"),
        clients=(str, "1,4,16", "how many at the same time"),
        requests=(int, 3, "of each client"),
    )
    settings = {
        "model": Path(args.model or "demo").name,
        "url": args.url,
        "options": args.options,
        "in": _IN,
        "out": _OUT,
        "requests": args.requests,
    }
    title = f"{_IN} words in, {_OUT} tokens out, {args.requests} requests of each client"
    header = ("clients", "tok/s", "TTFT p50 ms", "p99", "between tokens p50 ms", "p99")
    report = Report("serve", settings, title, header, unit="tokens/s, ms")
    with running(args) as (url, model):
        asyncio.run(load(url, model, 1, 1))  # warm
        for clients in map(int, args.clients.split(",")):
            streams, seconds = asyncio.run(
                load(url, model, clients, 1 if args.quick else args.requests)
            )
            found = summary(streams, seconds)
            report.measured[str(clients)] = found
            report.rows.append((str(clients), *(f"{value:.1f}" for value in found.values())))
    report.publish(args.out)


if __name__ == "__main__":
    main()
