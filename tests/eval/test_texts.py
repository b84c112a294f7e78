"""Texts: the one that comes with qoff, files, and datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from qoff.cli.convert import calibration_ids
from qoff.cli.options import TextOptions
from qoff.errors import ArgumentError, QoffError
from qoff.eval.texts import (
    CALIBRATION_TEXT,
    DEFAULT_TEXT,
    dataset_text,
    encode,
    first_token,
    read_text,
)
from tests.tiny_models import save_model, save_tokenizer


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


def cut_as(definition: str) -> TextOptions:
    return TextOptions(
        text=None, dataset=None, window=512, stride=None, definition=definition, limit=None
    )


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<pad> $A"])
def test_what_a_tokenizer_puts_before_a_text(template: str, tmp_path: Path) -> None:
    """Windows of `qoff eval` begin with it, and pieces that a conversion calibrates on."""
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    special = [(one, tokenizer.convert_tokens_to_ids(one)) for one in ("<s>", "</s>", "<pad>")]
    processor = TemplateProcessing(template, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(tmp_path)
    first = 1 if template.startswith("<s>") else None
    assert first_token(tokenizer) == first

    content = "".join(chr(97 + i % 7) for i in range(1100))
    text = tmp_path / "text.txt"
    text.write_text(content)
    plain = encode(tokenizer, content)
    wanted = plain[:1024].view(2, 512).clone()
    sample = cut_as("strided").sample(tokenizer, content)
    read = torch.stack([sample.tokens(window) for window in sample.windows[:2]])
    if first is not None:
        wanted[:, 0] = first
    assert torch.equal(read, wanted)
    assert torch.equal(calibration_ids(tmp_path, text), wanted)
    whole = cut_as("lm_eval").sample(tokenizer, content)
    assert whole.tokens(whole.windows[0]).tolist() == [1, *plain[:512].tolist()]


def whole_pieces(tokenizer: Any, content: str) -> torch.Tensor:
    """24 pieces of 512 tokens of a text that is tokenized as a whole."""
    ids = encode(tokenizer, content)
    pieces = len(ids) // 512
    return ids[: pieces * 512].view(pieces, 512)[torch.arange(24) * pieces // 24]


def test_the_own_text_is_calibrated_on_in_pieces_of_the_whole(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    wanted = whole_pieces(tokenizer, read_text(CALIBRATION_TEXT))
    assert torch.equal(calibration_ids(tmp_path, CALIBRATION_TEXT), wanted)


@pytest.mark.parametrize("excerpt", [1 << 13, 400])
def test_of_a_long_text_excerpts_alone_are_tokenized(
    excerpt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it where an excerpt has no whole piece."""
    read: list[str] = []

    def noted(tokenizer: Any, text: str) -> torch.Tensor:
        read.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr("qoff.cli.convert.encode", noted)
    monkeypatch.setattr("qoff.cli.convert._EXCERPT", excerpt)
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    content = "".join(f"{number} " for number in range(200_000))
    (tmp_path / "text").write_text(content)
    found = calibration_ids(tmp_path, tmp_path / "text")
    assert found.shape == (24, 512)
    if excerpt < 512:
        assert torch.equal(found, whole_pieces(tokenizer, content))
        return
    assert sum(map(len, read)) < len(content) / 5
    for number, ids in enumerate(found):
        at = content.find("".join(tokenizer.decode([one]) for one in ids.tolist()))
        assert 0 <= at - number * len(content) // 24 < 100


@pytest.mark.parametrize("content", [b"", b" \n\t", b"\xff\xfe\x00"])
def test_what_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="text"):
        read_text(path)


def test_the_mark_that_windows_begins_a_file_with_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfA text.")
    assert read_text(path) == "A text."


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
