"""All commands: what they print and write, and one line for each thing that can go wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.cli import command as cli_command
from tests.cli.commands import fail, run, succeed
from tests.tiny_models import load_budgets, tiny_checkpoint, tiny_model

# What `generate` and `eval` do not use with qoff's own decoder, and what it would take: 120 MB.
UNUSED = {
    "pandas",
    "scipy.optimize",
    "scipy.stats",
    "sklearn",
    "torch._dynamo",
    "torch._inductor",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "triton",
}
FAST = ["--solver", "rtn", "--group-size", "32"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


@pytest.mark.parametrize("packing", ["any", "cpu"])
def test_convert_writes_a_checkpoint_and_says_so(
    packing: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    printed = succeed("convert", source, out, *FAST, "--for", packing)
    assert printed.startswith(f"{out}: 4 layers, ")
    config = Checkpoint.open(out).config["quantization_config"]
    assert (config["bits"], config["group_size"], config["solver"]) == (4, 32, "rtn")
    assert config["packing"] == {"any": "split32", "cpu": "rows16"}[packing]


def test_convert_prints_json(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = json.loads(succeed("convert", source, out, *FAST, "--bits", 8, "--json"))
    files = list(out.glob("*.safetensors"))
    assert 0 < found.pop("kl_error") < found.pop("kl") < 0.01
    assert found == {
        "path": str(out),
        "layers": 4,
        "bytes": sum(f.stat().st_size for f in files),
        "kl_tokens": 512,
        "solver": "rtn",
    }


def test_convert_says_what_is_lost(source: Path, tmp_path: Path) -> None:
    much = succeed("convert", source, tmp_path / "a", *FAST)
    assert re.search(r"KL divergence from the source: 0\.\d{4,} \+- 0\.\d{4,} nats a token", much)
    assert succeed("convert", source, tmp_path / "b", *FAST, "--no-measure").count("\n") == 1


def test_convert_overwrites_only_when_told(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeed("convert", source, out, *FAST)
    before = (out / "config.json").read_bytes()
    assert f"{out}: " in fail("convert", source, out, *FAST, "--bits", 8)
    assert (out / "config.json").read_bytes() == before
    succeed("convert", source, out, *FAST, "--bits", 8, "--overwrite")
    assert (out / "config.json").read_bytes() != before


def test_verify_reads_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    assert succeed("verify", checkpoint).startswith(f"{checkpoint}: 5 files, ")
    found = json.loads(succeed("verify", checkpoint, "--json"))
    assert found["ok"] is True
    assert found["bytes"] == sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))


def test_env_describes_the_machine() -> None:
    found = json.loads(succeed("env", "--json"))
    assert {"python", "torch", "transformers", "memory", "disk", "gpu", "cores"} <= found.keys()
    assert found["cores"] == len(os.sched_getaffinity(0))
    printed = succeed("env")
    assert found["python"] in printed


def test_env_says_why_a_gpu_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="H1", total_memory=24 << 30, major=9, minor=0)
    for name, result in {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": gpu,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setitem(sys.modules, "qoff.kernels.triton.elementwise.rms_norm", None)
    found = json.loads(succeed("env", "--json"))
    assert found["gpu"].startswith("H1 24.0 GiB, compute capability 9.0 (not usable: the ops for")
    assert "device" in found["plans may use"]
    assert "driver" in found["cuda"]


def test_who_reads_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("qoff.cli.main.print_json", closed)
    result = run("env", "--json")
    assert (result.exit_code, result.output) == (1, "")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


LAYER = "model-layer-00001.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda p: flip(p / LAYER, -5), LAYER),
    "header": (lambda p: flip(p / LAYER, 3), LAYER),
    "truncated": (lambda p: os.truncate(p / LAYER, 5000), LAYER),
    "empty": (lambda p: os.truncate(p / LAYER, 0), LAYER),
    "missing": (lambda p: (p / LAYER).unlink(), LAYER),
    "index": (lambda p: (p / "model.safetensors.index.json").unlink(), "index.json"),
    "config": (lambda p: (p / "config.json").write_text("{"), "config.json"),
}


@pytest.mark.parametrize(("damage", "name"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_line_that_names_the_file(
    damage: Callable[[Path], object], name: str, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    damage(copy)
    assert name in fail("verify", copy)
    if name == LAYER:
        assert name in fail("generate", copy, "Hello")


def test_a_budget_that_is_too_small_names_the_least(checkpoint: Path) -> None:
    least, everything = load_budgets(checkpoint, context=5 + 128)
    line = fail("generate", checkpoint, "Hello", "--raw", "--device-memory", "1KiB")
    assert f"{least:,}" in line
    assert f"{everything:,}" in line
    assert "the budget is 1,024" in line


def test_a_path_that_is_not_utf8_is_refused_by_its_bytes(checkpoint: Path, tmp_path: Path) -> None:
    (other := tmp_path / "\udcff").symlink_to(checkpoint)
    for command in (["generate", other, "Hello"], ["batch", other, checkpoint / "config.json"]):
        assert r"/\xff': the path is not UTF-8, and libraries" in fail(*command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{tmp}/gone", "{tmp}/out"], "no such file or directory"),
        (["convert", "{tmp}", "{tmp}-out"], "no model.safetensors"),
        (["convert", "{source}", "{tmp}/out", "--solver", "magic"], "solver 'magic'"),
        (["convert", "{source}", "{tmp}/out", "--bits", "7"], "bits 7"),
        (["convert", "{source}", "{tmp}/out", "--group-size", "40"], "group_size 40"),
        (["convert", "{source}", "{tmp}/out", "--group-size", "128"], "does not divide"),
        (["convert", "{source}", "{tmp}/out", "--for", "toaster"], "'toaster'"),
        (["convert", "{source}", "{checkpoint}/config.json/out", *FAST], "cannot be written"),
        (["generate", "{tmp}/gone", "Hello"], "no such file or directory"),
        (["generate", "{tmp}", "Hello"], "no model.safetensors"),
        (["generate", "{checkpoint}", "Hello", "--device-memory", "much"], "'much' is not a size"),
        (["generate", "{checkpoint}", "", "--raw"], "the prompt has no tokens"),
        (["generate", "{checkpoint}", ""], "the prompt is empty; write something, or give --raw"),
        (["generate", "{checkpoint}", "a\udcff"], "the prompt is not UTF-8 (character 2"),
        (["generate", "{checkpoint}", "Hello", "--max-memory", "1GiB"], "like 0=12GiB,cpu=32GiB"),
        (
            ["generate", "{checkpoint}", "Hello", "--max-memory", "cpu=1GiB,cpu=2GiB"],
            "each once, not 'cpu=1GiB,cpu=2GiB'",
        ),
        (
            ["convert", "{source}", "{tmp}/out", "--weight", "*=8,32", "--weight", "*=4,32"],
            "--weight '*=4,32': * has a format already",
        ),
        (
            ["finetune", "{source}", "{source}/config.json", "--lora", "r=4,r=8", "-o", "{tmp}/o"],
            "--lora r=4,r=8: use r=16, or r=16,alpha=32,dropout=0.05, each once",
        ),
        (["generate", "", "Hello"], "'': no such file or directory"),
        (["generate", "{checkpoint}", "Hello", "--top-k", "5"], "--top-k is for sampling"),
        (["generate", "{checkpoint}", "Hello", "--seed", "5"], "give --temperature, too"),
        (["generate", "{checkpoint}", "Hello", "--revision", "main"], "models on the hub, and"),
        (
            ["generate", "{checkpoint}", "Hello", "--max-memory", "0=1GiB", "--device", "cpu"],
            "--max-memory names 0, and the model runs on the CPU",
        ),
        (["generate", "{checkpoint}", "Hello", "--max-memory", "cpu=x"], "--max-memory: 'x' is"),
        (["batch", "{checkpoint}", "{source}/config.json", "--kv", "none"], "of a batch is packed"),
        (["batch", "{checkpoint}", "{source}/config.json", "--errors", "{tmp}/e"], "-o FILE"),
        (
            ["batch", "{checkpoint}", "{source}/config.json", "--lora-modules", "a={tmp}/gone"],
            "there is no folder {tmp}/gone",
        ),
        (
            ["serve", "{source}", "--lora-modules", "a={source}"],
            "adapter_config.json: cannot be read (No such file or directory); PEFT's",
        ),
        (["convert", "{source}", "{source}/sub"], "{source}/sub: lies in the folder of the model"),
        (["convert", "{source}", "{source}"], "lies there, and would be lost"),
        (["verify", "{tmp}/gone"], "gone"),
        (["verify", "{source}"], "convert the model first"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    places = {"tmp": tmp_path, "source": source, "checkpoint": checkpoint}
    line = fail(*(a.format(**places) for a in arguments))
    assert message.format(**places) in line
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_system_is_told_without_its_number() -> None:
    assert cli_command._words(FileExistsError(17, "File exists", "a.txt")) == "a.txt: File exists"
    assert cli_command._words(OSError("the port is in use")) == "the port is in use"


def test_a_limit_without_room_for_the_libraries_is_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.cli.options.left_by_limits", lambda: 100 << 20)
    monkeypatch.setattr("qoff.cli.options.own_memory", lambda: 60 << 20)
    assert "leaves it 160.0 MiB" in fail("generate", checkpoint, "Hello")


def test_a_limit_of_address_space_without_room_for_them_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would fail in many ways while they are imported, or abort."""
    monkeypatch.setattr("qoff.cli.command.address_space", lambda: 600 << 20)
    assert "(ulimit -v) is 600.0 MiB" in fail("env")


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert"],
        ["generate", "model"],
        ["generate", "model", "Hello", "--slots", "1"],
        ["generate", "model", "Hello", "--max-new-tokens", "0"],
        ["generate", "model", "Hello", "--temperature", "-1"],
        ["generate", "model", "Hello", "--top-p", "1.5"],
        ["generate", "model", "Hello", "--attention-top", "some"],
        ["env", "--path", "/no/such/place"],
        ["batch", "model", "prompts.txt", "--spill-folder", "/no/such/place"],
        ["verify", "model", "--no-such-option"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_wrong_usage_has_a_status_of_its_own(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qoff.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_version_is_the_packages() -> None:
    assert succeed("--version") == f"qoff {qoff.__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["--version", "env --help", "bench --suite list"])
def test_output_that_cannot_be_written_is_one_line(line: str, unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qoff", *line.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=100,
            check=False,
        )
    (said,) = done.stderr.splitlines()
    assert said == "qoff: standard output: No space left on device"
    assert done.returncode == 1


def test_standard_streams_may_be_closed() -> None:
    program = (
        "import contextlib, sys; from qoff.cli.main import app\n"
        "with contextlib.suppress(SystemExit): app(['--version'])\n"
        "sys.stderr.write(repr(sys.stdin.read()))"
    )
    done = subprocess.run(
        f"exec '{sys.executable}' -c \"{program}\" <&- >&-",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("''", 0)


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in succeed("--help")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from qoff.cli.main import app\n"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'numba', 'numpy', 'triton'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.stdout.strip() == "[]", run.stderr


def test_the_program_itself(checkpoint: Path, tmp_path: Path) -> None:
    """Through a real process: status, both streams, nothing else on standard output."""
    listed = command("--help")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in ("convert", "generate", "batch", "verify"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    program = (
        "import contextlib, io, sys; from qoff.cli.main import app\n"
        "evaluation = ['eval', sys.argv[2], '--text', sys.argv.pop(), '--json']\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    app(evaluation, standalone_mode=False)\n"
        "app()"
    )
    arguments = ["generate", checkpoint, "Hello", "--max-new-tokens", "3", "--json", text]
    good = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["new_tokens"] > 0
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", good.stderr, re.MULTILINE))
    assert {"torch", "numba", "transformers"} <= imported
    assert imported & UNUSED == set()
    bad = command("env", "--save", tmp_path / "machine.json")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert len(bad.stderr.splitlines()) == 1
