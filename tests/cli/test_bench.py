"""`qoff bench`: what it prints and keeps, and one line for each thing that can go wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qoff.cli import bench, suite
from qoff.measure.results import read_result
from qoff.models.convert.convert import convert
from qoff.units import parse_size
from tests.cli import commands
from tests.tiny_models import QUANT, load_budgets, save_model, save_tokenizer, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
run, succeed, fail = (
    partial(each, "bench") for each in (commands.run, commands.succeed, commands.fail)
)
SAVED = ["{checkpoint}", "--save", "--results"]
FAST = ["-p", "8", "-n", "2,3", "-d", "0,70", "-r", "2"]


def edited(source: Path, target: Path, factor: float, **changes: Any) -> Path:
    """A kept result with every rate times `factor`, and five samples of each."""
    content = json.loads(source.read_text()) | changes
    for figure in content["measured"].values():
        median = figure["tokens_per_s"]["median"] * factor
        values = [median * (1 + i / 1000) for i in range(-2, 3)]
        figure["tokens_per_s"] = {"median": median, "spread": 0.002, "values": values}
    target.write_text(json.dumps(content))
    return target


def test_a_table_has_a_row_for_each_case_in_each_setup(checkpoint: Path) -> None:
    least = max(load_budgets(checkpoint, context=79, kv=kv)[0] for kv in (None, "8,4"))
    memory = ["--device-memory", f"all,{least}"]
    printed = succeed(checkpoint, *FAST, *memory, "--kv", "none", "--kv", "8,4")
    header, rule, *rows = [line.strip("| ").split(" | ") for line in printed.splitlines()]
    assert [cell.strip() for cell in header] == [
        "model", "size", "backend", "plan", "test", "t/s",
    ]  # fmt: skip
    assert set("".join(rule)) <= set("-:| ")
    tests = ["pp8", "tg2", "tg3", "pp8@d70", "tg2@d70", "tg3@d70"]
    plans = [f"{where}, KV {kv}" for where in ("resident", least) for kv in ("f32", "8,4-bit")]
    assert [(row[3].strip(), row[4].strip()) for row in rows] == [
        (plan, test) for plan in plans for test in tests
    ]
    assert all(row[0].strip() == checkpoint.name for row in rows)
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[5].strip()) for row in rows)


def test_csv_has_numbers_apart(checkpoint: Path) -> None:
    printed = succeed(checkpoint, *FAST, "-b", 2, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert [row["test"] for row in rows][:2] == ["pp8 x2", "tg2 x2"]
    nbytes = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    for row in rows:
        assert int(row["size_bytes"]) == nbytes
        assert (row["batch_size"], row["repetitions"], row["backend"]) == ("2", "2", "cpu")
        assert float(row["tokens_per_s"]) > 0 <= float(row["tokens_per_s_sd"])


def test_json_is_a_result_that_can_be_compared(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(succeed(checkpoint, *FAST, "-o", "json"))
    found = read_result(path)
    assert len(found.measured) == 6
    assert found.settings["model"] == checkpoint.name
    assert str(checkpoint.parent) not in path.read_text()
    assert {"cpu", "cores", "memory_bytes"} <= found.machine.keys()
    assert {"qoff", "torch", "python"} <= found.versions.keys()
    printed = succeed("--compare", path, path)
    assert printed.count("too few samples") == 7  # two samples each, and the summary


def test_results_are_kept_and_listed(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert "no results there" in fail("--history", "--results", folder)
    for number in range(2):
        result = run(checkpoint, "-p", 4, "-n", "none", "-r", 1, "--save", "--results", folder)
        assert result.exit_code == 0
        assert len(list(folder.iterdir())) == number + 1
    (folder / "other.json").write_text("{}")
    (folder / "more.json").write_text('{"bench": "gpu"}')
    (folder / "damaged.json").write_text("{")
    result = run("--history", "--results", folder)
    assert result.exit_code == 0
    assert result.stdout.count("model_rates-") == 2
    damaged, others = result.stderr.splitlines()
    assert f"not listed: {folder / 'damaged.json'}: " in damaged
    assert "not listed: 2 files of another form" in others
    assert others.endswith(": more.json, other.json")
    listed = json.loads(succeed("--history", "--results", folder, "-o", "json"))
    assert [row["model"] for row in listed] == [checkpoint.name] * 2
    assert {row["file"] for row in listed} < {path.name for path in folder.iterdir()}
    assert [row["file"].endswith("-2.json") for row in listed] == [False, True]


def test_the_history_of_the_source_tree_is_the_default() -> None:
    listed = json.loads(succeed("--history", "-o", "json"))
    assert {row["bench"] for row in listed} >= {"cpu_decode", "cpu_matmul", "disk_stream"}


@pytest.mark.parametrize(
    ("factor", "verdict", "status"),
    [(0.8, "slower", 1), (1.0, "within noise", 0), (1.3, "faster", 0)],
)
def test_what_is_slower_fails_only_when_told(
    factor: float, verdict: str, status: int, checkpoint: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(succeed(checkpoint, "-p", 4, "-n", 2, "-r", 1, "-o", "json"))
    a = edited(kept, tmp_path / "a.json", 1.0)
    b = edited(kept, tmp_path / "b.json", factor, versions={"qoff": "another"})
    result = run("--compare", a, b)
    assert result.exit_code == 0
    assert f"2 {verdict}. Beyond noise: " in result.stdout
    assert "differs: versions: qoff: " in result.stderr
    assert run("--compare", a, b, "--fail-on-slower").exit_code == status
    assert run("--compare", a, b, "--fail-on-slower", "--threshold", 50).exit_code == 0
    found = json.loads(succeed("--compare", a, b, "-o", "json"))
    assert [change["verdict"] for change in found["changes"]] == [verdict] * 2
    assert all(abs(change["change"] - (factor - 1)) < 1e-9 for change in found["changes"])
    rows = list(csv.DictReader(io.StringIO(succeed("--compare", a, b, "-o", "csv"))))
    assert [row["verdict"] for row in rows] == [verdict] * 2


def test_experts_that_a_text_takes(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    save_model(tmp_path / "model", "qwen3-moe", num_experts=16, moe_intermediate_size=64)
    save_tokenizer(tmp_path / "model")
    convert(tmp_path / "model", mixture, quant=QUANT, for_cpu=True)
    least, _ = load_budgets(mixture, context=33, kv="none")
    asked = (mixture, "--experts", "--device-memory", least, "-p", 8, "-n", 24, "--kv", "none")
    found = json.loads(succeed(*asked, "-o", "json"))
    per_token = [len(chosen) for layer, chosen in found["routes"]]
    layers = sum(count > 0 for count in found["counts"])
    assert per_token == [per_token[0]] * (24 * layers)  # of each token in each of them
    rows = list(csv.DictReader(io.StringIO(succeed(*asked, "-o", "csv"))))
    assert str(found["slots"]) in [row["slots"] for row in rows]
    for row in rows:
        hits = [float(row[name]) for name in ("LRU", "LFU, aged", "next use", "Belady")]
        assert max(hits[:3]) <= hits[3] <= 1
    assert "| slots |" in succeed(*asked)
    refused = fail(mixture, "--experts", "-p", 8, "-n", 4)
    assert "no expert comes on its own without a bound" in refused
    assert "--experts takes one -p" in fail(mixture, "--experts", "-n", "2,3")


def test_benches_of_the_source_tree_are_listed_and_run() -> None:
    listed = dict(line.split(maxsplit=1) for line in succeed("--suite", "list").splitlines())
    assert {"cpu_decode", "cpu_matmul", "disk_stream", "gpu"} <= listed.keys()
    assert "harness" not in listed
    assert listed["cpu_matmul"].startswith("The int4 matmul")
    assert "--quick" in succeed("--suite", "cpu_matmul", "--", "--help")
    assert run("--suite", "cpu_matmul", "--", "--no-such-option").exit_code == 2


def test_without_the_source_tree_there_are_no_benches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite.qoff, "__file__", str(tmp_path / "qoff" / "__init__.py"))
    assert "come with the source tree" in fail("--suite", "cpu_matmul")
    assert "come with the source tree" in fail("--suite", "list")
    assert "give --results DIR" in fail("--history")


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.cli.bench._measure", lambda *_: pytest.fail("it was measured"))
    access = os.access
    monkeypatch.setattr(
        "qoff.cli.results.os.access", lambda path, mode: not mode & os.W_OK and access(path, mode)
    )
    for folder in (tmp_path, tmp_path / "results"):
        line = fail(checkpoint, "--save", "--results", folder)
        assert f"--results {folder}: {tmp_path} cannot be written" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(3 << 30, "3GiB"), (1536 << 20, "1536MiB"), (5 << 10, "5KiB"), (1025, "1025")],
)
def test_a_bound_in_bytes_is_labelled_as_people_write_it(nbytes: int, text: str) -> None:
    assert bench._size(nbytes) == text
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of MODEL"),
        (["{checkpoint}", "--history"], "give one of MODEL"),
        (["--history", "--suite", "list"], "give one of MODEL"),
        (["--history", "--plan", "{tmp}/plan.json"], "--plan is for measuring MODEL"),
        (["--suite", "list", "--plan", "{tmp}/plan.json"], "--plan is for measuring MODEL"),
        (["--compare", "{decode}", "{decode}", "--plan", "{tmp}/a"], "--plan is for measuring"),
        (["{checkpoint}", "--results", "{tmp}"], "--results is for --save and --history"),
        (["--suite", "list", "--save"], "--save keeps the rates of MODEL"),
        (["{checkpoint}", "--experts", "--save"], "--save keeps the rates of MODEL"),
        (["{checkpoint}", "--threshold", "5"], "--fail-on-slower are for --compare"),
        (["{checkpoint}", "--fail-on-slower"], "--fail-on-slower are for --compare"),
        (["{checkpoint}", "--text", "{tmp}/a"], "--text is for --experts"),
        ([*SAVED, "{tmp}/gone/results"], "there is no folder {tmp}/gone; make it"),
        ([*SAVED, "{checkpoint}/config.json"], "config.json: is no folder"),
        ([*SAVED, "{checkpoint}/config.json/a"], "there is no folder {checkpoint}/config.json"),
        (["{short}", "--save", "--results", "{tmp}/results", "-d", "250"], "is run up to 256"),
        (["{checkpoint}", "{checkpoint}"], "2 models; one is measured"),
        (["{tmp}/gone"], "no such file or directory"),
        (["{tmp}"], "no model.safetensors"),
        (["{checkpoint}", "-p", "0"], "-p 0: '0' is not a whole number"),
        (["{checkpoint}", "-n", "many"], "'many' is not a whole number"),
        (["{checkpoint}", "-d", "-1"], "-d -1: "),
        (["{checkpoint}", "-p", "none", "-n", "none"], "nothing to measure"),
        (["{checkpoint}", "--kv", "5"], "4 or 8 bits, not 5"),
        (["{checkpoint}", "--kv", "none,4"], "KV bits are written like"),
        (["{checkpoint}", "--activation-bits", "4"], "8 or 16 bits, not 4"),
        (["{checkpoint}", "--device-memory", "all,much"], "'much' is not a size"),
        (["{checkpoint}", "--device-memory", "1KiB"], "takes at least"),
        (["{checkpoint}", "--max-memory", "cpu=1KiB"], "takes at least"),
        (["{checkpoint}", "--device-memory", "1MB", "--max-memory", "cpu=2MB"], "give one of the"),
        (["{checkpoint}", "--device", "tpu:0"], "no device is called 'tpu:0'"),
        (["{short}", "-d", "250"], "is run up to 256"),
        (["--compare", "{tmp}/a", "{tmp}/b"], "a: no such file"),
        (["--compare", "{checkpoint}/config.json", "{tmp}/b"], "is not a result of a bench"),
        (["--compare", "{decode}", "{disk}"], "no figure in common"),
        (["--suite", "nope"], "no bench is called 'nope'; there are batch_kills, batch_lines"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    kept = {key: next((ROOT / "bench/results").glob(f"{name}-*.json"))
            for key, name in (("decode", "cpu_decode"), ("disk", "disk_stream"))}  # fmt: skip
    short = tiny_checkpoint(tmp_path_factory.getbasetemp(), "opt")
    places = {"tmp": tmp_path, "checkpoint": checkpoint, "short": short, **kept}
    assert message.format(**places) in fail(*(a.format(**places) for a in arguments))
    assert list(tmp_path.iterdir()) == []
