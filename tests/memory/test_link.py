from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from qoff.errors import ArgumentError
from qoff.memory import DiskReader, Link


def seconds(link: Link, sizes: list[int]) -> float:
    """How long transfers take that are started together."""
    threads = [threading.Thread(target=link.pass_through, args=(n,)) for n in sizes]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def test_a_transfer_takes_latency_and_its_bytes() -> None:
    assert 0.07 <= seconds(Link(1e6, latency_s=0.05), [20_000]) < 0.5


def test_users_share_the_rate_and_latencies_overlap() -> None:
    assert 0.13 <= seconds(Link(1e6, latency_s=0.05), [20_000] * 4) < 0.26


def test_an_idle_link_saves_nothing_up() -> None:
    link = Link(1e6)
    link.pass_through(1)
    time.sleep(0.05)
    assert seconds(link, [40_000]) >= 0.04


def test_reads_from_behind_a_link_are_slow_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 256)
    reader = DiskReader(threads=4, chunk=4096, preadv=Link(1e6).preadv)
    found = torch.empty(65536, dtype=torch.uint8)
    start = time.perf_counter()
    reader.submit(path, 0, found).result()
    assert time.perf_counter() - start >= 0.065
    assert bytes(found.numpy()) == path.read_bytes()
    reader.close()


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (-1, 0), (1, -1), (float("nan"), 0)])
def test_impossible_links_are_refused(rate: float, latency: float) -> None:
    with pytest.raises(ArgumentError):
        Link(rate, latency)
