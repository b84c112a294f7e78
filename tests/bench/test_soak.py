"""Some seconds of bench.soak, which the command does for an hour."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bench.peers.servers import Address
from bench.soak import Sample, Soak, check
from tests.serve.conftest import MODEL, checkpoint, running  # noqa: F401

GROWTH = 50 << 20  # bytes that a process's memory may grow by


def test_nothing_is_wrong_or_left_after_some_seconds(
    checkpoint: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(checkpoint) as served:
        soak = Soak(Address(served.url, MODEL), os.getpid(), seconds=3, seed=1, requests=300)
        before, after = asyncio.run(soak.run())
        grew = [after.rss - before.rss]
        # A process in which thousands of tests have run grows now and then; what leaks, always.
        while grew[-1] >= GROWTH and len(grew) < 3:
            again = asyncio.run(soak.run())
            grew.append(again[1].rss - again[0].rss)
    assert soak.wrong == []
    assert sum(soak.counts[kind] for kind in soak.clients) >= 300
    assert min(grew) < GROWTH
    assert min(soak.counts[kind] for kind in soak.clients) >= 10
    assert (after.files, after.threads) <= (before.files, before.threads)


def test_wrong_answers_and_what_is_left_are_told(checkpoint: Path) -> None:  # noqa: F811
    with running(checkpoint) as served:
        soak = Soak(Address(served.url, MODEL), os.getpid(), 0.3, 1, clients={"honest": 1})
        soak._answer = _other  # type: ignore[method-assign]
        asyncio.run(soak.run())
    assert "not" in soak.wrong[0]
    sample = Sample(3, 3, 0)
    assert not check(sample, sample)
    assert len(check(sample, Sample(4, 4, 1 << 30))) == 3


def test_an_error_in_a_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> tuple[int, bytes]:
        return 200, b'data: {"error": {"message": "no memory"}}\n\ndata: [DONE]\n\n'

    soak = Soak(Address("", MODEL), 0, 1, 1)
    monkeypatch.setattr(soak, "_ask", fails)
    assert asyncio.run(soak._answer("a", stream=True)) is None
    assert "no memory" in soak.wrong[0]


async def _other(prompt: str, stream: bool, seen: list[str] = []) -> str:  # noqa: B006
    seen.append(prompt)
    return str(len(seen))
