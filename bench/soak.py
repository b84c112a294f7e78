"""A server among honest, hostile and vanishing clients: `python -m bench.soak --seconds 3600`.

Honest clients ask for answers that are known, in streams or not, and compare. Hostile ones send
what is no request, or a wrong one, and expect an error in OpenAI's shape. Vanishing ones hang up in
the middle of a request or of an answer, or send nothing. All draw from `--seed`. Watched are the
server's files, threads and memory: what they are after a tenth of the time (at least 10 s) is what
they may be at the end, memory plus 50 MiB. With `--requests 10000` it ends after so many more.
What is not as it should be ends it with an error, after the file of results is written; if the
server has ended, the error is its exit status and the last lines of its standard error.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from qoff.errors import QoffError

from .harness import Bar, Report, arguments
from .peers.qoff_server import Address, serving

_GROWTH = 50 << 20  # bytes of memory
_TOLD = 5  # things that are wrong, the first ones
_CLIENTS = {"honest": 6, "hostile": 3, "vanishing": 3}
_TOKENS, _PATIENCE_S, _LARGE = 24, 120.0, 1 << 16
_CUT_OFF = (asyncio.IncompleteReadError, ValueError, LookupError)  # of an answer, or of its JSON
_PROMPTS = tuple(f"Count: {n}, {n + 1}, {n + 2}," for n in range(1, 17))
_HOSTILE: tuple[tuple[bytes, int], ...] = (  # a body, and the status of its answer
    (b"{", 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "a", "temperature": NaN}', 400),
    (b'{"prompt": "a", "no_such_field": 1}', 400),
    (b'{"prompt": "a", "max_tokens": -1}', 400),
    (b'{"prompt": ' + b'{"a":' * 500 + b"1" + b"}" * 501, 400),
    (b'{"prompt": "a", "model": "other"}', 404),
    (b'{"prompt": "' + b"word " * 100_000 + b'"}', 400),
    (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413),
)


@dataclass(frozen=True)
class Sample:
    """What a process holds; rss: bytes."""

    files: int
    threads: int
    rss: int

    @classmethod
    def of(cls, process: psutil.Process) -> Sample:
        return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)


@dataclass
class Soak:
    """One run against a server whose process is `pid`.

    requests: how many there are after the first sample, in place of `seconds`; 0: no such number.
    """

    server: Address
    pid: int
    seconds: float
    seed: int
    requests: int = 0
    clients: dict[str, int] = field(default_factory=lambda: dict(_CLIENTS))
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self) -> tuple[Sample, Sample]:
        """What the process held after a tenth of the time, and at the end.

        If it ends or answers nothing before, that is in `wrong`, and what it held when it was
        looked at last stands for what is missing; zeros if it never was.
        """
        before = after = Sample(0, 0, 0)
        try:
            process = psutil.Process(self.pid)
            before = after = Sample.of(process)
            self._right = [await self._answer(prompt, stream=False) for prompt in _PROMPTS]
            await self._all(max(min(10.0, self.seconds / 3), self.seconds / 10))
            before = after = await self._at_rest(process)
            if self.requests:
                await self._all(math.inf, self.asked + self.requests)
            else:
                await self._all(self.seconds)
            after = await self._at_rest(process)
        except (*_CUT_OFF, OSError, psutil.Error) as error:
            self.wrong.append(f"the server cannot be watched: {error!r}")
        return before, after

    async def _all(self, seconds: float, most: float = math.inf) -> None:
        """Have all clients ask for so long, or until they have asked `most` times in all."""
        until = time.monotonic() + seconds
        kinds = {"honest": self._honest, "hostile": self._hostile, "vanishing": self._vanishing}
        async with asyncio.TaskGroup() as tasks:
            for kind, count in self.clients.items():
                for number in range(count):
                    chance = random.Random(f"{self.seed} {kind} {number} {seconds}")
                    tasks.create_task(self._client(kind, kinds[kind], chance, until, most))

    async def _client(
        self,
        kind: str,
        act: Callable[[random.Random], Awaitable[None]],
        chance: random.Random,
        until: float,
        most: float,
    ) -> None:
        while time.monotonic() < until and self.asked < most and not self.wrong:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await act(chance)
            except TimeoutError:
                self.wrong.append(f"{kind}: no answer within {_PATIENCE_S:.0f} s")
            except (*_CUT_OFF, OSError) as error:
                self.wrong.append(f"{kind}: {error!r}")
            self.counts[kind] += 1
            await asyncio.sleep(chance.expovariate(20))

    @property
    def asked(self) -> int:
        """Requests of all clients, those before the first sample included."""
        return sum(self.counts[kind] for kind in self.clients)

    async def _at_rest(self, process: psutil.Process) -> Sample:
        """What the process holds when nothing is asked of it, and silent clients are given up."""
        until, found = time.monotonic() + _PATIENCE_S, Sample.of(process)
        while time.monotonic() < until:
            async with asyncio.timeout(_PATIENCE_S):
                status, body = await self._ask("GET", "/stats")
            said = json.loads(body) if status == 200 else {}
            asked = said.get("answers", {"running": 1})  # one that stops tells of none
            await asyncio.sleep(1)
            last, found = found, Sample.of(process)
            if not any((asked["running"], asked.get("waiting"))) and found.files == last.files:
                return found
        self.wrong.append("answers are computed that nobody waits for")
        return found

    async def _honest(self, chance: random.Random) -> None:
        number, stream = chance.randrange(len(_PROMPTS)), chance.random() < 0.5
        answer = await self._answer(_PROMPTS[number], stream)
        if answer is not None and answer != self._right[number]:
            self.wrong.append(f"{_PROMPTS[number]!r}: {answer!r}, not {self._right[number]!r}")

    async def _answer(self, prompt: str, stream: bool) -> str | None:
        """The text of an answer; None where the queue is full."""
        wanted = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "stream": stream,
                  "ignore_eos": True, "model": self.server.model}  # fmt: skip
        status, body = await self._ask("POST", "/v1/completions", json.dumps(wanted).encode())
        if status == 429:
            self.counts["refused"] += 1
            return None
        if status != 200:
            self.wrong.append(f"honest: status {status}: {body[:200]!r}")
            return None
        if not stream:
            return str(json.loads(body)["choices"][0]["text"])
        lines = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
        events = [json.loads(line) for line in lines]
        if failed := [event for event in events if "error" in event]:
            self.wrong.append(f"honest: {failed[0]}")
            return None
        return "".join(choice["text"] for event in events for choice in event["choices"])

    async def _hostile(self, chance: random.Random) -> None:
        if chance.random() < 0.2:
            await self._no_http(chance)
            return
        data, wanted = chance.choice(_HOSTILE)
        path = chance.choice(("/v1/completions", "/v1/../v1/completions", "/%2e%2e/etc/passwd"))
        try:
            status, body = await self._ask("POST", path, data)
        except (ConnectionError, asyncio.IncompleteReadError):
            if len(data) < _LARGE:
                raise
            return  # the server has closed what it reads no further
        right = (wanted, 429) if path == "/v1/completions" else (404, 413)
        told = (not body and len(data) > _LARGE) or b'"message":' in body
        if status not in right or not told:
            self.wrong.append(f"{path}, {data[:40]!r}: status {status}: {body[:200]!r}")

    async def _no_http(self, chance: random.Random) -> None:
        reader, writer = await self._connect()
        writer.write(chance.randbytes(200) + b"\r\n\r\n")
        answer = b""
        with suppress(ConnectionError):
            answer = await reader.read()
        writer.close()
        if b"Traceback" in answer:
            self.wrong.append(f"garbage: {answer[:200]!r}")

    async def _vanishing(self, chance: random.Random) -> None:
        wanted = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True,
                  "n": chance.choice((1, 2))}  # fmt: skip
        data = _head("POST", "/v1/completions", wanted)
        part = chance.choice((0, 10, len(data) - 5, len(data)))
        reader, writer = await self._connect()
        with suppress(ConnectionError):
            writer.write(data[:part])
            await writer.drain()
            if part == len(data) and chance.random() < 0.5:
                await reader.read(chance.choice((1, 300)))
            await asyncio.sleep(chance.choice((0, 0.05, 0.5)))
            if chance.random() < 0.3:  # a reset, not an end
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = urlsplit(self.server.url)
        return await asyncio.open_connection(place.hostname, place.port)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of an answer."""
        reader, writer = await self._connect()
        try:
            with suppress(ConnectionError):  # refused while we write: the answer is there
                writer.write(_head(method, path, body))
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            answer = b""
            with suppress(ConnectionError):
                answer = await reader.read()
            return int(head.split(b" ", 2)[1]), _whole(head, answer)
        finally:
            writer.close()


