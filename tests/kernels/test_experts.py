"""The MLP of a mixture of experts: the CPU jobs against the reference, and `QExperts`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from qoff.errors import OpError
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.cpu.linear.linear import w4_linear
from qoff.kernels.cpu.moe.experts import experts
from qoff.kernels.cpu.moe.route import route
from qoff.kernels.layout import ending
from qoff.kernels.layout.ending import GATED_SILU, Ending
from qoff.kernels.layout.qexperts import ACTIVATIONS, ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.routing import Routing
from qoff.kernels.reference import ops as reference_ops
from tests.kernels.operands import random_experts, random_weight
from tests.tolerances import INT8_EXPERTS, INT16_EXPERTS, RELATIVE_RMS, assert_close, relative_rms

# Activations, and whether there is a gate.
KINDS = [(name, True) for name in ACTIVATIONS] + [(name, False) for name in ending.ACTIVATIONS]


def routed(tokens: int, count: int, per_token: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and topk_weights that sum to one."""
    topk_ids = torch.rand(tokens, count).argsort(1)[:, :per_token].contiguous()
    return topk_ids, torch.rand(tokens, per_token).softmax(1)


def expected(x: Tensor, *operands) -> Tensor:
    return reference_ops.experts(x.double(), *operands)


def random_mlp(
    count: int, hidden: int, inner: int, *options, activation="silu", gated=True
) -> ExpertsMlp:
    matrices = random_experts(count, hidden, inner, *options, gated=gated)
    return ExpertsMlp(*matrices, activation, gated=gated)


@given(
    count=st.integers(1, 20),
    per_token=st.integers(1, 8),
    tokens=st.integers(1, 40),
    groups=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    group_size=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    kind=st.sampled_from(KINDS),
    with_bias=st.booleans(),
    weighs_input=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_reference(
    count: int,
    per_token: int,
    tokens: int,
    groups: tuple[int, int],
    group_size: int,
    bits: int,
    kind: tuple[str, bool],
    with_bias: bool,
    weighs_input: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden, inner = (group_size * n for n in groups)
    activation, gated = kind
    mlp = random_mlp(count, hidden, inner, bits, group_size, activation=activation, gated=gated)
    x, routing = torch.randn(tokens, hidden), routed(tokens, count, min(per_token, count))
    if with_bias:
        biases = (torch.randn(count, q.shape[0]) for q in (mlp.gate_up, mlp.down))
        biases = tuple(biases)
        mlp = replace(mlp, gate_up_bias=biases[0], down_bias=biases[1])
    mlp = replace(mlp, weighs_input=weighs_input)
    found = experts(x, *routing, mlp)
    assert relative_rms(found, expected(x, *routing, mlp)) < INT16_EXPERTS


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("packing", ["split32", "rows16"])
@pytest.mark.parametrize(("activation", "gated"), KINDS)
def test_the_reference_is_the_formula(
    activation: str, gated: bool, packing: str, weighs_input: bool
) -> None:
    """Token by token, with gate and up apart, as a model's own code has it."""
    gate_up, down = random_experts(3, 64, 32, packing=packing, gated=gated)
    x, (topk_ids, topk_weights) = torch.randn(4, 64, dtype=torch.double), routed(4, 3, 2)
    functions = {
        "silu": lambda g, u: g * torch.sigmoid(g) * u,
        "gelu": lambda g, u: g * (1 + torch.erf(g / 2**0.5)) / 2 * u,
        "gelu_tanh": lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
        "relu": lambda g, u: g * (g > 0) * u,
        "relu2": lambda g, u: g**2 * (g > 0) * u,
        "clamped_swiglu": lambda g, u: (
            (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7))
        ),
    }
    mlp = ExpertsMlp(gate_up, down, activation, weighs_input=weighs_input, gated=gated)
    found = reference_ops.experts(x, topk_ids, topk_weights, mlp)
    for m in range(4):
        total = torch.zeros(64, dtype=torch.double)
        for e, s in zip(topk_ids[m].tolist(), topk_weights[m].tolist(), strict=True):
            before, behind = (s, 1) if weighs_input else (1, s)
            z = gate_up.expert(e).dequantize().double() @ (before * x[m])
            gate, up = z.view(2, 2, 16).transpose(0, 1).reshape(2, 32) if gated else (z, 1)
            value = functions[activation](gate, up)
            total += behind * (down.expert(e).dequantize().double() @ value)
        assert_close(found[m], total)


@pytest.mark.parametrize(("activation", "gated"), KINDS)
def test_large_gates(activation: str, gated: bool) -> None:
    mlp = random_mlp(2, 64, 32, activation=activation, gated=gated)
    x, routing = 40 * torch.randn(3, 64), routed(3, 2, 1)
    found = experts(x, *routing, mlp)
    assert relative_rms(found, expected(x, *routing, mlp)) < INT16_EXPERTS


@pytest.mark.parametrize("activation", ending.ACTIVATIONS)
def test_limits_of_gate_and_up(activation: str) -> None:
    mlp = replace(random_mlp(3, 64, 32, activation=activation), limit=0.75)
    x, routing = 4 * torch.randn(5, 64), routed(5, 3, 2)
    found = experts(x, *routing, mlp)
    assert relative_rms(found, expected(x, *routing, mlp)) < INT16_EXPERTS
    assert relative_rms(found, expected(x, *routing, replace(mlp, limit=0.0))) > 0.1


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint8])
def test_other_scales_and_strided_rows(scale_dtype: torch.dtype) -> None:
    mlp = ExpertsMlp(*random_experts(3, 64, 96, scale_dtype=scale_dtype), "silu")
    x, routing = torch.randn(5, 100)[:, 20:84], routed(5, 3, 2)
    found = experts(x, *routing, mlp)
    assert relative_rms(found, expected(x, *routing, mlp)) < INT16_EXPERTS


