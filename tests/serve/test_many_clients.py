"""Clients by the thousand: nobody waits for them, and nothing is left of them."""

from __future__ import annotations

import gc
import json
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from .conftest import Running
from .test_hostile_clients import (
    CHATS,
    TEXTS,
    chat,
    everything,
    head,
    idle,
    no_traceback,
    wait_for,
)

__all__ = ["no_traceback"]  # a fixture


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as a thousand connections take, both of whose ends are here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip(f"a process may have {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_idle_connections_hold_up_nobody(served: Running) -> None:
    socks = [served.connect() for _ in range(1000)]
    assert served.ask(TEXTS, {"prompt": "a", "max_tokens": 2})[0] == 200
    for sock in socks[::2]:
        sock.close()
    wait_for(lambda: served.server.connections == 0, 20)  # the others by the bound on time
    for sock in socks[1::2]:
        assert everything(sock).startswith(b"HTTP/1.1 408")
        sock.close()


def test_nothing_is_left_of_many_clients(served: Running) -> None:
    """Files, threads and memory after clients that end well, hang up and send garbage.

    `python -m bench.soak --requests 10000` does the same with more of them.
    """

    def ask(number: int) -> None:
        if number % 3 == 0:
            served.ask(TEXTS, {"prompt": "a", "max_tokens": 2})
        elif number % 3 == 1:
            served.ask(CHATS, b"{")
        else:
            body = json.dumps(chat(stream=True)).encode()
            with served.connect() as sock:
                sock.sendall(head(len(body)) + body)

    def all_of_them() -> None:
        with ThreadPoolExecutor(9) as pool:
            list(pool.map(ask, range(150)))
        wait_for(lambda: idle(served) and not served.server.connections)
        gc.collect()

    all_of_them()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    rss = psutil.Process().memory_info().rss
    all_of_them()
    assert len(os.listdir("/proc/self/fd")) <= files  # noqa: PTH208
    assert threading.active_count() <= threads
    assert psutil.Process().memory_info().rss < rss + (20 << 20)
