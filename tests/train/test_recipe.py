"""What a run of fine-tuning notes of itself, and what it says of a step that failed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from qoff.cli.main import app
from qoff.errors import DiskWriteError
from qoff.hf.generation_config import GENERATION_CONFIG
from qoff.train import checkpoints
from qoff.train.logs import Log, Told, begin
from tests.tiny_models import tiny_model


@pytest.fixture
def options(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"the number {i}"}) + "\n" for i in range(9)))
    model = tiny_model(tmp_path_factory.getbasetemp(), "llama")
    sizes = ["--sequence", 24, "--micro-batches", 2]
    return ["finetune", model, data, "--full", "-o", tmp_path / "out", *sizes]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(x) for x in arguments])


def test_a_run_whose_norm_is_only_measured_goes_on(options: list[object], tmp_path: Path) -> None:
    for steps in (1, 2):
        result = run(*options, "--max-norm", "inf", "--steps", steps)
        assert result.exit_code == 0, result.output
    position = json.loads((tmp_path / "out" / "checkpoint" / "run.json").read_text())["position"]
    assert position["max_norm"] == "inf"
    other = run(*options, "--max-norm", 1, "--steps", 3)
    assert "its max_norm is inf, here 1.0" in other.output


def test_a_log_on_a_full_disk_is_named_and_keeps_what_it_has(tmp_path: Path) -> None:
    told = Told(1, 2.0, None, 1e-3, 10.0)
    with pytest.raises(DiskWriteError, match=r"^/dev/full: No space left on device"):
        Log(Path("/dev/full"), None).add(told)
    path = tmp_path / "log.csv"
    begin(path, 0)
    Log(path, None).add(told)
    before = path.read_text()
    (tmp_path / "log.csv.new").symlink_to("/dev/full")
    with pytest.raises(DiskWriteError, match=r"log\.csv: No space left on device"):
        begin(path, 1)
    assert path.read_text() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_step_that_a_checkpoint_has_is_logged(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header has its name when the folder cannot be synced: the run goes on behind it."""

    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def logged() -> list[str]:
        rows = (tmp_path / "out" / "log.csv").read_text().splitlines()
        return [row.partition(",")[0] for row in rows[1:]]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "sync_directory", fails)
        result = run(*options, "--steps", 1)
    assert result.exit_code == 1
    assert "the checkpoint of step 1 is there" in result.output
    assert logged() == ["1"]
    result = run(*options, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert logged() == ["1", "2"]


def test_a_row_that_a_full_disk_cut_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    begin(path, 0)
    Log(path, None).add(Told(1, 2.0, None, 1e-3, 10.0))
    whole = path.read_text()
    path.write_text(f"{whole}1")  # of step 12
    begin(path, 3)
    assert path.read_text() == whole


def test_a_tokenizer_that_cannot_be_written_is_one_line(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tokenizers raises plain exceptions for what the system says; nothing is left half-written."""

    def cut(self: object, folder: str, **_: object) -> None:
        (Path(folder) / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", cut)
    result = run(*options, "--steps", 1)
    assert result.exit_code == 1
    said = result.stderr.splitlines()[-1]
    assert said == f"qoff: {tmp_path / 'out'}: No space left on device (os error 28)"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_how_a_model_generates_is_read_or_named(options: list[object], tmp_path: Path) -> None:
    """transformers takes a file that cannot be read for one that is not there."""
    model, given = tmp_path / "model", GENERATION_CONFIG
    shutil.copytree(str(options[1]), model)
    (model / given).write_text('{"temperature": 0.5, "do_sample": true}')
    options[1] = model
    result = run(*options, "--steps", 1)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out" / given).read_text())
    assert (saved["temperature"], saved["do_sample"]) == (0.5, True)
    (model / given).unlink()
    (model / given).symlink_to("/proc/self/mem")  # whose first bytes are an input/output error
    result = run(*options, "--steps", 1, "--overwrite")
    assert result.exit_code == 1
    assert f"{model / given}: " in result.stderr.splitlines()[-1]
    assert "Input/output error" in result.stderr.splitlines()[-1]


def test_a_step_that_failed_is_counted_behind_the_last_one(options: list[object]) -> None:
    result = run(*options, "--lr", 1e30, "--max-norm", 1, "--steps", 4)
    assert result.exit_code == 1
    said = result.output.splitlines()[-1]
    assert "step 2: the norm of the gradients is nan; weights are as before" in said
    assert "lower the learning rate" in said
    assert said.endswith("of step 1")