@pytest.mark.parametrize("end", [GATED_SILU, Ending("relu2")])
def test_one_expert_is_a_plain_mlp(end: Ending) -> None:
    mlp = random_mlp(1, 64, 96, 4, 32, activation=end.activation, gated=end.gated)
    x, ones = torch.randn(6, 64), torch.ones(6, 1)
    inner = w4_linear(x, mlp.gate_up.expert(0), end=end)
    plain = w4_linear(inner, mlp.down.expert(0))
    found = experts(x, ones.long() - 1, ones, mlp)
    assert torch.equal(found, plain)


def test_many_tokens_of_one_expert() -> None:
    """More than a run that stays in the cache while weights pass by."""
    mlp = random_mlp(2, 4096, 32, 4, 32, activation="gelu")
    x, (topk_ids, topk_weights) = torch.randn(70, 4096), routed(70, 2, 1)
    found = experts(x, topk_ids * 0, topk_weights, mlp)
    truth = expected(x, topk_ids * 0, topk_weights, mlp)
    assert relative_rms(found, truth) < INT16_EXPERTS


def test_experts_that_nobody_chose_are_not_read() -> None:
    gate_up, down = random_experts(5, 64, 64)
    topk_ids, topk_weights = routed(7, 2, 2)
    for q in (gate_up, down):
        q.scale_min[2:] = torch.nan
    mlp = ExpertsMlp(gate_up, down, "silu")
    found = experts(torch.randn(7, 64), topk_ids, topk_weights, mlp)
    assert torch.isfinite(found).all()


def test_an_expert_chosen_twice_counts_twice() -> None:
    mlp = random_mlp(3, 64, 64)
    x, topk_ids, topk_weights = (
        torch.randn(1, 64),
        torch.tensor([[1, 1]]),
        torch.tensor([[0.25, 0.5]]),
    )
    truth = expected(x, topk_ids, topk_weights, mlp)
    found = experts(x, topk_ids, topk_weights, mlp)
    assert relative_rms(found, truth) < INT16_EXPERTS


