"""Prompts that begin alike, through HTTP: what is read again, and what `/metrics` says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from qoff.kvcache import KVQuant
from qoff.plan import Plan

from .conftest import Running, running
from .test_hostile_clients import TEXTS, idle, wait_for

# Without tokens in floats, a prompt's pieces attend to the same with and without sharing.
SHARING = Plan(batch_size=2, context=200, kv=KVQuant(window=0), prefill_tokens=64,
               share_prefixes=True, draft_tokens=2)  # fmt: skip
DRAW = Random(4)
PROMPTS = [[DRAW.randrange(4, 128) for _ in range(150)] for _ in range(5)]
ALIKE = [*PROMPTS[0][:140], 7, 8, 9]


@pytest.fixture(scope="module")
def sharing(checkpoint: Path) -> Iterator[Running]:
    with running(checkpoint, plan=SHARING) as found:
        yield found


def figures(served: Running, *names: str) -> list[float]:
    """Counters of `/metrics`."""
    lines = served.ask("/metrics")[1].splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [float(values[f'vllm:{name}_total{{model_name="tiny"}}']) for name in names]


def answered(served: Running, prompt: list[int]) -> tuple[Any, list[float]]:
    """An answer, and of its prompt how many tokens were looked up and how many of them found."""
    names = "prefix_cache_queries", "prefix_cache_hits"
    before = figures(served, *names)
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 1}
    status, found, _ = served.ask(TEXTS, {**body, "ignore_eos": True})
    assert status == 200
    assert found["usage"]["prompt_tokens"] == len(prompt)
    wait_for(lambda: figures(served, *names)[0] > before[0] and idle(served))
    now = figures(served, *names)
    return found["choices"], [after - was for after, was in zip(now, before, strict=True)]


def test_what_a_prompt_begins_with_is_not_read_again_while_there_is_room(sharing: Running) -> None:
    """Other prompts take the room: no more memory is used, and the answers stay the same."""
    llm = sharing.engine.llm
    assert llm is not None
    read = sum(one.read for one in llm.rounds)
    first, looked_up = answered(sharing, PROMPTS[0])
    assert looked_up == [150, 0]
    memory = sharing.ask("/stats")[1]["memory"]
    alike, looked_up = answered(sharing, ALIKE)
    assert looked_up == [143, 128]
    for other in PROMPTS[1:]:
        assert answered(sharing, other)[1] == [150, 0]
    assert answered(sharing, ALIKE) == (alike, [143, 0])
    assert answered(sharing, PROMPTS[0]) == (first, [150, 128])
    assert sharing.ask("/stats")[1]["memory"] == memory
    (index,) = {one._prefixes for one in llm._rounds.current.opened.batches}
    assert index is not None
    assert len(index._found) <= sum(llm.kv_blocks.values())
    read = sum(one.read for one in llm.rounds) - read
    assert read == 6 * 150 + 2 * 143 - 2 * 128


def test_drafts_are_counted(sharing: Running) -> None:
    llm = sharing.engine.llm
    assert llm is not None
    answered(sharing, PROMPTS[0][:3] * 20)
    counts = [(one.drafts, one.drafted, one.accepted) for one in llm.rounds]
    wanted = [sum(each) for each in zip(*counts, strict=True)]
    names = [f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    wait_for(lambda: figures(sharing, *names) == wanted)
    assert wanted[0] > 0
