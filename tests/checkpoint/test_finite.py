"""NaN and infinity in a file whose checksum is right are found when it is first read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from qoff.checkpoint import Checkpoint, FileCheck, QuantEntry, verify
from qoff.checkpoint.layout import TensorEntry, WeightFile
from qoff.errors import ChecksumError, FormatError
from qoff.memory import WeightStore, plan_residency
from tests.checkpoint.samples import LAYER, MATRIX, set_bytes, write

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def damaged(folder: Path, value: float, at: int = 5) -> Path:
    """A checkpoint with one scale of layer 1 changed, and the checksums of what it is now."""
    write(folder)
    file = Checkpoint.open(folder).layers[1]
    entry = file.weights[MATRIX]
    assert isinstance(entry, QuantEntry)
    scales = entry.scale_min
    data = bytearray(file.path.read_bytes())
    first = scales.offset + at * scales.dtype.itemsize
    raw = torch.tensor([value], dtype=scales.dtype).view(torch.uint8).numpy().tobytes()
    data[first : first + len(raw)] = raw
    set_bytes(folder, LAYER, bytes(data))
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -65504.0])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_scale_is_found_when_it_is_first_read(
    tmp_path: Path, value: float, streamed: bool
) -> None:
    folder = damaged(tmp_path / "model", value)
    checkpoint = Checkpoint.open(folder)
    everything = plan_residency(checkpoint, None, 2, packing="split32").device_bytes

    def read() -> None:
        budget = everything - 1 if streamed else None
        plan = plan_residency(checkpoint, budget, 2, packing="split32")
        with WeightStore(checkpoint, plan) as store:
            for layer in range(3):
                with store.use(layer):
                    pass

    for run in (read, lambda: verify(folder)):
        if value == -65504.0:
            run()
            continue
        with pytest.raises(FormatError, match=rf"{LAYER}: '{MATRIX}\.scale_min' holds NaN") as e:
            run()
        assert not isinstance(e.value, ChecksumError)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf"), None])
def test_every_place_of_every_type(dtype: torch.dtype, bad: float | None) -> None:
    """In pieces of 64 bytes, some of which have the end of one tensor and the start of another."""
    largest = torch.finfo(dtype).max
    for at in range(0, 40, 3):
        values = torch.tensor([largest, -largest, 0.0, -0.0] * 10, dtype=dtype)
        if bad is not None:
            values[at] = bad
        data = bytes(24) + values.view(torch.uint8).numpy().tobytes() + b"\xff" * 40
        first = TensorEntry("codes", torch.uint8, (24,), 0, 24)
        floats = TensorEntry("floats", dtype, (40,), 24, values.nbytes)
        last = TensorEntry("more codes", torch.uint8, (40,), 24 + values.nbytes, 40)
        weights = {entry.name: entry for entry in (last, first, floats)}
        sha = hashlib.sha256(data).hexdigest()
        check = FileCheck(WeightFile(Path("file"), 0, len(data), sha, weights))
        for start in range(0, len(data), 64):
            check.update(np.frombuffer(data[start : start + 64], np.uint8))
        if bad is None:
            check.finish()
            return
        with pytest.raises(FormatError, match="file: 'floats' holds NaN or infinity"):
            check.finish()


@pytest.mark.parametrize(("bad", "named"), [([3], "one"), ([3, 25], "one"), ([25], "other")])
def test_the_first_of_several_tensors_is_named(bad: list[int], named: str) -> None:
    """In whatever order the index has them."""
    values = torch.zeros(40)
    values[bad] = torch.nan
    data = values.numpy().tobytes()
    entries = [
        TensorEntry(n, torch.float32, (20,), at, 80) for n, at in (("other", 80), ("one", 0))
    ]
    weights = {entry.name: entry for entry in entries}
    check = FileCheck(WeightFile(Path("file"), 0, 160, hashlib.sha256(data).hexdigest(), weights))
    for start in range(0, len(data), 64):
        check.update(np.frombuffer(data[start : start + 64], np.uint8))
    with pytest.raises(FormatError, match=f"file: '{named}' holds NaN or infinity"):
        check.finish()
