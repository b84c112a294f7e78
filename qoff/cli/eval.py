"""The options of `qoff eval`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from qoff.errors import ArgumentError

from .command import command, named, parsed
from .options import FormOptions, Json, QuantOptions, ReferenceOptions, RunOptions, TextOptions

_GRID = "bits=4,8 group=32,64 solver=hqq kv=float,4:4,8:4 window=0,64"


def _names(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}


# What an evaluation takes beside the model; "" is that of a text.
_TAKES = {
    "": _names(TextOptions, RunOptions, QuantOptions, FormOptions, ReferenceOptions) | {"batch"},
    "sweep": _names(TextOptions) | {"reference", "reference_memory", "grid", "out"},
    "tasks": _names(RunOptions, QuantOptions, FormOptions) | {"limit", "shots", "seed"},
    "needle": _names(RunOptions, QuantOptions)
    | {"lengths", "caches", "repetitions", "seed", "out"},
}  # fmt: skip


@command
def evaluate(
    context: Context,
    model: Annotated[
        str, Argument(help="A qoff checkpoint, or another model or hub id to quantize.")
    ],
    texts: TextOptions,
    weights: QuantOptions,
    cache: FormOptions,
    how: RunOptions,
    original: ReferenceOptions,
    batch: int = Option(1, min=1, help="Windows read together; for streamed weights."),
    sweep: bool = Option(False, "--sweep", help="Evaluate a grid of settings."),
    grid: str = Option("", help=f"Grid of --sweep, like '{_GRID}'; each axis has a default."),
    out: Path = Option(Path("qoff-eval"), help="Folder for tables, charts and finished cells."),
    tasks: str | None = Option(
        None, help="Tasks of lm-evaluation-harness, or qoff_knowledge, which needs no network."
    ),
    shots: int | None = Option(None, min=0, help="With --tasks: examples before each question."),
    needle: bool = Option(False, "--needle", help="Hide keys in long texts and ask for them."),
    lengths: str = Option(
        "512,1024,2048", help="With --needle: lengths in tokens, separated by commas."
    ),
    caches: str | None = Option(
        None,
        help="With --needle: KV caches, like '8,4 disk=0.5; 4 top=0.25'; default: 'float; 8,4; 4', "
        "on a GPU without 'float'.",
    ),
    repetitions: int = Option(3, min=1, help="With --needle: keys for each length and depth."),
    seed: int = Option(0, min=0, help="Seed of --needle and --tasks."),
    as_json: Json = False,
) -> None:
    """Measure what compression costs: perplexity, divergence from the original, tasks."""
    asked = {"sweep": sweep, "tasks": tasks is not None, "needle": needle}
    modes = [name for name, wanted in asked.items() if wanted]
    if len(modes) > 1:
        raise ArgumentError("--sweep, --needle and --tasks are different evaluations")
    mode = modes[0] if modes else ""
    _refuse_others(context, mode, _TAKES[mode] | {*asked, "model", "as_json"})
    from qoff.quant import QuantConfig
    from qoff.units import parse_size

    if original.reference_memory is not None:
        if original.reference is None and not sweep:
            raise ArgumentError(
                "--reference-memory bounds the model of --reference, which is missing; name one, "
                "or leave it out"
            )
        parsed("--reference-memory", parse_size, original.reference_memory)
    if texts.stride is not None and texts.definition in ("llama.cpp", "lm_eval"):
        raise ArgumentError(
            f"--stride does nothing with --definition {texts.definition}, which has windows of "
            "its own; leave it out"
        )
    from qoff.hf.checkpoints import QuantizedError

    from . import evaluate as work

    quant = QuantConfig(**vars(weights))
    try:
        if tasks is not None:
            chosen = {"limit": texts.limit, "num_fewshot": shots, "seed": seed}
            names = [name.strip() for name in tasks.split(",")]
            work.run_named_tasks(model, names, quant, cache, how, chosen, as_json)
        elif needle:
            asked_for = (lengths, repetitions, seed)
            work.run_needle(model, asked_for, caches, quant, how, out, as_json)
        elif sweep:
            work.run_sweep(model, texts, grid, out, original, as_json)
        else:
            from .evaluate_text import evaluate_one

            evaluate_one(model, texts, cache, how, quant, original, batch, as_json)
    except QuantizedError as error:
        given = " and ".join(named(context, _names(QuantOptions)).values())
        raise ArgumentError(
            f"{model}: is a qoff checkpoint, whose weights are quantized already; leave {given} "
            "out, or give the model that it was converted from"
        ) from error


def _refuse_others(context: Context, mode: str, taken: Iterable[str]) -> None:
    """Raise ArgumentError for an option that was given and that an evaluation does not use."""
    options = {p.name: p.opts[0] for p in context.command.params if p.name is not None}
    for option in named(context, options.keys() - taken).values():
        here = f"with --{mode}" if mode else "in the evaluation of a text"
        own = ", ".join(options[one] for one in sorted(_TAKES[mode] - _TAKES[""]))
        more = f", whose own options are {own}" if own else ""
        raise ArgumentError(f"{option} does nothing {here}{more}; leave it out")
