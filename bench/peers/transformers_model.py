"""Models behind transformers' `generate`, timed token by token."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from bench.greedy import Timing


class _Clock(BaseStreamer):
    """Notes the time after every token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        if self._prompt_came:
            self.stamps.append(time.perf_counter())
        self._prompt_came = True

    def end(self) -> None:
        pass


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
        streamer=clock,
    )
    found = ids[:, prompts.shape[1] :]
    return found, Timing(start, tuple(clock.stamps), len(prompts))
