"""ExpertWave: experts of a layer that are on the device together, and what stands for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.layout.qexperts import QExperts
from qoff.memory.plan import Weight

from .on_cpu import CpuExperts


@dataclass(frozen=True)
class StreamedExperts:
    """Stands among a layer's weights for its experts, which come as tokens choose them."""

    count: int
    following: int | None  # the next layer with any
    guessing: Mapping[str, Weight]  # its resident weights by local name, to guess with
    on_cpu: CpuExperts | None  # those of all layers that stay in host memory


@dataclass(frozen=True, eq=False)
class ExpertWave:
    """Some experts of a layer, until they are released.

    passing: whether they are the CPU's, which come for passes of many tokens alone.
    """

    numbers: tuple[int, ...]
    table: Tensor  # int64 [experts]: the slot of each of them, -1 for the others
    gate_up: QExperts  # of all slots
    down: QExperts
    biases: tuple[Tensor, Tensor]  # memory for theirs, float32 [slots, rows]; or [0, rows]
    passing: bool = False


def bias_memory(memory: Tensor, gate_up: QExperts, down: QExperts) -> tuple[Tensor, Tensor]:
    """Memory, uint8, as that for the biases of these, float32 [slots, rows]; [0, rows] of none."""
    rows = (gate_up.shape[0], down.shape[0])
    count = gate_up.count if memory.numel() else 0
    floats = memory.view(torch.float32)[: count * sum(rows)]
    first, second = floats.split([count * n for n in rows])
    return first.view(count, rows[0]), second.view(count, rows[1])
