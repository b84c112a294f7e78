"""Sweeps: grids, cells that are kept, tables and plots."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.errors import ArgumentError
from qoff.eval.cells import CellResult, CellStore
from qoff.eval.grid import Cell, Grid
from qoff.eval.plots import draw, pareto
from qoff.eval.reference import Reference
from qoff.eval.reference_cache import cached_reference
from qoff.eval.scoring import Sample
from qoff.eval.sweep import Sweep
from qoff.eval.tables import as_csv, as_json, header, markdown, rows
from qoff.eval.windows import cut
from qoff.hf.load import load_tokenizer
from tests.tiny_models import VOCAB, tiny_checkpoint, tiny_model

GRID = "bits=4,8 group=32 solver=rtn kv=float,4:4 form=channel window=every"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def source(base: Path) -> Path:
    return tiny_model(base, "llama-head64")


@pytest.fixture(scope="module")
def sample() -> Sample:
    ids = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(1))
    return Sample(ids, cut(200, 100), 2)


@pytest.fixture(scope="module")
def reference(source: Path, sample: Sample, base: Path) -> Reference:
    return cached_reference(source, sample, load_tokenizer(source), folder=base / "references")


def result(**changes: Any) -> CellResult:
    plain = CellResult("4 bits", "float32", 4.5, 1024.0, 99, 10.0, 0.1, None)
    return replace(plain, **changes)


def test_a_grid_is_the_product_of_its_axes_without_repetitions() -> None:
    cells = Grid.parse("bits=4,8 group=32,64 kv=float,4:4,8:4 form=channel,rotated window=0,64")
    found = cells.cells(convertible=True)
    assert len(found) == len(set(map(repr, found))) == 4 * (1 + 2 * 2 * 2)
    assert len(cells.cells(convertible=False)) == 9
    assert {cell.weights for cell in cells.cells(convertible=False)} == {None}
    names = {cell.kv.name for cell in found}
    assert {"float32", "8,4 rotated, window 0", "4,4 channel, window 64"} < names


def test_k_before_rope_is_evaluated_with_every_token_alone() -> None:
    cells = Grid.parse("kv=4 rope=after,before form=channel window=every,64").cells(False)
    assert sorted(cell.kv.name for cell in cells) == [
        "4,4 channel, before RoPE, every token",
        "4,4 channel, every token",
        "4,4 channel, window 64",
    ]


@pytest.mark.parametrize(
    "text",
    ["bits", "bits=", "bits=4 bits=8", "bits=x", "size=4", "kv=5", "form=odd", "rope=no",
     "solver=best", "group=48", "window=few", "kv=4 rope=before window=64"],
)  # fmt: skip
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises((ArgumentError, ValueError)):
        Grid.parse(text)


def test_a_sweep_computes_each_cell_once_and_a_damaged_one_again(
    source: Path, sample: Sample, reference: Reference, tmp_path: Path
) -> None:
    cells = Grid.parse(GRID).cells(convertible=True)
    states: list[str] = []

    def watch(done: int, total: int, cell: Cell, state: str) -> None:
        assert (done, total) == (len(states) + 1, 4)
        states.append(state)

    sweep = Sweep(source, sample, tmp_path, reference=reference)
    first = sweep.run(cells, watch)
    assert states == ["computed"] * 4
    assert [r.name for r in first] == [cell.name for cell in cells]
    four, eight = first[0], first[2]
    assert four.mean_kl is not None
    assert eight.mean_kl is not None
    assert four.mean_kl > 10 * eight.mean_kl > 0
    assert (four.bits_per_weight, eight.bits_per_weight) == (5.0, 9.0)
    assert first[1].kv_bytes_per_token < first[0].kv_bytes_per_token / 6
    assert len(first[0].layer_errors) == 1  # of the two layers, the last is not compared
    assert 0 < first[2].layer_errors[0] < first[0].layer_errors[0]

    files = sorted((tmp_path / "cells").glob("*.json"))
    assert len(files) == 4
    assert not list(tmp_path.glob(".weights-*"))
    text = files[1].read_text()
    files[1].write_text(text.replace('"perplexity": ', '"perplexity": 1'))
    files[2].write_text(text[:50])
    states.clear()
    assert sweep.run(cells, watch) == first
    assert sorted(states) == ["damaged", "damaged", "kept", "kept"]
    states.clear()
    other = Sample(sample.ids[:150], cut(150, 100), 2)
    Sweep(source, other, tmp_path).run(cells[:1], lambda *x: states.append(x[3]))
    assert states == ["computed"]


def test_a_checkpoint_is_swept_as_it_is(base: Path, sample: Sample, tmp_path: Path) -> None:
    cells = Grid.parse("kv=float,8:8 form=channel").cells(convertible=False)
    rates = {"float32": 1.0}

    def rate(checkpoint: Path, kv: object) -> float:
        assert checkpoint == tiny_checkpoint(base, "llama-head64")
        return rates["float32"] if kv is None else 2.0

    sweep = Sweep(tiny_checkpoint(base, "llama-head64"), sample, tmp_path, rate=rate)
    found = sweep.run(cells)
    assert [r.weights for r in found] == ["as they are"] * 2
    assert [r.tokens_per_s for r in found] == [1.0, 2.0]
    assert found[0].mean_kl is None
    with pytest.raises(ArgumentError, match="as it is"):
        sweep.run(Grid.parse(GRID).cells(convertible=True))


def test_a_damaged_reference_is_computed_again(
    source: Path, sample: Sample, reference: Reference, base: Path
) -> None:
    tokenizer = load_tokenizer(source)
    before = reference.nll.copy()
    (reference.path / "nll.npy").write_bytes(b"no")
    again = cached_reference(source, sample, tokenizer, folder=base / "references")
    assert (again.nll == before).all()


def test_a_reference_with_another_tokenizer_is_refused(
    source: Path, sample: Sample, base: Path
) -> None:
    other = load_tokenizer(source)
    other.add_tokens(["quick brown"])
    with pytest.raises(ArgumentError, match="another tokenizer"):
        cached_reference(source, sample, other, folder=base / "references")


def test_tables_hold_what_the_results_do() -> None:
    results = [
        result(mean_kl=0.01234, mean_kl_error=0.001, same_top=0.915, tokens_per_s=12.3),
        result(bits_per_weight=8.5, kl_by_place=[(1.0, 2.0)]),
    ]
    assert len(rows(results)) == 2
    assert all(len(row) == len(header()) for row in rows(results))
    lines = markdown(results).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {len(header()) + 1}
    assert "0.01234 ± 0.00100" in lines[2]
    assert "91.50%" in lines[2]
    read = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert float(read[0]["mean_kl"]) == 0.01234
    assert read[1]["mean_kl"] == ""
    assert json.loads(as_json(results))[1]["kl_by_place"] == [[1.0, 2.0]]


def test_the_pareto_front_is_what_nothing_beats() -> None:
    points = [(1.0, 5.0, "a"), (2.0, 5.0, "b"), (2.0, 3.0, "c"), (3.0, 4.0, "d"), (4.0, 1.0, "e")]
    assert [p[2] for p in pareto(points)] == ["a", "c", "e"]


def test_plots_are_drawn_of_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain = [result(), result(kv_bytes_per_token=160.0, kv="4,4")]
    assert {p.name for p in draw(plain, tmp_path)} == {"perplexity.png", "perplexity.svg"}
    more = [
        replace(r, mean_kl=0.1, layer_errors=[0.1, 0.2], kl_by_place=[(1.0, 0.1), (3.0, 0.2)])
        for r in plain
    ]
    found = draw(more, tmp_path / "more")
    assert {p.stem for p in found} == {"perplexity", "kl", "layers", "places"}
    assert all(p.stat().st_size > 1000 for p in found)


def test_a_store_keeps_results_and_nothing_damaged(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    assert store.read("a") is None
    kept = result(layer_errors=[0.5], kl_by_place=[(1.0, 2.0)])
    store.write("a", kept)
    assert store.read("a") == kept
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("0.5", "0.6"))
    assert store.read("a") is None
    assert store.exists("a")
