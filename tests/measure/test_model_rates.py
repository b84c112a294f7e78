"""Rates of a model: what is timed, from which depth, and what is refused. No time is asserted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qoff.errors import ArgumentError, BudgetError, OpError
from qoff.measure import model_rates
from qoff.measure.cases import Case, Setup, grid_of_cases
from qoff.measure.model_rates import backend_of, check, rates
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from tests.module_models import module_checkpoint
from tests.tiny_models import load_budgets, tiny_checkpoint

REPETITIONS = 3
Pass = tuple[int, int, int]  # sequences, tokens that each had, new tokens of each


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pass]]:
    """Every forward pass there is, those that follow one another without Python, too."""
    noted: list[Pass] = []
    forward, tokens = Runtime.forward, Runtime.tokens

    def note(batch: ForwardPass, steps: int = 1) -> None:
        ((past, count),) = {(span.past, span.count) for span in batch.ragged.spans}
        noted.extend((len(batch.ragged.spans), past + i, count) for i in range(steps))

    def noting(self: Runtime, batch: ForwardPass) -> Tensor:
        note(batch)
        assert batch.cache.lengths == [span.past for span in batch.ragged.spans]
        return forward(self, batch)

    def noting_steps(self: Runtime, batch: ForwardPass, *choosing: Any) -> list[list[int]]:
        steps = tokens(self, batch, *choosing)
        note(batch, len(steps))
        return steps

    monkeypatch.setattr(Runtime, "forward", noting)
    monkeypatch.setattr(Runtime, "tokens", noting_steps)
    return noted


def once(case: Case) -> list[Pass]:
    """The passes of one repetition."""
    if case.kind == "pp":
        return [(case.batch, case.depth, case.tokens)]
    return [(case.batch, case.depth + i, 1) for i in range(case.tokens)]


@pytest.mark.parametrize("kv_bits", ["none", "auto", "8,4/1:16"])
def test_every_repetition_begins_at_the_depth(
    kv_bits: str, checkpoint: Path, passes: list[Pass]
) -> None:
    cases = grid_of_cases([70], [3, 80], [0, 150], [1, 2])
    found = rates(checkpoint, Setup(kv_bits=kv_bits), cases, REPETITIONS)
    assert {str(one.setup) for one in found} == {str(Setup(kv_bits=kv_bits.replace("auto", "4")))}
    assert [one.case for one in found] == cases
    wanted: list[Pass] = []
    for (batch, depth), group in itertools.groupby(cases, lambda c: (c.batch, c.depth)):
        wanted += [(batch, 0, depth)] * (depth > 0)  # the cache is filled once
        wanted += [p for case in group for p in (1 + REPETITIONS) * once(case)]
    assert passes == wanted
    assert all(len(one.tokens_per_s.values) == REPETITIONS for one in found)
    assert all(one.kv_bytes > 0 == one.disk_bytes_per_token for one in found)


def test_a_deep_cache_is_filled_in_pieces(
    checkpoint: Path, passes: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_rates, "_PIECE", 64)
    rates(checkpoint, Setup(), [Case("tg", 1, 70, batch=2)], 1)
    assert passes == [(2, 0, 32), (2, 32, 32), (2, 64, 6), (2, 70, 1), (2, 70, 1)]


def test_a_rate_is_all_tokens_over_the_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 2.0)  # two seconds from one look to the next
    monkeypatch.setattr(model_rates, "perf_counter", lambda: next(clock))
    calls: list[int] = []
    cases = [Case("pp", 7, batch=3), Case("tg", 5, batch=3)]
    found = rates(checkpoint, Setup(), cases, REPETITIONS, done=lambda: calls.append(1))
    assert [one.tokens_per_s.values for one in found] == [(10.5,) * 3, (7.5,) * 3]
    assert len(calls) == len(cases) * (1 + REPETITIONS)


def test_bytes_from_disk_are_shared_by_the_sequences_of_a_batch(checkpoint: Path) -> None:
    least, everything = load_budgets(checkpoint, context=5, batch_size=2)
    cases = [Case("tg", 4), Case("tg", 4, batch=2)]
    alone, two = rates(checkpoint, Setup(str(least)), cases, REPETITIONS)
    resident, _ = rates(checkpoint, Setup(str(everything)), cases, REPETITIONS)
    assert resident.disk_bytes_per_token == 0 < two.disk_bytes_per_token
    ratio = alone.disk_bytes_per_token / two.disk_bytes_per_token
    assert ratio == pytest.approx(2, rel=0.2)  # what is read ahead may count with the next


def test_a_bound_is_of_everything(checkpoint: Path, passes: list[Pass]) -> None:
    """A prompt that has no room in one pass is read in pieces, a deep cache takes its share."""
    case = Case("pp", 200)
    least, everything = load_budgets(checkpoint, context=201)
    (found,) = rates(checkpoint, Setup(str(least)), [case], 1)
    assert len(passes) > 2
    assert sum(count for _, _, count in passes) == 2 * 200
    assert found.kv_bytes < least < everything
    with pytest.raises(BudgetError, match="take"):
        rates(checkpoint, Setup(str(least)), [Case("pp", 200, 2000)], 1)


def test_states_that_cannot_go_back_are_made_anew(
    passes: list[Pass], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = module_checkpoint(tmp_path_factory.getbasetemp(), "jamba")  # recurrent
    case = Case("tg", 2, 9)
    check(path, [Setup()], [case])
    (found,) = rates(path, Setup(), [case], REPETITIONS)
    assert passes == (1 + REPETITIONS) * [(1, 0, 9), *once(case)]
    assert found.kv_bytes > 0


def test_what_cannot_be_measured_is_known_before(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = tiny_checkpoint(tmp_path_factory.getbasetemp(), "opt")
    check(short, [Setup()], [Case("tg", 6, 250)])
    with pytest.raises(ArgumentError, match=r"tg7@d250 has sequences of 257 tokens.*up to 256"):
        check(short, [Setup()], [Case("pp", 1), Case("tg", 7, 250)])
    with pytest.raises(BudgetError, match="streaming"):
        check(checkpoint, [Setup(), Setup("1KiB")], [Case("pp", 1)])
    with pytest.raises(ArgumentError, match="layers"):
        check(checkpoint, [Setup(kv_bits="4/99:8")], [Case("pp", 1)])
    small = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")  # heads of 16
    with pytest.raises(OpError, match="16"):
        check(small, [Setup(kv_bits="4")], [Case("pp", 1)])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (1, r"pp1@d999999999: a KV cache and a pass take [\d,]+ bytes, and [\d,]+ are free; lower"),
        (
            9999999,
            r"[\d,]+ bytes of KV cache .* use fewer or shorter sequences \(batch_size, context",
        ),
    ],
)
def test_a_cache_beyond_all_memory_is_refused(checkpoint: Path, batch: int, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        rates(checkpoint, Setup(), [Case("pp", 1, 999999999, batch)], 1)


def test_the_backend_is_named() -> None:
    assert backend_of("cpu") == "cpu"
    with pytest.raises(ArgumentError, match="no device is called"):
        backend_of("tpu:0")
