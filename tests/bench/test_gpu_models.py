"""Whole models on a GPU: FlexGen's flags, rows, bars; a row that fails or hangs costs itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_models import peers, rows
from bench.gpu_models.campaign import SYSTEMS
from bench.gpu_models.flexgen import plan_of
from bench.gpu_models.ours import ComputeClock, HostEvent, Place
from bench.gpu_models.report import Measured, ModelReport
from bench.gpu_models.rows import Row
from bench.random_model import write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM
from qoff.errors import ArgumentError
from qoff.kvcache import KVPlacement
from qoff.models.spec import DecoderSpec

ROOT = Path(__file__).resolve().parents[2]
OPT = {
    **rows.MODELS["opt-30b"],
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 512,
    "vocab_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
FLEXGEN = """
from types import SimpleNamespace

class AutoTokenizer: pass

def add_parser_arguments(parser):
    for name in ("model", "path", "offload-dir"):
        parser.add_argument("--" + name)
    for name in ("gpu-batch-size", "num-gpu-batches", "prompt-len", "gen-len", "cut-gen-len"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--percent", nargs="+", type=int)
    parser.add_argument("--compress-weight", action="store_true")
    parser.add_argument("--compress-cache", action="store_true")
    parser.add_argument("--log-file")

def run_flexgen(args):
    tokenizer = AutoTokenizer.from_pretrained("facebook/opt-30b", padding_side="left")
    ids = tokenizer(["Paris"], padding="max_length", max_length=args.prompt_len).input_ids
    assert args.path == "_DUMMY_" and len(ids[0]) == args.prompt_len
    open(args.log_file, "w").write(str(args.gpu_batch_size))

def read_benchmark_log(path):
    return SimpleNamespace(total_throughput=float(open(path).read()), decode_throughput=3.0,
                           prefill_latency=0.5)
"""


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flexgen") / "opt"
    write_random_checkpoint(path, OPT)
    return path


def test_flexgens_flags_are_a_plan(opt: Path) -> None:
    command = (
        "--model facebook/opt-30b --path _DUMMY_ --percent 100 0 25 50 0 100 --prompt-len 96 "
        "--gen-len 8 --gpu-batch-size 3 --num-gpu-batches 2 --cpu --compress-w --compress-c "
        "--sep-layer False --offload-dir /spill"
    )
    found = plan_of(command, Checkpoint.open(opt), prefill_tokens=128)
    plan = found.plan
    assert (found.model, found.prompt, found.new) == ("facebook/opt-30b", 96, 8)
    assert (plan.batch_size, plan.batches, plan.context) == (3, 2, 104)
    assert plan.prefill_tokens == 128
    assert plan.kv_placement == KVPlacement(0.25, 0.5)
    assert (plan.cpu_attention, plan.activations) == ("always", "host")
    assert (plan.device_memory, plan.host_memory) == (None, None)
    assert plan.spill_folder == Path("/spill")
    assert found.inexact == ()


def test_what_a_plan_cannot_express_is_said(opt: Path) -> None:
    command = "--overlap False --pin-weight 0 --gpu-batch-size 9"
    lines = plan_of(command, Checkpoint.open(opt)).inexact
    assert [line.split(":")[0] for line in lines] == [
        "no --compress-weight",
        "no --compress-cache",
        "--overlap False",
        "--sep-layer",
        "--pin-weight False",
        "a GPU batch of prompts in one pass",
    ]


@pytest.mark.parametrize(
    "command", ["--percent 100 0 100 0 50 50", "--percent 90 20 100 0 100 0", "--beams 4", "--co"]
)
def test_what_is_no_command_line_is_refused(opt: Path, command: str) -> None:
    with pytest.raises(ArgumentError, match=r"activations|--percent|not a command line"):
        plan_of(command, Checkpoint.open(opt))


@pytest.mark.parametrize(("device", "host"), [(0, 100), (40, 60), (50, 0), (20, 40)])
def test_percentages_of_weights_are_where_they_lie(opt: Path, device: int, host: int) -> None:
    command = f"--percent {device} {host} 100 0 100 0 --prompt-len 64 --gen-len 4"
    plan = plan_of(f"{command} --gpu-batch-size 1", Checkpoint.open(opt)).plan
    with LLM(opt, plan, device="cpu") as llm:
        residency = llm.runtime.residency
        total = sum(file.nbytes for file in llm.runtime.checkpoint.layers)
        total += llm.runtime.checkpoint.outer.nbytes
        assert residency.slots == (0 if device + host == 100 else 2)
        assert residency.resident_bytes / total == pytest.approx(device / 100, abs=0.1)
        if device + host == 100:  # nothing is left on disk
            before = llm.runtime.stats().disk_bytes
            llm.generate([[5] * 64])
            assert llm.runtime.stats().disk_bytes == before
        assert (residency.host_weight_bytes > 0) == (host > 0)


def test_threads_write_the_same_checkpoint(opt: Path, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "again", OPT, threads=3)
    names = {path.name for path in opt.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    same = [n for n in names if (opt / n).read_bytes() == (tmp_path / "again" / n).read_bytes()]
    assert {n for n in names if n.endswith(".safetensors")} <= {*same}


def test_rows_have_models_systems_and_names_of_their_own() -> None:
    for models, found in ((rows.MODELS, rows.ROWS), rows.rehearsed()):
        assert len({row.key for row in found}) == len(found)
        assert {row.system for row in found} <= {*SYSTEMS}
        for model in {row.model for row in found}:
            assert DecoderSpec.from_config(models[model]).num_layers


def test_idle_time_is_what_no_step_fills() -> None:
    now = 0.0

    class Event(HostEvent):
        def record(self) -> None:
            self._at = now

    clock = ComputeClock(make=Event)
    with clock.span("compute", "before it begins"):
        now += 5
    clock.begin(lambda: 7)
    for seconds, gap in ((2, 1), (3, 4), (1, 0)):
        with clock.span("disk to host", "no computation"):
            now += gap
        with clock.span("compute", "a layer"):
            now += seconds
    assert len(clock.steps) == 3
    assert clock.idle_share({7}) == pytest.approx(1 - 6 / 10)
    assert clock.idle_share({8}) is None


def measured(row: Row, rate: float, **more: Any) -> Measured:
    return Measured.of(row, {"tokens_per_s": rate, "prefill_s": 1.0, **more})


def test_bars_compare_links_flexgen_and_budgets() -> None:
    ours, theirs = Row("opt-30b", "qoff", "16GB"), Row("opt-30b", "flexgen", "16GB", label="c")
    found = [
        measured(ours, 40.0, link_bytes_per_s=48.0, link_alone=50.0, peak_bytes=9, budget_bytes=8),
        measured(Row("opt-30b", "qoff", "8GB"), 9.0, link_bytes_per_s=1.0, link_alone=50.0),
        measured(Row("opt-30b", "flexgen", "16GB", flags="--compress-weight"), 10.0),
        measured(theirs, 90.0),  # without compression
    ]
    bars = ModelReport({}, results=found).bars()
    values = [(bar.wanted, bar.measured, bar.met) for bar in bars]
    assert values == [(0.95, 0.96, True), (3.0, 4.0, True), (1.0, 8 / 9, False)]


def test_a_missing_flexgen_is_said_with_what_to_do(tmp_path: Path) -> None:
    place = Place(tmp_path, torch.device("cpu"), {})
    with pytest.raises(ArgumentError, match="pip download flexgen"):
        peers.flexgen(place, Row("opt-30b", "flexgen", "16GB"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal is for where there is no GPU")
@pytest.mark.timeout(120)
def test_a_rehearsal_brings_home_all_but_what_hangs(tmp_path: Path) -> None:
    """With a stand-in for FlexGen; a second call has nothing but the hanging row to do."""
    package = tmp_path / "site" / "flexgen"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "flex_opt.py").write_text(FLEXGEN)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bench.gpu_models", "--rehearse", "--out", str(out)]
    command += ["--flexgen", str(package.parent), "--folder", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    report = ModelReport.read((out / "gpu_models.json").read_text())
    _, wanted = rows.rehearsed()
    assert report.failed.keys() == {row.key for row in wanted if row.system == "hang"}
    assert "no sign of life" in next(iter(report.failed.values()))
    assert report.done == {row.key for row in wanted} - report.failed.keys()
    assert {*report.written} == {row.model for row in wanted}
    by_key = {one.key: one for one in report.results}
    streamed = next(one for key, one in by_key.items() if "from disk" in key)
    assert streamed.disk_bytes_per_s
    assert streamed.link_alone
    assert streamed.idle is None  # a round over what moves is one recording on a CPU
    assert (out / "gpu_models.txt").read_text().strip() in run.stdout
    assert "no sign of life" in (out / "log.txt").read_text()
    assert [path.name for path in tmp_path.iterdir() if "gpu-models" in path.name] == []
