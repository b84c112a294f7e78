"""Windows: every definition against its own words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import ArgumentError
from qoff.eval.perplexity.windows import Window, cut


def scored(windows: list[Window]) -> list[int]:
    return [token for w in windows for token in range(w.first, w.stop)]


@given(st.integers(2, 40), st.integers(1, 300), st.data())
def test_strided_windows_score_every_token_once_from_enough_others(
    length: int, more: int, data: st.DataObject
) -> None:
    total = length + more
    stride = data.draw(st.integers(1, length))
    windows = cut(total, length, stride=stride)
    assert scored(windows) == ([*range(1, total)] if stride < length else expected(total, length))
    for window in windows:
        assert window.start < window.first < window.stop <= window.start + length
        if window.start:
            assert window.first - window.start >= length - stride


def expected(total: int, length: int) -> list[int]:
    """Without overlap the first token of each window has nothing to be predicted from."""
    return [token for token in range(total) if token % length]


@given(st.integers(2, 40), st.integers(0, 300))
def test_windows_of_llama_cpp_score_second_halves(length: int, more: int) -> None:
    windows = cut(length + more, length, definition="llama.cpp")
    assert len(windows) == (length + more) // length
    for i, window in enumerate(windows):
        assert (window.start, window.stop) == (i * length, (i + 1) * length)
        assert window.scored == length - 1 - length // 2


@given(st.integers(2, 40), st.integers(0, 300))
def test_windows_of_lm_eval_score_every_token_with_one_before(length: int, more: int) -> None:
    windows = cut(length + more, length, definition="lm_eval")
    assert scored(windows) == [*range(length + more)]
    ids = torch.arange(length + more) + 1000
    for window in windows:
        tokens = window.tokens(ids, 7)
        assert len(tokens) == length + 1  # the last is predicted only
        assert tokens[window.place] == 1000 + window.first
    assert windows[0].tokens(ids, 7)[0] == 7


def test_a_limit_keeps_the_first() -> None:
    assert cut(100, 10, limit=2) == cut(100, 10)[:2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"total": 9, "length": 10}, "9 tokens, less than one window of 10"),
        ({"total": 9, "length": 1}, "2 at least"),
        ({"total": 99, "length": 10, "stride": 11}, "stride of 11"),
        ({"total": 99, "length": 10, "stride": 0}, "stride of 0"),
        ({"total": 99, "length": 10, "definition": "mine"}, "no definition 'mine'"),
        ({"total": 99, "length": 10, "limit": 0}, "1 at least"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        cut(**arguments)


@given(st.integers(2, 40), st.integers(0, 300))
def test_windows_of_lm_eval_are_the_packages(length: int, more: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    total = length + more
    wanted = map(
        utils.make_disjoint_window,
        utils.get_rolling_token_windows(list(range(total)), -1, length, context_len=1),
    )
    ids = torch.arange(total)
    for window, (context, scored) in zip(
        cut(total, length, definition="lm_eval"), wanted, strict=True
    ):
        tokens = window.tokens(ids, -1)
        assert tokens.tolist() == context + scored
        assert window.place == len(context)
