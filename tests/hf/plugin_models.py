"""Models of `from_pretrained`, and what they say of a few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 20, 23]])
CONFIG = {"group_size": 32, "solver": "rtn"}  # that of tiny checkpoints


def load(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **options)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits
