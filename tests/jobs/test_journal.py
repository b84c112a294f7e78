"""A job goes on from its journal, whatever ended it; a journal that is not its own is refused."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest

from bench.batch_kills import answers
from qoff.engine import LLM
from qoff.errors import ArgumentError, FormatError, QoffError
from qoff.hf.stamps import source_stamps
from qoff.jobs.file import Asked, FileJob, fingerprint
from qoff.jobs.journal import BLOCK, Journal, Places
from qoff.jobs.runner import Runner
from qoff.kvcache import KVPlacement, KVQuant
from tests.io_faults import each_call
from tests.jobs.file_jobs import PARAMS, PLAN, file_job, line, read, write
from tests.reopening import changing


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


def test_answers_are_counted_and_sorted_beside_errors(tmp_path: Path) -> None:
    """Also where the last two are in order already."""
    places = Places(tmp_path / "out", tmp_path / "errors")
    with closing(Journal(places, {})) as journal:
        said = [{"index": i, "sample": 0, "job": journal.job} for i in range(4)]
        lines = [json.dumps(one).encode() + b"\n" for one in said]
        journal.write([3, 1, 0], [lines[3], lines[0]], [lines[1]])
        assert (journal.completed, journal.failed) == (2, 1)
        journal.write([2], [lines[2]], [])
        journal.sort()
        assert read(places.output) == [said[0], said[2], said[3]]
    with closing(Journal(places, {})) as journal:
        assert (journal.completed, journal.failed) == (3, 1)


def test_a_block_of_errors_has_a_line_for_each_request(tmp_path: Path) -> None:
    """However many samples a request has: what is damaged further from the end was on disk."""
    places = Places(tmp_path / "out", tmp_path / "errors")
    with closing(Journal(places, {}, samples=3)) as journal:
        said = [{"index": i, "job": journal.job, "error": "x"} for i in range(BLOCK + 2)]
    lines = [json.dumps(one).encode() + b"\n" for one in said]
    for damaged, count in ((1, 1), (0, None)):
        places.errors.write_bytes(b"".join([*lines[:damaged], b"{\n", *lines[damaged + 1 :]]))
        with nullcontext() if count else pytest.raises(FormatError, match="line 1 is damaged"):
            journal = Journal(places, {}, samples=3)
            journal.close()
            assert journal.failed == count


def test_a_file_of_no_job_is_refused_and_nothing_left_beside_it(tmp_path: Path) -> None:
    places = Places(tmp_path / "out", tmp_path / "errors")
    places.errors.write_text("mine")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="no job of qoff that it belongs to"):
            Journal(places, {})
        assert [path.name for path in tmp_path.iterdir()] == ["errors"]


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
