"""The MLP of a mixture of experts in Triton against the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.experts import activate
from tests.kernels.operands import random_experts
from tests.kernels.test_experts import KINDS, routed
from tests.tolerances import RELATIVE_RMS, assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")
from qoff.kernels.triton.launch.gpu import Gpu  # noqa: E402
from qoff.kernels.triton.moe import experts as w4_experts  # noqa: E402
from qoff.kernels.triton.moe.pairs import fma_pairs  # noqa: E402
from qoff.kernels.triton.moe.product import Product  # noqa: E402
from qoff.kernels.triton.moe.tiles import BLOCKS, block_for, tiles  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)

OLDER = Gpu(80, 4)
# experts, tokens, experts of a token, hidden, inner, bits, group
SHAPES = [
    (1, 1, 1, 32, 32, 4, 32),
    (5, 3, 2, 96, 64, 4, 32),
    (6, 4, 2, 64, 128, 4, 64),
    (3, 2, 2, 128, 128, 4, 128),
    (4, 3, 3, 64, 64, 8, 64),
]


def case(
    experts: int,
    tokens: int,
    per_token: int,
    hidden: int,
    inner: int,
    bits: int = 4,
    group: int = 32,
    dtype: torch.dtype = torch.float16,
    activation: str = "silu",
    scale_dtype: torch.dtype = torch.float16,
    gated: bool = True,
) -> tuple[Tensor, Tensor, Tensor, ExpertsMlp]:
    """Operands of the op, with biases."""
    form = {"packing": "split32", "scale_dtype": scale_dtype, "gated": gated}
    weights = random_experts(experts, hidden, inner, bits, group, **form)
    biases = (torch.randn(experts, q.shape[0]).to(dtype) for q in weights)
    mlp = ExpertsMlp(*weights, activation, *biases, gated=gated)
    return (torch.randn(tokens, hidden).to(dtype), *routed(tokens, experts, per_token), mlp)


def check(found: Tensor, operands: tuple[Any, ...]) -> None:
    x = operands[0]
    truth = reference_ops.experts(x.double(), *operands[1:])
    assert found.dtype == x.dtype
    # Two steps are rounded: the activations and the result.
    assert_close(found.double(), truth, tolerance=2 * RELATIVE_RMS[x.dtype])


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [True, False])
def test_equals_reference(gated: bool, shape: tuple[int, ...], block: int) -> None:
    operands = case(*shape, gated=gated)
    check(triton_ops.experts(*operands, block=block), operands)


@pytest.mark.parametrize("block", [0, 16])
def test_weights_of_inputs(block: int) -> None:
    *operands, mlp = case(*SHAPES[1])
    operands = [*operands, replace(mlp, weighs_input=True)]
    check(triton_ops.experts(*operands, block=block), tuple(operands))


@pytest.mark.parametrize("block", [0, 16])
def test_in_bfloat16(block: int) -> None:
    operands = case(*SHAPES[1], dtype=torch.bfloat16)
    check(triton_ops.experts(*operands, block=block), operands)


@pytest.mark.parametrize("block", [0, 16])
def test_compact_scales(block: int) -> None:
    operands = case(*SHAPES[1], scale_dtype=torch.uint8)
    check(triton_ops.experts(*operands, block=block), operands)


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize(("activation", "gated"), KINDS)
def test_activations(activation: str, gated: bool, block: int) -> None:
    x, *others = case(3, 4, 2, 64, 32, activation=activation, gated=gated)
    operands = (4 * x, *others)
    check(triton_ops.experts(*operands, block=block), operands)


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_limits(activation: str, block: int) -> None:
    x, ids, weights, mlp = case(3, 4, 2, 64, 32, activation=activation)
    operands = (4 * x, ids, weights, replace(mlp, limit=0.75))
    check(triton_ops.experts(*operands, block=block), operands)


def test_tiles_without_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "of", staticmethod(lambda device: OLDER))
    operands = case(*SHAPES[0])
    check(triton_ops.experts(*operands, block=16), operands)


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("relu2", False), ("", True)])
def test_without_tensor_cores(activation: str, gated: bool) -> None:
    x, topk_ids, topk_weights, mlp = case(3, 4, 2, 96, 64, gated=gated)
    weight, bias = (mlp.gate_up, mlp.gate_up_bias) if activation else (mlp.down, mlp.down_bias)
    x = x if activation else torch.randn(8, 64).half()
    found = fma_pairs(Product(x, topk_ids, topk_weights, weight, bias, activation, gated))
    chosen = topk_ids.flatten().tolist()
    z = torch.stack([weight.expert(e).dequantize() for e in chosen])
    z = torch.einsum("prk,pk->pr", z, x.float().repeat_interleave(8 // len(x), 0))
    z = z + bias.float()[chosen]
    if activation:
        assert_close(found, activate(z, activation, gated).half())
    else:
        assert_close(found, z * topk_weights.view(-1, 1), dtype=torch.float16)


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_all_tokens_choose_one_expert(tokens: int) -> None:
    x, topk_ids, topk_weights, mlp = case(6, tokens, 1, 32, 32)
    operands = (x, torch.full_like(topk_ids, 4), topk_weights, mlp)
    check(triton_ops.experts(*operands), operands)


def test_tokens_one_part_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = case(4, 5, 2, 32, 32)
    monkeypatch.setattr(w4_experts, "PAIRS_MAX", 5)
    check(triton_ops.experts(*operands), operands)


def test_without_biases_and_with_biases_of_another_dtype() -> None:
    x, topk_ids, topk_weights, mlp = case(4, 3, 2, 32, 32)
    wide = [bias.float() for bias in (mlp.gate_up_bias, mlp.down_bias)]
    for biases in ((None, None), wide):
        other = ExpertsMlp(mlp.gate_up, mlp.down, "silu", *biases)
        operands = (x, topk_ids, topk_weights, other)
        check(triton_ops.experts(*operands), operands)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (3, 64), (100, 7), (513, 9)])
def test_tiles_hold_every_pair_once(tokens: int, experts: int, block: int) -> None:
    topk_ids, _ = routed(tokens, experts, min(3, experts))
    topk_ids = topk_ids.clamp(max=max(0, experts - 3))  # nobody chooses the last
    order, table = tiles(topk_ids, experts, block)
    assert order.dtype == table.dtype == torch.int32
    counts, seen = Counter(topk_ids.flatten().tolist()), []
    for expert, first, last in table.T.tolist():
        assert last - first <= block
        places = range(first, max(first, last))
        seen += places
        assert all(topk_ids.view(-1)[order[place]] == expert for place in places)
    assert sorted(seen) == list(range(topk_ids.numel()))
    live = sum(last > first for _, first, last in table.T.tolist())
    assert live == sum(-(-count // block) for count in counts.values())


def test_the_rule() -> None:
    assert [w4_experts.rule(pairs, 128, 90) for pairs in (8, 128, 129)] == [0, 0, 16]
    assert w4_experts.rule(4096, 128, 90) == 32
    assert w4_experts.rule(4096, 128, 75) == 0
    assert [w4_experts.rule(pairs, 8, 80) for pairs in (16, 17, 1 << 14)] == [0, 16, 64]
    assert block_for(1, 1) == 16


def moved(q: QExperts, by: int) -> QExperts:
    """The same experts, `by` bytes further than a multiple of 16."""
    codes = torch.zeros(q.codes.numel() + 16, dtype=torch.uint8)[by : by + q.codes.numel()]
    return QExperts(
        codes.view(q.codes.shape), q.scale_min, q.shape, q.bits, q.group_size, q.packing
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"x": torch.zeros(3, 64)}, "x is float16 or bfloat16"),
        ({"x": torch.zeros(3, 96).half()}, r"x is .* \[M, 64\]"),
        ({"x": torch.zeros(64, 3).half().T}, "contiguous"),
        ({"topk_ids": torch.zeros(3, 2).int()}, "topk_ids is int64"),
        ({"topk_ids": torch.zeros(2, 2).long()}, r"topk_ids is int64 \[3, T\]"),
        ({"topk_ids": torch.zeros(3, 0).long()}, "at least one"),
        ({"topk_weights": torch.zeros(3, 2).half()}, "topk_weights is float32"),
        ({"topk_weights": torch.zeros(3, 2, device="meta")}, "topk_weights is on meta"),
    ],
)
def test_wrong_operands_are_refused(change: dict, complaint: str) -> None:
    names = ("x", "topk_ids", "topk_weights", "mlp")
    operands = dict(zip(names, case(4, 3, 2, 64, 32), strict=True))
    with pytest.raises(OpError, match=complaint):
        triton_ops.experts(**{**operands, **change})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gate_up_bias": torch.zeros(4, 63).half()}, "gate_up_bias is"),
        ({"down_bias": torch.zeros(64).half()}, "down_bias is"),
        ({"activation": "tanh"}, "unknown activation"),
        ({"gate_up": random_experts(4, 64, 32)[0]}, "packing (rows16|split32)"),
        ({"down": random_experts(4, 32, 32, packing="split32")[1]}, "2I, H"),
        ({"down": moved(random_experts(4, 64, 32, packing="split32")[1], 8)}, "multiples of 16"),
    ],
)
def test_a_wrong_mlp_is_refused(change: dict, complaint: str) -> None:
    *operands, mlp = case(4, 3, 2, 64, 32)
    with pytest.raises(OpError, match=complaint):
        triton_ops.experts(*operands, replace(mlp, **change))
