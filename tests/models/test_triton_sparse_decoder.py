"""Attention to a part of the blocks on the ops of a GPU, in the interpreter, against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.experts import activate
from tests.models.test_triton_decoder import COARSER, KV8, Runs, checkpoint, interpreted
from tests.triton_module import interpret_few, triton_module


def w4_linear(x: Tensor, weight: QTensor, bias: Tensor | None, end: Any, scratch: Any) -> Tensor:
    """`kernels.triton.linear.linear.w4_linear` by the reference."""
    y = reference_ops.w4_linear(x.float(), weight, bias=None if bias is None else bias.float())
    y = activate(y, "silu") if end.silu_mul else y
    y = (y if end.residual is None else y + end.residual).to(x.dtype)
    return y if end.out is None else end.out.copy_(y)


@interpreted
@pytest.mark.parametrize("family", ["llama", "gemma3n"])
def test_logits_are_those_of_the_cpu(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where windows hide blocks, and where layers attend to what others have appended."""
    interpret_few(monkeypatch, w4_linear)
    decode, chosen = triton_module("attention.decode"), []
    select = decode.select_blocks

    def watched(*arguments: Any) -> Any:
        chosen.append(select(*arguments))
        return chosen[-1]

    monkeypatch.setattr(decode, "select_blocks", watched)
    kv = replace(KV8, window=0, attention_top=0.3)
    runs = Runs(checkpoint(tmp_path, family), 2, kv, COARSER.get(family, 1))
    runs.forward([261, 3])
    runs.forward([1, 1])
    runs.forward([1, 64])
    runs.forward([1, 1])
    counts = [one.counts[:, 0].tolist() for one in chosen if one is not None]
    assert counts[0] == [2, 0]  # of 4 blocks 1.2
    assert counts[-1] == [2, 1]
