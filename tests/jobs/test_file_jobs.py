"""A file of requests is answered once and whole, whatever ends a run of it."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from io import BytesIO, StringIO
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.batch_kills import answers
from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.calls import Call
from qoff.engine.request import Sequence
from qoff.errors import ArgumentError, DiskWriteError, FormatError, QoffError
from qoff.hf.stamps import source_stamps
from qoff.jobs.file import Asked, FileJob, fingerprint
from qoff.jobs.journal import BLOCK, Journal, Places
from qoff.jobs.lines import IdSet, Line, is_openai, overview, prompt, read_lines
from qoff.jobs.requests import PromptReader, PromptRequest
from qoff.jobs.runner import Runner
from qoff.kvcache import KVPlacement, KVQuant
from qoff.plan import Plan
from tests.io_faults import each_call
from tests.reopening import changing

PLAN = Plan(batch_size=4, context=100, prefill_tokens=64)
PARAMS = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN) as found:
        yield found


def file_job(
    tmp_path: Path, checkpoint: Path | None = None, plan: Plan = PLAN, overwrite: bool = False,
    **more: Any,
) -> FileJob:  # fmt: skip
    """On `in.jsonl`. checkpoint: None for one that nothing is read of."""
    asked = Asked(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", None, "tiny", PARAMS, True, False, False
    )
    if checkpoint is None:
        (checkpoint := tmp_path / "model").mkdir(exist_ok=True)
    return FileJob(replace(asked, **more), checkpoint, plan, overwrite=overwrite)


@pytest.fixture
def job(llm: LLM, checkpoint: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the job on `in.jsonl`; how many requests have failed."""

    def run(overwrite: bool = False, plan: Plan = PLAN, **more: Any) -> int:
        with file_job(tmp_path, checkpoint, plan, overwrite, **more) as opened:
            if opened.left != 0:  # None: nobody knows
                opened.run(llm, lambda _: None)
            return opened.finish()

    return run


