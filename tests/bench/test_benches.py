"""The benches run, compare the same computations, and write what they say. No time is asserted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import conversion, cpu_matmul, disk_stream
from bench.bandwidth import ReadBandwidth, read_all, read_pieces
from bench.greedy import generate as native_generate
from bench.harness import Bar, Report, arguments
from bench.peers import accelerate_offload
from bench.peers.int4 import DequantizeGemm, TorchInt4
from bench.random_model import TINYLLAMA, random_matrix, write_random_checkpoint
from qoff.checkpoint import Checkpoint, verify
from qoff.errors import QoffError
from qoff.measure.machine import machine, versions
from qoff.measure.samples import Samples
from qoff.models.runtime import Runtime
from tests.tiny_models import tiny_checkpoint, tiny_model

TINY_SHAPE = TINYLLAMA | {
    "hidden_size": 128,
    "num_hidden_layers": 12,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


def test_a_report_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("name", {"rounds": 1}, "title", ("", "b"), rows=[("label", "1.5")])
    report.bars = [Bar("reached", 1.0, 1.0), Bar("missed", 1.0, 0.99)]
    path = report.publish(tmp_path / "new" / "out.json")
    printed = capsys.readouterr().out
    assert "label" in printed
    assert "NOT MET: missed" in printed
    written = json.loads(path.read_text())
    assert [bar["met"] for bar in written["bars"]] == [True, False]
    assert written["machine"].keys() == machine().keys()
    assert written["versions"].keys() == versions().keys()


@pytest.mark.parametrize("into_a_folder", [False, True])
def test_an_out_that_cannot_be_written_is_refused_before_measuring(
    into_a_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out, said = (tmp_path, "is a folder") if into_a_folder else (tmp_path / "file" / "x", "exists")
    with pytest.raises(SystemExit, match="2"):
        arguments("", ["--out", str(out)])
    assert said in capsys.readouterr().err
    assert arguments("", ["--out", str(tmp_path / "new" / "x")]).out.parent.is_dir()


def test_reading_memory_reads_all_of_it() -> None:
    reading = ReadBandwidth(3 << 20)
    buffer = reading.buffer
    buffer.copy_(torch.randint(-8, 8, buffer.shape))
    assert read_all(buffer) == buffer.sum().item()
    seconds = {name: Samples((way(),)) for name, way in reading.ways().items()}
    fastest = min(samples.median for samples in seconds.values())
    assert math.isclose(reading.best(seconds).median, (3 << 20) / fastest)


@pytest.mark.parametrize("count", [1, 16, 37])
def test_pieces_are_read_once_each(count: int) -> None:
    memory = torch.randint(-8, 8, (50, 128)).float()
    chosen = torch.randperm(50)[:count]
    assert read_pieces(memory.data_ptr() + 512 * chosen, 512) == memory[chosen].sum().item()


@pytest.mark.parametrize("tile", [16, 48, 256])
def test_int4_peers_compute_the_product(tile: int) -> None:
    weight = random_matrix((80, 192), 4, torch.Generator().manual_seed(3))
    x = torch.randn(5, 192)
    truth = x @ weight.dequantize().T
    out = DequantizeGemm(weight, tile, {})(x, torch.empty(5, 80))
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    rounded = TorchInt4(weight)(x.bfloat16()).float()
    assert (rounded - truth).norm() < 0.02 * truth.norm()


def test_a_peer_that_computes_something_else_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_matmul, "COPIES_BYTES", 1)

    class Wrong(cpu_matmul.Operands):
        def calls(self, tokens: int) -> dict[str, Callable[[], torch.Tensor]]:
            calls = super().calls(tokens)
            return {**calls, cpu_matmul.TORCH: lambda: 1.1 * calls[cpu_matmul.TORCH]()}

    with pytest.raises(QoffError, match="torch int4 is off by"):
        cpu_matmul.check(Wrong(64, 256))


def test_the_matmul_bench_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_matmul, "QUICK_SHAPES", ((64, 1024),))
    monkeypatch.setattr(cpu_matmul, "COPIES_BYTES", 1 << 18)
    cpu_matmul.main(["--quick", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written["ratios"]) == {"64x1024 M=1", "64x1024 M=16"}
    assert written["measured"]["64x1024 M=1"]["weight_bytes"] == 64 * 1024 // 2 + 64 * 16 * 4
    assert "64 x 1024" in capsys.readouterr().out


def test_the_random_model_is_a_checkpoint_that_computes_numbers(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "random", TINY_SHAPE)
    verify(tmp_path / "random")
    assert len(Checkpoint.open(tmp_path / "random").layers) == 12
    with Runtime(tmp_path / "random") as runtime:
        tokens, _ = native_generate(runtime, torch.arange(6)[None], 4)
    assert tokens.shape == (1, 4)
    weight = random_matrix((64, 256), 8, torch.Generator()).dequantize()
    assert 0.9 < weight.std() * 256**0.5 < 1.2


def test_the_disk_bench_runs_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_stream, "SMALL", TINY_SHAPE)
    folder = tmp_path / "models"
    folder.mkdir()
    disk_stream.main(["--quick", "--folder", str(folder), "--out", str(tmp_path / "out.json")])
    assert list(folder.iterdir()) == []
    written = json.loads((tmp_path / "out.json").read_text())
    settings, measured = written["settings"], written["measured"]
    assert settings["arena_bytes"] <= settings["device_memory"] < settings["model_bytes"] / 4
    assert 0 < measured["beside"]["disk_bytes_per_token"]["median"] < settings["model_bytes"]
    assert 0 < measured["beside"]["disk_busy"]["median"] <= 1


def test_accelerate_has_all_weights_on_disk(tmp_path: Path) -> None:
    peer = accelerate_offload.Offloaded(TINY_SHAPE, tmp_path / "weights")
    assert all(parameter.is_meta for parameter in peer._model.parameters())
    assert peer.nbytes == sum(2 * p.numel() for p in peer._model.parameters())
    peer.drop_page_cache()
    assert peer.token() > 0


def test_a_conversion_is_timed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tiny_model(tmp_path_factory.getbasetemp(), "llama")
    options = ["--options", "--solver rtn --no-measure --group-size 32"]
    conversion.main(["--model", str(source), "--out", str(tmp_path / "x.json"), *options])
    measured = json.loads((tmp_path / "x.json").read_text())["measured"]
    assert measured.keys() == {"seconds", "bytes"}
    assert measured["bytes"] > 0
