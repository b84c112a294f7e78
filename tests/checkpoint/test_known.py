"""Which files were found to be right, from process to process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qoff.checkpoint import Checkpoint, KnownFiles
from qoff.errors import ChecksumError
from qoff.memory.io.disk import DiskReader
from qoff.memory.load import FileChecks

STAMP = (10, 20, 30)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_known_with_its_checksum_and_stamp(checkpoint: Path) -> None:
    first, second = Checkpoint.open(checkpoint).layers[:2]
    one, other = KnownFiles(checkpoint), KnownFiles(checkpoint)
    assert not other.holds(first, STAMP)
    one.add(first, STAMP)
    other.add(second, STAMP)  # without losing what another process has added
    known = KnownFiles(checkpoint)
    assert known.holds(first, STAMP)
    assert known.holds(second, STAMP)
    assert not known.holds(first, (10, 20, 31))
    assert not known.holds(first, None)
    assert not known.holds(replace(first, sha256=second.sha256), STAMP)  # converted again
    assert not KnownFiles(checkpoint.parent).holds(second, STAMP)


def test_what_is_remembered_may_be_damaged(checkpoint: Path, cache: Path) -> None:
    file = Checkpoint.open(checkpoint).layers[0]
    KnownFiles(checkpoint).add(file, STAMP)
    (there,) = (cache / "verified").iterdir()
    for damaged in (b"", b"[1]", b"\xff", b'{"' + file.path.name.encode() + b'": 1}'):
        there.write_bytes(damaged)
        known = KnownFiles(checkpoint)
        assert not known.holds(file, STAMP)
        known.add(file, STAMP)
        assert known.holds(file, STAMP)
        assert list(there.parent.iterdir()) == [there]


@pytest.mark.parametrize("home", [True, False])
def test_nothing_is_remembered_where_nothing_can_be_written(
    checkpoint: Path, home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home:
        (tmp_path / "cache").write_text("")  # a file
    else:
        for name in ("QOFF_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda _: {}["of this user"])
    file = Checkpoint.open(checkpoint).layers[0]
    KnownFiles(checkpoint).add(file, STAMP)
    assert not KnownFiles(checkpoint).holds(file, STAMP)


def test_a_file_is_never_known_that_was_not_right(
    checkpoint: Path, tmp_path: Path, cache: Path
) -> None:
    file = Checkpoint.open(checkpoint).layers[0]
    copy = tmp_path / file.path.name
    damaged = bytearray(file.path.read_bytes())
    damaged[-1] ^= 1
    copy.write_bytes(damaged)
    file = replace(file, path=copy)
    reader = DiskReader(threads=1)
    try:
        for _ in range(2):
            with pytest.raises(ChecksumError):
                FileChecks(reader, KnownFiles(checkpoint)).check(file)
    finally:
        reader.close()
    assert not cache.exists()