def line(number: int, prompt: Any = "abc", **body: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 1 + number % 5, "temperature": 0, **body}
    said = {"custom_id": f"id {number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps({**said, "body": body})


def write(tmp_path: Path, *lines: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


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


def test_a_job_goes_on_from_any_byte(job: Callable[..., int], tmp_path: Path) -> None:
    """However much of its files is there: each answer is there once in the end, as before."""
    write(tmp_path, *map(line, range(12)), "{", line(13, "x" * 200), line(14))
    assert job() == 2
    output, wrong = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    whole, whole_wrong, wanted = output.read_bytes(), wrong.read_bytes(), answers(output)
    assert len(wanted) == 15
    for part in (0, 0.3, 0.61, 0.999, 1):
        torn = whole[: int(part * len(whole))]
        output.write_bytes(torn)
        wrong.write_bytes(whole_wrong[: int((1 - part) * len(whole_wrong))])
        assert job() == 2
        assert answers(output) == wanted
        assert output.read_bytes().startswith(torn[: torn.rfind(b"\n") + 1])


def test_a_change_of_the_plan_leaves_the_journal_alone(checkpoint: Path, tmp_path: Path) -> None:
    """Requests without a place wait for it; what is answered is the same, and there once."""
    write(tmp_path, *(line(i, max_tokens=9) for i in range(40)), line(40, "x" * 200))
    plan = replace(PLAN, kv=KVQuant(window=16), kv_placement=KVPlacement(0, 0))
    other = replace(plan, batch_size=3, kv_placement=KVPlacement())
    for name, plans in (("without", ()), ("with", (other, plan))):
        asked = Asked(
            tmp_path / "in.jsonl", tmp_path / f"{name}.jsonl", None, "tiny", PARAMS, True, False,
            keep_order=True,
        )  # fmt: skip
        with (
            changing(*plans) as opened,
            LLM(checkpoint, plan) as llm,
            FileJob(asked, checkpoint, plan, overwrite=False) as job,
        ):
            job.run(llm, lambda _: None)
            assert job.finish() == 1
        assert opened == [plan, *plans]
        assert len(read(tmp_path / f"{name}.jsonl")) == 40
    assert answers(tmp_path / "with.jsonl") == answers(tmp_path / "without.jsonl")


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


def test_another_job_is_refused_and_begun_anew_on_request(
    job: Callable[..., int], tmp_path: Path
) -> None:
    write(tmp_path, line(0))
    job()
    before = (tmp_path / "out.jsonl").read_bytes()
    by_layer = replace(PLAN, kv=replace(PLAN.kv, layers={1: (4, 2)}))
    with pytest.raises(ArgumentError, match=r"kv layers 1 was None and is \[4, 2\]"):
        job(plan=by_layer)
    with pytest.raises(ArgumentError, match=r"context was 100 and is 64.*--overwrite"):
        job(plan=replace(PLAN, context=64))
    with pytest.raises(ArgumentError, match="name was 'tiny' and is 'other'"):
        job(model="other")
    header = tmp_path / "out.jsonl.job"
    begun = header.read_bytes()
    header.write_bytes(re.sub(rb'"model": "\w+"', b'"model": "0"', begun))
    with pytest.raises(ArgumentError, match="another: model has other contents"):
        job()
    header.write_bytes(begun.replace(b'"adapters": {}', b'"adapters": {"a": "0"}'))
    with pytest.raises(ArgumentError, match="adapters a was '0' and is None"):
        job()
    header.write_bytes(begun.replace(b'"adapters": {}, ', b""))  # as of a version without them
    job()
    header.write_bytes(begun)
    write(tmp_path, line(0), line(1))
    with pytest.raises(ArgumentError, match="requests have other contents"):
        job()
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert job(overwrite=True) == 0
    assert len(answers(tmp_path / "out.jsonl")) == 2
    job(overwrite=True, plan=by_layer)
    with pytest.raises(ArgumentError, match=r"kv layers 1 was \[4, 2\] and is None"):
        job()
    (tmp_path / "out.jsonl.job").unlink()
    with pytest.raises(ArgumentError, match="no job of qoff that it belongs to"):
        job()
    with pytest.raises(ArgumentError, match="leave out --raw"):
        job(raw=True)
    with pytest.raises(ArgumentError, match="a file each"):
        job(errors=tmp_path / "in.jsonl")


def test_what_bits_of_its_cache_cost_is_no_part_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path), source_stamps(tmp_path)
    for name in ("kv-sensitivity.json", ".kv-sensitivity.json.partial"):
        (tmp_path / name).write_text("{}")
        assert (fingerprint(tmp_path), source_stamps(tmp_path)) == before


def test_damage_before_the_last_block_is_refused(job: Callable[..., int], tmp_path: Path) -> None:
    write(tmp_path, *map(line, range(BLOCK + 3)))
    job()
    output = tmp_path / "out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([lines[0], b"damaged\n", *lines[2:]]))
    with pytest.raises(FormatError, match="line 2 is damaged"):
        job()
    output.write_bytes(b"".join([*lines, lines[4]]))
    with pytest.raises(FormatError, match="is there twice"):
        job()
    output.write_bytes(b"".join([*lines[:9], lines[9][:20] + bytes(30) + b"\n", *lines[10:20]]))
    assert job() == 0
    assert len(answers(output)) == BLOCK + 3


def test_ids_of_done_lines_count_as_they_did(job: Callable[..., int], tmp_path: Path) -> None:
    """Also those of lines that are none: the answers do not depend on where a run has ended."""
    wrong = [json.dumps(json.loads(line(0)) | {"custom_id": one}) for one in (5, None)]
    half = json.dumps({"custom_id": "id 4", "method": "POST", "url": "/v1/completions"})
    write(tmp_path, *wrong, half, line(3), line(4), line(4))
    assert job() == 4
    output = tmp_path / "out.jsonl"
    wanted = answers(output)
    output.write_bytes(b"")
    assert job() == 4
    assert answers(output) == wanted


@pytest.mark.parametrize("role", ["output", "errors"])
def test_what_is_no_regular_file_is_left_alone(
    role: str, job: Callable[..., int], tmp_path: Path
) -> None:
    """`-o /dev/null` would have the superuser replace that device."""
    write(tmp_path, line(0))
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(ArgumentError, match="is no regular file"):
            job(overwrite=True, **{role: path})
    assert pipe.is_fifo()
    assert not Path(f"{pipe}.job").exists()


@pytest.mark.parametrize("printed", [False, True])
def test_requests_may_come_through_a_pipe(
    printed: bool, job: Callable[..., int], tmp_path: Path, capfdbinary: Any
) -> None:
    """As a shell's <(...) gives one."""
    reading, writing = os.pipe()
    os.write(writing, f"{line(0)}\n{line(1)}\n".encode())
    os.close(writing)
    out = tmp_path / "out.jsonl"
    try:
        assert job(requests=Path(f"/dev/fd/{reading}"), output=None if printed else out) == 0
    finally:
        os.close(reading)
    found = capfdbinary.readouterr().out if printed else out.read_bytes()
    assert found.count(b'"status_code": 200') == 2


def test_standard_output_that_is_full_is_named(
    job: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, line(0))
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: None, buffer=full))
        with pytest.raises(DiskWriteError, match="standard output: No space left"):
            job(output=None)


