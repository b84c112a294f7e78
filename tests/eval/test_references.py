"""References and evaluations on disk: what goes on after a kill, what is refused."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from qoff.errors import ArgumentError, DiskReadError, DiskWriteError, FormatError
from qoff.eval.perplexity import models
from qoff.eval.perplexity.metrics import Scores
from qoff.eval.perplexity.models import (
    stored_reference,
)
from qoff.eval.perplexity.records import Records
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Original, evaluate, make_reference
from qoff.eval.perplexity.subjects import (
    Predictions,
    QoffSubject,
)
from qoff.hf.tokenizer import load_tokenizer
from qoff.models.runtime import Runtime
from tests.tiny_models import tiny_model

from .conftest import FAMILY
from .test_scoring import sample


class Killed(BaseException):
    """What a test ends an evaluation with."""


class Dying(QoffSubject):
    """Dies at its piece number `left`; windows: how many were begun."""

    left = windows = 0

    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        Dying.windows += len(windows)
        for found in super().predict(windows, place):
            Dying.left -= 1
            if not Dying.left:
                raise Killed
            yield found


def test_an_evaluation_that_was_killed_goes_on_by_window(runtime: Runtime, tmp_path: Path) -> None:
    text = sample(tokens=240, length=60)  # of two pieces each

    def run(path: Path, left: int = 0, **says: object) -> Scores:
        Dying.left, Dying.windows = left, 0
        with closing(Records(path, {"of": "this", **says})) as journal:
            return evaluate(Dying(runtime, "x", 32), text, journal=journal)

    whole = run(tmp_path / "whole")
    for left in (4, 2):
        with pytest.raises(Killed):
            run(tmp_path / "killed", left)
    with (tmp_path / "killed").open("ab") as file:
        file.write(b"torn")
    again = run(tmp_path / "killed")
    assert Dying.windows == 3
    np.testing.assert_array_equal(again.nll, whole.nll)
    with pytest.raises(ArgumentError, match="of was 'this', is 'that'"):
        run(tmp_path / "killed", of="that")


def test_a_reference_that_was_not_finished_goes_on_by_window(
    runtime: Runtime, tmp_path: Path
) -> None:
    text, told = sample(tokens=240, length=60), list[tuple[int, int]]()
    path, subject = tmp_path / "r", Dying(runtime, "x", 32)
    for left, windows in ((4, 2), (0, 3), (0, 0)):
        Dying.left, Dying.windows = left, 0
        with suppress(Killed):
            make_reference(subject, text, path, tell=lambda *x: told.append(x[:2])).close()
        assert Dying.windows == windows
        if left:
            with closing(Reference(path)) as some, pytest.raises(ArgumentError, match="lacks 3 of"):
                evaluate(subject, text, some)
    assert told[-1] == (236, 236)
    with closing(Reference(path)) as found:
        scores = evaluate(subject, text, found)
    assert scores.kl is not None
    assert abs(scores.kl).max() < 1e-6


def test_records_are_found_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with closing(Records(path, {"of": "this"})) as records:
        for window in (4, 2):
            records.append(window, {"x": np.arange(window)})
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 255]))
    with closing(Records(path)) as found:
        assert found.windows == [4, 2]
        assert found.read(4)["x"].tolist() == [0, 1, 2, 3]
        with pytest.raises(FormatError, match="window 2 is damaged"):
            found.read(2)
    with closing(Records(path, {"of": "this", "more": None})) as found:  # cut where it is damaged
        assert found.windows == [4]


def test_a_file_without_windows_is_not_left(tmp_path: Path) -> None:
    with closing(Records(tmp_path / "r", {"of": "this"})) as records:
        records.agree({"more": 1})
    assert not (tmp_path / "r").exists()


class Broken(QoffSubject):
    """Predicts what is not finite."""

    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        for found in super().predict(windows, place):
            yield Predictions(found.window, found.place, found.logits * math.nan)


def test_a_reference_that_is_not_finite_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    subject, broken, text = QoffSubject(runtime, "x"), Broken(runtime, "b"), sample()
    with pytest.raises(ArgumentError, match="the reference b: predictions that are not finite"):
        evaluate(subject, text, Original(broken))
    with pytest.raises(ArgumentError, match="the reference b: predictions that are not finite"):
        make_reference(broken, text, tmp_path / "r")


def test_windows_that_alternate_are_read_from_a_reference_once(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, subject, read = sample(), QoffSubject(runtime, "x", 32), list[int]()
    stored = make_reference(subject, text, tmp_path / "r")
    of = Records.read
    monkeypatch.setattr(Records, "read", lambda self, i: read.append(i) or of(self, i))
    evaluate(subject, text, stored, batch=2)
    assert read == [0, 1, 2]


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        closing(Records(tmp_path / "r", {})),
        pytest.raises(ArgumentError, match="another process"),
    ):
        Records(tmp_path / "r", {})


@pytest.mark.parametrize("damage", ["missing", "header", "row", "other"])
def test_a_damaged_reference_is_refused(damage: str, runtime: Runtime, tmp_path: Path) -> None:
    path, text = tmp_path / "r", sample(100, 100)
    make_reference(QoffSubject(runtime, "x"), text, path).close()
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage != "missing":
        data[0 if damage == "header" else len(data) // 2] ^= 255
        path.write_bytes(data if damage != "other" else b"{}\n")
    said = {"missing": "No such file", "row": "window 0 is damaged"}.get(damage, "remove it")
    with pytest.raises((FormatError, ArgumentError, DiskReadError), match=said):
        evaluate(QoffSubject(runtime, "x"), text, Reference(path))


def stored(source: Path, path: Path, **options: Any) -> Reference:
    return stored_reference(source, sample(), load_tokenizer(source), path, **options)


def test_a_file_beside_the_original_does_not_change_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(copytree(tiny_model(base, FAMILY), tmp_path / "original"))
    stored(source, path := source / "reference").close()
    moved = source.rename(tmp_path / "elsewhere").rename(source)
    monkeypatch.setattr(models, "opened_original", None)  # no model is loaded from here on
    stored(moved, path).close()
    with pytest.raises(ArgumentError, match="is of other tokens"):
        stored_reference(source, sample(50, 50), load_tokenizer(source), path)
    with (
        closing(Records(busy := tmp_path / "busy", {})),
        pytest.raises(ArgumentError, match="work"),
    ):
        stored(source, busy)
    (source / "config.json").touch()
    with pytest.raises(ArgumentError, match="the files of the reference model have changed"):
        stored(source, path)


def test_a_reference_of_something_else_is_refused(
    runtime: Runtime, checkpoint: Path, tmp_path: Path
) -> None:
    subject = QoffSubject(runtime, "x")
    reference = make_reference(subject, sample(), tmp_path / "r")
    with pytest.raises(ArgumentError, match="other tokens"):
        evaluate(subject, sample(seed=1), reference)
    with pytest.raises(ArgumentError, match="other tokens"):
        evaluate(subject, sample(length=50), reference)
    subject.vocab_size += 1
    with pytest.raises(ArgumentError, match="not the same model"):
        evaluate(subject, sample(), reference)


def test_what_differs_from_a_reference_is_said_as_far_as_it_is_known(
    runtime: Runtime, tmp_path: Path
) -> None:
    subject = QoffSubject(runtime, "x")
    reference = make_reference(subject, sample(100, 100), tmp_path / "r")
    for other, said in (
        (sample(), "r: is of other tokens: 1 window in it, 3 asked for; .* --reference MODEL"),
        (sample(50, 50), "99 scored tokens a window in it, 49 asked for; evaluate with the same"),
        (sample(100, 100, seed=1), "another text, other windows or another tokenizer"),
    ):
        with pytest.raises(ArgumentError, match=said):
            evaluate(subject, other, reference)


def test_a_full_disk_is_said_with_the_file(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskWriteError, match=r"/r: No space left on device"):
        make_reference(QoffSubject(runtime, "x"), sample(), tmp_path / "r")
