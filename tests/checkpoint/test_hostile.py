"""Checkpoints made to confuse: whatever is edited, opening one works or is refused by us."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint, read_weight
from qoff.checkpoint.layout import CONFIG_FILE, INDEX_FILE
from qoff.errors import FormatError, QoffError
from tests.checkpoint.samples import (
    LAYER,
    MATRIX,
    edit_config,
    edit_description,
    edit_header,
    edit_index,
    set_bytes,
    write,
)

TEXT = 1200  # bytes from the start of a weight file that hold its header's text, and some padding

small = st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=9)
anything = small | st.lists(small, max_size=3) | st.dictionaries(st.text(max_size=9), small)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("intact") / "model", layers=2)


@pytest.fixture(scope="module")
def victim(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(intact, tmp_path_factory.mktemp("victim") / "model"))


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key within a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def opens_or_is_refused(folder: Path, intact: Path) -> None:
    """Open and read everything; anything but a QoffError fails. The files are then put back."""
    try:
        with suppress(QoffError):
            for file in Checkpoint.open(folder).files:
                for entry in file.weights.values():
                    read_weight(file, entry)
    finally:
        for name in (LAYER, INDEX_FILE, CONFIG_FILE):
            (folder / name).write_bytes((intact / name).read_bytes())


@given(data=st.data())
def test_no_edit_of_bytes_escapes_as_another_error(
    intact: Path, victim: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([LAYER, INDEX_FILE, CONFIG_FILE]))
    edited = bytearray((intact / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(edited), TEXT) - 1))
        edited[at] = data.draw(st.integers(0, 255))
    if name == LAYER:
        set_bytes(victim, name, bytes(edited))
    else:
        (victim / name).write_bytes(edited)
    opens_or_is_refused(victim, intact)


@given(data=st.data())
def test_no_edit_of_values_escapes_as_another_error(
    intact: Path, victim: Path, data: st.DataObject
) -> None:
    def edit(value: Any) -> None:
        container, key = data.draw(st.sampled_from(list(places(value))))
        container[key] = data.draw(anything)

    kinds = [edit_index, edit_config, edit_header, edit_description]
    data.draw(st.sampled_from(kinds))(victim, edit)
    opens_or_is_refused(victim, intact)


def empty_tensor(shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    ("name", "shape", "what"),
    [
        (MATRIX, [0], "both whole and in parts"),
        ("a.scale_min.codes", [0], "'a.scale_min.scale_min' is missing"),
        ("a", [1 << 62, 0, 1 << 62], "impossible shape"),
        ("a", [0] * 1000, "impossible shape"),
    ],
)
def test_an_empty_tensor_too_many_is_refused(
    folder: Path, name: str, shape: list[int], what: str
) -> None:
    edit_header(folder, lambda header: header.update({name: empty_tensor(shape)}))
    with pytest.raises(FormatError, match=rf"{LAYER}: .*{what}.*again"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "described", "what"),
    [
        (MATRIX, [], "is not described"),
        (MATRIX, {"packing_version": True}, "is not described"),
        ("model.layers.1.input_layernorm.weight", {}, "not there as a quantized weight"),
    ],
)
def test_a_description_of_something_else_is_refused(
    folder: Path, name: str, described: Any, what: str
) -> None:
    def edit(descriptions: dict[str, Any]) -> None:
        whole = {**descriptions[MATRIX], **described} if isinstance(described, dict) else described
        descriptions[name] = whole

    edit_description(folder, edit)
    with pytest.raises(FormatError, match=rf"{LAYER}: .*{what}.*again"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", [CONFIG_FILE, INDEX_FILE, LAYER])
def test_a_pipe_is_refused_instead_of_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FormatError, match=rf"{name}: is not a file"):
        Checkpoint.open(folder)


def test_a_name_twice_in_the_index_is_refused(folder: Path) -> None:
    text = (folder / INDEX_FILE).read_text()
    (folder / INDEX_FILE).write_text(text.replace("{", '{"checksums": {},', 1))
    with pytest.raises(FormatError, match=rf"{INDEX_FILE}: .*'checksums' occurs twice"):
        Checkpoint.open(folder)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in ("x" * 300, "a\0b", "model.gguf"):
        with pytest.raises(FormatError, match=r"no such directory.*qoff convert"):
            Checkpoint.open(tmp_path / name)
