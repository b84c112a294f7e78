"""The unmodified `openai` client has batches of uploaded files answered."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from qoff.engine import SamplingParams
from qoff.errors import ArgumentError
from qoff.serve.batches import open_batches
from tests.adapters import save_adapter

from .conftest import MODEL, OPTIONS, PLAN, Running, running
from .test_hostile_clients import idle, in_threads, wait_for

CHATS = "/v1/chat/completions"


def line(number: int, tokens: int = 4, content: str = "Hi", **more: Any) -> str:
    body = {
        "messages": [{"role": "user", "content": f"{content} {number}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    return json.dumps({"custom_id": f"id {number}", "method": "POST", "url": CHATS, "body": body})


def batch_of(client: OpenAI, *lines: str, name: str = "in.jsonl") -> Any:
    file = client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: OpenAI, batch_id: str, *statuses: str) -> Any:
    end = time.monotonic() + 20
    while (found := client.batches.retrieve(batch_id)).status not in (statuses or ("completed",)):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def read(client: OpenAI, file_id: str) -> dict[str, Any]:
    lines = client.files.content(file_id).text.splitlines()
    return {one["custom_id"]: one for one in map(json.loads, lines)}


def test_a_batch_is_answered(client: OpenAI, served: Running) -> None:
    lines = [*(line(i) for i in range(9)), "{", line(10, content="x" * 300)]
    made = batch_of(client, *lines)
    assert (made.object, made.metadata, made.errors) == ("batch", {"a": "b"}, None)
    found = ended(client, made.id)
    assert found.request_counts is not None
    assert found.request_counts.to_dict() == {"total": 11, "completed": 9, "failed": 2}
    assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at
    answers = read(client, found.output_file_id)
    assert sorted(answers) == [f"id {i}" for i in range(9)]
    assert served.engine.llm is not None
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (wanted,) = served.engine.llm.chat([{"role": "user", "content": "Hi 3"}], params)
    body = answers["id 3"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == wanted.text
    assert body["model"] == MODEL
    errors = [
        json.loads(one) for one in client.files.content(found.error_file_id).text.splitlines()
    ]
    by_line = {one["line"]: one for one in errors}
    assert set(by_line) == {10, 11}
    said = by_line[11]["response"]["body"]["error"]
    assert (said["code"], said["param"]) == ("context_length_exceeded", "messages")
    assert client.batches.list(limit=1).data[0].id == made.id
    assert client.files.retrieve(found.output_file_id).purpose == "batch_output"


def test_batches_that_cannot_be(client: OpenAI) -> None:
    wrong = client.files.create(file=b"{}", purpose="user_data")
    for file_id in (wrong.id, "file-none"):
        with pytest.raises(openai.APIStatusError):
            client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")
    found = ended(client, batch_of(client, "\n\n").id, "failed")
    assert "no requests" in found.errors.data[0].message
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(found.id)


def test_a_cancelled_batch_keeps_what_is_answered(client: OpenAI, served: Running) -> None:
    batches = served.engine.batches
    assert batches is not None

    def answered() -> bool:
        runner = batches._runner
        return runner is not None and runner.counts.completed + len(runner._held[0]) == 1

    with served.slowed():
        made = batch_of(client, line(0, 1), *(line(i, 150) for i in range(1, 30)))
        ended(client, made.id, "in_progress")
        with pytest.raises(openai.ConflictError):
            client.files.delete(made.input_file_id)
        wait_for(answered, 20)
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    found = ended(client, made.id, "cancelled")
    assert list(read(client, found.output_file_id)) == ["id 0"]
    assert found.request_counts.to_dict() == {"total": 30, "completed": 1, "failed": 0}


def test_a_batch_that_waits_is_cancelled_at_once(client: OpenAI, served: Running) -> None:
    with served.slowed():
        first = batch_of(client, *(line(i, 150) for i in range(20)))
        ended(client, first.id, "in_progress")
        second = batch_of(client, line(0))
        found = client.batches.cancel(second.id)
        assert (found.status, found.output_file_id) == ("cancelled", None)
        assert found.cancelling_at
        assert found.cancelled_at
        assert client.batches.retrieve(first.id).status == "in_progress"
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(second.id)
        client.batches.cancel(first.id)
    ended(client, first.id, "cancelled")


def test_requests_go_before_batches(client: OpenAI, served: Running) -> None:
    """Places and queue are full of a batch; requests are answered within few rounds."""
    llm = served.engine.llm
    assert llm is not None
    with served.slowed():
        made = batch_of(client, *(line(i, 150) for i in range(20)))
        end = time.monotonic() + 5
        while llm.waiting < 4 or not llm.rounds:
            assert time.monotonic() < end
        rounds, threads = llm.rounds[-1].number, list[threading.Thread]()
        for _ in range(4):
            options: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 3}
            threads.append(threading.Thread(target=client.completions.create, kwargs=options))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert llm.rounds[-1].number - rounds < 30
        client.batches.cancel(made.id)
    ended(client, made.id, "cancelled")


@pytest.mark.parametrize("read", [True, False])
def test_a_first_token_comes_within_the_rounds_of_the_bound(
    client: OpenAI, served: Running, read: bool
) -> None:
    """Places and queue are full of a batch, whose prompts were read before or are to be."""
    llm = served.engine.llm
    assert llm is not None
    wait_for(lambda: idle(served))
    places, prompt = llm._rounds._places, "a" * 150

    def first_token() -> str:
        options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}
        with client.completions.create(**options) as stream:
            return str(next(iter(stream)).id)

    def rounds_of(tokens: int) -> int:
        return ceil(tokens / PLAN.prefill_tokens)

    with served.held() as rounds:
        made = batch_of(client, *(line(i, 30, "x" * 120) for i in range(12)))
        wait_for(lambda: len(places.calls) == 8)
        while len(running := places.batches[0].sequences()) < 4 or (
            read and not all(one.decoding for one in running)
        ):
            rounds.end()
            rounds.under_way()
        unread = [one for one in running[:3] if not one.decoding]
        (answer,) = in_threads(first_token)
        wait_for(lambda: len(places.calls) == 9 and len(llm._rounds._gone) == 5)
        rounds.end(1 + rounds_of(len(llm.encode(prompt))))
        assert answer.result(20)
        client.batches.cancel(made.id)
    assert bool(unread) != read
    ended(client, made.id, "cancelled")


def test_several_answers_of_a_prompt_come_within_the_bound(
    checkpoint: Path, tmp_path: Path
) -> None:
    """They need places in one of two batches, and a long answer has one of three in each."""
    plan, prompt = replace(PLAN, batch_size=3, batches=2), "a" * 150
    with (
        running(checkpoint, OPTIONS, plan, tmp_path) as served,
        served.client() as client,
        served.held() as rounds,
    ):
        engine, llm = served.engine, served.engine.llm
        assert llm is not None
        assert engine.batches is not None
        places, jobs = llm._rounds._places, engine.batches

        def asked(n: int, tokens: int) -> Any:
            options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "n": n}
            return client.completions.create(extra_body={"ignore_eos": True}, **options)

        def given_up(requests: int) -> bool:
            """The batch has given up all that it is to."""
            room = engine._room_for_batches(jobs.in_flight)
            return engine.in_flight == requests and (room >= 0 or not jobs.in_flight)

        made = batch_of(client, *(line(i, 150) for i in range(12)))
        wait_for(lambda: len(places.calls) == 12)
        while places.batches[1].free or not places.batches[1].sequences()[2].answer:
            rounds.end()
            rounds.under_way()
        (one,) = in_threads(lambda: asked(1, 45))
        wait_for(lambda: given_up(1))
        bound = 1 + ceil(len(llm.encode(prompt)) / plan.prefill_tokens)
        rounds.end(bound)
        rounds.under_way()
        (three,) = in_threads(lambda: asked(3, 1))
        wait_for(lambda: given_up(4))
        rounds.end(bound)
        assert len(three.result(20).choices) == 3
        client.batches.cancel(made.id)
        rounds.free()
        assert len(one.result(20).choices) == 1
        ended(client, made.id, "cancelled")


def test_a_batch_goes_on_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, shutdown_timeout_s=0.2)
    with running(checkpoint, options, files=tmp_path) as served, served.client() as client:
        assert served.engine.batches is not None
        made = slowly_begun(client, served)
        served.engine.batches.stop()
    with running(checkpoint, options, files=tmp_path) as served, served.client() as client:
        found = ended(client, made.id)
        answers = read(client, found.output_file_id)
        assert sorted(answers) == sorted(f"id {i}" for i in range(12))
        assert len(client.files.content(found.output_file_id).text.splitlines()) == 12
        with pytest.raises(ArgumentError) as raised:
            open_batches(tmp_path, MODEL, 1, 1)
        kept = "another server keeps its files there; give another --files folder"
        assert str(raised.value) == f"{tmp_path}: {kept}"
        assert [path.name for path in (tmp_path / "batches").iterdir()] == [f"{made.id}.json"]


def test_an_error_of_cuda_ends_the_engine_and_only_the_batch_in_hand(
    checkpoint: Path, tmp_path: Path
) -> None:
    asked = threading.Event()

    def fails(_: object) -> None:
        assert asked.wait(20)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with running(checkpoint, OPTIONS, files=tmp_path) as served, served.client() as client:
        assert served.engine.llm is not None
        schedule: Any = served.engine.llm._rounds._schedule
        schedule.round = fails
        made = [batch_of(client, line(0)) for _ in range(2)]
        asked.set()
        assert served.engine.ended.wait(20)
        assert served.ask("/health")[0] == 503
        ended(client, made[0].id, "failed")
    with running(checkpoint, OPTIONS, files=tmp_path) as served, served.client() as client:
        assert ended(client, made[1].id).request_counts.completed == 1


@pytest.mark.parametrize(
    ("adapter", "thinking", "said"),
    [("b", True, "adapters sql was"), ("a", False, "reasoning format was 'none' and is None")],
)
def test_a_batch_does_not_go_on_with_another_adapter_or_form(
    checkpoint: Path, tmp_path: Path, adapter: str, thinking: bool, said: str
) -> None:
    """thinking: whether it was told apart."""
    for name, alpha in (("a", 16), ("b", 8)):
        save_adapter(checkpoint, tmp_path / name, lora_alpha=alpha)
    files = tmp_path / "files"

    def opened(name: str, thinking: bool) -> Any:
        options = replace(OPTIONS, shutdown_timeout_s=0.2, thinking=thinking)
        adapters = {"sql": tmp_path / name}
        return running(checkpoint, options, files=files, adapters=adapters, device="cpu")

    with opened("a", thinking) as served, served.client() as client:
        assert served.engine.batches is not None
        made = slowly_begun(client, served)
        served.engine.batches.stop()
    with opened(adapter, True) as served, served.client() as client:
        found = ended(client, made.id, "failed")
        assert said in found.errors.data[0].message
        assert str(tmp_path) not in found.errors.data[0].message


def test_answers_take_no_more_room_than_files_may(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, files=tmp_path) as served, served.client() as client:
        assert served.engine.batches is not None
        files = served.engine.batches.files
        lines = "\n".join(line(i) for i in range(8)).encode()
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        files._max_bytes = len(lines) + 1000
        made = client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
        found = ended(client, made.id, "failed")
        assert "keeps no more files" in found.errors.data[0].message
        assert sum(one["bytes"] for one in files.all()) <= files._max_bytes


def slowly_begun(client: OpenAI, served: Running) -> Any:
    """A batch of twelve requests, some of which are answered."""
    with served.slowed():
        made = batch_of(client, line(0, 1), *(line(i, 40) for i in range(1, 12)))
        end = time.monotonic() + 10
        while client.batches.retrieve(made.id).request_counts.completed < 1:  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.02)
    return made
