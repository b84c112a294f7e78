"""The header of a GGUF file is the gguf package's, and nothing in it is believed."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from qoff.errors import FormatError
from qoff.quant import GGUFFile
from qoff.quant.gguf_header import GGUFHeader

VALUES: dict[str, Any] = {
    "text": "三",
    "yes": True,
    "texts": ["", "a", "é"],
    "floats": [0.5, -1.0],
    "whole": [1, 2, 1 << 30],
    "switches": [True, False],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_string("text", "三")
    writer.add_bool("yes", True)
    for i, kind in enumerate(("uint8", "int8", "uint16", "int16", "uint32", "int32")):
        getattr(writer, f"add_{kind}")(kind, 100 + i)
    for kind, value in (("uint64", 1 << 63), ("int64", -(1 << 62))):
        getattr(writer, f"add_{kind}")(kind, value)
    for kind in ("float32", "float64"):
        getattr(writer, f"add_{kind}")(kind, 0.25)
    for name in ("texts", "floats", "whole", "switches"):
        writer.add_array(name, VALUES[name])
    writer.add_tensor("a", np.ones((3, 5, 7), np.float32))
    writer.add_tensor("b", np.zeros((4, 34), np.uint8), raw_dtype=Type.Q8_0)
    writer.add_tensor("c", np.zeros((2, 110), np.uint8), raw_dtype=Type.Q3_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_what_is_read_is_what_the_package_reads(path: Path) -> None:
    theirs = gguf.GGUFReader(path)
    ours = GGUFHeader.read(np.memmap(path, mode="r"))
    fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {k: plain(v) for k, v in ours.metadata.items()} == fields
    assert {k: plain(ours.metadata[k]) for k in VALUES} == VALUES
    assert [
        (t.name, t.kind, t.shape, t.offset, t.nbytes) for t in ours.tensors.values()
    ] == [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape[::-1])), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]  # fmt: skip


def test_no_count_is_believed(path: Path, tmp_path: Path) -> None:
    """Each 8 bytes of the header with one bit that makes a count of them absurd."""
    content, damaged = path.read_bytes(), tmp_path / "damaged.gguf"
    size = next(iter(GGUFFile(path)._tensors.values()))[1].offset
    start = time.process_time()
    for at in range(8, size - 8):
        (count,) = struct.unpack_from("<Q", content, at)
        edited = bytearray(content)
        struct.pack_into("<Q", edited, at, count | 1 << 40)
        damaged.write_bytes(edited)
        with suppress(FormatError):
            GGUFFile(damaged)
    assert time.process_time() - start < 20  # some milliseconds each


@pytest.mark.parametrize("counts", [(1 << 40, 0), (0, 1 << 60), (1, 1)])
def test_counts_of_nothing_are_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    with pytest.raises(FormatError, match=r"m\.gguf: .* do not fit the 0 bytes that are left"):
        GGUFFile(path)


def test_a_large_vocabulary_opens_at_once(tmp_path: Path) -> None:
    path, count = tmp_path / "m.gguf", 1 << 18
    texts = b"".join(struct.pack("<Q", 5) + b"%05x" % i for i in range(count))

    def key(name: bytes, kind: int, body: bytes) -> bytes:
        head = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, kind, count)
        return head + body

    body = key(b"tokens", 8, texts) + key(b"scores", 6, bytes(4 * count))
    body += key(b"types", 5, np.arange(count, dtype="<i4").tobytes())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + body)
    start = time.process_time()
    found = GGUFFile(path).metadata
    assert time.process_time() - start < 1.5  # 0.1 s; the package takes a minute
    assert (found["tokens"][-1], found["types"][-1], len(found["scores"])) == (
        "3ffff",
        count - 1,
        count,
    )
