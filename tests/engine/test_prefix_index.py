"""A prompt finds the blocks with its tokens and with what comes before, while they hold these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qoff.engine.prefixes import PrefixIndex, common_blocks
from qoff.kernels.layout.kv_format import BLOCK_TOKENS

A, B, C = ([token] * BLOCK_TOKENS for token in (1, 2, 3))


class Store:
    """Blocks whose contents are counted; the first `near` of a sequence are to be near."""

    def __init__(self, near: int = 9) -> None:
        self.written = [0] * 9
        self.far: set[int] = set()
        self.placement = SimpleNamespace(tier=lambda index, expected: "far" * (index >= near))

    def contents(self, block: int) -> int:
        return self.written[block]

    def tier(self, block: int) -> str:
        return "far" * (block in self.far)


@pytest.fixture
def store() -> Any:
    return Store()


def test_one_token_is_left_to_be_read(store: Any) -> None:
    index = PrefixIndex(store)
    index.add([*A, *B, 7], [0, 1])
    assert index.find([*A, *B], 2) == [0]
    assert index.find([*A, *B, 8], 3) == [0, 1]
    assert index.find([*B, *A, 8], 3) == []


def test_the_same_tokens_behind_others_are_another_block(store: Any) -> None:
    """Also behind a block whose tokens another one holds already."""
    index = PrefixIndex(store)
    index.add([*A, *B], [0, 1])
    index.add([*A, *C], [2, 3])
    assert index.find([*A, *C, 7], 3) == [0, 3]
    assert index.find([*C, 7], 2) == []


def test_what_an_adapter_read_is_found_with_it_alone(store: Any) -> None:
    index = PrefixIndex(store)
    index.add(A, [0], adapter=1)
    assert [index.find([*A, 7], 2, adapter=one) for one in (-1, 0, 1)] == [[], [], [0]]


def test_a_block_that_was_written_again_has_its_new_tokens(store: Any) -> None:
    index = PrefixIndex(store)
    index.add(A, [0])
    store.written[0] += 1
    index.add(B, [0])
    assert index.find([*A, 7], 2) == []
    assert index.find([*B, 7], 2) == [0]
    store.written[0] += 1
    assert index.find([*B, 7], 2) == []
    index.add(B, [1])
    index.add(C, [0])
    assert index.find([*B, 7], 2) == [1]
    assert index.find([*C, 7], 2) == [0]


def test_blocks_are_shared_where_the_sequence_would_have_them() -> None:
    store: Any = Store(near=1)
    index = PrefixIndex(store)
    index.add([*A, *B], [0, 1])
    assert index.find([*A, *B, 7], 3) == [0]
    store.far.add(1)
    assert index.find([*A, *B, 7], 3) == [0, 1]
    store.far.add(0)
    assert index.find([*A, *B, 7], 3) == []


def test_common_blocks_are_whole_and_from_the_first_one_on() -> None:
    assert common_blocks([*A, *B, 7], [*A, *B, 7]) == 2
    assert common_blocks([*A, *B], [*A, *C]) == 1
    assert common_blocks([*C, *B], [*A, *B]) == 0
    assert common_blocks(A[1:], A[1:]) == 0
