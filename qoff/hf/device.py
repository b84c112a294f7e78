"""The device that a model runs on, known before it is downloaded or converted."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from qoff.budgets import resolve_device
from qoff.errors import ArgumentError
from qoff.kernels.ops import ops_for


def device_for(device: torch.device | str) -> torch.device:
    """The device of a name, as `resolve_device`. Raises OpError for a GPU that cannot be used."""
    where = resolve_device(device)
    if where.type != "cpu":
        ops_for(where)
    return where


def check_packing(
    name: str | PathLike[str], config: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ArgumentError for weights of a checkpoint in the CPU's packing, on a GPU.

    config: its config.json.
    """
    quantization = config.get("quantization_config")
    packing = quantization.get("packing") if isinstance(quantization, Mapping) else None
    if device.type != "cpu" and packing == "rows16":
        raise ArgumentError(
            f"{name}: was converted for the CPU (--for cpu), and weights are not repacked on their "
            "way to a GPU; use device='cpu' (--device cpu), or convert the model again without "
            "--for cpu"
        )
