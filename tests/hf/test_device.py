"""Where models run on a machine with a GPU, as far as that is known before one computes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, OpError
from qoff.hf import device as module
from qoff.hf.checkpoints import find_checkpoint
from qoff.hf.device import check_packing
from qoff.hf.load import open_runtime
from qoff.hf.plugin.streaming import Streaming
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UnpackableError
from qoff.memory.instrumentation import Instrumentation
from qoff.models.native.caches import check_kv
from qoff.models.spec import DecoderSpec
from qoff.quant import matrix
from qoff.schema import read_object
from tests.cli.commands import fail
from tests.hf.plugin_models import load
from tests.tiny_models import QUANT, tiny_checkpoint, tiny_model

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that qoff can use, as far as is asked."""
    names = ("auto", "cuda", GPU)
    monkeypatch.setattr(
        module, "resolve_device", lambda name: GPU if name in names else torch.device(name)
    )
    monkeypatch.setattr("qoff.hf.load.resolve_device", module.resolve_device)
    monkeypatch.setattr(module, "ops_for", lambda _: None)


@pytest.fixture
def nothing_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "qoff.hf.checkpoints.convert", lambda *_, **__: pytest.fail("was converted")
    )


@pytest.mark.usefixtures("gpu", "nothing_is_converted")
def test_a_gpu_that_cannot_be_used_is_refused_before_the_conversion(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device) -> None:
        raise OpError("no GPU that torch can use")

    monkeypatch.setattr(module, "ops_for", missing)
    for opened in (qoff.load, qoff.LLM):
        with pytest.raises(OpError, match="no GPU that torch can use"):
            opened(tiny_model(base, "llama"), device="cuda", cache_dir=tmp_path)
    assert "no GPU that torch can use" in fail(
        "generate", tiny_model(base, "llama"), "x", "--device", "cuda", "--cache-dir", tmp_path
    )


def on_gpu(streaming: Streaming, _: object) -> dict[int, str]:
    streaming.device = GPU
    return {0: "disk"}


@pytest.mark.usefixtures("gpu")
def test_the_packing_of_the_cpu_is_refused_for_a_gpu_at_once(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, halves = (tiny_checkpoint(base, "llama", packing) for packing in ("rows16", "split32"))
    refused = r"use device='cpu' \(--device cpu\), or convert the model again without --for cpu"
    monkeypatch.setattr("qoff.hf.load.load_tokenizer", lambda *_: pytest.fail("was opened"))
    with pytest.raises(ArgumentError, match=refused):
        qoff.load(rows)
    assert find_checkpoint(halves, device=GPU) == halves
    assert find_checkpoint(rows) == rows
    check_packing(halves, Checkpoint.open(halves).config, GPU)
    assert "use device='cpu'" in fail("plan", rows, "--device", "cuda")
    monkeypatch.setattr(Streaming, "start", lambda _: pytest.fail("was loaded"))
    monkeypatch.setattr(Streaming, "mapped", on_gpu)
    with pytest.raises(ArgumentError, match=refused):
        load(rows, device_map="disk", offload_folder="unused")


def test_a_second_conversion_of_a_model_is_said(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for for_cpu in (True, False):
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            find_checkpoint(source, quant=QUANT, cache_dir=tmp_path, for_cpu=for_cpu)
    (line,) = (one.getMessage() for one in caplog.records)
    assert line.endswith("and now for a GPU, too")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_gpu_that_fails_leaves_the_conversion_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(matrix, "_fastest", lambda _: GPU)
    asked = list[torch.device]()

    def compute(place: torch.device) -> int:
        asked.append(place)
        if place.type == "cuda":
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore")
        return 7

    with caplog.at_level(logging.WARNING):
        assert [matrix.computed(compute, torch.device("cpu"), None, "w") for _ in "ab"] == [7, 7]
    assert [place.type for place in asked] == ["cuda", "cpu"] * 2
    (line,) = (one.getMessage() for one in caplog.records)
    assert line.endswith("as the GPU fails: CUDA error: all CUDA-capable devices are busy")
    with pytest.raises(RuntimeError):
        matrix.computed(compute, GPU, None, "w")
    monkeypatch.setattr(matrix, "_fastest", lambda _: compute(GPU))
    assert matrix.computed(compute, torch.device("cpu"), None, "w") == 7


@pytest.mark.usefixtures("gpu")
def test_beside_a_bound_of_a_gpu_what_is_free_in_host_memory_is_used(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpeningError(Exception):
        """Ends before the GPU is used."""

    def opened(*_: object, **options: object) -> None:
        found.append((options["device_memory"], options["host_memory"]))
        raise OpeningError

    found = list[tuple[object, object]]()
    monkeypatch.setattr("qoff.hf.load.Runtime", opened)
    monkeypatch.setattr(Instrumentation, "ops_for", lambda *_: None)
    free = {"device": 1 << 30, "host": 1 << 31, "disk": 1 << 40}
    monkeypatch.setattr("qoff.plan.default.usable_memory", lambda *_: free)
    for host in (None, 0, "1MiB"):
        with pytest.raises(OpeningError):
            open_runtime(checkpoint, device_memory="8MiB", host_memory=host)
    assert found == [(8 << 20, 1 << 31), (8 << 20, 0), (8 << 20, 1 << 20)]


def test_heads_that_cannot_be_packed_are_for_the_cpu(base: Path) -> None:
    spec = DecoderSpec.from_config(read_object(tiny_model(base, "llama") / "config.json"))
    said = r"device='cpu' \(--device cpu\)"
    for kv in (KVQuant(), None):
        with pytest.raises((UnpackableError, ArgumentError), match=said):
            check_kv(spec, kv, on_device=True)
