"""The requests of a file are answered in OpenAI's form, or with errors of their own."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.calls import Call
from qoff.engine.request import Sequence
from qoff.errors import FormatError
from qoff.jobs.lines import Line
from qoff.jobs.requests import PromptReader, PromptRequest
from tests.jobs.file_jobs import PARAMS, line, read, write


def test_answers_have_openais_form(job: Callable[..., int], llm: LLM, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
    url = "/v1/chat/completions"
    first = json.dumps({"custom_id": "chat", "method": "POST", "url": url, "body": chat})
    write(tmp_path, first, line(1, ["abc", "de"], n=2, temperature=1, seed=3, model="tiny"))
    assert job() == 0
    said = {one["custom_id"]: one for one in read(tmp_path / "out.jsonl")}
    response = said["chat"]["response"]
    assert set(said["chat"]) == {"id", "custom_id", "response", "error"}
    assert (response["status_code"], said["chat"]["error"]) == (200, None)
    (wanted,) = llm.chat(chat["messages"], SamplingParams(temperature=0, max_tokens=6))
    assert response["body"]["choices"][0]["message"]["content"] == wanted.text
    texts = [choice["text"] for choice in said["id 1"]["response"]["body"]["choices"]]
    params = SamplingParams(temperature=1, seed=3, n=2, max_tokens=2)
    assert texts == [one.text for one in llm.generate(["abc", "de"], params)]
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_what_is_wrong_is_told_with_its_line(job: Callable[..., int], tmp_path: Path) -> None:
    other = json.loads(line(9)) | {"url": "/v1/embeddings"}
    write(
        tmp_path, line(0), "", '{"custom_id": "torn', line(0), line(3, "x" * 200), line(4, []),
        line(5, what=1), line(6, stream=True), line(7, model="gpt"), json.dumps(other), line(10),
    )  # fmt: skip
    assert job() == 8
    assert {one["custom_id"] for one in read(tmp_path / "out.jsonl")} == {"id 0", "id 10"}
    told = {one["line"]: one for one in read(tmp_path / "out.errors.jsonl")}
    codes = {at: one["error"]["code"] for at, one in told.items() if one["error"]}
    assert codes == {3: "invalid_line", 4: "duplicate_custom_id", 10: "invalid_url"}
    statuses = {at: one["response"]["status_code"] for at, one in told.items() if one["response"]}
    assert statuses == {5: 400, 6: 400, 7: 400, 8: 400, 9: 404}
    assert "no room" in told[5]["response"]["body"]["error"]["message"]
    assert told[7]["custom_id"] == "id 5"
    said = told[9]["response"]["body"]["error"]["message"]
    assert said.startswith("there is no model 'gpt'; this batch (--served-model-name")
    assert said.endswith("has 'tiny'")


def test_an_answer_that_is_an_error_leaves_the_others(
    job: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that takes up the file finds the line answered, whichever answer that was."""
    done = Call.grew

    def grew(self: Call, sequence: Sequence, answer: Completion | None) -> None:
        if answer is not None and answer.sample in (0, 2):
            answer = replace(answer, finish_reason="error", error="a dead end")
        done(self, sequence, answer)

    monkeypatch.setattr(Call, "grew", grew)
    write(tmp_path, '"abc"', '"de"')
    more = {"params": replace(PARAMS, temperature=1, n=3, seed=1), "plain": False, "raw": True}
    assert job(**more) == 0
    said = read(tmp_path / "out.jsonl")
    assert [one["sample"] for one in said] == [0, 1, 2] * 2
    assert [one.get("error") for one in said] == ["a dead end", None, "a dead end"] * 2
    assert not (tmp_path / "out.errors.jsonl").exists()
    whole = (tmp_path / "out.jsonl").read_bytes()
    for lines in (1, 2, 3, 4):  # what a kill leaves
        (tmp_path / "out.jsonl").write_bytes(b"".join(whole.splitlines(True)[:lines]))
        assert job(**more) == 0
        assert read(tmp_path / "out.jsonl") == said


def test_the_samples_of_a_prompt_stay_together(job: Callable[..., int], tmp_path: Path) -> None:
    write(tmp_path, "first", "second", "third")
    params = SamplingParams(temperature=1, seed=1, n=2, max_tokens=3)
    assert job(params=params, plain=False) == 0
    output = tmp_path / "out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    assert Counter(one["index"] for one in read(output)) == {0: 2, 1: 2, 2: 2}
    output.write_bytes(b"".join(lines[:3]))
    assert job(params=params, plain=False) == 0
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_answers_are_sorted_on_request(job: Callable[..., int], tmp_path: Path) -> None:
    numbers = [*range(20)]
    write(tmp_path, *(line(i, max_tokens=1 + (7 * i) % 11) for i in numbers))
    assert job() == 0
    output = tmp_path / "out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(reversed(lines)))
    assert job(keep_order=True) == 0
    assert [one["custom_id"] for one in read(output)] == [f"id {i}" for i in numbers]
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert job(keep_order=True) == 0


def test_an_answer_without_text_says_so() -> None:
    request = PromptReader(PARAMS, chats=False, job="0").read(Line(0, 1, b"abc"))
    assert isinstance(request, PromptRequest)
    (said,) = request.answered([Completion(0, 0, "abc", (5,), "", (), "stop")], 1)
    assert json.loads(said) == {
        "index": 0, "sample": 0, "text": "", "token_ids": [], "finish_reason": "stop",
        "prompt_tokens": 1,
    }  # fmt: skip


def test_outputs_do_not_share_their_errors(job: Callable[..., int], tmp_path: Path) -> None:
    """And answers of another job are not taken for those of this one, whatever their form."""
    for lines in (["{}", "first"], ["{", line(1)]):
        write(tmp_path, *lines)
        one, other = tmp_path / "out-t0.5", tmp_path / "out-t0.7"
        assert job(output=one, overwrite=True) == job(output=other, overwrite=True) == 1
        found = [Path(f"{path}.errors.jsonl") for path in (one, other)]
        lines = found[1].read_bytes()
        for other_lines in (lines, re.sub(rb'("index": ?|-)0\b', rb"\g<1>99", lines)):
            found[0].write_bytes(other_lines)
            with pytest.raises(FormatError, match="lines of another job"):
                job(output=one)
