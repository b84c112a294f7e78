"""Sparse attention to blocks that come to the device moves little more than it attends to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache.store.placement import KVPlacement
from qoff.kvcache.store.sparse import WRONG_GUESSES, LateChoices, record_runs
from qoff.memory.arena import Arena
from qoff.memory.io.disk import DiskReader
from tests.kvcache.test_tiered import (
    FORMS,
    LAYERS,
    PLAIN,
    WINDOW,
    cache_on,
    forward,
    plan_of,
    tiered,
)

HEADS, BLOCKS = 2, 50
TOKENS = WINDOW + 64 * BLOCKS  # all packed but for the window, so many tokens deep


def moved(folder: Path, placement: KVPlacement, top: float, steps: int) -> int:
    """Bytes that single tokens bring to the device, whose queries change little by little."""
    torch.manual_seed(1)
    reader = DiskReader()
    plan = plan_of(placement, False, 1, TOKENS + 64, sparse=top < 1)
    with tiered(folder, placement, plan, reader=reader) as store:
        cache = cache_on(store, 1, tokens=TOKENS + 64, top=top)
        prompt = Ragged.of([TOKENS], [0])
        qkv = [torch.randn(TOKENS, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache, prompt, qkv, PLAIN, False)
        before = reader.stats.bytes + store._copies.bytes
        now = [x[-1:].clone() for x in qkv]
        for _ in range(steps):
            now = [0.95 * x + 0.3 * torch.randn_like(x) for x in now]
            forward(cache, Ragged.of([1], cache.lengths), now, PLAIN, True)
        return reader.stats.bytes + store._copies.bytes - before


@pytest.mark.parametrize("top", [0.1, 0.5])
@pytest.mark.parametrize("host", [0, 1])
def test_moves_the_fraction_that_is_attended_to(tmp_path: Path, host: int, top: float) -> None:
    placement = KVPlacement(0, host)
    dense = moved(tmp_path, placement, 1.0, 20)
    assert dense >= 20 * BLOCKS * sum(HEADS * form.nbytes for form in FORMS)
    assert 0.5 * top * dense < moved(tmp_path, placement, top, 20) <= (top + 0.02) * dense


@settings(max_examples=30)
@given(
    blocks=st.integers(1, 300),
    kept=st.floats(0, 1),
    change=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 99),
)
def test_few_guesses_are_wrong(blocks: int, kept: float, change: float, seed: int) -> None:
    choices = new_choices(blocks)
    numbers, draw = np.arange(blocks), np.random.default_rng(seed)
    chosen = draw.random((blocks, HEADS)) < kept
    wrong = 0
    for token in range(1, 60):
        guessed = choices.guess(0, numbers)
        choices.note(0, numbers, chosen, guessed)
        wrong += np.count_nonzero(guessed & ~chosen)
        assert wrong <= WRONG_GUESSES * token * chosen.size
        chosen = np.where(
            draw.random(chosen.shape) < change, draw.random(chosen.shape) < kept, chosen
        )


def test_what_is_chosen_again_and_again_is_read_ahead() -> None:
    choices, numbers = new_choices(200), np.arange(200)
    chosen = np.zeros((200, HEADS), dtype=bool)
    chosen[::3, 0] = chosen[5:9] = True
    for _ in range(40):
        guessed = choices.guess(0, numbers)
        choices.note(0, numbers, chosen, guessed)
    assert (guessed == chosen).all()
    choices.forget(0, [0])
    assert not choices.guess(0, numbers)[0].any()


def new_choices(blocks: int) -> LateChoices:
    return LateChoices([HEADS], blocks, Arena("device", blocks * HEADS))


def test_neighbours_are_one_run() -> None:
    found = record_runs(np.array([0, 10, 20, 40, 50]), np.array([5, 15, 25, 35, 55]), 10)
    assert [(run.source, run.dest, run.nbytes) for run in found] == [
        (0, 5, 30),
        (40, 35, 10),
        (50, 55, 10),
    ]
