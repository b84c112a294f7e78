"""What was written is what is read: by qoff, and by the safetensors library."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from qoff.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    QuantEntry,
    TensorEntry,
    WeightFile,
    read_weight,
    tensors_of,
    verify,
    view_weight,
)
from qoff.checkpoint.layout import DTYPES, INDEX_FILE
from qoff.errors import DiskReadError
from qoff.kernels.layout.packing import PACKINGS
from qoff.kernels.layout.scales import SCALE_DTYPES
from qoff.quant import QTensor
from tests.checkpoint.samples import write as write_checkpoint
from tests.kernels.operands import random_weight

Weights = dict[str, QTensor | Tensor]


def dense(shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 200, shape).to(dtype)


quantized = st.builds(
    lambda n, groups, bits, group, packing, scale: random_weight(
        n, groups * group, bits, group, packing=packing, scale_dtype=scale
    ),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(list(PACKINGS)),
    st.sampled_from(SCALE_DTYPES),
)
shapes = st.lists(st.integers(0, 5), max_size=4)
dense_tensors = st.builds(dense, shapes, st.sampled_from(list(DTYPES.values())))
names = st.text(st.characters(categories=["L", "N"], include_characters="._- /"), min_size=1)


@st.composite
def files(draw: st.DrawFn) -> list[Weights]:
    """The weights of a few files, no name twice."""
    weights = draw(st.lists(quantized | dense_tensors, max_size=6))
    count = len(weights)
    unique = draw(st.lists(names, min_size=count, max_size=count, unique=True))
    items: list[tuple[str, Any]] = [(f"{n}.w", w) for n, w in zip(unique, weights, strict=True)]
    cut = draw(st.integers(0, count))
    return [dict(items[:cut]), dict(items[cut:])]


def parts_of(name: str, weight: QTensor | Tensor) -> dict[str, Tensor]:
    if isinstance(weight, QTensor):
        return {f"{name}.codes": weight.codes, f"{name}.scale_min": weight.scale_min}
    return {name: weight}


def same(a: QTensor | Tensor, b: QTensor | Tensor) -> bool:
    """Whether all bits are the same."""
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        described = (a.shape, a.bits, a.group_size, a.packing)
        return (
            described == (b.shape, b.bits, b.group_size, b.packing)
            and same(a.codes, b.codes)
            and same(a.scale_min, b.scale_min)
        )
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def write(folder: Path, layers: list[Weights], outer: Weights) -> Checkpoint:
    with CheckpointWriter(folder) as writer:
        for i, weights in enumerate(layers):
            writer.write_layer(i, weights)
        writer.write_outer(outer)
        writer.finish({"num_hidden_layers": len(layers), "hidden_size": 7})
    return Checkpoint.open(folder)


def check_file(file: WeightFile, weights: Weights) -> None:
    data = file.path.read_bytes()
    parts = {n: parts_of(n, w).values() for n, w in weights.items()}
    whole = [n for n, some in parts.items() if not any(part.nbytes % 16 for part in some)]
    assert list(file.weights)[: len(whole)] == whole
    assert file.weights.keys() == weights.keys()
    for name in whole:  # what a GPU reads 16 bytes of at once
        assert all(t.offset % 16 == 0 for t in tensors_of(file.weights[name]))
    assert file.data_start % 4096 == 0
    assert (file.nbytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    tensors = [t for entry in file.weights.values() for t in tensors_of(entry)]
    assert sum(t.nbytes for t in tensors) == file.nbytes - file.data_start
    assert [t.offset for t in tensors] == sorted(t.offset for t in tensors)
    for name, weight in weights.items():
        assert same(read_weight(file, file.weights[name]), weight)
    with safe_open(file.path, "pt") as plain:
        expected = {k: v for n, w in weights.items() for k, v in parts_of(n, w).items()}
        assert set(plain.keys()) == set(expected)
        assert all(same(plain.get_tensor(k), v) for k, v in expected.items())


@given(files())
def test_any_weights_come_back_bit_for_bit(parts: list[Weights]) -> None:
    with TemporaryDirectory() as folder:
        layer, outer = parts
        checkpoint = write(Path(folder) / "model", [layer], outer)
        check_file(checkpoint.layers[0], layer)
        check_file(checkpoint.outer, outer)
        assert checkpoint.config["hidden_size"] == 7
        assert checkpoint.config["quantization_config"]["quant_method"] == "qoff"
        index = json.loads((Path(folder) / "model" / INDEX_FILE).read_text())
        assert index["weight_map"] == checkpoint.weight_map
        verify(Path(folder) / "model")


def test_strided_and_scalar_tensors_and_parameters_are_stored(tmp_path: Path) -> None:
    weights: Weights = {
        "scalar": torch.tensor(2.5),
        "strided": torch.randn(6, 4).T[::2],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "empty": torch.empty(0, 5),
    }
    check_file(write(tmp_path / "model", [], weights).outer, weights)


def test_viewed_weights_share_the_memory_they_lie_in(tmp_path: Path) -> None:
    file = Checkpoint.open(write_checkpoint(tmp_path / "model")).layers[0]
    memory = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.uint8)
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    for entry in file.weights.values():
        viewed = view_weight(entry, lambda t: memory[t.offset : t.offset + t.nbytes])
        assert same(viewed, read_weight(file, entry))
        for part in parts_of("w", viewed).values():
            assert start <= part.data_ptr() < end
        kinds = {QTensor: QuantEntry, Tensor: TensorEntry}
        assert isinstance(entry, kinds[type(viewed)])


def test_a_file_cut_after_opening_is_a_disk_error(tmp_path: Path) -> None:
    file = Checkpoint.open(write_checkpoint(tmp_path / "model")).layers[0]
    with file.path.open("r+b") as opened:
        opened.truncate(file.nbytes - 1)
    with pytest.raises(DiskReadError, match="model-layer-00000"):
        read_weight(file, list(file.weights.values())[-1])


def test_verify_reports_progress_up_to_the_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    calls: list[tuple[int, int]] = []
    report = verify(folder, lambda done, total: calls.append((done, total)))
    total = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert (report.files, report.nbytes) == (4, total)
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def test_the_hub_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    write_checkpoint(snapshot)
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(Path("../../blobs") / str(i))
    assert len(Checkpoint.open(snapshot).layers) == 3
