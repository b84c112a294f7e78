"""Cases and setups: their names, their combinations, and what is refused."""

from __future__ import annotations

import csv
import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import ArgumentError, QoffError
from qoff.kvcache import KVQuant
from qoff.measure.cases import Case, Setup, grid_of_cases, grid_of_setups, numbers
from qoff.measure.tables import comma_separated, markdown

CELLS = st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("pp", 512), "pp512"),
        (Case("tg", 128, 4096), "tg128@d4096"),
        (Case("tg", 32, 128, 16), "tg32@d128 x16"),
    ],
)
def test_a_case_is_named_by_its_numbers(case: Case, name: str) -> None:
    assert str(case) == name
    assert case.positions == case.depth + case.tokens


@pytest.mark.parametrize(
    ("setup", "name", "budget", "kv"),
    [
        (Setup(), "resident, KV auto", None, "auto"),
        (Setup(kv_bits="none"), "resident, KV f32", None, None),
        (Setup("48MiB", "4"), "48MiB, KV 4-bit", 48 << 20, KVQuant(4, 4)),
        (Setup("1GB", "8,4", 8), "1GB, KV 8,4-bit, 8-bit activations", 10**9, KVQuant(8, 4)),
        (Setup(kv_bits="16"), "resident, KV f32", None, KVQuant(16, 16)),
    ],
)
def test_a_setup_is_named_by_where_things_are(
    setup: Setup, name: str, budget: int | None, kv: KVQuant | str | None
) -> None:
    assert (str(setup), setup.budget, setup.kv) == (name, budget, kv)


@given(*[st.lists(st.integers(1, 9), unique=True, min_size=1, max_size=3)] * 4)
def test_a_grid_has_every_combination_once(
    prompts: list[int], new: list[int], depths: list[int], batches: list[int]
) -> None:
    found = grid_of_cases(prompts, new, depths, batches)
    assert len(set(found)) == len(found)
    assert len(found) == (len(prompts) + len(new)) * len(depths) * len(batches)
    starts = [(case.batch, case.depth) for case in found]
    changes = 1 + sum(a != b for a, b in pairwise(starts))
    assert changes == len(depths) * len(batches)  # each start once


def test_setups_are_combined_too() -> None:
    found = grid_of_setups(["all", "1MiB", "all"], ["none", "8,4"], [16])
    assert list(map(str, found)) == [
        "resident, KV f32",
        "resident, KV 8,4-bit",
        "1MiB, KV f32",
        "1MiB, KV 8,4-bit",
    ]


def test_numbers_are_read_once_each() -> None:
    assert numbers("-p", " 512,16 , 512", 1) == [512, 16]
    assert numbers("-p", "none", 1, may_be_none=True) == []


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1,,2", "1;2", "²", "9" * 10, "1,none"])
def test_other_numbers_are_refused_by_name(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^-p .*from 1 up.*or give none$"):
        numbers("-p", text, 1, may_be_none=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Case("pp", 0),
        lambda: Case("tg", 1, -1),
        lambda: Case("tg", 1, 0, 0),
        lambda: Setup("much"),
        lambda: Setup(kv_bits="5"),
        lambda: Setup(activation_bits=4),
        lambda: grid_of_cases([], [], [0], [1]),
    ],
)
def test_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(QoffError):
        make()  # type: ignore[operator]


@given(CELLS)
def test_csv_reads_as_it_was(rows: list[tuple[str, str]]) -> None:
    rows = [tuple(cell.replace("\r", "").replace("\0", "") for cell in row) for row in rows]  # type: ignore[misc]
    text = comma_separated(("a", "b"), rows)
    assert list(map(tuple, csv.reader(io.StringIO(text + "\n")))) == [("a", "b"), *rows]


@given(CELLS)
def test_a_markdown_table_has_a_line_a_row_of_equal_widths(rows: list[tuple[str, str]]) -> None:
    lines = markdown(("a", "b"), rows).split("\n")
    assert len(lines) == 2 + len(rows)
    assert len({len(line) for line in lines}) == 1
    assert all(line.replace("\\|", "").count("|") == 3 for line in lines)
