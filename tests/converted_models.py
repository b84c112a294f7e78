"""Logits of models that are converted, and of those that they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.models.forward_pass import ForwardPass
from qoff.quant import QuantConfig
from tests.tiny_models import PlainRun

EIGHT = QuantConfig(bits=8, group_size=32, head_bits=8, solver="rtn")
NEARLY = 0.025  # relative, of logits after rounding weights to 8 bits


@torch.no_grad()
def random_weights(model: Any) -> None:
    """Give parameters, and corrections of routers, random values."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.normal_(std=0.1)


def logits(checkpoint: Path, tokens: Tensor) -> Tensor:
    run = PlainRun(checkpoint, reference_ops)
    ragged = Ragged.of([len(tokens)], [0])
    return run.forward(
        ForwardPass(tokens, ragged, run.decoder.new_cache(1), torch.arange(len(tokens)))
    )


@torch.no_grad()
def expected(model: Any, tokens: Tensor) -> Tensor:
    return model.float().eval()(tokens[None]).logits[0]