def test_answers_are_written_to_where_a_link_leads(job: Callable[..., int], tmp_path: Path) -> None:
    write(tmp_path, line(0), line(1))
    (tmp_path / "disk").mkdir()
    there, link = tmp_path / "disk" / "answers", tmp_path / "link"
    link.symlink_to(there)
    for overwrite in (False, False, True):
        assert job(overwrite=overwrite, output=link) == 0
        assert link.is_symlink()
        assert len(answers(there)) == 2
    Path(f"{there}.job").rename(f"{link}.job")  # as where answers are moved, and linked to
    assert job(output=link) == 0


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


def test_old_answers_are_gone_before_a_new_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path / "out", tmp_path / "other" / "errors")
    places.errors.parent.mkdir()
    forced: list[Path] = []

    def synced(folder: Path) -> None:
        assert forced or not places.header.stat().st_size
        forced.append(folder)

    monkeypatch.setattr("qoff.jobs.journal.sync_directory", synced)
    for overwrite in (False, True):
        forced.clear()
        Journal(places, {}, overwrite=overwrite).close()
        assert forced[:2] == [places.output.parent, places.errors.parent]


def test_a_job_interrupted_at_its_start_ends(
    llm: LLM, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Runner] = []
    start = Runner.start

    def interrupted(runner: Runner) -> None:
        begun.append(runner)
        start(runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "start", interrupted)
    write(tmp_path, line(0))
    with file_job(tmp_path, checkpoint) as opened:
        with pytest.raises(KeyboardInterrupt):
            opened.run(llm, lambda _: None)
        assert begun[0].ended.is_set()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_journal_has_whole_requests(samples: int, tmp_path: Path) -> None:
    """Whatever part of its last block is there; and in the requests' order, if that was asked."""
    places, count = Places(tmp_path / "out", tmp_path / "errors"), BLOCK + 2

    def opened() -> closing[Journal]:
        return closing(Journal(places, {}, samples=samples))

    with opened() as journal:
        said = [{"index": i, "sample": s, "job": journal.job}
                for i in reversed(range(count)) for s in range(samples)]  # fmt: skip
        lines = [json.dumps(one).encode() + b"\n" for one in said]
        for first in range(0, len(lines), samples):
            journal.write([said[first]["index"]], lines[first : first + samples], [])
    whole = b"".join(lines)
    for end in (*range(0, len(whole), 997), len(whole)):
        places.output.write_bytes(whole[:end])
        places.sorting.touch()  # of a process that was killed
        with opened() as journal:
            done = whole[:end].count(b"\n") // samples
            assert (journal.completed, journal.failed) == (done, 0)
            assert [i for i in range(count) if i in journal.done] == [*range(count - done, count)]
            assert places.output.read_bytes() == b"".join(lines[: done * samples])
            assert not places.sorting.exists()
            if done == count:
                for _ in range(2):
                    journal.sort()
                    assert read(places.output) == sorted(said, key=itemgetter("index"))
    for damaged, lost in ((2 * samples - 1, False), (2 * samples - 2, True)):
        places.output.write_bytes(b"".join([*lines[:damaged], b"{\n", *lines[damaged + 1 :]]))
        with (
            pytest.raises(FormatError, match=f"line {damaged + 1} is damaged")
            if lost
            else nullcontext(),
            opened() as journal,
        ):
            assert journal.completed == 1


