"""A server whose plan changes: clients wait, and are answered as if it had not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.errors import BudgetError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.plan import Plan
from tests.reopening import changing

from .conftest import MODEL, OPTIONS, Running, running

TEXTS = "/v1/completions"
PLAN = Plan(batch_size=2, context=200, kv=KVQuant(window=16), kv_placement=KVPlacement(0.5, 0.5))
OTHER = replace(PLAN, batch_size=1, batches=3, kv_placement=KVPlacement())
MANY = replace(OPTIONS, max_queue=20)


def body(number: int, **more: Any) -> dict[str, Any]:
    said = {"prompt": "abc" * number, "max_tokens": 12, "temperature": number % 2, "seed": number}
    return {"model": MODEL, "n": 2, "ignore_eos": True, **said, **more}


def texts(found: tuple[int, Any, dict[str, str]]) -> list[str]:
    status, answer, _ = found
    assert status == 200, answer
    return [one["text"] for one in answer["choices"]]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def cache(served: Running) -> list[str]:
    """What the server says of its KV cache."""
    status, text, _ = served.ask("/metrics")
    assert status == 200
    return [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]


def test_clients_wait_while_another_plan_is_opened(checkpoint: Path) -> None:
    numbers = range(1, 7)
    with running(checkpoint, MANY, replace(PLAN, adapt=False)) as served:
        wanted = [texts(served.ask(TEXTS, body(number))) for number in numbers]
    begun, go_on = threading.Event(), threading.Event()

    def opening(plan: Plan) -> None:
        if plan == OTHER:
            begun.set()
            assert go_on.wait(20)

    with (
        changing(OTHER, opening=opening) as opened,
        running(checkpoint, MANY, PLAN) as served,
        ThreadPoolExecutor(8) as pool,
    ):
        caches = [cache(served)]
        asked = [pool.submit(served.ask, TEXTS, body(number)) for number in numbers[:5]]
        assert begun.wait(20)
        assert served.ask("/health")[0] == 200
        assert not cache(served)
        stats = served.ask("/stats")[1]
        assert (stats["state"], stats["kv_used"]) == ("reopening", 0)
        there = served.engine.in_flight
        asked.append(pool.submit(served.ask, TEXTS, body(6)))
        with served.connect() as gone:
            said = json.dumps(body(1, stream=True)).encode()
            gone.sendall(
                f"POST {TEXTS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(said)}\r\n\r\n".encode()
            )
            gone.sendall(said)
            until(lambda: served.engine.in_flight == there + 4)
        until(lambda: served.engine.in_flight == there + 2)
        go_on.set()
        assert [texts(one.result()) for one in asked] == wanted
        until(lambda: served.engine.in_flight == 0)
        assert served.ask("/stats")[1]["state"] == "ready"
        assert texts(served.ask(TEXTS, body(2))) == wanted[1]  # two answers, in a batch of one
        caches.append(cache(served))
        assert all(map(len, caches))
        assert caches[0] != caches[1]
    assert opened == [PLAN, OTHER]


def test_a_model_that_is_lost_ends_the_engine(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = list[Plan]()

    def opening(plan: Plan) -> None:
        tries.append(plan)
        if len(tries) > 1:
            raise BudgetError("another program took the memory")

    with (
        changing(OTHER, opening=opening),
        running(checkpoint, MANY, PLAN) as served,
        ThreadPoolExecutor(4) as pool,
    ):
        asked = [pool.submit(served.ask, TEXTS, body(number)) for number in (1, 2, 3, 4)]
        assert served.engine.ended.wait(20)
        told = [found for status, found, _ in map(Future.result, asked) if status == 500]
        assert told  # others may have been answered before
        assert all("its log says why" in found["error"]["message"] for found in told)
        assert served.ask("/health")[0] == 503
        assert "took the memory" in str(served.engine.failure)
    logged: list[Any] = [one for one in caplog.records if one.getMessage() == "request"]
    why = [one.fields["error"] for one in logged if one.fields["status"] == 500]
    assert len(why) == len(told)
    assert all("took the memory" in one for one in why)
    assert tries == [PLAN, OTHER, PLAN]
