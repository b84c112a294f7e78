"""Block numbers: never handed out twice, free again when the last user is gone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import ArgumentError
from qoff.kvcache.store.allocator import BlockAllocator


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "release", "grow"]), st.integers(0, 9))
    )
)
def test_counts_users_through_any_moves(moves: list[tuple[str, int]]) -> None:
    allocator, users = BlockAllocator(2), Counter[int]()
    for move, number in moves:
        held = sorted(users.elements())
        if move == "grow":
            allocator.grow(allocator.capacity + number)
        elif move == "allocate":
            if allocator.free:
                block = allocator.allocate()
                assert users[block] == 0
                assert 0 <= block < allocator.capacity
                users[block] = 1
            else:
                with pytest.raises(ArgumentError, match="blocks of the KV cache are in use"):
                    allocator.allocate()
        elif held:
            block = held[number % len(held)]
            getattr(allocator, move)([block])
            users[block] += 1 if move == "share" else -1
        users = +users
        assert allocator.free == allocator.capacity - len(users)
        assert all(allocator.users(block) == count for block, count in users.items())
