"""Sweeps: grids, cells that are kept, tables and plots."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from qoff.errors import ArgumentError, DiskWriteError
from qoff.eval.kv import kv_name
from qoff.eval.perplexity.models import stored_reference
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Sample
from qoff.eval.perplexity.windows import cut
from qoff.eval.sweep.cells import CellResult, as_csv, as_json, draw, markdown, pareto
from qoff.eval.sweep.grid import Cell, Grid
from qoff.eval.sweep.sweep import Sweep, decode_rate
from qoff.hf.tokenizer import load_tokenizer
from qoff.schema import json_text
from tests.tiny_families import VOCAB
from tests.tiny_models import tiny_checkpoint, tiny_model

GRID = "bits=4,8 group=32 solver=rtn kv=float,4:4"


@pytest.fixture(scope="module")
def source(base: Path) -> Path:
    return tiny_model(base, "llama-head64")


@pytest.fixture(scope="module")
def sample() -> Sample:
    ids = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(1))
    return Sample(ids, cut(200, 100), 2)


@pytest.fixture(scope="module")
def reference(source: Path, sample: Sample, base: Path) -> Reference:
    return stored_reference(source, sample, load_tokenizer(source), base / "reference")


def result(kv: str = "float32", kv_bytes: float = 1024.0, **found: float) -> CellResult:
    plain = {"tokens": 99, "perplexity": 10.0, "perplexity_error": 0.1}
    return CellResult("4 bits", kv, 4.5, kv_bytes, None, plain | found)


def test_a_grid_is_the_product_of_its_axes_without_repetitions() -> None:
    cells = Grid.parse("bits=4,8 group=32,64 kv=float,4:4,8:4 window=0,64")
    found = cells.cells(convertible=True)
    assert len(found) == len(set(map(repr, found))) == 4 * (1 + 2 * 2)
    assert len(cells.cells(convertible=False)) == 5
    assert {cell.weights for cell in cells.cells(convertible=False)} == {None}
    names = {kv_name(cell.kv) for cell in found}
    assert {"float32", "8,4, window 0", "4,4, window 64"} < names


@pytest.mark.parametrize(
    "text",
    ["bits", "bits=", "bits=4 bits=8", "bits=x", "size=4", "kv=5", "solver=best",
     "group=48", "window=few"],
)  # fmt: skip
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises((ArgumentError, ValueError)):
        Grid.parse(text)


def test_a_sweep_computes_each_cell_once_and_a_damaged_one_again(
    source: Path,
    sample: Sample,
    reference: Reference,
    tmp_path: Path,
) -> None:
    computed: list[str] = []

    class Counted(Sweep):
        def _compute(self, cell: Cell, checkpoint: Path) -> CellResult:
            computed.append(cell.name)
            return super()._compute(cell, checkpoint)

    cells = Grid.parse(GRID).cells(convertible=True)
    names = [cell.name for cell in cells]
    done: list[tuple[int, int]] = []
    sweep = Counted(source, sample, tmp_path, reference=reference)
    first = sweep.run(cells, lambda *both: done.append(both))
    assert done == [(i, 4) for i in range(1, 5)]
    assert computed == [f"{r.weights}; KV {r.kv}" for r in first] == names
    four, eight = first[0], first[2]
    assert four.found["mean_kl"] > 10 * eight.found["mean_kl"] > 0
    assert (four.bits_per_weight, eight.bits_per_weight) == (4.5, 8.5)
    assert first[1].kv_bytes_per_token < first[0].kv_bytes_per_token / 6

    files = sorted((tmp_path / "cells").glob("*.json"))
    assert len(files) == 4
    assert not list(tmp_path.glob(".weights-*"))
    for damage in (files[2].read_text()[:50], "{}"):
        files[2].write_text(damage)
        computed.clear()
        assert sweep.run(cells) == first
        assert len(computed) == 1
    other = Sample(sample.ids[:150], cut(150, 100), 2)
    Counted(source, other, tmp_path).run(cells[:1])
    assert computed[1:] == names[:1]


def test_a_checkpoint_is_swept_as_it_is(base: Path, sample: Sample, tmp_path: Path) -> None:
    cells = Grid.parse("kv=float,8:8").cells(convertible=False)

    def rate(checkpoint: Path, kv: object, prompt: torch.Tensor) -> float:
        assert checkpoint == tiny_checkpoint(base, "llama-head64")
        assert torch.equal(prompt, sample.ids[:100])
        return 1.0 if kv is None else 2.0

    sweep = Sweep(tiny_checkpoint(base, "llama-head64"), sample, tmp_path, rate=rate)
    found = sweep.run(cells)
    assert [r.weights for r in found] == ["as they are"] * 2
    assert [r.tokens_per_s for r in found] == [1.0, 2.0]
    assert "mean_kl" not in found[0].found
    with pytest.raises(ArgumentError, match="as it is"):
        sweep.run(Grid.parse(GRID).cells(convertible=True))


def test_a_reference_with_another_tokenizer_is_refused(
    source: Path, sample: Sample, base: Path
) -> None:
    other = load_tokenizer(source)
    other.add_tokens(["quick brown"])
    with pytest.raises(ArgumentError, match="another tokenizer"):
        stored_reference(source, sample, other, base / "other")


def test_a_rate_is_of_tokens_a_second(base: Path, sample: Sample) -> None:
    assert 1 < decode_rate(tiny_checkpoint(base, "llama-head64"), None, sample.ids[:40]) < 1e6


def test_tables_hold_what_the_results_do() -> None:
    results = [
        replace(result(mean_kl=0.01234, mean_kl_error=0.001, same_top=0.915), tokens_per_s=12.3),
        result(mean_kl=0.5, mean_kl_error=0.1, same_top=0.5),
    ]
    lines = markdown(results).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "0.01234 ± 0.00100" in lines[2]
    assert "91.50%" in lines[2]
    read = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert float(read[0]["mean_kl"]) == 0.01234
    assert read[1]["tokens_per_s"] == ""
    assert json.loads(as_json(results))[1]["mean_kl"] == 0.5
    assert " - " in markdown([result()])


def test_the_pareto_front_is_what_nothing_beats() -> None:
    points = [(1.0, 5.0), (2.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0)]
    assert pareto(points) == [(1.0, 5.0), (2.0, 3.0), (4.0, 1.0)]


def test_plots_are_drawn_of_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain = [result(), result("4,4", 160.0)]
    assert {p.name for p in draw(plain, tmp_path)} == {"perplexity.png", "perplexity.svg"}
    found = draw([replace(r, found={**r.found, "mean_kl": 0.1}) for r in plain], tmp_path / "more")
    assert {p.stem for p in found} == {"perplexity", "kl"}
    assert all(p.stat().st_size > 1000 for p in found)


def test_a_full_disk_is_said_with_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(DiskWriteError, match=r"/perplexity\.png: No space left on device"):
        draw([result(), result("4,4", 160.0)], tmp_path)


def test_an_error_that_is_not_known_is_null_and_read_again() -> None:
    one = result(perplexity_error=math.nan, median_kl=-1e-9)
    (plain,) = json.loads(as_json([one]), parse_constant=pytest.fail)
    assert plain["perplexity_error"] is None
    assert "| 10.000 ± - |" in markdown([one])
    assert " 0.00000 |" in markdown([one])
    assert "-0.0" not in markdown([one])
    again = CellResult.read(json_text(asdict(one)))
    assert math.isnan(again.found["perplexity_error"])
    assert replace(again, found=one.found) == one
