"""`qoff finetune`: what it leaves, that it goes on, and what it says when it cannot."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from qoff.checkpoint import Checkpoint
from qoff.cli.main import app
from qoff.errors import ArgumentError
from qoff.train import Training
from qoff.train.finetune import check_place
from qoff.train.same_model import model_digest
from tests.tiny_models import tiny_checkpoint, tiny_model

peft = pytest.importorskip("peft")
SAYS = [f"the number {i} is followed by {i + 1}" for i in range(6)]
QUICK = ["--sequence", 48, "--micro-batches", 2, "--steps", 4, "--save-every", 2]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"text": x}) + "\n" for x in SAYS))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["finetune", *map(str, arguments)])


def succeed(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def log(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_weights_learn_and_load_in_transformers(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--full", "-o", out, *QUICK, "--lr", 1e-2, "--max-norm", 1, "--steps", 8]
    options += ["--plot", tmp_path / "losses"]
    packed = tmp_path / "packed"
    said = succeed(
        model, data, *options, "--host-memory", 0, "--disk", tmp_path / "disk", "--packed", packed
    )
    assert "all weights after 8 steps" in said.stdout
    assert f"{packed}: {len(Checkpoint.open(packed).layers)} layers" in said.stdout
    rows = log(out)
    assert [row["step"] for row in rows] == [str(i) for i in range(1, 9)]
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    assert all(float(row["norm"]) > 0 for row in rows)
    assert all(row["held_out_loss"] == "" for row in rows)
    chart = (tmp_path / "losses.svg").read_text()
    assert "nats a token" in chart
    assert "held out" not in chart
    assert len(list(out.glob("model*.safetensors"))) > 1  # one layer at a time
    trained = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(model)
    theirs = dict(before.named_parameters())
    assert all(not torch.equal(p, theirs[name]) for name, p in trained.named_parameters())
    assert all(p.isfinite().all() for p in trained.parameters())
    header = out / "checkpoint" / "run.json"
    begun = json.loads(header.read_text())
    del begun["position"]["optimizer"], begun["position"]["gradients"]  # as of an older version
    header.write_text(json.dumps(begun))
    again = succeed(model, data, *options, "--packed", packed)  # nothing is left, wherever it lies
    assert "is at step 8 already, and 8 are wanted: nothing is learned" in again.output
    begun["position"]["gradients"] = "auto"  # float32, of this model; as of an older version
    header.write_text(json.dumps(begun))
    succeed(model, data, *options, "--gradients", "float32")
    other = run(model, data, *options, "--gradients", "bfloat16")
    assert "its gradients is float32, here bfloat16" in other.output


def test_a_run_that_was_ended_goes_on_bit_for_bit(
    data: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters on a qoff checkpoint: Ctrl-C in the fourth step, after the second was saved."""
    base = tmp_path_factory.getbasetemp()
    path = tiny_checkpoint(base, "llama")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [path, data, "--lora", "r=4,alpha=8,dropout=0.1", *QUICK, "--lr", 1e-2]
    succeed(*options, "-o", whole)
    step = Training.step

    def ended(self: Training, batches: Any) -> float:
        if self.steps == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Training, "step", ended)
            result = run(*options, "-o", parts)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert "interrupted after step 3; the last checkpoint is" in result.output
    assert "of step 2" in result.output
    assert result.output.count("interrupted") == 1
    assert len(log(parts)) == 3
    assert "goes on after step 2" in succeed(*options, "-o", parts).output
    assert [r["loss"] for r in log(parts)] == [r["loss"] for r in log(whole)]
    ours, theirs = (load_file(x / "adapter_model.safetensors") for x in (parts, whole))
    assert ours
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model(base, "llama")), parts
    )
    assert loaded.peft_config["default"].lora_alpha == 8

    monkeypatch.delattr("qoff.train.finetune.loaded")  # it is refused before
    other = run(*options, "-o", parts, "--seed", 5)
    assert other.exit_code == 1
    assert "is of another run: its seed is 0, here 5" in other.output
    assert "begin anew with --overwrite" in other.output
    here = tmp_path / "model"
    shutil.copytree(path, here)
    header = json.loads((parts / "checkpoint/run.json").read_text())
    header["position"]["model"] = str(here)
    (parts / "checkpoint/run.json").write_text(json.dumps(header))
    assert "is of another run: its lr" in run(here, *options[1:], "-o", parts, "--lr", 1).output
    shutil.rmtree(here)
    shutil.copytree(tiny_checkpoint(base, "llama", bits=8), here)
    assert "is of another run: its model_digest" in run(here, *options[1:], "-o", parts).output


