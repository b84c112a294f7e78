"""`generate` of families other than Llama gives what transformers gives."""

from __future__ import annotations

import pytest
import torch

import qoff
from tests.tiny_models import reference_model, tiny_checkpoint

FAMILIES = ["gemma3", "opt", "gpt-neox", "phi3-longrope", "qwen2-moe"]
FAMILIES += ["gemma3n", "gemma4", "gemma4-small", "deepseek-v3", "deepseek-v3.2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_padded_batch(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    ids = torch.randint(3, 128, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    model, _ = qoff.load(path)
    with model:
        found = model.generate(ids, **options)
    assert torch.equal(found, reference_model(path).generate(ids, **options))