def _head(method: str, path: str, body: bytes | dict[str, object]) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _whole(head: bytes, answer: bytes) -> bytes:
    """A body that may have come in chunks."""
    if b"transfer-encoding: chunked" not in head.lower():
        return answer
    found, rest = b"", answer
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found, rest = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return found


def check(before: Sample, after: Sample) -> list[str]:
    """What was left behind."""
    found = []
    if after.files > before.files:
        found.append(f"{after.files} open files, {before.files} before")
    if after.threads > before.threads:
        found.append(f"{after.threads} threads, {before.threads} before")
    if after.rss > before.rss + _GROWTH:
        found.append(f"memory grew by {(after.rss - before.rss) >> 20} MiB")
    return found


def report(
    settings: dict[str, Any], soak: Soak, before: Sample, after: Sample, seconds: float
) -> Report:
    """What was asked, what the server held, and, as notes, the first things that were wrong."""
    wrong = soak.wrong + check(before, after)
    held = {name: asdict(one) for name, one in (("before", before), ("after", after))}
    kinds = {kind: soak.counts[kind] for kind in (*soak.clients, "refused")}
    rows: list[tuple[str, ...]] = [(kind, f"{count:,}") for kind, count in kinds.items()]
    rows += [(f"{what} {when}", f"{count:,}") for when, one in held.items()
             for what, count in one.items()]  # fmt: skip
    measured = {"requests": soak.asked, **kinds, "errors": len(wrong), "seconds": seconds, **held}
    return Report(
        "soak",
        settings,
        f"{soak.asked:,} requests, {seconds:.0f} s",
        ("what", "count"),
        rows,
        measured,
        bars=[Bar("a server as it should be", 1, float(not wrong))],
        notes=wrong[:_TOLD],
    )


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments(
        __doc__,
        argv,
        seconds=(float, 60.0, "of requests"),
        requests=(int, 0, "in place of --seconds"),
        seed=(int, 0, "of what clients do"),
        model=(str, "", "checkpoint; by default the demo model"),
    )
    seconds, options = given.seconds, ("--read-timeout", "2", "--max-queue", "8")
    if given.quick:
        seconds = min(seconds, 5.0)
    with serving(8, given.model, options) as served:
        soak = Soak(served.address, served.address.pid, seconds, given.seed, given.requests)
        start = time.perf_counter()
        before, after = asyncio.run(soak.run())
        spent = time.perf_counter() - start
        ended = served.ended() if soak.wrong else ""
    if ended:
        soak.wrong.insert(0, ended)
    settings = {"model": Path(given.model or "demo").name, "seconds": seconds,
                "requests": given.requests, "seed": given.seed}  # fmt: skip
    found = report(settings, soak, before, after, spent)
    found.publish(given.out)
    if found.notes:
        raise QoffError(ended or "; ".join(found.notes))


if __name__ == "__main__":
    try:
        main()
    except QoffError as error:
        sys.exit(f"soak: {error}")