@given(
    tokens=st.integers(1, 40),
    threads=st.integers(1, 4),
    gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_bits_do_not_depend_on_batch_or_threads(
    tokens: int, threads: int, gated: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    mlp = random_mlp(6, 64, 96, gated=gated)
    x, (topk_ids, topk_weights) = torch.randn(tokens, 64), routed(tokens, 6, 3)
    alone = torch.cat(
        [
            experts(x[i : i + 1], topk_ids[i : i + 1], topk_weights[i : i + 1], mlp)
            for i in range(tokens)
        ]
    )
    pool = Pool(threads)
    try:
        together = experts(x, topk_ids, topk_weights, mlp, pool=pool)
    finally:
        pool.close()
    assert torch.equal(alone, together)


def test_activations_of_8_bits() -> None:
    mlp = random_mlp(4, 128, 64)
    x, routing = torch.randn(9, 128), routed(9, 4, 2)
    found = experts(x, *routing, mlp, activation_bits=8)
    assert INT16_EXPERTS < relative_rms(found, expected(x, *routing, mlp)) < INT8_EXPERTS


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("activation", "gated"), KINDS)
def test_bad_activations_are_not_hidden(activation: str, gated: bool, bad: float) -> None:
    mlp = random_mlp(2, 64, 32, activation=activation, gated=gated)
    x, routing = torch.randn(2, 64), routed(2, 2, 1)
    x[1, 40] = bad
    y = experts(x, *routing, mlp)
    assert torch.isfinite(y[0]).all()
    assert not torch.isfinite(y[1]).any()


def test_no_tokens() -> None:
    none = torch.empty(0, 2)
    found = experts(torch.empty(0, 64), none.long(), none, random_mlp(2, 64, 32))
    assert found.shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 63)}, "x must be"),
        ({"x": torch.ones(64)}, r"x must be \[M, H\]"),
        ({"x": torch.ones(3, 64).half()}, "float16"),
        ({"topk_ids": torch.zeros(2, 2).long()}, r"topk_ids must be \[M, T\]"),
        ({"topk_ids": torch.zeros(3, 0).long()}, "T > 0"),
        ({"topk_ids": torch.zeros(3, 2).int()}, "int32"),
        ({"topk_ids": torch.tensor([[0, 1], [1, 2], [3, 4]])}, "experts 0 to 4 .* 0 to 3"),
        ({"topk_ids": torch.tensor([[0, 1], [1, -1], [3, 3]])}, "experts -1 to 3"),
        ({"topk_weights": torch.zeros(3, 1)}, "topk_weights must be"),
        ({"activation_bits": 4}, "8 or 16"),
    ],
)
def test_wrong_operands_are_refused(change: dict, message: str) -> None:
    topk_ids, topk_weights = routed(3, 4, 2)
    operands = {"x": torch.ones(3, 64), "topk_ids": topk_ids, "topk_weights": topk_weights}
    with pytest.raises(OpError, match=message):
        experts(**{**operands, "mlp": random_mlp(4, 64, 32), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up_bias": torch.zeros(4, 32)}, "gate_up_bias must be"),
        ({"down_bias": torch.zeros(64)}, "down_bias must be"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"gated": False}, r"up is 4 x \[I, H\] and down 4 x \[H, I\], not \[64, 64\]"),
        ({"gate_up": random_experts(4, 64, 32, packing="split32")[0]}, "gate_up needs packing"),
        ({"down": random_experts(3, 64, 32)[1]}, "of as many experts"),
        ({"down": random_experts(4, 64, 64)[1]}, "2I, H"),
    ],
)
def test_a_wrong_mlp_is_refused(change: dict, message: str) -> None:
    mlp = random_mlp(4, 64, 32)
    with pytest.raises(OpError, match=message):
        experts(torch.ones(3, 64), *routed(3, 4, 2), replace(mlp, **change))


def test_an_activation_of_gate_and_up_wants_a_gate() -> None:
    with pytest.raises(OpError, match="clamped_swiglu is of gate and up, and there is no gate"):
        random_mlp(2, 64, 32, activation="clamped_swiglu", gated=False)
    for options in ({"gated": False}, {"activation": "clamped_swiglu"}):
        with pytest.raises(OpError, match="a limit is of gate and up, and not of clamped_swiglu"):
            replace(random_mlp(2, 64, 32, **options), limit=2.0)


def test_experts_share_memory_with_their_matrices() -> None:
    gate_up, down = random_experts(3, 64, 32)
    for q in (gate_up, down):
        assert q.codes.stride(0) > q.codes[0].numel()
        again = QExperts.of([q.expert(e) for e in range(3)])
        assert again.codes.data_ptr() == q.codes.data_ptr()
        assert again.strides == q.strides
        assert torch.equal(again.expert(2).dequantize(), q.expert(2).dequantize())
    assert gate_up.strides == (gate_up.expert(0).nbytes + down.expert(0).nbytes,) * 2


def _apart(distances: list[int]) -> list[QTensor]:
    """Matrices [16, 32] at these bytes of one buffer, scales in another."""
    codes, scales = torch.zeros(8192, dtype=torch.uint8), torch.zeros(8, 1, 1, 2, 16).half()
    views = [codes[at : at + 256].view(1, 4, 16, 4) for at in distances]
    parts = zip(views, scales, strict=False)
    return [QTensor(view, scale, (16, 32), 4, 32, "rows16") for view, scale in parts]


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([], "no experts"),
        (_apart([0, 512, 1000]), "expert 2 are 1000 bytes from the first, not 2 times 512"),
        (_apart([512, 0]), "-512 bytes apart"),
        (_apart([0, 128]), "128 bytes apart, which is less"),
        ([random_weight(16, 32, 4, 32) for _ in range(2)], "in other memory"),
        ([*_apart([0]), random_weight(32, 32, 4, 32)], "expert 1 is"),
    ],
)
def test_matrices_that_are_no_constant_distance_apart(matrices: list, message: str) -> None:
    with pytest.raises(OpError, match=message):
        QExperts.of(matrices)


