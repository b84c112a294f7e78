"""What the comparison of tokens with llama.cpp's finds, on a vocabulary of a few tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from bench import gguf_tokens
from bench.gguf_tokens import HARD, differences, main, pairs, settled, with_special, write_model
from qoff.errors import FormatError
from qoff.quant import GGUFFile

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*LETTERS, "ab", "Ġab", "</s>", "<|go|>", "<|tool|>"]
AT = {token: index for index, token in enumerate(TOKENS)}
CASES = {"": [], "ab ab": [AT["ab"], AT["Ġab"]], "a\nb": [AT["a"], AT["Ċ"], AT["b"]]}
SEPARATOR = "\n__ggml_vocab_test__\n"


def metadata(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": np.array([*[1] * (len(TOKENS) - 2), 3, 4], np.int32),
        "merges": ["a b", "Ġ ab"],
        "bos_token_id": AT["<|go|>"],
        "add_bos_token": True,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def written(folder: Path, cases: dict[str, list[int]], **changes: Any) -> Path:
    """A vocabulary's file with the two beside it."""
    path = folder / "ggml-vocab-tiny.gguf"
    write_model(metadata(**changes), path)
    path.with_name(f"{path.name}.inp").write_text("".join(text + SEPARATOR for text in cases))
    lines = (" ".join(map(str, ids)) + "\n" for ids in cases.values())
    path.with_name(f"{path.name}.out").write_text("".join(lines))
    return path


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokens.native, "llama_cpp", lambda tool: None)


def run(folder: Path) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    status = main(["--vocabularies", str(folder), "--out", str(out)])
    return status, json.loads(out.read_text())["measured"]


@pytest.mark.usefixtures("unbuilt")
def test_equal_tokens(tmp_path: Path) -> None:
    written(tmp_path, CASES)
    assert run(tmp_path) == (0, {"tiny": {"compared": 3, "different": 0}})


@pytest.mark.usefixtures("unbuilt")
def test_a_different_token_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, {**CASES, "ba": [AT["b"], AT["ab"]]})
    assert run(tmp_path) == (1, {"tiny": {"compared": 4, "different": 1}})
    line = f"'ba': token 1: llama.cpp has [{AT['ab']}], not [{AT['a']}]"
    assert line in capsys.readouterr().out


@pytest.mark.usefixtures("unbuilt")
def test_a_kind_that_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, CASES, model="bert")
    assert run(tmp_path) == (0, {})
    assert "tiny: not read: GGUF key tokenizer.ggml.model is 'bert'" in capsys.readouterr().out


@pytest.mark.usefixtures("unbuilt")
def test_texts_that_the_model_normalizes_are_left_out(tmp_path: Path) -> None:
    apart = {"e\u0301": [AT["e"], AT["Ì"], AT["ģ"]]}
    written(tmp_path, {**CASES, **apart}, pre="qwen2")
    assert run(tmp_path) == (0, {"tiny": {"compared": 3, "different": 0}})
    written(tmp_path, {**CASES, **apart})  # GPT-2 does not
    assert run(tmp_path) == (0, {"tiny": {"compared": 4, "different": 0}})


@pytest.mark.parametrize("ends", [True, False])
def test_texts_and_ids_are_read(ends: bool, tmp_path: Path) -> None:
    """One file of llama.cpp's has no separator at its end."""
    path = written(tmp_path, CASES)
    texts = path.with_name(f"{path.name}.inp")
    if not ends:
        texts.write_text(texts.read_text().removesuffix(SEPARATOR))
    assert pairs(path) == list(CASES.items())
    texts.write_text("a" + SEPARATOR)
    with pytest.raises(FormatError, match=r"1 texts, and 3 lines in ggml-vocab-tiny\.gguf\.out"):
        pairs(path)
    texts.unlink()
    assert pairs(path) == []


def test_a_folder_without_vocabularies(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no ggml-vocab-\*\.gguf"):
        main(["--vocabularies", str(tmp_path)])


def test_a_model_around_a_vocabulary_has_all_of_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model({**metadata(), "general.name": "Phi3"}, path)
    found = GGUFFile(path)
    assert found.metadata["general.name"] == "Phi3"
    for key, value in metadata().items():
        assert np.array_equal(found.metadata[key], value), key
    assert found.shape("token_embd.weight")[0] == len(TOKENS)


def test_texts_are_asked_alone_and_with_what_is_put_around() -> None:
    def theirs(text: str, around: bool) -> Sequence[int]:
        return [*[1] * around, *text.encode()]

    def without(text: str, around: bool) -> Sequence[int]:
        return list(text.encode())

    assert not differences(theirs, theirs, HARD)
    (apart,) = differences(theirs, without, ["ab"])
    assert (apart.text, apart.around, apart.wanted, apart.found) == (
        "ab",
        True,
        [1, 97, 98],
        [97, 98],
    )
    (apart,) = differences(theirs, without, ["e\u0301"], nfc=True)
    assert apart.wanted == [1, *"\u00e9".encode()]


def test_special_tokens_are_in_texts() -> None:
    texts = with_special(metadata())
    for token in ("<|go|>", "<|tool|>"):
        assert f"a{token}b" in texts
    assert not any("</s>" in text for text in texts)


def test_what_llama_cpp_takes_for_special_by_name_is_left_out() -> None:
    assert not settled(metadata(), "a </s>")  # the file says that it is text
    assert settled(metadata(), "a <|go|>")
    assert settled(metadata(), "a <|im_end|>")  # no token here
    types = np.array([*[1] * (len(TOKENS) - 3), 3, 3, 4], np.int32)
    assert settled(metadata(token_type=types), "a </s>")
