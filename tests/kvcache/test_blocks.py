"""Block numbers: never handed out twice, free again when the last user is gone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import BudgetError
from qoff.kvcache.store.pool import BlockPool


@pytest.mark.parametrize("grows", [False, True])
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "release", "reserve"]), st.integers(0, 9))
    )
)
def test_counts_users_through_any_moves(grows: bool, moves: list[tuple[str, int]]) -> None:
    memory = torch.empty(2, 1, 8, dtype=torch.uint8)
    pool, users = BlockPool("host", [memory], 2, grows=grows), Counter[int]()
    for move, number in moves:
        held = sorted(users.elements())
        if move == "reserve":
            wanted, before = pool.capacity + number, pool.nbytes
            most = pool.bytes_for(wanted)
            pool.reserve(wanted)
            assert pool.nbytes + before * (pool.nbytes > before) == most  # while it is copied
        elif move == "allocate":
            if grows or number <= pool.capacity - len(users):
                blocks = pool.allocate(number)
                assert len(set(blocks)) == number
                assert users.keys().isdisjoint(blocks)
                assert all(0 <= block < pool.capacity for block in blocks)
                users.update(blocks)
            else:
                with pytest.raises(BudgetError, match="KV blocks of the host are in use"):
                    pool.allocate(number)
        elif held:
            block = held[number % len(held)]
            if move == "share":
                pool.users[block] += 1
            else:
                pool.release(block)
            users[block] += 1 if move == "share" else -1
        users = +users
        assert pool.used == len(users)
        assert pool.capacity == len(pool.layers[0])
        assert all(pool.users[block] == count for block, count in users.items())
