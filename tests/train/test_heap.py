"""What is freed during a step stays in the C library's heap, until memory runs short."""

import time
from collections.abc import Callable, Iterator

import pytest

from qoff.system_memory import keep_large_apart
from qoff.train.heap import GAPS, reused

_MIB = 1 << 20


class _Process:
    """With memory in use, and gaps in its heap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
        self.used, self.gaps, self.returned = 100 * _MIB, 0, 0
        monkeypatch.setattr("qoff.train.heap.free_memory", lambda: free)
        monkeypatch.setattr("qoff.train.heap.own_memory", lambda: self.used + self.gaps)
        monkeypatch.setattr("qoff.train.heap.return_freed", self._return)

    def _return(self) -> None:
        self.gaps, self.returned = 0, self.returned + 1


@pytest.fixture(autouse=True)
def _heap() -> Iterator[None]:
    yield
    keep_large_apart()


def _comes(happened: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not happened() and time.monotonic() < until:
        time.sleep(0.005)
    return happened()


@pytest.mark.parametrize("free", [400 * _MIB, None], ids=["much is free", "not known"])
def test_gaps_stay_where_memory_is_not_short(
    free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _Process(monkeypatch, free)
    with reused():
        process.gaps = 200 * _MIB
        time.sleep(0.1)
    assert process.returned == 0


def test_gaps_go_back_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    process = _Process(monkeypatch, 200 * _MIB)
    with reused():
        process.gaps = 200 * _MIB
        assert _comes(lambda: process.returned == 1)
        assert process.gaps == 0


def test_gaps_go_back_where_whoever_trains_bounds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    process = _Process(monkeypatch, 4000 * _MIB)
    with reused(GAPS):
        process.gaps = GAPS + 1
        assert _comes(lambda: process.returned == 1)
        process.gaps = 10 * _MIB
    assert process.gaps == 0
    with reused():
        process.gaps = 200 * _MIB
    assert process.gaps == 200 * _MIB


def test_memory_that_is_in_use_is_not_looked_through_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = _Process(monkeypatch, 200 * _MIB)
    with reused():
        process.used += 200 * _MIB
        assert _comes(lambda: process.returned == 1)
        process.used += 15 * _MIB
        time.sleep(0.1)
        assert process.returned == 1
        process.used += 20 * _MIB
        assert _comes(lambda: process.returned == 2)
