"""Memory that weights, states and hidden states pass through is NaN while it holds nothing."""

from __future__ import annotations

import queue
from pathlib import Path

import torch
from torch import Tensor

from qoff import train

from .test_training import LR, PLACES, batch, model_of, offloaded


def freed(buffers: queue.SimpleQueue[Tensor]) -> list[Tensor]:
    """Those that are free; they stay so."""
    found = [buffers.get() for _ in range(buffers.qsize())]
    for buffer in found:
        buffers.put(buffer)
    return found


def test_what_is_free_between_steps_is_nan(tmp_path: Path) -> None:
    training = offloaded(model_of("llama"), PLACES[2], tmp_path, optimizer=train.AdamW(lr=LR))
    for step in range(2):
        training.step([batch(step), batch(step + 9)])
        parts = training._engine.parts
        free = [*parts.held.weights._free, *freed(parts.updater._free)]
        free += freed(parts.boundaries._free)
        assert len(free) == 9
        assert all(x.view(torch.float32).isnan().all() for x in free)
