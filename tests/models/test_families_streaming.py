"""Families other than Llama give the same bits resident and under budgets, with poisoned slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from tests.instruments import POISON
from tests.tiny_models import budgets, tiny_checkpoint

LENGTHS = [1, 19, 6]
FAMILIES = ["gemma2", "glm4", "gpt-neox", "opt", "qwen3-moe", "qwen2-moe", "gpt-oss"]
FAMILIES += [
    "deepseek-v3",
    "glm-5",
    "glm4-moe-lite",
    "youtu",
    "llama4",
    "gemma4-moe",
    "gemma4-small",
]
FAMILIES += ["gemma3n", "lfm2-moe", "nemotron-h-latent", "falcon-h1", "laguna", "step-3.5"]
FAMILIES += ["mimo-v2", "apertus", "phimoe", "ling3", "olmo-hybrid"]


def logits(path: Path, memory: int | None) -> Tensor:
    """Of a ragged prefill and of two decode steps."""
    torch.manual_seed(5)
    with Runtime(path, device_memory=memory, instrumentation=POISON) as runtime:
        cache, found = runtime.new_cache(len(LENGTHS)), []
        for counts in (LENGTHS, [1, 1, 1], [1, 1, 1]):
            ragged = Ragged.of(counts, cache.lengths)
            tokens = torch.randint(3, 128, (ragged.tokens,))
            rows = torch.arange(ragged.tokens)
            found.append(runtime.forward(ForwardPass(tokens, ragged, cache, rows)))
        return torch.cat(found)


@pytest.mark.parametrize("packing", ["split32", "rows16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_budget_gives_the_same_bits(
    family: str, packing: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family, packing)
    least, everything = budgets(path)
    wanted = logits(path, None)
    assert least < everything
    for memory in (least, (least + everything) // 2, everything - 1):
        assert torch.equal(logits(path, memory), wanted)
