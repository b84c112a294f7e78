"""Loss curves of fine-tuning the demo model, beside PEFT and transformers.

LoRA (r = 16) beside all linear layers of the packed demo model, on the text that comes with qoff.
Theirs is the same model with its weights dequantized, float32, in memory, and torch's AdamW; ours
reads packed layers from disk, and has inputs of layers and states there, too. Data, seeds, adapters
and optimizer are the same; the deviation of each step's loss is printed, and a chart is written
beside the JSON.

    python -m bench.train_curves
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report, arguments
from qoff import train
from qoff.eval.charts import new_figure, save
from qoff.eval.texts import encode, read_text
from qoff.hf.tokenizer import load_tokenizer
from qoff.train.finetune import Lora, adapted

_OURS, _THEIRS = "qoff", "PEFT and transformers"
_RATE = 2e-4
_FAR = 0.01  # of a loss: packed products have gradients in bfloat16


def steps_of(path: Path, steps: int, micro_batches: int, tokens: int) -> list[list[dict[str, Any]]]:
    """Micro-batches of each step, of the text in its order."""
    ids = encode(load_tokenizer(path), read_text())
    wanted = steps * micro_batches * tokens
    ids = ids.repeat(-(-wanted // len(ids)))[:wanted].view(steps, micro_batches, 1, tokens)
    return [[{"input_ids": x, "labels": x} for x in step] for step in ids]


def _adapted(path: Path, dense: bool) -> Any:
    from transformers import AutoModelForCausalLM

    where = {} if dense else {"device_map": "disk"}
    model = AutoModelForCausalLM.from_pretrained(path, **where)
    if dense:
        model = model.dequantize(torch.float32)
    torch.manual_seed(0)
    return adapted(model, Lora(16, 32)).train()


def ours(path: Path, steps: Sequence[Sequence[dict[str, Tensor]]], folder: Path) -> Iterator[float]:
    """The loss of each step, with all that can be on disk there."""
    training = train.offload(
        _adapted(path, dense=False),
        train.AdamW(lr=_RATE, weight_decay=0.0),
        tokens=steps[0][0]["input_ids"].numel(),
        micro_batches=len(steps[0]),
        host_memory=0,
        disk=folder,
    )
    for step in steps:
        yield training.step(step)


def theirs(path: Path, steps: Sequence[Sequence[dict[str, Tensor]]]) -> Iterator[float]:
    """The same by torch's autograd in memory."""
    model = _adapted(path, dense=True)
    learns = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=_RATE, weight_decay=0.0, fused=True)
    for step in steps:
        total = 0.0
        for batch in step:
            loss = model(**batch, use_cache=False).loss / len(step)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        yield total


def draw(losses: dict[str, list[float]], path: Path) -> list[Path]:
    """Both curves, and their deviation below."""
    figure = new_figure(8.0, 5.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, style in ((_THEIRS, "-"), (_OURS, "--")):
        above.plot(range(1, len(losses[name]) + 1), losses[name], style, label=name)
    above.set_ylabel("loss, nats a token")
    above.legend()
    far = [100 * (a / b - 1) for a, b in zip(losses[_OURS], losses[_THEIRS], strict=True)]
    below.plot(range(1, len(far) + 1), far, color="black", linewidth=0.9)
    below.axhline(0.0, color="#999999", linewidth=0.6)
    below.set_ylabel("deviation, %")
    below.set_xlabel("step")
    return save(figure, path, ("svg",))


def main(argv: Sequence[str] | None = None, path: Path | None = None) -> None:
    """Run it from the command line. path: another checkpoint than the demo model's."""
    args = arguments(
        __doc__,
        argv,
        steps=(int, 50, "of each"),
        tokens=(int, 256, "of a micro-batch"),
        micro_batches=(int, 2, "of a step"),
    )
    count, tokens = (4, 16) if args.quick else (args.steps, args.tokens)
    path = path or fetch_checkpoint()
    steps = steps_of(path, count, args.micro_batches, tokens)
    losses: dict[str, list[float]] = {_OURS: [], _THEIRS: []}
    with tempfile.TemporaryDirectory() as folder:
        for a, b in zip(ours(path, steps, Path(folder)), theirs(path, steps), strict=True):
            losses[_OURS].append(a)
            losses[_THEIRS].append(b)
    far = [abs(a / b - 1) for a, b in zip(losses[_OURS], losses[_THEIRS], strict=True)]
    report = Report(
        "train_curves",
        {"steps": count, "micro_batches": args.micro_batches, "tokens": tokens, "lr": _RATE},
        f"LoRA beside the packed demo model, {args.micro_batches * tokens} tokens a step",
        ("step", *losses, "deviation"),
    )
    report.measured |= {**losses, "deviation": far}
    shown = sorted({0, *range(count // 5 - 1, count, max(1, count // 5)), count - 1})
    for i in (i for i in shown if i >= 0):
        a, b = (losses[name][i] for name in (_OURS, _THEIRS))
        report.rows.append((f"{i + 1}", f"{a:.4f}", f"{b:.4f}", f"{far[i]:.3%}"))
    report.notes.append(f"mean deviation {sum(far) / count:.3%}, largest {max(far):.3%}")
    report.bars.append(Bar("1 % over the largest deviation of a step", 1.0, _FAR / max(far)))
    written = report.publish(args.out)
    for chart in draw(losses, written.with_suffix("")):
        print("wrote", chart)


if __name__ == "__main__":
    main()
