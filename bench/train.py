"""Optimizer steps on this CPU: parameters a second, beside torch's and the memory's bandwidth.

A step reads weights, gradients and moments once and writes all but the gradients once: 28 bytes a
parameter of AdamW in float32. The bound is the best rate, in bytes, of three plain loops over
memory of that size. All take turns, DeepSpeed's CPUAdam, too, where `bench.peers deepspeed` has
installed it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.harness import Bar, Report, arguments
from bench.peers import native
from bench.sampling import timed
from qoff.kernels.cpu.optim.scratch import BLOCK
from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.memory.arena import map_pages

_ADAM = Rule("adam", 1e-3, 0.9, 0.999, keep=1 - 1e-5, root=1.1, eps=1e-8)
_WIDE, _CODED = "qoff, fp32", "qoff, bf16 gradients, 8-bit moments"
_TORCH, _DEEPSPEED = "torch AdamW(fused=True), fp32", "DeepSpeedCPUAdam, fp32"


def _floats(n: int, value: float) -> Tensor:
    return map_pages(4 * n).view(torch.float32).fill_(value)


def contestants(n: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """By name: bytes a parameter, and one step on n parameters."""
    weights, grad, first, second = (_floats(n, 1e-3) for _ in range(4))
    narrow = map_pages(2 * n).view(torch.bfloat16).fill_(1e-3)
    copy = map_pages(2 * n).view(torch.bfloat16).fill_(1e-3)
    scales = [torch.full((n // BLOCK,), 1e-3) for _ in range(2)]
    coded = Moments(map_pages(n).view(torch.int8), map_pages(n), scales[0], scales[1])
    wide = Moments(first, second)
    theirs = torch.nn.Parameter(weights)
    theirs.grad = grad
    optimizer = torch.optim.AdamW([theirs], fused=True)
    optimizer.step()
    state = optimizer.state[theirs]
    state["exp_avg"], state["exp_avg_sq"] = first, second  # in huge pages, as ours
    each = 8 / BLOCK * 2
    peers = {}
    their_step = _deepspeed(theirs, first, second)
    if their_step is not None:
        peers[_DEEPSPEED] = (28.0, their_step)
    return peers | {
        "memory, a += b": (12, lambda: first.add_(second)),
        "memory, a *= c": (8, lambda: grad.mul_(1.0)),
        "memory, a = b": (8, lambda: first.copy_(second)),
        _TORCH: (28, optimizer.step),
        _WIDE: (28, lambda: update(_ADAM, weights, grad, wide)),
        "qoff, bf16 gradients and weights": (
            28,
            lambda: update(_ADAM, weights, narrow, wide, copy),
        ),
        _CODED: (14 + each, lambda: update(_ADAM, weights, narrow, coded)),
        "qoff, bf16 gradients and weights, 8-bit moments": (
            16 + each,
            lambda: update(_ADAM, weights, narrow, coded, copy),
        ),
        "qoff, Lion, fp32": (20, lambda: update(_LION, weights, grad, Moments(first))),
        "qoff, SGD, fp32": (20, lambda: update(_SGD, weights, grad, Moments(first))),
    }


def _deepspeed(p: Tensor, first: Tensor, second: Tensor) -> Callable[[], object] | None:
    """A step of DeepSpeed's CPUAdam on a parameter and moments; None where it is not installed."""
    packages = native.deepspeed_packages()
    if packages is None:
        return None
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] += f"{os.pathsep}{packages / 'bin'}"  # ninja
    sys.path.append(str(packages))
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    optimizer = DeepSpeedCPUAdam([p], adamw_mode=True)
    optimizer.state[p] = {"step": 0, "exp_avg": first, "exp_avg_sq": second}
    step: Callable[[], object] = optimizer.step
    return step


_LION = Rule("lion", 1e-4, 0.9, 0.99, keep=1 - 1e-5)
_SGD = Rule("sgd", 1e-4, 0.9)


def measured(n: int, rounds: int) -> dict[str, tuple[float, float]]:
    """By name: bytes a parameter, and seconds of the fastest step."""
    found = {}
    runs = {name: (size, timed(run)) for name, (size, run) in contestants(n).items()}
    for _, run in runs.values():
        run()
    seconds = {name: [run() for _ in range(1)] for name, (_, run) in runs.items()}
    for _ in range(rounds - 1):
        for name, (_, run) in runs.items():
            seconds[name].append(run())
    for name, (size, _) in runs.items():
        found[name] = size, min(seconds[name])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    args = arguments(__doc__, argv)
    n, rounds = (1 << 22, 3) if args.quick else (50_003_968, 15)
    found = measured(n, rounds)
    bound = max(n * size / s for name, (size, s) in found.items() if name.startswith("memory"))
    theirs = n / found[_TORCH][1]
    report = Report(
        "train",
        {"parameters": n, "rounds": rounds, "threads": torch.get_num_threads()},
        f"{n:,} parameters, fastest of {rounds} steps; memory {bound / 1e9:.1f} GB/s",
        ("", "bytes a parameter", "10^6 parameters/s", "of the bandwidth", "of torch"),
    )
    for name, (size, seconds) in found.items():
        rate = n / seconds
        share, ratio = rate * size / bound, rate / theirs
        report.measured[name] = rate
        report.ratios[name] = ratio
        row = f"{size:.1f}", f"{rate / 1e6:.0f}", f"{share:.2f}", f"{ratio:.2f}"
        report.rows.append((name, *row))
    wide, coded = (n / found[name][1] for name in (_WIDE, _CODED))
    report.bars += [
        Bar("fp32 AdamW over torch's fused", 1.0, wide / theirs),
        *(
            [Bar("fp32 AdamW over DeepSpeedCPUAdam", 1.0, wide * found[_DEEPSPEED][1] / n)]
            if _DEEPSPEED in found
            else []
        ),
        Bar("fp32 AdamW over the bandwidth", 0.8, wide * 28 / bound),
        Bar("bf16 gradients and 8-bit moments over torch's fused", 1.7, coded / theirs),
    ]
    report.publish(args.out)


if __name__ == "__main__":
    main()
