"""Random adapters as PEFT saves them, and the models they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import reference_model


def save_adapter(checkpoint: Path, folder: Path, seed: int = 0, **options: Any) -> Any:
    """Save a random LoRA adapter of a checkpoint; returns PEFT's model on dequantized weights."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    wanted = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **wanted)
    model = peft.get_peft_model(reference_model(checkpoint), config)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model.eval()
