"""Every damage gives one error of ours that names the file and says what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint, CheckpointWriter, verify
from qoff.checkpoint.layout import INDEX_FILE, OUTER_FILE, layer_file
from qoff.errors import ChecksumError, FormatError
from tests.checkpoint.samples import (
    LAYER,
    MATRIX,
    edit_config,
    edit_description,
    edit_header,
    edit_index,
    header_of,
    outer_weights,
    set_bytes,
    with_header,
    write,
)
from tests.kernels.operands import random_weight

Damage = Callable[[Path], None]
ADVICE = r"again|convert|newer qoff|is this a qoff checkpoint|copy the files there"


def truncated(folder: Path) -> None:
    data = (folder / LAYER).read_bytes()
    (folder / LAYER).write_bytes(data[:-1])


def truncated_with_its_index(folder: Path) -> None:
    set_bytes(folder, LAYER, (folder / LAYER).read_bytes()[:-1])


def a_byte_too_many(folder: Path) -> None:
    set_bytes(folder, LAYER, (folder / LAYER).read_bytes() + b"\0")


def empty(folder: Path) -> None:
    set_bytes(folder, LAYER, b"")


def header_of_length(length: int) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / LAYER).read_bytes()
        set_bytes(folder, LAYER, length.to_bytes(8, "little") + data[8:])

    return damage


def header_text(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        header, data = header_of((folder / LAYER).read_bytes())
        set_bytes(folder, LAYER, with_header(change(json.dumps(header).encode()), data))

    return damage


def unaligned(folder: Path) -> None:
    header, data = header_of((folder / LAYER).read_bytes())
    text = json.dumps(header).encode()
    set_bytes(folder, LAYER, len(text).to_bytes(8, "little") + text + data)


def tensor(part: str, **changes: Any) -> Damage:
    return lambda folder: edit_header(folder, lambda h: h[MATRIX + part].update(changes))


def shifted(by: int) -> Damage:
    def edit(header: dict[str, Any]) -> None:
        begin, end = header[MATRIX + ".scale_min"]["data_offsets"]
        header[MATRIX + ".scale_min"]["data_offsets"] = [begin + by, end + by]

    return lambda folder: edit_header(folder, edit)


def without(key: str) -> Damage:
    def damage(folder: Path) -> None:
        """Take a tensor out of header, data and index alike."""
        header, data = header_of((folder / LAYER).read_bytes())
        begin, end = header.pop(key)["data_offsets"]
        for name, value in header.items():
            if name != "__metadata__" and value["data_offsets"][0] >= end:
                value["data_offsets"] = [x - (end - begin) for x in value["data_offsets"]]
        rest = data[:begin] + data[end:]
        set_bytes(folder, LAYER, with_header(json.dumps(header).encode(), rest))
        edit_index(folder, lambda index: index["weight_map"].pop(key))

    return damage


def described(**changes: Any) -> Damage:
    return lambda folder: edit_description(folder, lambda d: d[MATRIX].update(changes))


def metadata(value: Any) -> Damage:
    return lambda folder: edit_header(folder, lambda h: h.update(__metadata__=value))


def misaligned_tensor(folder: Path) -> None:
    header = {
        "__metadata__": {"qoff": "{}"},
        "model.layers.1.a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "model.layers.1.b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
    }
    set_bytes(folder, LAYER, with_header(json.dumps(header).encode(), bytes(5)))


HEADERS: dict[str, tuple[Damage, str]] = {
    "truncated": (truncated, "the index says"),
    "truncated, index agrees": (truncated_with_its_index, "its header describes"),
    "a byte too many": (a_byte_too_many, "its header describes"),
    "empty": (empty, "claims a header"),
    "header of 2**60 bytes": (header_of_length(1 << 60), "claims a header of 1152921504606846976"),
    "header of 2**64-1 bytes": (header_of_length((1 << 64) - 1), "claims a header"),
    "header of 0 bytes": (header_of_length(0), "not JSON"),
    "header cut off": (header_text(lambda t: t[:-9]), "not JSON"),
    "header not text": (header_text(lambda t: b"\xff" + t[1:]), "not JSON"),
    "header nested too deep": (header_text(lambda t: b"[" * 100_000), "not JSON"),
    "header an array": (header_text(lambda t: b"[]"), "not a JSON object"),
    "name twice": (
        header_text(lambda t: t.replace(b'.codes"', b'.scale_min"')),
        "occurs twice",
    ),
    "data not at a block": (unaligned, "not at a multiple of 4096"),
    "overlap": (shifted(-4), "hole or an overlap"),
    "hole": (shifted(4), "hole or an overlap"),
    "element not aligned": (misaligned_tensor, "not at a multiple of 4"),
    "offsets reversed": (tensor(".codes", data_offsets=[9, 3]), "offsets span -6"),
    "offsets negative": (tensor(".codes", data_offsets=[-1536, 0]), "whole numbers"),
    "one offset": (tensor(".codes", data_offsets=[0]), "whole numbers"),
    "three offsets": (tensor(".codes", data_offsets=[0, 1536, 1536]), "whole numbers"),
    "offsets missing": (tensor(".codes", data_offsets=None), "wrongly"),
    "shape not numbers": (tensor(".codes", shape=["48", 32]), "whole numbers"),
    "shape of 2**70": (tensor(".codes", shape=[0, 1 << 70], data_offsets=[0, 0]), "whole numbers"),
    "shape of 2**60": (tensor(".codes", shape=[0, 1 << 60], data_offsets=[0, 0]), "impossible"),
    "shape of 17": (tensor(".codes", shape=[1536] + [1] * 16), "impossible"),
    "bytes not those of the shape": (tensor(".codes", shape=[48, 33]), "takes 1584 bytes"),
    "unknown dtype": (tensor(".codes", dtype="F4"), "wrongly"),
    "tensor not an object": (lambda f: edit_header(f, lambda h: h.update(x=1)), "wrongly"),
    "other codes shape": (tensor(".codes", shape=[32, 48]), "should have codes"),
    "scales of integers": (
        tensor(".scale_min", dtype="I32", shape=[1, 48, 1]),
        "should have codes",
    ),
    "scales of bfloat16": (tensor(".scale_min", dtype="BF16"), "not uint8, float16 or float32"),
    "no scales": (without(MATRIX + ".scale_min"), "scale_min' is missing"),
    "no codes": (without(MATRIX + ".codes"), "codes' is missing"),
    "described, not there": (
        lambda f: edit_description(f, lambda d: d.update(ghost=d[MATRIX])),
        "'ghost' is described, but not there",
    ),
    "not described": (lambda f: edit_description(f, lambda d: d.clear()), "is not described"),
    "other rows": (described(shape=[32, 64]), "should have codes"),
    "other bits": (described(bits=8), "should have codes"),
    "7 bits": (described(bits=7), "codes of 7 bits"),
    "infinite bits": (described(bits=float("inf")), "whole numbers"),
    "group of 48": (described(group_size=48), "group size 48"),
    "shape of three": (described(shape=[48, 64, 1]), "is not described"),
    "shape as text": (described(shape=["48", "64"]), "whole numbers"),
    "unknown packing": (described(packing="gpu99"), "packed as 'gpu99'"),
    "former packing": (described(packing="half32"), "an earlier version wrote it, so convert"),
    "packing a list": (described(packing=["split32"]), "whole numbers, packing a name"),
    "newer packing": (described(packing_version=2), "'split32' version 2"),
    "no metadata": (metadata(None), "no readable metadata"),
    "metadata not JSON": (metadata({"qoff": "{"}), "no readable metadata"),
    "metadata too deep": (metadata({"qoff": "[" * 100_000}), "no readable metadata"),
    "metadata an array": (metadata({"qoff": "[]"}), "not a JSON object"),
    "file gone": (lambda f: (f / LAYER).unlink(), "cannot be read"),
}  # fmt: skip


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("intact") / "model")


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def refused(folder: Path, file: str, what: str) -> None:
    with pytest.raises(FormatError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert message.startswith(str(folder / file))
    assert what in message
    assert any(word in message for word in ADVICE.split("|"))


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_file_of_weights_is_refused(folder: Path, case: str) -> None:
    damage, what = HEADERS[case]
    damage(folder)
    refused(folder, LAYER, what)


def test_a_directory_in_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / LAYER).unlink()
    (folder / LAYER).mkdir()
    refused(folder, LAYER, "is not a file")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "..", "", "a/b", "a\0b", "\ud800", "./x", "x" * 300]
)
@pytest.mark.parametrize("table", ["checksums", "weight_map"])
def test_an_index_cannot_lead_out_of_the_directory(folder: Path, name: str, table: str) -> None:
    def edit(index: Any) -> None:
        if table == "checksums":
            index[table][name] = index[table].pop(LAYER)
        else:
            index[table][MATRIX + ".codes"] = name

    edit_index(folder, edit)
    refused(folder, INDEX_FILE, "")


def test_a_link_out_of_the_directory_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / LAYER).rename(tmp_path / "elsewhere")
    (folder / LAYER).symlink_to(tmp_path / "elsewhere")
    refused(folder, INDEX_FILE, "not in the checkpoint's own directory")


def test_a_loop_of_links_is_refused(folder: Path) -> None:
    (folder / LAYER).unlink()
    (folder / LAYER).symlink_to(LAYER)
    refused(folder, "", "")


def test_a_link_within_the_directory_is_followed(folder: Path) -> None:
    (folder / LAYER).rename(folder / "data")
    (folder / LAYER).symlink_to("data")
    assert verify(folder).files == 4


def forget(index: Any, file: str) -> None:
    """Take a file out of the index, as if it had never been."""
    del index["checksums"][file]
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != file}


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda i: forget(i, LAYER), f"{LAYER} is missing"),
        (lambda i: forget(i, layer_file(0)), f"{layer_file(0)} is missing"),
        (lambda i: forget(i, OUTER_FILE), f"{OUTER_FILE} is missing"),
        (lambda i: i["weight_map"].pop(MATRIX + ".codes"), f"{MATRIX}.codes"),
        (lambda i: i["weight_map"].update(ghost=LAYER), "'ghost'"),
        (lambda i: i["weight_map"].update({MATRIX + ".codes": OUTER_FILE}), f"{MATRIX}.codes"),
        (lambda i: i["weight_map"].update(ghost=7), "ghost"),
        (lambda i: i.pop("checksums"), "no checksums"),
        (lambda i: i.update(weight_map=[]), "no checksums and weight_map"),
        (lambda i: i["checksums"].update({LAYER: 5}), "checksum of"),
        (lambda i: i["checksums"][LAYER].update(sha256="A" * 64), "checksum of"),
        (lambda i: i["checksums"][LAYER].update(sha256="a" * 65), "checksum of"),
        (lambda i: i["checksums"][LAYER].update(nbytes="12"), "checksum of"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, edit: Callable[[Any], None], what: str) -> None:
    edit_index(folder, edit)
    with pytest.raises(FormatError, match=ADVICE) as caught:
        Checkpoint.open(folder)
    assert str(folder / INDEX_FILE) in str(caught.value)
    assert what in str(caught.value)


def test_the_last_layer_cannot_go_unnoticed(folder: Path) -> None:
    edit_index(folder, lambda index: forget(index, layer_file(2)))
    refused(folder, "", "num_hidden_layers 3")


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda c: c.pop("quantization_config"), "quant_method is None"),
        (lambda c: c.update(quantization_config="qoff"), "quant_method is None"),
        (lambda c: c["quantization_config"].update(quant_method="gptq"), "'gptq'"),
        (lambda c: c["quantization_config"].update(version=2), "version 2"),
        (lambda c: c["quantization_config"].pop("version"), "version None"),
        (lambda c: c["quantization_config"].update(layout="state_dict"), "'state_dict'; load it"),
    ],
)
def test_another_config_is_refused(folder: Path, edit: Callable[[Any], None], what: str) -> None:
    edit_config(folder, edit)
    refused(folder, "config.json", what)


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, None])
def test_unreadable_json_is_refused(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    refused(folder, name, "")


def test_no_directory_is_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "", "no such directory")


def test_the_same_tensor_in_two_files_is_refused(folder: Path) -> None:
    set_bytes(folder, OUTER_FILE, (folder / LAYER).read_bytes())
    refused(folder, OUTER_FILE, "is also in")


@given(data=st.data())
def test_verify_finds_any_flipped_bit(intact: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(Checkpoint.open(intact).files)).path
    original = file.read_bytes()
    at, bit = data.draw(st.integers(0, len(original) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(original)
    flipped[at] ^= 1 << bit
    file.write_bytes(flipped)
    try:
        with pytest.raises(FormatError, match=file.name):
            verify(intact)
    finally:
        file.write_bytes(original)


def test_a_flipped_bit_of_the_data_is_a_wrong_checksum(folder: Path) -> None:
    data = bytearray((folder / LAYER).read_bytes())
    data[-1] ^= 1
    (folder / LAYER).write_bytes(data)
    Checkpoint.open(folder)
    with pytest.raises(ChecksumError, match=rf"{LAYER}.*SHA-256.*again"):
        verify(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["scale", "dense"])
def test_verify_finds_numbers_that_are_none(tmp_path: Path, value: float, where: str) -> None:
    matrix, dense = random_weight(16, 64), torch.ones(5)
    (matrix.scale_min if where == "scale" else dense).view(-1)[3] = value
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_outer({**outer_weights(), "matrix": matrix, "dense": dense})
        writer.finish({})
    with pytest.raises(FormatError, match=rf"{OUTER_FILE}.*NaN or infinity.*convert"):
        verify(tmp_path / "model")


@given(content=st.binary(max_size=200), pad=st.booleans())
def test_no_content_of_a_file_escapes_as_another_error(
    intact: Path, content: bytes, pad: bool
) -> None:
    name, index = OUTER_FILE, (intact / INDEX_FILE).read_bytes()
    original = (intact / name).read_bytes()
    set_bytes(intact, name, with_header(content, b"") if pad else content)
    try:
        with pytest.raises(FormatError, match=name):
            Checkpoint.open(intact)
    finally:
        (intact / name).write_bytes(original)
        (intact / INDEX_FILE).write_bytes(index)


def test_a_file_nobody_may_read_is_named(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (folder / LAYER).chmod(0)
    refused(folder, LAYER, "cannot be read")
