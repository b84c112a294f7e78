"""The CPU matmul on packed weights against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import XIELUActivation

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.cpu.linear.linear import w4_linear
from qoff.kernels.layout.ending import ACTIVATIONS, GATED_SILU, Ending, Norm, Xielu
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.linear import activated, xielu
from tests.kernels.operands import random_weight
from tests.tolerances import INT16_ACTIVATIONS, RELATIVE_RMS, assert_close, relative_rms

XIELU = Xielu(1.3, 0.8, 0.5, -1e-6)


@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(16, 32, 32), (5, 64, 64), (33, 256, 128), (100, 192, 64), (160, 96, 32), (512, 1536, 32)],
)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 65])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_equals_reference(n: int, k: int, group_size: int, tokens: int, bits: int) -> None:
    weight = random_weight(n, k, bits, group_size)
    x = torch.randn(tokens, k)
    expected = reference_ops.w4_linear(x.double(), weight)
    assert relative_rms(w4_linear(x, weight), expected) < INT16_ACTIVATIONS


@pytest.mark.parametrize("tokens", [1, 69])
@pytest.mark.parametrize("n", [96, 100])
def test_norm_bias_and_residual(n: int, tokens: int) -> None:
    weight = random_weight(n, 128)
    operands = {
        "norm": Norm(torch.rand(128) + 0.5, 1e-3),
        "bias": torch.randn(n),
        "residual": torch.randn(tokens, n),
    }
    x = torch.randn(tokens, 128)
    expected = reference_ops.w4_linear(x.double(), weight, **operands)
    assert relative_rms(w4_linear(x, weight, **operands), expected) < INT16_ACTIVATIONS


@pytest.mark.parametrize("tokens", [1, 70])
def test_gate(tokens: int) -> None:
    weight = random_weight(160, 64)
    x, bias = torch.randn(tokens, 64), torch.randn(160)
    expected = reference_ops.w4_linear(x.double(), weight, bias=bias, end=GATED_SILU)
    actual = w4_linear(x, weight, bias=bias, end=GATED_SILU)
    assert relative_rms(actual, expected) < INT16_ACTIVATIONS


def _norm(k: int, *, centered: bool = False) -> Norm:
    bias = torch.randn(k) if centered else None
    return Norm(torch.rand(k) + 0.5, 1e-3, bias, centered, scale=0.7)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("k", [96, 2048])  # few long tokens are split between threads
def test_layer_norm(k: int, tokens: int) -> None:
    weight = random_weight(48, k, group_size=32)
    x, norm = torch.randn(tokens, k) + 3, _norm(k, centered=True)
    expected = reference_ops.w4_linear(x.double(), weight, norm=norm)
    assert relative_rms(w4_linear(x, weight, norm=norm), expected) < INT16_ACTIVATIONS


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, gated: bool) -> None:
    weight, x, bias = random_weight(96, 64), torch.randn(5, 64), torch.randn(96)
    end = Ending(activation, gated)
    expected = reference_ops.w4_linear(x.double(), weight, bias=bias, end=end)
    assert relative_rms(w4_linear(x, weight, bias=bias, end=end), expected) < INT16_ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("limit", [0.75, 40.0])
def test_limits_of_gate_and_up(limit: float, activation: str) -> None:
    """min(activation(gate), limit) * up within -limit..limit."""
    weight, x = random_weight(96, 64), 4 * torch.randn(5, 64)
    gate, up = (x @ weight.dequantize().T).view(5, 3, 2, 16).unbind(2)
    gate = activated(activation, gate).clamp(max=limit)
    wanted = (gate * up.clamp(-limit, limit)).flatten(1)
    end = Ending(activation, gated=True, limit=limit)
    assert relative_rms(w4_linear(x, weight, end=end), wanted) < INT16_ACTIVATIONS
    assert_close(reference_ops.w4_linear(x, weight, end=end), wanted)


@pytest.mark.parametrize("learned", [(0.3, -1.2), (2.5, 25.0)])
def test_xielu_is_that_of_transformers(learned: tuple[float, float]) -> None:
    """Also next to 0, where the exponential less one is nearly the number itself."""
    module = XIELUActivation(dtype=torch.float64)
    module.alpha_p.data.fill_(learned[0])
    module.alpha_n.data.fill_(learned[1])
    by = Xielu(
        F.softplus(module.alpha_p).item(),
        (module.beta + F.softplus(module.alpha_n)).item(),
        float(module.beta),
        float(module.eps),
    )
    x = torch.cat([torch.logspace(-9, 2, 64).double() * sign for sign in (-1, 1)])[:, None]
    x = torch.cat([x, torch.zeros(1, 1).double()]).requires_grad_()
    wanted = module(x)
    found = xielu(x, by)
    assert_close(found, wanted)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)]
    assert_close(*slopes)


def test_xielu_next_to_0_and_far_from_it() -> None:
    """Each number by itself, of the products that the kernel has."""
    weight, x = random_weight(48, 64), torch.randn(64, 64) * torch.logspace(-9, 2, 64)[:, None]
    products = w4_linear(x, weight)
    by = XIELU._replace(alpha_n=0.4)  # which has no other zero, where terms would cancel
    found = w4_linear(x, weight, end=Ending("xielu", xielu=by))
    torch.testing.assert_close(found.double(), xielu(products.double(), by), rtol=1e-5, atol=0.0)
    x[3] = float("nan")
    assert w4_linear(x, weight, end=Ending("xielu", xielu=by))[3].isnan().all()


@pytest.mark.parametrize("n", [96, 100])
@pytest.mark.parametrize(
    "end",
    [
        Ending(scale=0.4, soft_cap=2.0),
        Ending("gelu", score=torch.randn(5, 1)),
        Ending("relu", scale=-3.0),
        Ending("relu2"),
        Ending("xielu", xielu=XIELU),
    ],
    ids=["soft cap", "score", "scale", "square", "xielu"],
)
def test_scale_score_and_soft_cap_come_before_the_residual(n: int, end: Ending) -> None:
    weight, x, residual = random_weight(n, 64), torch.randn(5, 64), torch.randn(5, n)
    expected = reference_ops.w4_linear(x.double(), weight, residual=residual, end=end)
    actual = w4_linear(x, weight, residual=residual, end=end, out=residual)
    assert relative_rms(actual, expected) < INT16_ACTIVATIONS


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("n", [96, 2048])
@pytest.mark.parametrize(
    "which",
    [{"post_norm": False, "scale": 0.3, "sum_scale": 0.7}, {"post_norm": True}, {"sum_norm": True}],
    ids=str,
)
def test_norms_of_whole_rows(n: int, tokens: int, which: dict) -> None:
    """In the same job, or behind tiles of rows: the bits are the same."""
    name, centered = next(iter(which.items()))
    norm = _norm(n, centered=centered)
    scales = {key: which.get(key, 1.0) for key in ("scale", "sum_scale")}
    end = Ending(**scales)._replace(**{name: norm})
    weight, x, residual = random_weight(n, 64), torch.randn(tokens, 64), torch.randn(tokens, n)
    expected = reference_ops.w4_linear(x.double(), weight, residual=residual.double(), end=end)
    tiles = w4_linear(x, weight, residual=residual if end.sum_norm else None, end=end.by_element)
    hidden = residual.clone()
    w4_linear(x, weight, residual=hidden, end=end, out=hidden)
    assert relative_rms(hidden, expected) < INT16_ACTIVATIONS
    added = residual if end.post_norm else None
    assert torch.equal(cpu.norm(tiles, norm, residual=added, **scales), hidden)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("tokens", [1, 2, 79])
def test_activations_of_8_bits_are_rounded_as_said(tokens: int, bits: int) -> None:
    weight, x = random_weight(80, 192, bits, 32), torch.randn(tokens, 192)
    groups = x.view(tokens, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).view(tokens, -1)
    actual = w4_linear(x, weight, activation_bits=8)
    expected = reference_ops.w4_linear(rounded.double(), weight)
    assert relative_rms(actual, expected) < RELATIVE_RMS[torch.float32]
    assert relative_rms(actual, reference_ops.w4_linear(x.double(), weight)) > INT16_ACTIVATIONS


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("bits", "scale_dtype"),
    [(4, torch.float32), (4, torch.uint8), (6, torch.uint8), (8, torch.uint8)],
)
def test_other_scales(bits: int, scale_dtype: torch.dtype, tokens: int) -> None:
    weight = random_weight(40, 128, bits, 32, scale_dtype=scale_dtype)
    x = torch.randn(tokens, 128)
    expected = reference_ops.w4_linear(x.double(), weight)
    assert relative_rms(w4_linear(x, weight), expected) < INT16_ACTIVATIONS


@given(
    tokens=st.integers(1, 80),
    threads=st.integers(1, 4),
    activation_bits=st.sampled_from([8, 16]),
    with_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_bits_do_not_depend_on_batch_or_threads(
    tokens: int, threads: int, activation_bits: int, with_residual: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = random_weight(80, 192), torch.randn(tokens, 192)
    residual = torch.randn(tokens, 80)

    def product(first: int, last: int, **options: Any) -> Tensor:
        if with_residual:
            options["residual"] = residual[first:last]
        return w4_linear(x[first:last], weight, activation_bits=activation_bits, **options)

    alone = torch.cat([product(i, i + 1) for i in range(tokens)])
    pool = Pool(threads)
    try:
        together = product(0, tokens, pool=pool)
    finally:
        pool.close()
    assert torch.equal(alone, together)


def test_in_place_residual_and_strided_rows() -> None:
    weight = random_weight(64, 64)
    wide = torch.randn(5, 200)
    x, hidden = wide[:, 10:74], torch.randn(5, 64)
    expected = reference_ops.w4_linear(x.double(), weight, residual=hidden)
    w4_linear(x, weight, residual=hidden, out=hidden)
    assert relative_rms(hidden, expected) < INT16_ACTIVATIONS


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_activations_are_not_hidden(bad: float) -> None:
    weight, x = random_weight(32, 128), torch.randn(2, 128)
    x[1, 70] = bad
    y = w4_linear(x, weight)
    assert torch.isfinite(y[0]).all()
    assert not torch.isfinite(y[1]).any()


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e30])
def test_extreme_activations(value: float) -> None:
    weight = random_weight(32, 64)
    x = torch.full((1, 64), value)
    expected = reference_ops.w4_linear(x.double(), weight)
    torch.testing.assert_close(w4_linear(x, weight).double(), expected, rtol=1e-3, atol=1e-30)


def test_no_tokens() -> None:
    assert w4_linear(torch.empty(0, 64), random_weight(32, 64)).shape == (0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 63)}, "x must be"),
        ({"x": torch.ones(2, 64, dtype=torch.bfloat16)}, "bfloat16"),
        ({"x": torch.ones(64, 2).T}, "contiguous rows"),
        ({"x": torch.ones(64)}, r"x must be \[M, K\]"),
        ({"norm": Norm(torch.ones(63), 0.0)}, "norm must be"),
        ({"bias": torch.ones(64)}, "bias must be"),
        ({"residual": torch.ones(2, 31)}, "residual must be"),
        ({"out": torch.ones(1, 48)}, "out must be"),
        ({"end": GATED_SILU}, "multiple of 32"),
        ({"end": Ending("tanh")}, "unknown activation 'tanh'"),
        ({"end": Ending(score=torch.ones(3, 1))}, "score must be"),
        ({"end": Ending("silu", gated=True, scale=2.0), "weight": random_weight(64, 64)}, "gate"),
        ({"end": Ending(post_norm=_norm(48), soft_cap=2.0)}, "nor the last two a norm"),
        ({"end": Ending(post_norm=_norm(48), sum_norm=_norm(48))}, "not two"),
        ({"end": Ending(sum_norm=_norm(40))}, "norm must be"),
        ({"end": Ending(sum_scale=2.0)}, "scaled behind a norm only"),
        ({"end": Ending("xielu")}, "numbers of its own"),
        ({"end": Ending("relu2", xielu=XIELU)}, "others have no numbers"),
        ({"end": Ending("silu", limit=2.0)}, "a limit is of gate and up"),
        ({"activation_bits": 4}, "8 or 16"),
        ({"weight": random_weight(48, 64, packing="split32")}, "rows16"),
    ],
)
def test_wrong_operands_are_refused(change: dict, message: str) -> None:
    operands = {"x": torch.ones(2, 64), "weight": random_weight(48, 64), **change}
    with pytest.raises(OpError, match=message):
        w4_linear(operands.pop("x"), operands.pop("weight"), **operands)
