from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import BudgetError
from qoff.memory.arena import HUGE_PAGE, PAGE, Arena, map_pages


@given(st.integers(0, 1 << 18), st.lists(st.integers(0, 1 << 16), max_size=12))
def test_pieces_are_aligned_disjoint_and_within_the_budget(
    capacity: int, requests: list[int]
) -> None:
    arena = Arena("device", capacity)
    pieces = []
    for i, nbytes in enumerate(requests):
        before = arena.used
        try:
            piece = arena.alloc(nbytes, f"piece {i}")
        except BudgetError:
            assert before + nbytes + PAGE > capacity
            assert arena.used == before
            continue
        assert piece.numel() == nbytes
        assert piece.storage_offset() % PAGE == 0
        piece.fill_(i + 1)
        pieces.append((piece, i + 1))
        assert before + nbytes <= arena.used <= arena.capacity == capacity
    assert all(bool((piece == value).all()) for piece, value in pieces)


def test_memory_starts_on_a_page() -> None:
    assert Arena("device", 10_000).alloc(100, "a").data_ptr() % 4096 == 0


def test_large_memory_starts_on_a_huge_page_and_takes_no_more_than_it_has() -> None:
    memory = map_pages(3 * HUGE_PAGE + 5 * PAGE).fill_(1)
    assert memory.data_ptr() % HUGE_PAGE == 0
    end = memory.data_ptr() + memory.nbytes
    taken = resident(end)  # what is mapped behind it is in no use
    assert taken == 0
    assert resident(memory.data_ptr()) >= memory.nbytes


def resident(address: int) -> int:
    """Bytes in use of what was mapped with an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            low, high = (int(x, 16) for x in first.split("-"))
            here = low <= address < high
        elif here and first == "Rss:":
            return int(rest[0]) << 10
    return -1


def test_refusal_names_tier_purpose_and_bytes() -> None:
    arena = Arena("device", 10_000)
    arena.alloc(8192, "slot 0")
    with pytest.raises(BudgetError, match=r"device.*slot 1 needs 4,000 bytes, 1,808 of 10,000"):
        arena.alloc(4000, "slot 1")


def test_memory_the_system_refuses_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=f"{1 << 60:,} bytes"):
        Arena("device", 1 << 60)


def mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_memory_is_unmapped_when_the_last_view_dies_after_close() -> None:
    arena = Arena("device", 1 << 24)
    piece = arena.alloc(1 << 24, "all")
    address = piece.data_ptr()
    arena.close()
    assert mapped(address)
    piece.fill_(1)
    del piece
    assert not mapped(address)
    with pytest.raises(ValueError, match="closed"):
        arena.alloc(1, "late")
