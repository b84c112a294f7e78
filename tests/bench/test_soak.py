"""Some seconds of bench.soak, which the command does for an hour.

QOFF_TEST_SOAK_S: so many seconds, in place of 300 requests (`make soak`: a minute).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.peers.qoff_server import Address, Served
from bench.soak import Sample, Soak, check, main, report
from qoff.errors import QoffError
from tests.serve.conftest import MODEL, checkpoint, running  # noqa: F401

GROWTH = 50 << 20  # bytes that a process's memory may grow by
SECONDS = float(os.environ.get("QOFF_TEST_SOAK_S", 0))


@pytest.mark.timeout(120 + 8 * SECONDS)
def test_nothing_is_wrong_or_left_after_some_seconds(
    checkpoint: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(checkpoint) as served:
        seconds, requests = (SECONDS, 0) if SECONDS else (3, 300)
        soak = Soak(Address(served.url, MODEL), os.getpid(), seconds, 1, requests)
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


def test_wrong_answers_and_what_is_left_are_told(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file of results is written all the same."""
    with running(checkpoint) as served:
        address = Address(served.url, MODEL, pid=os.getpid())
        alive = SimpleNamespace(address=address, ended=lambda: "")
        monkeypatch.setattr("bench.soak.serving", lambda *_: nullcontext(alive))
        monkeypatch.setattr("bench.soak._CLIENTS", {"honest": 1})
        monkeypatch.setattr(Soak, "_answer", _other)
        with pytest.raises(QoffError, match="not"):
            main(["--seconds", "0.3", "--seed", "1", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    found = written["measured"]
    assert found["requests"] == found["honest"] >= 1
    assert found["errors"] >= len(written["notes"]) >= 1
    assert found["before"].keys() == found["after"].keys() == {"files", "threads", "rss"}
    assert found["before"]["rss"] > 0 < found["seconds"]
    assert [bar["met"] for bar in written["bars"]] == [False]
    sample = Sample(3, 3, 0)
    assert not check(sample, sample)
    assert len(check(sample, Sample(4, 4, 1 << 30))) == 3


def test_a_server_that_is_killed_is_told_in_one_line(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file of results is written all the same."""
    honest, out = Soak._honest, tmp_path / "out.json"

    async def kills(soak: Soak, chance: random.Random) -> None:
        if soak.counts["honest"] >= 3:
            os.kill(soak.pid, signal.SIGKILL)
        await honest(soak, chance)

    monkeypatch.setattr(Soak, "_honest", kills)
    with pytest.raises(QoffError) as raised:
        main(["--model", str(checkpoint), "--seconds", "20", "--out", str(out)])
    said = str(raised.value)
    assert said.startswith("the server has ended by SIGKILL; its last lines: {")
    assert "\n" not in said
    written = json.loads(out.read_text())
    assert written["notes"][0] == said
    assert written["measured"]["honest"] >= 3 <= written["measured"]["errors"]
    assert written["measured"]["before"]["rss"] > 0


@pytest.mark.parametrize(
    ("lines", "told"), [("", "none"), ("a\nb\nc\n d ", "b | c | d")], ids=["silent", "four-lines"]
)
def test_a_server_that_does_not_start_is_told(lines: str, told: str) -> None:
    script = f"import sys; sys.stderr.write({lines!r}); sys.exit(3)"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    with process, pytest.raises(QoffError) as raised:
        Served(process).listen()
    assert str(raised.value) == f"the server has ended with status 3; its last lines: {told}"


@pytest.mark.parametrize("answer", [(200, b'{"choi'), (200, b"{}"), (503, b"")])
def test_answers_that_are_cut_off_are_told(
    answer: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut_off(*_: object) -> tuple[int, bytes]:
        return answer

    soak = Soak(Address("", MODEL), os.getpid(), 1, 1, clients={"honest": 1})
    monkeypatch.setattr(soak, "_ask", cut_off)
    monkeypatch.setattr("bench.soak._PATIENCE_S", 0.1)
    before, after = asyncio.run(soak.run())
    assert before.rss > 0 < after.rss
    assert soak.wrong
    soak.wrong, soak._right = [], [""] * 16
    asyncio.run(soak._all(1))
    assert len(soak.wrong) == soak.counts["honest"] == 1
    assert soak.wrong[0].startswith("honest: ")


def test_a_run_without_errors_is_reported_so() -> None:
    soak, sample = Soak(Address("", MODEL), 0, 1, 1), Sample(3, 4, 5)
    soak.counts.update(honest=3, hostile=2, refused=1)
    found = report({}, soak, sample, sample, 1.5)
    assert (found.notes, [bar.met for bar in found.bars]) == ([], [True])
    counted = {"requests": 5, "honest": 3, "hostile": 2, "vanishing": 0, "refused": 1}
    held = {"files": 3, "threads": 4, "rss": 5}
    rest = {"errors": 0, "seconds": 1.5, "before": held, "after": held}
    assert found.measured == {**counted, **rest}


def test_an_error_in_a_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> tuple[int, bytes]:
        return 200, b'data: {"error": {"message": "no memory"}}\n\ndata: [DONE]\n\n'

    soak = Soak(Address("", MODEL), 0, 1, 1)
    monkeypatch.setattr(soak, "_ask", fails)
    assert asyncio.run(soak._answer("a", stream=True)) is None
    assert "no memory" in soak.wrong[0]


async def _other(soak: Soak, prompt: str, stream: bool, seen: list[str] = []) -> str:  # noqa: B006
    seen.append(prompt)
    return str(len(seen))
