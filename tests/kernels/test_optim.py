"""A step of an optimizer on flat memory is torch's; 8-bit moments are the nearest codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.cpu.optim import rows
from qoff.kernels.cpu.optim.scratch import BLOCK
from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.kernels.reference.optim import dequantized

N = 5 * BLOCK + 16  # the last item is not a whole block
CODED = 70 * BLOCK  # more than an item
UPDATES = 2e-6  # of float32 updates, against torch's: some roundings of a step
ESTIMATES = 2**-13  # of updates with codes, relative: roots and reciprocals have 14 bits
LR, DECAY = 1e-2, 0.1


def adam_rule(step: int, **changes: Any) -> Rule:
    rate, root = LR / (1 - 0.9**step), (1 - 0.99**step) ** -0.5
    return Rule("adam", rate, 0.9, 0.99, root=root, eps=1e-8, **changes)


RULES: dict[str, tuple[Callable[..., Any], Callable[[int], Rule]]] = {
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY),
        lambda step: adam_rule(step, keep=1 - LR * DECAY),
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY),
        lambda step: adam_rule(step, l2=DECAY),
    ),
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=DECAY),
        lambda _: Rule("sgd", LR, 0.9, l2=DECAY),
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
        lambda _: Rule("sgd", LR, 0.9, nesterov=True),
    ),
}


def moments(n: int, second: bool, coded: bool = False) -> Moments:
    if not coded:
        return Moments(torch.zeros(n), torch.zeros(n) if second else None)
    scales = [torch.zeros(n // BLOCK) for _ in range(2)]
    first = torch.zeros(n, dtype=torch.int8)
    if not second:
        return Moments(first, None, scales[0])
    return Moments(first, torch.zeros(n, dtype=torch.uint8), *scales)


@pytest.mark.parametrize("narrow", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_torch(name: str, narrow: torch.dtype | None) -> None:
    torch.manual_seed(0)
    optimizer, rule = RULES[name]
    ours = torch.randn(N)
    copy = None if narrow is None else torch.empty(N, dtype=narrow)
    theirs = torch.nn.Parameter(ours.clone())
    torchs, state = optimizer([theirs]), moments(N, "adam" in name)
    for step in range(1, 6):
        grad = torch.randn(N).to(torch.bfloat16 if narrow == torch.bfloat16 else torch.float32)
        theirs.grad = grad.float()
        torchs.step()
        update(rule(step), ours, grad, state, copy)
        assert (ours - theirs.data).abs().max() < UPDATES
        assert copy is None or torch.equal(copy, ours.to(copy.dtype))


def test_lion_is_the_papers() -> None:
    torch.manual_seed(0)
    w, grads = torch.randn(N), torch.randn(3, N)
    grads[:, 5] = 0
    wanted, mean, state = w.double(), torch.zeros(N, dtype=torch.float64), moments(N, False)
    for grad in grads:
        update(Rule("lion", 0.01, 0.9, 0.99, keep=0.999, grad_scale=0.5), w, grad, state)
        g = grad.double() / 2
        wanted = wanted * 0.999 - 0.01 * (0.9 * mean + 0.1 * g).sign()
        mean = 0.99 * mean + 0.01 * g
    assert (w - wanted).abs().max() < UPDATES


def _wide_range(n: int) -> Tensor:
    return torch.randn(n) * torch.logspace(-5, 0, n)[torch.randperm(n)]


def test_codes_are_the_nearest_in_the_root_of_a_share() -> None:
    torch.manual_seed(0)
    grad, state, exact = _wide_range(CODED), moments(CODED, True, coded=True), moments(CODED, True)
    grad[BLOCK : 2 * BLOCK] = 0
    for one in (state, exact):
        update(adam_rule(1), torch.zeros(CODED), grad, one)
    assert exact.second is not None
    assert state.second is not None
    for codes, scales, values, root, last in (
        (state.first, state.first_scale, exact.first, 1 / 2, 127),
        (state.second, state.second_scale, exact.second, 1 / 4, 255),
    ):
        assert scales is not None
        largest = values.abs().view(-1, BLOCK).amax(1)
        assert torch.equal(scales, largest)
        share = values.abs() / largest.repeat_interleave(BLOCK).clamp(min=1e-30)
        wanted = last * share**root * values.sign()
        assert (codes.float() - wanted).abs()[codes != 1].max() < 0.5 + last * 2**-13
        found = dequantized(codes, scales).abs() / largest.repeat_interleave(BLOCK).clamp(min=1e-30)
        assert (found**root - share**root).abs()[codes != 1].max() < 0.51 / last
    assert bool((state.second >= 1).all())  # rounded up: else a step could be of any size


@pytest.mark.parametrize("changes", [{}, {"grad_scale": 0.5}, {"grad_scale": 1e-12}, {"l2": DECAY}])
def test_a_step_reads_the_codes_of_the_last(changes: dict[str, float]) -> None:
    torch.manual_seed(0)
    ours, state = torch.randn(CODED), moments(CODED, True, coded=True)
    for step in range(1, 4):
        grad = _wide_range(CODED)
        first, second = torch.zeros(CODED), torch.zeros(CODED)
        assert state.first_scale is not None
        assert state.second_scale is not None
        assert state.second is not None
        if step > 1:
            first = dequantized(state.first, state.first_scale)
            second = dequantized(state.second, state.second_scale)
        before, wanted = ours.clone(), ours.clone()
        update(adam_rule(step, **changes), wanted, grad, Moments(first, second))
        update(adam_rule(step, **changes), ours, grad, state)
        moved = (wanted - before).abs()
        assert ((ours - wanted).abs() <= UPDATES + ESTIMATES * moved).all()


def test_a_rate_of_0_changes_no_weight() -> None:
    for coded in (False, True):
        before, state = torch.randn(CODED), moments(CODED, True, coded)
        before[5] = 0
        w = before.clone()
        update(Rule("adam", 0.0, 0.9, 0.99, eps=1e-8), w, torch.ones(CODED), state)
        assert torch.equal(w, before)


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_one_moment_of_8_bits(name: str) -> None:
    torch.manual_seed(0)
    w = [torch.randn(CODED)] * 2
    ours, wanted = w[0].clone(), w[1].clone()
    coded, wide = moments(CODED, False, coded=True), moments(CODED, False)
    for _ in range(2):
        grad = torch.randn(CODED)
        update(Rule(name, 1e-2, 0.9, 0.99), ours, grad, coded)
        update(Rule(name, 1e-2, 0.9, 0.99), wanted, grad, wide)
    assert ((ours - wanted).abs() > 1e-3).float().mean() < 0.01


def test_nan_is_not_hidden() -> None:
    for coded in (False, True):
        w, state, grad = torch.ones(CODED), moments(CODED, True, coded), torch.ones(CODED)
        grad[3] = float("nan")
        update(adam_rule(1), w, grad, state)
        assert w[3].isnan()
        assert not w[BLOCK:].isnan().any()
        update(adam_rule(2), w, torch.ones(CODED), state)
        assert w[3].isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": torch.zeros(17)}, "17 weights are no multiple of 16"),
        ({"grad": torch.zeros(32)}, r"grad must be float32 or bfloat16 \[16\]"),
        ({"grad": torch.zeros(32)[::2]}, "grad must be"),
        ({"weight": torch.zeros(16)}, r"weight must be bfloat16 or float16 \[16\]"),
        ({"moments": moments(16, False)}, "adam with a second|adam without"),
        ({"moments": moments(256, True, coded=True)}, "no multiple of 256"),
    ],
)
def test_other_operands_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"master": torch.zeros(16), "grad": torch.zeros(16), "moments": moments(16, True)}
    with pytest.raises(OpError, match=message):
        update(adam_rule(1), **{**given, **change})


def _updates(g: Tensor, of_rows: Tensor, of_columns: Tensor, most: float) -> Tensor:
    return g.double() * (of_rows.double()[:, None] * of_columns.double()).clamp(max=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (7, 4096), (1100, 32)])
def test_passes_over_rows_are_those_of_wider_numbers(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    n, k = shape
    g = _wide_range(n * k).view(n, k).to(dtype)
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    of_rows, of_columns = rows.squares(g, 0.5)
    square = (g.double() / 2).square()
    torch.testing.assert_close(of_rows, square.sum(1).float(), **near)
    torch.testing.assert_close(of_columns, square.sum(0).float(), **near)
    a, b = torch.rand(n) + 0.1, torch.rand(k) + 0.1
    a[0] = math.inf
    wanted = _updates(g, a, b, 4.0)
    size = rows.size(g, a, b, 4.0)
    torch.testing.assert_close(size, wanted.square().sum(1).float(), **near)
    before = torch.randn(n, k)
    found = []
    for threads in (1, 3):
        pool, w, copy = Pool(threads), before.clone(), torch.empty(n, k, dtype=torch.bfloat16)
        try:
            after = rows.step(w, g, a, b, 4.0, 0.9, 0.1, copy, pool)
        finally:
            pool.close()
        assert torch.equal(copy, w.bfloat16())
        torch.testing.assert_close(w, (before.double() * 0.9 - 0.1 * wanted).float(), **near)
        torch.testing.assert_close(after, w.double().square().sum(1).float(), **near)
        found.append((w, after))
    assert all(map(torch.equal, *found))


def test_passes_over_rows_do_not_ask_what_dtype_torch_makes() -> None:
    g = torch.randn(7, 32)
    wanted = rows.squares(g, 1.0)
    torch.set_default_dtype(torch.float64)
    try:
        found = rows.squares(g, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))


def test_rows_that_are_no_vectors_are_refused() -> None:
    for g in (
        torch.zeros(3, 8),
        torch.zeros(16),
        torch.zeros(16, 32).t(),
        torch.zeros(3, 16).half(),
    ):
        with pytest.raises(OpError, match=r"contiguous float32 or bfloat16 \[N, K\]"):
            rows.squares(g, 1.0)
    g, a, b = torch.zeros(3, 16), torch.ones(3), torch.ones(16)
    with pytest.raises(OpError, match="of_rows must be"):
        rows.size(g, b, a, 1.0)
    with pytest.raises(OpError, match=r"copy must be bfloat16 or float16 \[3, 16\]"):
        rows.step(g, g, a, b, 1.0, 1.0, 0.0, torch.zeros(3, 16))