def test_a_header_that_this_version_did_not_write_is_refused(tmp_path: Path) -> None:
    places = Places(tmp_path / "out", tmp_path / "errors")
    Journal(places, {"model": "a"}).close()
    begun = json.loads(places.header.read_text())
    for change, message in (
        ({"version": 1}, "begun by an earlier version"),
        ({"version": 3}, "is not the header of a job"),
        ({"version": None}, "is not the header of a job"),
        ({"job": 7}, "is not the header of a job"),
    ):
        places.header.write_text(json.dumps(begun | change))
        with pytest.raises(FormatError, match=message):
            Journal(places, {"model": "a"})
    places.header.write_text(json.dumps(begun))
    Journal(places, {"model": "a"}).close()  # nothing has kept its lock


def test_two_processes_do_not_share_a_job(tmp_path: Path) -> None:
    places = Places(tmp_path / "out", tmp_path / "errors")
    first = Journal(places, {})
    with pytest.raises(ArgumentError, match="another process"):
        Journal(places, {})
    first.close()
    Journal(places, {}).close()


@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO])
def test_every_call_on_files_fails_once(how: int, tmp_path: Path) -> None:
    """What was said to be written is found again; an error names a path."""
    places = Places(tmp_path / "out", tmp_path / "errors")
    said: set[int] = set()

    def run() -> None:
        journal = Journal(places, {"model": "a"})
        try:
            for number in range(6):
                if number not in journal.done:
                    text = json.dumps({"id": f"batch_req_{journal.job}_{number}"}).encode() + b"\n"
                    wrong = number % 3 == 0
                    journal.write([number], [] if wrong else [text], [text] if wrong else [])
                    said.add(number)
        finally:
            journal.close()

    def clear() -> None:
        said.clear()
        for path in tmp_path.iterdir():
            path.unlink()

    failed = 0
    for error in each_call(tmp_path, how, run):
        if error is not None:
            failed += 1
            assert isinstance(error, QoffError), repr(error)
            assert str(tmp_path) in str(error)
        written = set(said)
        if not (places.header.exists() and not places.header.stat().st_size):
            found = Journal(places, {"model": "a"})
            assert all(number in found.done for number in written)
            found.close()
            run()
            ids = [one["id"] for path in (places.output, places.errors) for one in read(path)]
            assert sorted(one.rpartition("_")[2] for one in ids) == [*"012345"]
        clear()
    assert failed > 15


def test_any_line_is_a_prompt(tmp_path: Path) -> None:
    lines = [
        '"quoted", she said',
        '{"prompt": "json\u2028line"}',
        "",
        "plain\x85text",
        " \t",
        '"text"',
    ]
    (tmp_path / "in").write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    with (tmp_path / "in").open("rb") as file:
        found = list(read_lines(file))
    assert [prompt(one) for one in found] == [lines[0], "json\u2028line", "plain\x85text", "text"]
    assert [(one.number, one.at) for one in found] == [(0, 1), (1, 2), (2, 4), (3, 6)]
    with pytest.raises(QoffError, match="is not UTF-8"):
        prompt(Line(0, 1, b"\xff\xfe"))


