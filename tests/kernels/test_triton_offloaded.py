"""What a GPU chose of blocks in host memory, as the parts of a cache there have them."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.triton.attention.offloaded import chosen_bytes, chosen_of

FORM, KV_HEADS, WIDTH, SLOTS = KVFormat(64), 2, 6, 4


def parts_of(counts: list[tuple[int, int]], slots: list[int]) -> list[PackedTokens]:
    """Two parts, with so many blocks of each slot, the oldest in the first."""
    spans = tuple(Span(slot, row, 1, 64 * 40) for row, slot in enumerate(slots))
    parts = []
    for i in range(2):
        tokens = [64 * both[i] for both in counts]
        first = [64 * both[0] * i for both in counts]
        blocks = torch.zeros(SLOTS, 20, dtype=torch.int32)
        pool = torch.empty(1, KV_HEADS, FORM.nbytes, dtype=torch.uint8)
        parts.append(PackedTokens(FORM, pool, BlockTable(blocks, tokens, Ragged(spans), first)))
    return parts


class Made(TorchDispatchMode):
    """Counts the bytes of new tensors that are no views."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
        if found.untyped_storage().data_ptr() not in given:
            self.nbytes += found.untyped_storage().nbytes()
        return found


@given(
    counts=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=SLOTS, max_size=SLOTS
    ),
    slots=st.sets(st.integers(0, SLOTS - 1), min_size=1).map(sorted),
    draw=st.randoms(use_true_random=False),
)
def test_each_part_has_its_own_places(
    counts: list[tuple[int, int]], slots: list[int], draw: Random
) -> None:
    """Those of the first part, then those of the second, are all that were chosen.

    No more bytes are taken than plans count.
    """
    blocks = torch.full((SLOTS, KV_HEADS, WIDTH), 2**30, dtype=torch.int32)
    far = torch.zeros(SLOTS, KV_HEADS, dtype=torch.int32)
    for slot, both in enumerate(counts):
        for head in range(KV_HEADS):
            most = min(WIDTH, sum(both))
            some = sorted(draw.sample(range(sum(both)), draw.randint(0, most)))
            blocks[slot, head, : len(some)] = torch.tensor(some, dtype=torch.int32)
            far[slot, head] = len(some)
    found = []
    for part in parts_of(counts, slots):
        with Made() as made:
            found.append(chosen_of(part, blocks, far))
        most = chosen_bytes(SLOTS, KV_HEADS, WIDTH)
        assert made.nbytes <= most - blocks.nbytes - far.nbytes
    for row, slot in enumerate(slots):
        for head in range(KV_HEADS):
            mine: list[int] = []
            for (places, numbers), start in zip(found, (0, counts[slot][0]), strict=True):
                listed = places[row, head, : int(numbers[row, head])].tolist()
                mine += [start + place for place in listed]
            assert mine == blocks[slot, head, : int(far[slot, head])].tolist()
