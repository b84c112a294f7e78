"""`update`: a step of an optimizer on flat memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, fail

from .job import update_job
from .scratch import BLOCK, update_bytes
from .weights import ADAM, LION, SGD, UpdateArguments

_OP = "update"
_RULES = {"adam": ADAM, "sgd": SGD, "lion": LION}
LINE = 16  # weights are updated by so many


@dataclass(frozen=True)
class Rule:
    """What one step does; g is the gradient times `grad_scale`, plus `l2` times the weight.

    adam: m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w = keep w - rate m / (root sqrt(v) + eps).
    sgd: m = beta1 m + g; w = keep w - rate m, with nesterov g + beta1 m for m.
    lion: w = keep w - rate sign(beta1 m + (1 - beta1) g); m = beta2 m + (1 - beta2) g
    (arXiv 2302.06675).
    """

    kind: str
    rate: float
    beta1: float = 0.0
    beta2: float = 0.0
    keep: float = 1.0
    l2: float = 0.0
    root: float = 1.0
    eps: float = 0.0
    nesterov: bool = False
    grad_scale: float = 1.0


@dataclass(frozen=True)
class Moments:
    """Running means of n gradients: float32 [n], or codes [n] with float32 [n / 256] scales.

    first: as codes int8. second: of the squares, for adam alone; as codes uint8. What codes mean
    is in `lanes`; all begin as 0.
    """

    first: Tensor
    second: Tensor | None = None
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None


def update(
    rule: Rule,
    master: Tensor,
    grad: Tensor,
    moments: Moments,
    weight: Tensor | None = None,
    pool: Pool | None = None,
) -> None:
    """One step: weights and moments change in place.

    master: float32 [n]; n is a multiple of 16, of 256 where moments are codes. grad: float32 or
    bfloat16 [n]. weight: bfloat16 or float16 [n], becomes the new weights, rounded. All are
    contiguous on the CPU. Raises OpError.
    """
    pool = pool or default_pool()
    n, coded = len(master), moments.first_scale is not None
    each = BLOCK if coded else LINE
    if n % each:
        fail(_OP, f"{n:,} weights are no multiple of {each}")
    if (moments.second is not None) != (rule.kind == "adam"):
        fail(_OP, f"{rule.kind} with a second moment, or adam without")
    _check("master", master, n, (torch.float32,))
    _check("grad", grad, n, (torch.float32, torch.bfloat16))
    _check("weight", weight, n, (torch.bfloat16, torch.float16))
    for name, code in (("first", torch.int8), ("second", torch.uint8)):
        _check(f"{name} moment", getattr(moments, name), n, (code if coded else torch.float32,))
        _check(f"{name} scale", getattr(moments, f"{name}_scale"), n // BLOCK, (torch.float32,))
    plain = rule.kind == "sgd"
    with pool.lock:
        arguments = UpdateArguments(
            _RULES[rule.kind], n, master.data_ptr(), grad.data_ptr(),
            grad.dtype == torch.bfloat16, moments.first.data_ptr(), address(moments.second),
            address(moments.first_scale), address(moments.second_scale), address(weight),
            weight is not None and weight.dtype == torch.float16, rule.nesterov,
            pool.workspace(update_bytes(pool.threads)), rule.grad_scale, rule.keep, rule.l2,
            rule.beta1, 1.0 if plain else 1 - rule.beta1, rule.beta2, 1 - rule.beta2, -rule.rate,
            rule.root, rule.eps,
        )  # fmt: skip
        pool.run(update_job.address, arguments)


def _check(name: str, x: Tensor | None, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if x is None:
        return
    if x.dtype not in dtypes or x.shape != (n,) or not x.is_contiguous() or not x.is_cpu:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        fail(_OP, f"{name} must be {wanted} [{n}] on the CPU, not {x.dtype} {list(x.shape)}")