def test_a_line_that_is_too_long_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is kept, all of it is read, and its end may be that of the file."""
    monkeypatch.setattr("qoff.jobs.lines.MAX_LINE", 8)
    data = b"12345678\n123456789\n" + b"x" * 30 + b"\n\nab\r\n" + b"y" * 20
    digest = hashlib.sha256()
    found = list(read_lines(BytesIO(data), digest))
    assert [(one.number, one.at, one.data) for one in found] == [
        (0, 1, b"12345678"), (1, 2, None), (2, 3, None), (3, 5, b"ab"), (4, 6, None)
    ]  # fmt: skip
    assert digest.digest() == hashlib.sha256(data).digest()
    assert not is_openai(found[1])
    with pytest.raises(QoffError, match="longer than 8 bytes"):
        prompt(found[1])
    for end in range(len(data) + 1):
        there = list(read_lines(BytesIO(data[:end])))
        assert list(read_lines(BytesIO(data), nbytes=end)) == there


def test_json_may_be_indented_and_has_to_be_whole(tmp_path: Path) -> None:
    said = [b' \t{"prompt": "a"}', b'  "b"', b" c", b"\t{d}"]
    assert [prompt(Line(0, 1, one)) for one in said] == ["a", "b", " c", "\t{d}"]
    for torn in (b'{"prompt": "What is', b' { "prompt" : "a" "b"}'):
        with pytest.raises(QoffError, match="but is no JSON"):
            prompt(Line(0, 1, torn))
    write(tmp_path, f" {line(0)}")
    with (tmp_path / "in.jsonl").open("rb") as file:
        assert overview(file).openai


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(b"a\nb\n"), "compressed.*zcat"),
        ("a\nb\n".encode("utf-16"), "UTF-16.*iconv"),
        (b"\xfe\xff" + "a\nb\n".encode("utf-16-be"), "UTF-16.*iconv"),
    ],
    ids=["gzip", "little-endian", "big-endian"],
)
def test_a_file_that_is_no_text_is_refused_as_a_whole(
    data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(QoffError, match=message):
        file_job(tmp_path)
    assert not (tmp_path / "out.jsonl.job").exists()


def test_a_file_that_grows_or_changes_while_it_is_read(tmp_path: Path) -> None:
    """Lines that come later are not of this job; others than those that it began with end it."""
    write(tmp_path, "first", "second")
    path = tmp_path / "in.jsonl"
    with file_job(tmp_path) as job, path.open("a") as more:
        more.write("third\n")
        more.flush()
        assert [one.data for one in job._lines] == [b"first", b"second"]
    with file_job(tmp_path, overwrite=True) as job:
        path.write_text("first\nother!\nthird\n")
        with pytest.raises(QoffError, match="has changed while it was read"):
            list(job._lines)


def test_answers_are_not_printed_into_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `>> in.jsonl`: each answer would be the next request."""
    write(tmp_path, "first")
    with (tmp_path / "in.jsonl").open("ab") as same, (tmp_path / "out").open("wb") as other:
        for file, refused in ((same, True), (other, False)):
            monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=file.fileno))
            with pytest.raises(ArgumentError, match="-o") if refused else nullcontext():
                file_job(tmp_path, output=None)


@pytest.mark.parametrize("out", [StringIO(), SimpleNamespace(write=lambda _: 0)])
def test_answers_are_printed_where_text_alone_is_taken(
    out: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in notebooks, or where a program keeps what a command prints."""
    write(tmp_path, "first")
    said = []
    with monkeypatch.context() as patch:
        patch.setattr(out, "write", said.append)
        patch.setattr(out, "flush", lambda: None, raising=False)
        patch.setattr(sys, "stdout", out)
        with file_job(tmp_path, output=None) as job:
            job.sink.write([0], ['{"text": "é"}\n'.encode()], [])
    assert said == ['{"text": "é"}\n']


@pytest.mark.parametrize("index", ["Infinity", "NaN", "1e3", "9" * 30, "67", "-1", "null"])
def test_an_index_of_no_request_is_damage(index: str, tmp_path: Path) -> None:
    places = Places(tmp_path / "out", tmp_path / "errors")
    with closing(Journal(places, {}, requests=BLOCK + 3)) as journal:
        lines = [
            f'{{"index": {i}, "sample": 0, "job": "{journal.job}"}}\n' for i in range(BLOCK + 3)
        ]
    wrong = lines[1].replace('"index": 1', f'"index": {index}')
    places.output.write_text("".join([lines[0], wrong, *lines[2:]]))
    with pytest.raises(FormatError, match="line 2 is damaged"):
        Journal(places, {}, requests=BLOCK + 3)


def test_ids_are_told_apart() -> None:
    ids = IdSet()
    assert all(ids.add(f"id {i}") for i in range(20_000))
    assert not any(ids.add(f"id {i}") for i in range(0, 20_000, 7))
