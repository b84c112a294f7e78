"""What waits for a copy, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.kernels.upload import on_device


@pytest.mark.parametrize(("device", "waits"), [("meta", False), ("cpu", True)])
def test_only_copies_to_host_memory_are_waited_for(
    device: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch returns memory of the host before what a GPU copies there has arrived."""
    told, own = list[bool](), Tensor.to

    def to(x: Tensor, *where: Any, non_blocking: bool = False) -> Tensor:
        told.append(non_blocking)
        return own(x, *where, non_blocking=non_blocking)

    monkeypatch.setattr(Tensor, "to", to)
    assert on_device(torch.ones(2), torch.device(device)).device.type == device
    assert told == [not waits]
