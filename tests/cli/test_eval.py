"""`qoff eval`: what it prints and writes, and one line for each thing that can go wrong."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from qoff.cli import progress
from qoff.eval.perplexity.metrics import Scores
from tests.cli.test_cli import fail, succeed
from tests.tiny_models import load_budgets, tiny_model

FAMILY = "llama-head64"
WORDS = "the quick brown fox jumps over the lazy dog while nine judges watch. "


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), FAMILY)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Options for a short text; references are kept in a folder of their own."""
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 5)
    return ["--text", path, "--window", 100]


def test_a_table_says_what_was_measured(checkpoint: Path, text: list[object]) -> None:
    printed = succeed("eval", checkpoint, *text)
    assert "perplexity" in printed
    assert "4,4, window 64" in printed
    assert "mean KL" not in printed
    assert "float32" in succeed("eval", checkpoint, *text, "--kv", "none")


def test_json_has_the_same_numbers_for_any_budget(checkpoint: Path, text: list[object]) -> None:
    plain = json.loads(succeed("eval", checkpoint, *text, "--json"))
    assert plain["tokens"] == 99 * 3 + 44
    assert 1 < plain["perplexity"] < 1e6
    refused = fail("eval", checkpoint, *text, "--device-memory", 1)
    least = re.search(r"at least ([\d,]+)", refused)
    assert least is not None
    bound = int(least[1].replace(",", ""))
    streamed = succeed("eval", checkpoint, *text, "--json", "--device-memory", bound)
    assert json.loads(streamed)["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-6)
    for more in (["--window", 200], ["--batch", 2]):
        assert "at least" in fail("eval", checkpoint, *text, *more, "--device-memory", bound)


def test_a_model_is_compared_beside_its_original_or_with_a_file_of_it(
    checkpoint: Path, source: Path, text: list[object], tmp_path: Path
) -> None:
    plain = ["eval", checkpoint, *text, "--json"]
    found = json.loads(succeed(*plain, "--reference", source))
    assert found["mean_kl"] > 0
    assert found["perplexity_ratio"] == pytest.approx(
        found["perplexity"] / found["reference_perplexity"]
    )
    small = json.loads(succeed(*plain, "--reference", source, "--reference-memory", "1MiB"))
    assert small["mean_kl"] == pytest.approx(found["mean_kl"], rel=1e-3)
    assert not [*(tmp_path / "cache").rglob("*")][1:]  # no window of what is done is kept

    file = tmp_path / "likeliest"
    made = json.loads(succeed(*plain, "--reference", source, "--reference-file", file))
    stamp = file.stat().st_mtime_ns
    again = json.loads(succeed(*plain, "--reference-file", file))
    assert again["mean_kl"] == made["mean_kl"]
    assert file.stat().st_mtime_ns == stamp
    assert made["kl_at_least"] <= found["mean_kl"] * 1.0001
    assert found["mean_kl"] <= made["kl_at_most"] * 1.0001
    refused = fail(*plain, "--reference-file", file, "--limit", 1)
    assert "likeliest: is of other tokens: 4 windows in it, 1 asked for" in refused


def test_what_one_token_does_not_tell_is_null(checkpoint: Path, text: list[object]) -> None:
    options = [*text[:2], "--window", 2, "--limit", 1]
    found = json.loads(succeed("eval", checkpoint, *options, "--json"), parse_constant=pytest.fail)
    assert found["perplexity_error"] is None
    printed = succeed("eval", checkpoint, *options)
    assert "1 in 1 window " in printed
    assert "± - " in printed


def test_an_evaluation_does_not_need_a_place_for_its_windows(
    checkpoint: Path, text: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "evaluations"
    folder.mkdir(parents=True)
    for name, age in (("old", 31), ("new", 29)):
        (folder / name).touch()
        os.utime(folder / name, (0, time.time() - age * 24 * 3600))
    succeed("eval", checkpoint, *text)
    assert [file.name for file in folder.iterdir()] == ["new"]
    assert not caplog.messages
    (folder / "new").unlink()
    folder.rmdir()
    folder.touch()
    succeed("eval", checkpoint, *text)
    (said,) = caplog.messages
    assert "cannot be continued if it is interrupted" in said


def test_a_sweep_writes_tables_and_plots(source: Path, text: list[object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "sweep"
    grid = "bits=4,8 group=32 solver=rtn kv=float,8:8"
    printed = succeed("eval", source, *text, "--sweep", "--grid", grid, "--out", out)
    assert printed.count("\n| ") == 4 + 1
    assert {p.name for p in out.iterdir() if p.is_file()} >= {
        "table.md", "table.csv", "results.json", "kl.png", "kl.svg", "perplexity.png"
    }  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    assert all(math.isfinite(r["mean_kl"]) for r in results)
    assert all(r["tokens_per_s"] > 0 for r in results)


def test_a_sweep_prints_one_document(checkpoint: Path, text: list[object], tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    options = ["--window", 2, "--limit", 1, "--sweep", "--grid", "kv=float,8:8", "--out", out]
    for _ in range(2):  # the second time of what is kept
        printed = succeed("eval", checkpoint, *text[:2], *options, "--json")
        assert printed == (out / "results.json").read_text()
        found = json.loads(printed, parse_constant=pytest.fail)
        assert [cell["perplexity_error"] for cell in found] == [None, None]
        with (out / "table.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        assert [cell["perplexity_error"] for cell in table] == ["", ""]
        assert all(float(cell["perplexity"]) > 0 for cell in table)


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        (["4", "--kv-window", 0], "windows of 65 tokens end before any token is packed"),
        (["4"], "use --window 130 or more"),
        (["none"], None),
        (["auto"], None),
        (["16"], None),
    ],
)
def test_windows_too_short_to_measure_a_packed_cache_are_told(
    kv: list[object],
    said: str | None,
    checkpoint: Path,
    text: list[object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    succeed("eval", checkpoint, *text[:2], "--window", 65, "--limit", 1, "--kv", *kv)
    assert caplog.text == "" if said is None else said in caplog.text


def test_a_window_longer_than_the_positions_of_the_model_is_told(
    checkpoint: Path, text: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    succeed("eval", checkpoint, *text[:2], "--window", 257, "--limit", 1)
    assert caplog.text == ""
    succeed("eval", checkpoint, *text[:2], "--window", 258, "--limit", 1)
    assert "longer than the 256 positions" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--window", 1000], "less than one window of 1000"),
        (["--stride", 101], "stride of 101"),
        (["--definition", "mine"], "no definition 'mine'"),
        (["--dataset", "wikitext2"], "not both"),
        (["--kv", "none", "--kv-window", "0"], "with --kv none nothing is packed"),
        (["--kv", "none", "--attention-top", 0.5], "with --kv none nothing is packed"),
        (["--max-memory", "4GiB"], "like 0=12GiB,cpu=32GiB"),
        (["--max-memory", "0=4GiB"], "the model runs on the CPU"),
        (["--shots", 1], "--shots does nothing in the evaluation of a text"),
        (["--sweep", "--kv", "4"], "--kv does nothing with --sweep"),
        (["--kv", "5"], "4 or 8 bits"),
        (["--sweep", "--grid", "bits=7"], "no cells|KV|bits 7"),
        (["--reference", "/nowhere/at/all"], "nowhere"),
        (["--reference-memory", "1GiB"], "--reference, which is missing"),
        (["--reference", "x", "--reference-memory", "y"], "--reference-memory: 'y' is not a size"),
        (["--definition", "llama.cpp", "--stride", 50], "--stride does nothing"),
        (["--reference-file", "no.ref"], "file no.ref: there is no such file; --reference MODEL"),
        (["--bits", 8, "--group-size", 64], "; leave --bits and --group-size out, or give the"),
        (["--sweep", "--out", "/dev/null"], "--out /dev/null: cannot be made a folder"),
        (["--sweep", "--out", "/dev/null/x"], "--out /dev/null/x: cannot be made a folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    checkpoint: Path, text: list[object], options: list[object], said: str
) -> None:
    assert re.search(said, fail("eval", checkpoint, *text, *options))


@pytest.mark.parametrize(
    "options",
    [
        ["--text", "/nowhere"],
        ["--definition", "mine"],
        ["--kv", "5"],
        ["--reference", "/nowhere"],
        ["--reference-memory", "much"],
        ["--reference-file", "missing"],
        ["--tasks", "qoff_nothing"],
    ],
)
def test_what_cannot_be_is_known_before_a_model_is_converted(
    source: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.hf.checkpoints.find_checkpoint", None)
    assert fail("eval", source, *options)


def test_a_text_that_is_none_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    assert "cannot be read (No such" in fail("eval", checkpoint, "--text", tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "not a text in UTF-8" in fail("eval", checkpoint, "--text", tmp_path / "binary")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "zeros").write_bytes(b"text\0")
    assert "holds NUL bytes" in fail("eval", checkpoint, "--text", tmp_path / "zeros")
    assert "is empty" in fail("eval", checkpoint, "--text", tmp_path / "empty")
    assert "no dataset 'imagenet'" in fail("eval", checkpoint, "--dataset", "imagenet")


def test_another_model_as_reference_is_one_line(
    checkpoint: Path, text: list[object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_model(tmp_path_factory.getbasetemp(), "llama-gqa-tied")
    found = fail("eval", checkpoint, *text, "--reference", other)
    assert "another tokenizer" in found or "not the same model" in found


def test_a_quantized_model_is_not_swept(text: list[object], tmp_path: Path) -> None:
    from tests.tiny_models import save_gguf

    save_gguf(tmp_path / "x.gguf")
    assert "floats" in fail("eval", tmp_path / "x.gguf", *text, "--sweep")


def test_keys_are_asked_for_and_drawn(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--needle", "--lengths", "256", "--repetitions", 1, "--out", tmp_path / "out"]
    printed = succeed("eval", checkpoint, *options, "--caches", "float; 8,4 disk=0.5 top=0.5")
    assert "8,4 disk=0.5 top=0.5" in printed
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"needle.png", "needle.svg"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--needle", "--lengths", "x"], "whole numbers with commas, not 'x'"),
        (["--needle", "--lengths", "256.5"], "whole numbers with commas, not '256.5'"),
        (["--needle", "--caches", "4 window=inf"], "a window is a whole number"),
        (["--needle", "--lengths", "9999"], "9999 tokens"),
        (["--needle", "--caches", "4 size=3"], "a cache is written as"),
        (["--needle", "--caches", "4 top=0.5 top=1"], "each once; not '4 top=0.5 top=1'"),
        (["--needle", "--lengths", "256", "--caches", " ; "], "no cache setting"),
        (["--needle", "--sweep"], "different evaluations"),
        (["--needle", "--lengths", "256", "--out", "/dev/null"], "--out /dev/null: cannot"),
        (
            ["--needle", "--kv", "4"],
            "does nothing with --needle, whose own options are --caches",
        ),
        (["--needle", "--attention-top", 0.5], "--attention-top does nothing"),
        (["--needle", "--lengths", "256", "--activation-bits", 4], "8 or 16"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    checkpoint: Path, options: list[object], said: str
) -> None:
    assert said in fail("eval", checkpoint, *options)


def test_a_task_with_its_data_in_the_package_runs_within_a_budget(checkpoint: Path) -> None:
    pytest.importorskip("lm_eval")
    options = ["--tasks", "qoff_knowledge", "--limit", 2, "--json"]
    found = json.loads(succeed("eval", checkpoint, *options))
    assert found["samples"]["qoff_knowledge"] == 2
    least, _ = load_budgets(checkpoint, batch_size=8)
    streamed = json.loads(succeed("eval", checkpoint, *options, "--device-memory", least))
    assert streamed["results"] == found["results"]


def test_names_of_tasks_may_have_spaces_between(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mock()
    monkeypatch.setattr("qoff.cli.evaluate.run_named_tasks", asked)
    succeed("eval", checkpoint, "--tasks", "qoff_words, qoff_knowledge ")
    assert asked.call_args.args[1] == ["qoff_words", "qoff_knowledge"]


def test_a_log_says_how_far_an_evaluation_is_and_what_it_comes_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_EACH_S", -1.0)
    nll, kl = np.array([1.0, 2.0]), np.array([0.1, 0.3])
    with progress.score_progress("reading") as tell:
        tell(10, 40, None)
        tell(20, 40, Scores(nll, nll, kl, kl > 0))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "reading: 10 of 40 tokens"
    assert re.fullmatch(
        r"reading: 20 of 40 tokens, perplexity 4\.5 ± 2\.2, KL 0\.20 ± 0\.10, \d+ s left",
        second.replace("4.48", "4.5").replace("2.24", "2.2"),
    )
