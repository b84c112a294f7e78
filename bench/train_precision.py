"""What gradients in bfloat16 and moments of 8 bits cost in loss, beside torch's training.

A small llama in bfloat16 learns the text that comes with qoff, byte by byte, from the same weights
and on the same batches. Torch's is in memory, with float32 master weights and float32 sums of
gradients. Seeds differ by more than precisions, so the loss of each is held against that of torch
with the same seed.

    python -m bench.train_precision
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean

import torch
from torch import Tensor

from bench.harness import Bar, Report, arguments
from bench.random_model import TINYLLAMA
from bench.train_steps import random_model
from qoff import train
from qoff.eval.texts import read_text

_CONFIG = TINYLLAMA | {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_RATE, _LAST, _TOKENS = 1e-3, 40, 128  # steps whose losses count, tokens of a micro-batch
_TORCH = "torch, float32 sums"
_FAR = 0.01  # of a loss
Steps = Sequence[Sequence[dict[str, Tensor]]]
KINDS = {
    "float32 gradients": ("float32", 32),
    "bfloat16 gradients": ("bfloat16", 32),
    "float32 gradients, 8-bit moments": ("float32", 8),
    "bfloat16 gradients, 8-bit moments": ("bfloat16", 8),
}


def steps_of(seed: int, steps: int, micro_batches: int) -> Steps:
    """Micro-batches of each step, from anywhere in the text."""
    text = torch.tensor(list(read_text().encode()))
    numbers = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - _TOKENS, (steps, micro_batches), generator=numbers)
    ids = [[text[at : at + _TOKENS][None] for at in step] for step in starts.tolist()]
    return [[{"input_ids": x, "labels": x} for x in step] for step in ids]


def ours(seed: int, steps: Steps, gradients: str, bits: int) -> list[float]:
    """The loss of each step."""
    optimizer = train.AdamW(lr=_RATE, bits=bits)
    training = train.offload(
        random_model(_CONFIG, torch.bfloat16, seed),
        optimizer,
        tokens=_TOKENS,
        micro_batches=len(steps[0]),
        gradients=gradients,
    )
    return [training.step(step) for step in steps]


def theirs(seed: int, steps: Steps) -> list[float]:
    """The same by torch."""
    model = random_model(_CONFIG, torch.bfloat16, seed)
    narrow = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in narrow]
    optimizer = torch.optim.AdamW(masters, lr=_RATE)
    losses = []
    for step in steps:
        for master in masters:
            master.grad = torch.zeros_like(master)
        total = 0.0
        for batch in step:
            loss = model(**batch, use_cache=False).loss / len(step)
            loss.backward()
            total += float(loss.detach())
            for master, p in zip(masters, narrow, strict=True):
                assert master.grad is not None
                master.grad += p.grad
                p.grad = None
        optimizer.step()
        for master, p in zip(masters, narrow, strict=True):
            p.data.copy_(master)
        losses.append(total)
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    args = arguments(
        __doc__,
        argv,
        steps=(int, 300, "of each"),
        micro_batches=(int, 4, "of a step"),
        seeds=(int, 3, "runs of each"),
    )
    count, seeds = (3, 1) if args.quick else (args.steps, args.seeds)
    runs: dict[str, Callable[[int, Steps], list[float]]] = {_TORCH: theirs}
    for name, (gradients, bits) in KINDS.items():
        runs[name] = partial(ours, gradients=gradients, bits=bits)
    last: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(seeds):
        steps = steps_of(seed, count, args.micro_batches)
        for name, run in runs.items():
            last[name].append(mean(run(seed, steps)[-_LAST:]))
    report = Report(
        "train_precision",
        {"steps": count, "micro_batches": args.micro_batches, "seeds": seeds, "lr": _RATE},
        f"mean loss of the last {_LAST} of {count} steps, of {seeds} seeds",
        ("", "nats a byte", "over torch's"),
    )
    for name, found in last.items():
        over = mean(a / b - 1 for a, b in zip(found, last[_TORCH], strict=True))
        report.measured[name] = found
        report.ratios[name] = over
        report.rows.append((name, f"{mean(found):.4f}", f"{over:+.2%}"))
    worst = max(abs(report.ratios[name]) for name in KINDS)
    report.bars.append(Bar("1 % over the largest deviation", 1.0, _FAR / max(worst, 1e-9)))
    report.publish(args.out)


if __name__ == "__main__":
    main()
