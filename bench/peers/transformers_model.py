"""Models behind transformers' `generate`, timed token by token."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from bench.greedy import Timing


class _Clock(StoppingCriteria):
    """Notes the time after every token, and never stops."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.stamps.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def generate(model: Any, prompts: Tensor, new: int) -> tuple[Tensor, Timing]:
    """Generate `new` tokens greedily, end of text or not: int64 [B, new], and when each came."""
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0
    clock = _Clock()
    start = time.perf_counter()
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    found = ids[:, prompts.shape[1] :]
    return found, Timing(start, tuple(clock.stamps), len(prompts))
