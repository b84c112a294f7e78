"""Comparing results: what counts as a change, in which direction, and what is refused."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import FormatError, QoffError
from qoff.measure.compare import Change, compare, differences, more_is_faster, samples_of
from qoff.measure.results import BenchResult, read_result
from qoff.measure.samples import Samples

KEPT = sorted((Path(__file__).resolve().parents[2] / "bench/results").glob("cpu_*.json"))
MACHINE: dict[str, Any] = {"cpu": "One CPU", "cores": 2, "load_1min": 0.5}


def result(measured: dict[str, Any], bench: str = "x", **circumstances: Any) -> BenchResult:
    given = {"settings": {}, "machine": MACHINE, "versions": {"qoff": "1"}, **circumstances}
    return BenchResult(bench, measured=measured, **given)


def drawn(median: float, noise: float, count: int = 5, seed: int = 0) -> Samples:
    random = np.random.default_rng(seed)
    return Samples(tuple(median * (1 + noise * random.standard_normal(count))))


def verdict(before: Samples, after: Samples, more_is_faster: bool = True) -> str:
    return Change.of("", before, after, more_is_faster).verdict


@pytest.mark.parametrize("grown", [0.5, 0.88, 1.12, 2.0])
def test_a_change_beyond_noise_has_a_direction(grown: float) -> None:
    before, after = drawn(100, 0.003), drawn(100 * grown, 0.003, seed=1)
    directions = {True: ("slower", "faster"), False: ("faster", "slower")}
    for more, words in directions.items():
        assert verdict(before, after, more) == words[grown > 1]


@given(st.lists(st.integers(1, 1000), unique=True, min_size=2, max_size=9), st.data())
def test_p_counts_the_ways_to_deal_the_values(values: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values) - 1))
    order = sorted(values)
    ranks = [order.index(value) for value in values]
    found, sums = sum(ranks[:size]), [sum(dealt) for dealt in combinations(ranks, size)]
    wanted = 2 * min(sum(s <= found for s in sums), sum(s >= found for s in sums)) / len(sums)
    samples = Samples(tuple(values[:size])), Samples(tuple(values[size:]))
    assert Change.of("", *samples, True).p == pytest.approx(min(1.0, wanted))


def test_noise_is_no_change_however_large() -> None:
    pairs = [(drawn(100, 0.3, seed=i), drawn(100, 0.3, seed=1000 + i)) for i in range(400)]
    flagged = [verdict(a, b) for a, b in pairs if verdict(a, b) != "within noise"]
    assert len(flagged) <= 0.02 * len(pairs)


def test_a_small_shift_between_runs_is_no_change() -> None:
    assert verdict(drawn(100, 0.001), drawn(108, 0.001, seed=1)) == "within noise"
    found = Change.of("", drawn(100, 0.001), drawn(108, 0.001, seed=1), True, threshold=0.01)
    assert found.verdict == "faster"


def test_one_value_far_out_is_no_change() -> None:
    before = Samples((100.0, 101.0, 99.0, 100.5, 99.5))
    after = Samples((100.2, 100.8, 99.1, 100.4, 1.0))
    assert verdict(before, after) == "within noise"


def test_few_samples_decide_nothing() -> None:
    assert verdict(Samples((1.0, 1.0, 1.0)), Samples((9.0, 9.0, 9.0))) == "too few samples"


@pytest.mark.parametrize(
    ("path", "unit", "more"),
    [
        (("a case", "seconds", "qoff"), "", False),
        (("a case", "wait_s"), "", False),
        (("a case", "tokens_per_s"), "", True),
        (("a case", "read_bytes_per_s"), "s", True),
        (("decode", "qoff"), "", True),
        (("decode", "qoff"), "tokens/s", True),
        (("context 4096", "dense"), "s", False),
    ],
)
def test_seconds_are_better_when_lower(path: tuple[str, ...], unit: str, more: bool) -> None:
    assert more_is_faster(path, unit) == more


def test_samples_are_found_at_any_depth_and_what_explains_them_is_not() -> None:
    summary = Samples((1.0, 2.0)).summary()
    found = result(
        {
            "a": summary,
            "b": {"seconds": {"qoff": summary}, "bytes": 3},
            "beside": {"waiting": summary},
            "agreement": {"tokens": 4},
        }
    )
    assert [path for path, _ in samples_of(found)] == [("a",), ("b", "seconds", "qoff")]


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, float("nan")], ["1"], None, [1.0, -2]])
def test_samples_that_are_no_positive_numbers_are_refused(values: Any) -> None:
    bad = result({"a": {"b": {"median": 1.0, "values": values}}})
    with pytest.raises(FormatError, match="a / b"):
        compare(bad, bad)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_only_what_was_changed_in_a_kept_result_has_changed(path: Path, tmp_path: Path) -> None:
    before = read_result(path)
    assert {change.verdict for change in compare(before, before)} == {"within noise"}
    assert differences(before, before) == []
    content = json.loads(path.read_text())
    names = next(iter(samples_of(before)))[0]
    summary = content["measured"]
    for name in names:
        summary = summary[name]
    summary["values"] = [value / 2 for value in summary["values"]]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    (changed,) = (c for c in compare(before, read_result(other)) if c.verdict != "within noise")
    assert (changed.name, changed.relative) == (" / ".join(names), -0.5)
    assert changed.verdict == ("faster" if "seconds" in names else "slower")


def test_results_with_nothing_in_common_are_refused() -> None:
    a = result({"a": Samples((1.0,)).summary()})
    b = result({"b": Samples((1.0,)).summary()})
    with pytest.raises(QoffError, match="no figure in common"):
        compare(a, b)


def test_circumstances_that_differ_are_named_but_not_the_moment() -> None:
    a = result({})
    assert differences(a, result({}, machine={**MACHINE, "load_1min": 7.0})) == []
    other = result(
        {}, "y", machine={**MACHINE, "cores": 4}, versions={"qoff": "2"}, settings={"rounds": 5}
    )
    assert differences(a, other) == [
        "bench: x, then y",
        "machine: cores: 2, then 4",
        "versions: qoff: 1, then 2",
        "settings: rounds: not said, then 5",
    ]


def test_a_result_is_kept_beside_those_of_the_same_day(tmp_path: Path) -> None:
    kept = result({"a": Samples((1.0, 2.0)).summary()}, unit="s", notes=["a note"])
    paths = [kept.add_to(tmp_path / "new") for _ in range(3)]
    assert [p.name.removeprefix(f"x-one-cpu-{kept.date}") for p in paths] == [
        ".json",
        "-2.json",
        "-3.json",
    ]
    for path in paths:
        assert read_result(path).text() == kept.text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "not JSON"),
        ("[]", "but a list"),
        ('{"bench": "gpu", "results": []}', "has no date, settings"),
        ('{"a": 1, "a": 2}', "occurs twice"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_other_files_are_refused(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError, match=message) as refusal:
        read_result(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("key", ["bench", "date", "settings", "machine", "versions", "measured"])
def test_parts_of_another_kind_are_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**result({}).content(), key: 3}))
    with pytest.raises(FormatError, match=f"its {key} is a int"):
        read_result(path)
