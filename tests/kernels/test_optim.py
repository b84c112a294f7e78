"""A step of an optimizer on flat memory is torch's; 8-bit moments are those of the dynamic map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu.optim.job import BLOCK
from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.kernels.reference.optim import ZERO, dequantized, dynamic_map

N = 5 * BLOCK + 16  # the last item is not a whole block
CODED = 70 * BLOCK  # more than an item
UPDATES = 2e-6  # of float32 updates, against torch's: some roundings of a step
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
    first = torch.full((n,), ZERO, dtype=torch.uint8)
    if not second:
        return Moments(first, None, scales[0])
    return Moments(first, torch.zeros(n, dtype=torch.uint8), *scales)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_torch(name: str, narrow: bool) -> None:
    torch.manual_seed(0)
    optimizer, rule = RULES[name]
    ours = torch.randn(N)
    copy = torch.empty(N, dtype=torch.bfloat16) if narrow else None
    theirs = torch.nn.Parameter(ours.clone())
    torchs, state = optimizer([theirs]), moments(N, "adam" in name)
    for step in range(1, 6):
        grad = torch.randn(N).to(torch.bfloat16 if narrow else torch.float32)
        theirs.grad = grad.float()
        torchs.step()
        update(rule(step), ours, grad, state, copy)
        assert (ours - theirs.data).abs().max() < UPDATES
        assert copy is None or torch.equal(copy, ours.bfloat16())


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


def test_the_map_is_the_published_one() -> None:
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert len(signed) == len(unsigned) == len(set(signed.tolist())) == 256
    assert signed[ZERO] == unsigned[0] == 0
    assert signed[-1] == unsigned[-1] == 1
    assert torch.equal(-signed[:ZERO].flip(0), signed[ZERO + 1 : -1])
    # The first and last entries of bitsandbytes' create_dynamic_map.
    assert signed[-2].item() == pytest.approx(1 - 0.45 / 64)
    assert signed[ZERO + 1].item() == pytest.approx(5.5e-7)
    assert unsigned[1].item() == pytest.approx(3.25e-7)


def _wide_range(n: int) -> Tensor:
    return torch.randn(n) * torch.logspace(-5, 0, n)[torch.randperm(n)]


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_steps_that_moments_lie_in(signed: bool) -> None:
    torch.manual_seed(0)
    grad, state = _wide_range(CODED), moments(CODED, True, coded=True)
    grad[BLOCK : 2 * BLOCK] = 0
    exact = moments(CODED, True)
    for one in (state, exact):
        update(adam_rule(1), torch.zeros(CODED), grad, one)
    codes, scales = (
        (state.first, state.first_scale) if signed else (state.second, state.second_scale)
    )
    values = exact.first if signed else exact.second
    assert codes is not None
    assert scales is not None
    assert values is not None
    largest = values.abs().view(-1, BLOCK).amax(1)
    assert torch.equal(scales, largest)
    found = dequantized(codes, scales, signed)
    share = values.abs() / largest.repeat_interleave(BLOCK).clamp(min=1e-30)
    decade = share.clamp(min=1e-7).log10().floor().clamp(max=-1)
    steps = 2.0 ** (decade + 7) if not signed else 2.0 ** (decade + 6)
    half = 0.45 * 10.0 ** (decade + 1) / steps * (1 + 1e-3)
    least = share < 1e-7  # rounded to 0, or up where there is no sign
    error = (found - values).abs() / largest.repeat_interleave(BLOCK).clamp(min=1e-30)
    assert (error[~least] <= half[~least] + 1e-9).all()
    assert (error[least] < 1e-6).all()
    assert signed or bool((codes >= 1).all())


def test_a_step_reads_the_codes_of_the_last() -> None:
    torch.manual_seed(0)
    ours, state = torch.randn(CODED), moments(CODED, True, coded=True)
    for step in range(1, 4):
        grad = _wide_range(CODED)
        first, second = torch.zeros(CODED), torch.zeros(CODED)
        assert state.first_scale is not None
        assert state.second_scale is not None
        assert state.second is not None
        if step > 1:
            first = dequantized(state.first, state.first_scale, True)
            second = dequantized(state.second, state.second_scale, False)
        wanted = ours.clone()
        update(adam_rule(step), wanted, grad, Moments(first, second))
        update(adam_rule(step), ours, grad, state)
        assert (ours - wanted).abs().max() < UPDATES


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
        ({"weight": torch.zeros(16)}, r"weight must be bfloat16 \[16\]"),
        ({"moments": moments(16, False)}, "adam with a second|adam without"),
        ({"moments": moments(256, True, coded=True)}, "no multiple of 256"),
    ],
)
def test_other_operands_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"master": torch.zeros(16), "grad": torch.zeros(16), "moments": moments(16, True)}
    with pytest.raises(OpError, match=message):
        update(adam_rule(1), **{**given, **change})
