"""Offloaded blocks come to the places of a slot, whatever tiers they come from."""

from __future__ import annotations

import pytest
import torch

from qoff.kvcache.device.prefetch import _pairs
from qoff.kvcache.store.ring import CopyPlan, runs
from qoff.memory.io.copies import Copies


@pytest.mark.parametrize("padding", [0, 24], ids=["whole pages", "padded"])
@pytest.mark.parametrize("on_disk", [[], [0, 1, 2, 3, 4, 5], [0, 1, 4], [2, 5]], ids=str)
def test_blocks_come_to_their_places(padding: int, on_disk: list[int]) -> None:
    """on_disk: numbers there; these come first."""
    record, count = 40, 6
    on_host = range(len(on_disk), count)
    read = torch.randint(0, 255, (len(on_disk), record + padding), dtype=torch.uint8)
    pool = torch.randint(0, 255, (9, record), dtype=torch.uint8)
    plan = CopyPlan(
        count,
        tuple(range(count)),
        tuple(on_disk),
        runs(enumerate(on_disk)),
        runs((at, at + 3) for at in on_host),
    )
    dest = torch.full((count, record), 255, dtype=torch.uint8)
    pairs = list(_pairs(plan, dest, read[:, :record], pool))
    with_padding = len(on_disk) if padding and on_disk else len(plan.from_disk)
    assert len(pairs) <= with_padding + len(plan.from_host)  # a copy for each run, where it can be
    assert all(part.is_contiguous() for pair in pairs for part in pair)
    copies = Copies()
    try:
        copies.call(lambda: copies.copy(pairs), dest.nbytes, "host to device", "KV").result()
    finally:
        copies.close()
    assert torch.equal(dest[: len(on_disk)], read[:, :record])
    for at in on_host:
        assert torch.equal(dest[at], pool[at + 3])