def test_a_model_is_known_by_its_weights(model: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(model, tmp_path / "copied")
    assert model_digest(copied) == model_digest(model)
    (file,) = copied.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] += 1
    save_file(weights, file, {"format": "pt"})
    assert model_digest(copied) != model_digest(model)


def test_a_result_of_the_other_kind_goes(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for kind in (["--lora", "r=4"], ["--full"], ["--lora", "r=4"]):
        succeed(model, data, "-o", out, *QUICK, *kind, "--steps", 1, "--overwrite")
        names = {path.name for path in out.iterdir()}
        adapter = {"adapter_config.json", "adapter_model.safetensors"}
        whole = {"config.json", "model.safetensors.index.json"}
        assert names & (adapter | whole) == (whole if kind == ["--full"] else adapter)
        assert bool(list(out.glob("model*.safetensors"))) == (kind == ["--full"])
        assert {"log.csv", "checkpoint", "tokenizer.json"} <= names


def test_a_folder_with_files_of_others_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()  # a file manager's, which is in nobody's way
    check_place(tmp_path, overwrite=False)
    (tmp_path / "letters").touch()
    with pytest.raises(ArgumentError, match="is there, and no run of qoff"):
        check_place(tmp_path, overwrite=False)


def test_more_epochs_say_what_the_last_step_of_fewer_had_no_room_for(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """Of 12 sequences, 5 a step: the third has 2 of them, and 5 steps are 2 epochs."""
    out = tmp_path / "out"
    options = [model, data, "--full", "-o", out, "--sequence", 20, "--micro-batches", 5]
    succeed(*options, "--epochs", 1)
    assert len(log(out)) == 3
    again = succeed(*options, "--epochs", 2).output
    assert "goes on after step 3" in again
    assert "room for more sequences: the next 3 of the data are left out" in again
    assert len(log(out)) == 5
    assert "at step 5 already, and 1 are wanted" in succeed(*options, "--steps", 1).output


def test_rates_fall_and_what_is_held_out_is_evaluated(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--full", "-o", out, *QUICK, "--lr", 1e-2, "--schedule", "linear", "--warmup", 2]
    said = succeed(model, data, *options, "--hold-out", 0.2, "--sequence", 20)
    rows = log(out)
    assert [float(row["lr"]) for row in rows] == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])
    held_out = [row["held_out_loss"] for row in rows]
    assert held_out[0] == held_out[2] == ""
    assert float(held_out[3]) < float(held_out[1])
    assert "held out" in said.output
    longer = run(model, data, *options, "--hold-out", 0.2, "--sequence", 20, "--steps", 6)
    assert "its decay_steps is 4, here 6" in longer.output
    few = run(model, data, *options, "--hold-out", 0.2, "--sequence", 5000, "--overwrite")
    assert "too few to hold some out" in few.output


def test_curves_are_for_tensorboard(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--full", "-o", tmp_path / "out", *QUICK, "--tensorboard", tmp_path / "board"]
    options += ["--optimizer", "adafactor"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard", None)
        patch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        assert "need tensorboard, which is not installed" in run(model, data, *options).output
    found: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            found.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            found.append((step, name, value))

        def flush(self) -> None: ...
        def close(self) -> None:
            found.append("closed")

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer)
    )
    succeed(model, data, *options, "--hold-out", 0.2, "--sequence", 20)
    assert found[0] == (str(tmp_path / "board"), 1)
    assert found[-1] == "closed"
    rows = log(tmp_path / "out")
    wanted = [
        (int(row["step"]), f"train/{name}", float(row[name]))
        for row in rows
        for name in ("loss", "lr", "held_out_loss")
        if row[name]
    ]
    assert [x for x in found[1:-1] if x[1] != "train/tokens_per_s"] == wanted
    assert len(found) == 2 + len(wanted) + len(rows)


def test_a_bad_schedule_is_refused_before_the_model_is_loaded(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("qoff.train.finetune.loaded")
    options = ["--full", "-o", tmp_path / "out", *QUICK, "--schedule", "linear", "--warmup", 4]
    result = run(model, data, *options)
    assert result.exit_code == 1
    assert "4 of them warm-up; use fewer warm-up steps" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_said_in_a_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("qoff.train.finetune.loaded")
    result = run(model, data, "--full", "-o", tmp_path / "out", *QUICK, "--device", "cuda")
    assert result.exit_code == 1
    assert "there is no GPU that torch can use; train with device 'cpu'" in result.output
    assert len(result.output.splitlines()) == 1


def test_a_run_that_ends_while_it_evaluates_has_a_checkpoint_and_its_row(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def ended(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "evaluate", ended)
    options = ["--full", "-o", out, *QUICK, "--hold-out", 0.2, "--sequence", 20]
    result = run(model, data, *options)
    assert result.exit_code == 130
    assert "of step 2" in result.output
    assert [row["step"] for row in log(out)] == ["1", "2"]


def test_tokens_that_the_model_does_not_have_are_refused_before_the_first_step(
    model: Path, data: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more"
    shutil.copytree(model, more)
    tokenizer = AutoTokenizer.from_pretrained(more)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(more)
    lines = tmp_path / "data.jsonl"
    lines.write_text(data.read_text() * 9 + json.dumps({"text": "a <new> word"}) + "\n")
    result = run(more, lines, "--full", "-o", tmp_path / "out", *QUICK, "--steps", 1)
    assert result.exit_code == 1
    assert f"have {len(tokenizer) - 1}; this model's vocabulary is" in result.output


@pytest.mark.parametrize(
    ("every", "said"), [(50, "step 3: the loss is nan"), (1, "step 2: weights are not finite")]
)
def test_weights_that_are_not_finite_replace_no_checkpoint(
    every: int, said: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """Of those after the second step nothing can be gone on with."""
    out = tmp_path / "out"
    result = run(model, data, "--full", "-o", out, *QUICK, "--lr", 1e30, "--save-every", every)
    assert result.exit_code == 1
    assert said in result.output
    where = "there is no checkpoint yet" if every > 1 else f"{out / 'checkpoint'}, of step 1"
    assert result.output.rstrip().endswith(where)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-norm", 0], "--max-norm is 0.0; use a number above 0, or leave it out"),
        (["--device-memory", "a"], "--device-memory: 'a' is not a size"),
        (["--host-memory", "a"], "--host-memory: 'a' is not a size"),
        (["--activation-memory", "a"], "--activation-memory: 'a' is not a size"),
        (["--activation-disk", "a"], "--activation-disk: 'a' is not a size"),
        (["--activation-disk", "1GiB"], "--activation-disk needs --disk, and --activation-memory"),
        (["--disk", "{file}/x"], "data.jsonl/x: Not a directory; choose another --disk"),
        (["-o", "{file}/x"], "data.jsonl: File exists; choose another --output"),
        (["-o", "{file}/x/y"], "data.jsonl/x: Not a directory; choose another --output"),
    ],
)
def test_an_option_is_refused_by_its_name_before_the_model_is_loaded(
    options: list[Any],
    said: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("qoff.train.finetune.loaded")
    given = [str(option).format(file=data) for option in options]
    result = run(model, data, "--full", "-o", tmp_path / "out", *QUICK, *given)
    assert result.exit_code == 1
    assert said in result.output
    assert len(result.output.splitlines()) == 1


def test_what_cannot_be_is_refused(
    model: Path, data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out, bad = tmp_path / "out", tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    base = tmp_path_factory.getbasetemp()
    checkpoint = tiny_checkpoint(base, "llama")
    full = ["--full", "-o", out]
    for arguments, said in (
        ([model, data, "-o", out], "say what learns: --lora r=16, or --full"),
        ([model, data, "-o", out, "--lora", "16"], "--lora 16: use r=16, or"),
        ([model, data, "--full", "-o", model, "--overwrite"], "is the model itself"),
        ([checkpoint, data, *full], "packed weights do not learn; use --lora"),
        ([model, bad, *full, "--strict"], "bad.jsonl: line 1: a line is {"),
        ([model, bad, *full], "bad.jsonl has no example that something is learned from"),
        ([model, data, "--full", "-o", model], "is there, and no run of qoff"),
        (
            [model, data, *full, "--host-memory", 0],
            "give a folder for the disk, or raise the bound",
        ),
        ([model, data, *full, "--packed", model], "is there, and no qoff checkpoint; choose"),
        ([model, data, *full, "--packed", tmp_path], "has the output in it; choose a folder of"),
        ([model, data, *full, "--packed", checkpoint], "is there, and no result of this run"),
        ([model, data, "-o", out, "--lora", "r=4", "--packed", out], "--packed is for --full"),
        ([model, data, *full, "--epochs", 0], "--epochs is 0.0; use a number above 0"),
        ([model, data, *full, "--epochs", "inf"], "--epochs is inf; use a number above 0"),
        ([model, data, *full, "--plot", bad / "losses"], "bad.jsonl: File exists; choose another"),
        ([model, data, *full, "--packed", bad / "packed"], "bad.jsonl: File exists; choose anoth"),
        ([model, data, "--full", "-o", bad / "out", "--steps", 1], "choose another --output"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1, arguments
        assert said in result.output
    assert "line 2: there is no message of the assistant" in run(model, bad, *full).output
    assert not out.exists()
