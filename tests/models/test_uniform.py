"""Experts of a layer take one form, without a change of value."""

from __future__ import annotations

from dataclasses import replace

import torch

from qoff.models.convert.builder import with_uniform_experts
from qoff.quant import QTensor, quantize

NAME = "model.layers.3.mlp.experts.{}.{}_proj"


def test_the_form_that_holds_all() -> None:
    def matrix(bits: int, group: int) -> QTensor:
        return quantize(torch.randn(32, 128), bits, group, "rtn", "split32", torch.float16)

    wide = matrix(4, 64)
    weights: dict[str, QTensor | torch.Tensor] = {
        NAME.format(0, "gate_up"): matrix(4, 64),
        NAME.format(0, "down"): matrix(4, 128),
        NAME.format(1, "gate_up"): matrix(8, 128),
        NAME.format(1, "down"): matrix(4, 128),
        NAME.format(2, "gate_up"): matrix(4, 32),
        NAME.format(2, "down"): replace(wide, scale_min=wide.scale_min.float()),
        "model.layers.3.self_attn.o_proj": matrix(4, 64),
        "model.layers.3.mlp.experts.gate_up_proj.bias": torch.zeros(3),
    }
    found = with_uniform_experts(weights)
    assert list(found) == list(weights)
    for name, weight in weights.items():
        now = found[name]
        if not isinstance(weight, QTensor) or not isinstance(now, QTensor):
            assert now is weight
            continue
        assert torch.equal(now.dequantize(), weight.dequantize())
        if "experts" in name:
            gate = "gate_up" in name
            assert (now.bits, now.group_size) == ((8, 32) if gate else (4, 64))
            assert now.scale_min.dtype == (torch.float16 if gate else torch.float32)
