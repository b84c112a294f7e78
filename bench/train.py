"""Optimizer steps on this CPU: parameters a second, beside torch's and the memory's bandwidth.

A step reads weights, gradients and moments once and writes all but the gradients once: 28 bytes a
parameter of AdamW in float32. The bound is the best rate, in bytes, of three plain loops over
memory of that size. All take turns, DeepSpeed's CPUAdam, too, where `bench.peers deepspeed` has
installed it. Ratios are medians of those within a round: the rate of memory that a machine shares
with others changes by half within seconds, and fastest steps are of other moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from bench.harness import Bar, Report, arguments
from bench.peers import packages
from bench.sampling import interleaved, timed
from qoff.kernels.cpu.optim.scratch import BLOCK
from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.memory.arena import map_pages
from qoff.train.factored import FactoredMoments, count, runs
from qoff.train.layout import FlatUnit
from qoff.train.optimizers import Adafactor

_ADAM = Rule("adam", 1e-3, 0.9, 0.999, keep=1 - 1e-5, root=1.1, eps=1e-8)
_LOOP = "memory, "
_WIDE, _CODED = "qoff, fp32", "qoff, bf16 gradients, 8-bit moments"
_TORCH, _DEEPSPEED = "torch AdamW(fused=True), fp32", "DeepSpeedCPUAdam, fp32"
_FACTORED, _TORCH_FACTORED = "qoff, Adafactor, fp32", "torch Adafactor, fp32"
_WIDTH = 4096  # of Adafactor's matrix


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
    matrix = torch.nn.Parameter(_floats(n, 1e-3).view(-1, _WIDTH))
    matrix.grad = grad.view(-1, _WIDTH)
    return peers | {
        f"{_LOOP}a += b": (12, lambda: first.add_(second)),
        f"{_LOOP}a *= c": (8, lambda: grad.mul_(1.0)),
        f"{_LOOP}a = b": (8, lambda: first.copy_(second)),
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
        _TORCH_FACTORED: (20, torch.optim.Adafactor([matrix]).step),
        _FACTORED: (20, _factored_step(weights, grad)),
    }


def _factored_step(weights: Tensor, grad: Tensor) -> Callable[[], None]:
    """A step of Adafactor, which goes through gradients three times, on one matrix."""
    unit = FlatUnit("weights", {"weight": torch.nn.Parameter(weights.view(-1, _WIDTH))})
    parts, shapes = list(runs(unit)), list(unit.shapes.values())
    moments = FactoredMoments(shapes, torch.zeros(count(shapes)))
    moments.begin(parts, weights)
    rule = Adafactor().rule(1, 1e-4, 1.0)

    def step() -> None:
        moments.prepare(rule, lambda: [(parts, grad)])
        for run in parts:
            moments.step(rule, run, weights[run.start : run.stop], grad, None)

    return step


def _deepspeed(p: Tensor, first: Tensor, second: Tensor) -> Callable[[], object] | None:
    """A step of DeepSpeed's CPUAdam on a parameter and moments; None where it is not installed."""
    if not packages.use_deepspeed():
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    optimizer = DeepSpeedCPUAdam([p], adamw_mode=True)
    optimizer.state[p] = {"step": 0, "exp_avg": first, "exp_avg_sq": second}
    step: Callable[[], object] = optimizer.step
    return step


_LION = Rule("lion", 1e-4, 0.9, 0.99, keep=1 - 1e-5)
_SGD = Rule("sgd", 1e-4, 0.9)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    args = arguments(__doc__, argv)
    n, rounds = (1 << 22, 3) if args.quick else (50_003_968, 30)
    found = contestants(n)
    seconds = interleaved({name: timed(run) for name, (_, run) in found.items()}, rounds)
    loops = [(size, seconds[name]) for name, (size, _) in found.items() if name.startswith(_LOOP)]
    rates = [[n * size / s for s in samples.values] for size, samples in loops]
    bounds = [max(turn) for turn in zip(*rates, strict=True)]

    def over(name: str, other: str) -> float:
        """How many times the rate of another, in the same round; the median."""
        pairs = zip(seconds[name].values, seconds[other].values, strict=True)
        return median(theirs / ours for ours, theirs in pairs)

    report = Report(
        "train",
        {"parameters": n, "rounds": rounds, "threads": torch.get_num_threads()},
        f"{n:,} parameters, medians of {rounds} rounds; memory {median(bounds) / 1e9:.1f} GB/s",
        ("", "bytes a parameter", "10^6 parameters/s", "of the bandwidth", "of torch"),
    )
    shares = {}
    for name, (size, _) in found.items():
        rate, ratio = n / seconds[name].median, over(name, _TORCH)
        moved = [n * size / s for s in seconds[name].values]
        shares[name] = median(x / y for x, y in zip(moved, bounds, strict=True))
        report.measured[name] = {"rate": rate, "fastest": n / min(seconds[name].values)}
        report.ratios[name] = ratio
        row = f"{size:.1f}", f"{rate / 1e6:.0f}", f"{shares[name]:.2f}", f"{ratio:.2f}"
        report.rows.append((name, *row))
    peers = [_TORCH, *([_DEEPSPEED] if _DEEPSPEED in found else [])]
    report.bars += [
        *(Bar(f"fp32 AdamW over {peer}", 1.0, over(_WIDE, peer)) for peer in peers),
        Bar(f"Adafactor over {_TORCH_FACTORED}", 1.0, over(_FACTORED, _TORCH_FACTORED)),
        Bar("fp32 AdamW over the bandwidth", 0.8, shares[_WIDE]),
        *(
            Bar(f"bf16 gradients and 8-bit moments over {peer}", 1.7, over(_CODED, peer))
            for peer in peers
        ),
    ]
    report.publish(args.out)


if __name__ == "__main__":
    main()