def test_parts_that_do_not_fit() -> None:
    gate_up, _ = random_experts(3, 64, 32)
    with pytest.raises(OpError, match="codes of 2 experts, scales of 3"):
        replace(gate_up, codes=gate_up.codes[:2])
    with pytest.raises(OpError, match="codes of a"):
        replace(gate_up, bits=8)


ROUTINGS = [
    Routing(3),
    Routing(3, normalized=True),
    Routing(3, "topk"),
    Routing(3, "sigmoid", normalized=True, scale=2.5),
    Routing(3, "sigmoid"),
    Routing(3, "mixer", jitter=0.3),
    Routing(3, "mixer", normalized=True, scale=2.0, jitter=0.01),
    Routing(3, normalized=True, groups=6, top_groups=2),
    Routing(3, groups=6, top_groups=2, scale=2.0, group_best=1),
    Routing(3, "sigmoid", normalized=True, groups=6, top_groups=3, scale=0.5),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("count", [12, 60])
def test_routes_are_those_of_the_reference(routing: Routing, corrected: bool, count: int) -> None:
    scores = torch.randn(7, 100)[:, :count]
    vectors = (torch.randn(count) if corrected else None, torch.rand(count) if corrected else None)
    expected = reference_ops.route(scores, routing, *vectors)
    ids, weights = route(scores, routing, *vectors)
    assert torch.equal(ids, expected[0])
    assert_close(weights, expected[1], tolerance=RELATIVE_RMS[torch.float32])


def test_experts_are_chosen_from_the_groups_with_the_two_best_of_their_own() -> None:
    scores = torch.tensor([[9.0, -9.0, -9.0, 1.0, 2.0, 0.0, 1.5, 1.0, 0.0]])
    routing = Routing(2, "sigmoid", groups=3, top_groups=1)  # the best expert is in another group
    for op in (route, reference_ops.route):
        ids, weights = op(scores, routing, torch.zeros(9))
        assert ids.tolist() == [[4, 3]]
        assert_close(weights, scores[:, [4, 3]].sigmoid(), tolerance=1e-6)


def test_sparse_mixer_is_that_of_transformers() -> None:
    scores = torch.randn(50, 8)
    scores[:5] = -scores[:5].abs()
    for jitter in (0.01, 0.3):
        weights, ids = sparsemixer(scores, jitter, training=False)
        for op in (route, reference_ops.route):
            found = op(scores, Routing(2, "mixer", jitter=jitter))
            assert torch.equal(found[0], ids)
            assert_close(found[1], weights, tolerance=1e-6)


def test_a_correction_chooses_and_does_not_weigh() -> None:
    scores, correction = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 5.0])
    ids, weights = route(scores, Routing(1, "sigmoid"), correction)
    assert ids.tolist() == [[2]]
    assert_close(weights, scores[:, [2]].sigmoid(), tolerance=1e-6)


@pytest.mark.parametrize(
    ("routing", "correction", "message"),
    [
        (Routing(5), None, "1 to 4 experts, not 5"),
        (Routing(1, groups=3), None, "4 experts are no 3 groups"),
        (Routing(1, groups=4), None, "4 experts are no 4 groups"),  # of one
        (Routing(3, groups=2), None, "of which 1 have 3 experts"),
        (Routing(1), torch.zeros(3), r"float32 \[4\]"),
    ],
)
def test_routes_that_there_are_not(
    routing: Routing, correction: Tensor | None, message: str
) -> None:
    with pytest.raises(OpError, match=message):
        route(torch.zeros(2, 4), routing, correction)
    with pytest.raises(OpError, match="1 to 2 groups, not 3"):
        replace(routing, groups=2, top_groups=3)


@pytest.mark.parametrize("routing", [Routing(3), Routing(3, "sigmoid", normalized=True)], ids=str)
def test_equal_scores_go_to_the_first_expert_and_bad_ones_are_not_hidden(routing: Routing) -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0], [0.0, torch.nan, 1.0, 0.0]])
    ids, weights = route(scores, routing)
    assert ids[0].tolist() == [1, 3, 0]
    assert ((ids >= 0) & (ids < 4)).all()
    assert weights[1].isnan().all()


def test_experts_add_to_the_residual() -> None:
    gate_up, down = random_experts(4, 64, 32)
    mlp, x, hidden = ExpertsMlp(gate_up, down, "silu"), torch.randn(3, 64), torch.randn(3, 64)
    chosen = route(torch.randn(3, 4), Routing(2))
    expected = experts(x, *chosen, mlp) + hidden
    experts(x, *chosen, mlp, residual=hidden, out=hidden)
    assert torch.equal(hidden, expected)
