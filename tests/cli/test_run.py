"""`qoff run`: programs that never import qoff load its checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from qoff.cli.main import app
from tests.tiny_models import tiny_checkpoint

LOADING = """import sys
from transformers import AutoModelForCausalLM

assert __name__ == "__main__"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model).__name__, sys.argv[2:])
"""
# lm_eval without the 14,000 files of its own tasks, which take 10 s to read.
LM_EVAL = """import runpy
import sys

assert "qoff" in sys.modules
import lm_eval.tasks.manager

lm_eval.tasks.manager.__file__ = {file!r}
runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
"""
TASK = """task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: a
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and the interpreter's arguments and paths as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def qoff_run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


def test_an_error_of_the_system_in_a_program_is_told_as_python_does(folder: Path) -> None:
    """It is the program's, and not one of writing qoff's own output."""
    (folder / "program.py").write_text("print('begun')\nopen('gone.txt')\n")
    command = [sys.executable, "-m", "qoff", "run", "program.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, env=env, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "begun\n")
    assert "Traceback" in done.stderr
    assert done.stderr.endswith(
        "FileNotFoundError: [Errno 2] No such file or directory: 'gone.txt'\n"
    )


def test_a_program_without_input_is_told_as_python_does(folder: Path) -> None:
    (folder / "program.py").write_text("input()\n")
    found = qoff_run("program.py")
    assert found.exit_code == 1
    assert "Traceback" in found.stderr
    assert found.stderr.endswith("EOFError: EOF when reading a line\n")


def test_a_script_loads_a_checkpoint_and_gets_its_arguments(checkpoint: Path, folder: Path) -> None:
    (folder / "script.py").write_text(LOADING)
    found = qoff_run("script.py", checkpoint, "--help", "-m", "x", "--", "y")
    assert found.exit_code == 0, found.output
    assert found.stdout.strip() == "LlamaForCausalLM ['--help', '-m', 'x', '--', 'y']"


@pytest.mark.slow
def test_the_command_line_of_lm_eval_evaluates_a_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    documents = [{"q": "abc", "c": ["d", "x"], "a": 0}, {"q": "", "c": ["a", "b", "c"], "a": 2}]
    data = tmp_path / "letters.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "letters.yaml").write_text(TASK.format(data=data))
    (tmp_path / "no-tasks").mkdir()
    code = LM_EVAL.format(file=str(tmp_path / "no-tasks" / "manager.py"))
    (tmp_path / "short_lm_eval.py").write_text(code)
    found = subprocess.run(
        [
            *(sys.executable, "-m", "qoff", "run", "-m", "short_lm_eval"),
            *("run", "--model", "hf", "--model_args", f"pretrained={checkpoint}"),
            *("--tasks", "letters", "--include_path", tmp_path, "--device", "cpu"),
            *("--output_path", tmp_path / "out"),
        ],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["n-samples"]["letters"]["effective"] == 2
    assert results["results"]["letters"]["acc,none"] in (0, 0.5, 1)


def test_the_programs_exit_status_is_passed_on(folder: Path) -> None:
    (folder / "script.py").write_text("raise SystemExit(7)")
    assert qoff_run("script.py").exit_code == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "no_such.module"], "no module 'no_such.module'"),
        (["no_such.py"], "no_such.py: there is no such script"),
    ],
)
def test_a_program_that_is_not_there_is_one_line(
    arguments: list[str], message: str, folder: Path
) -> None:
    found = qoff_run(*arguments)
    assert found.exit_code == 1
    assert message in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_model_is_no_script(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    found = qoff_run("model.gguf", "Why?")
    assert found.exit_code == 1
    assert "model.gguf is no Python script; models answer in qoff generate" in found.stderr


def test_an_option_without_its_module_is_wrong_usage(folder: Path) -> None:
    assert qoff_run("-m").exit_code == 2
