"""Where requests come from and answers go: lines, pipes, links, standard output."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.batch_kills import answers
from qoff.errors import ArgumentError, DiskWriteError, QoffError
from qoff.jobs.lines import IdSet, Line, is_openai, overview, prompt, read_lines
from tests.jobs.file_jobs import file_job, line, write


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


def test_ids_are_told_apart() -> None:
    ids = IdSet()
    assert all(ids.add(f"id {i}") for i in range(20_000))
    assert not any(ids.add(f"id {i}") for i in range(0, 20_000, 7))
