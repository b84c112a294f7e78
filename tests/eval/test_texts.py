"""Texts: the one that comes with qoff, files, and datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qoff.errors import ArgumentError, QoffError
from qoff.eval.texts import CALIBRATION_TEXT, DEFAULT_TEXT, dataset_text, read_text


def test_texts_come_with_the_package_and_do_not_overlap() -> None:
    evaluation, calibration = (path.read_text() for path in (DEFAULT_TEXT, CALIBRATION_TEXT))
    assert 100_000 < len(evaluation) < 300_000
    assert read_text() == evaluation
    pieces = {evaluation[i : i + 60] for i in range(0, len(evaluation) - 60, 500)}
    # Addresses begin alike: "Mr. Speaker, Mr. Vice President, Members of Congress".
    assert sum(piece in calibration for piece in pieces) < len(pieces) / 100


def test_every_third_of_the_calibration_text_has_prose_and_source() -> None:
    text = CALIBRATION_TEXT.read_text()
    third = len(text) // 3
    for part in (text[i * third : (i + 1) * third] for i in range(3)):
        lines = part.splitlines()
        assert sum(line.lstrip().startswith(("def ", "return ", "import ")) for line in lines) > 10
        assert sum(len(line) for line in lines if len(line) > 500) > third / 3  # an address


@pytest.mark.parametrize("content", [b"", b" \n\t", b"\xff\xfe\x00"])
def test_what_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="text"):
        read_text(path)


def test_a_dataset_is_its_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, config: str, split: str) -> dict[str, list[str]]:
        assert (path, config, split) == ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
        return {"text": ["", " = A = \n", "b"]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert dataset_text("wikitext2") == "\n\n = A = \n\n\nb"


def test_a_dataset_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(QoffError, match="no network"):
        dataset_text("wikitext2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(QoffError, match=r"pip install 'qoff\[eval\]'"):
        dataset_text("wikitext2")
    with pytest.raises(ArgumentError, match="'imagenet'"):
        dataset_text("imagenet")
