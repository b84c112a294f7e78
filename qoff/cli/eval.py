"""The options of `qoff eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import errors_in_one_line

_GRID = "bits=4,8 group=64,128 solver=hqq kv=float,4:4,8:4 window=every,64"


@errors_in_one_line
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A qoff checkpoint, or another model or hub id to quantize.")
    ],
    text: Annotated[
        Path | None, typer.Option(help="Text in UTF-8; default: one that comes with qoff.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A dataset instead of a text: wikitext2.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window to the next; default: no overlap."),
    ] = None,
    definition: Annotated[
        str,
        typer.Option(help="Which tokens of a window are scored: strided, llama.cpp or lm_eval."),
    ] = "strided",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Windows, at most; with --tasks: documents.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Original model to compare with; its predictions are kept on disk."),
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits of weights to quantize: 4 or 8.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Columns that share a scale: 32, 64 or 128.")
    ] = 64,
    solver: Annotated[
        str, typer.Option(help="Solver of weights to quantize: hqq, mse or rtn.")
    ] = "hqq",
    kv: Annotated[
        str | None, typer.Option(help="Bits of the KV cache: 4, 8, or 8,4; default: float32.")
    ] = None,
    kv_window: Annotated[int, typer.Option(min=0, help="Newest tokens that stay unpacked.")] = 64,
    every_token: Annotated[
        bool, typer.Option("--every-token", help="Pack all tokens, down to the newest.")
    ] = False,
    attention_top: Annotated[
        float, typer.Option(help="Fraction of the packed KV blocks that a new token attends to.")
    ] = 1.0,
    device: Annotated[str, typer.Option(help="cpu, or a GPU such as cuda.")] = "cpu",
    device_memory: Annotated[
        str | None, typer.Option(help="Bound of what is on the device, like 24MiB or 8GB.")
    ] = None,
    activation_bits: Annotated[int, typer.Option(help="Bits of activations: 16 or 8.")] = 16,
    batch: Annotated[
        int, typer.Option(min=1, help="Windows read together, for weights that stream.")
    ] = 1,
    sweep: Annotated[bool, typer.Option("--sweep", help="Evaluate a grid of settings.")] = False,
    grid: Annotated[
        str, typer.Option(help=f"Grid of --sweep, like '{_GRID}'; axes have defaults.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder for tables, charts and the finished cells of a sweep.")
    ] = Path("qoff-eval"),
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Compare with the installed packages that quantize weights."),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness; qoff_knowledge needs no network."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of --tasks.")
    ] = None,
    needle: Annotated[
        bool, typer.Option("--needle", help="Hide keys in long texts and ask for them.")
    ] = False,
    lengths: Annotated[
        str, typer.Option(help="Lengths of --needle in tokens, separated by commas.")
    ] = "512,1024,2048",
    caches: Annotated[
        str, typer.Option(help="KV caches of --needle, like 'float; 4; 8,4 disk=0.5; 4 top=0.25'.")
    ] = "float; 8,4; 4",
    repetitions: Annotated[
        int, typer.Option(min=1, help="Keys of --needle for each length and depth.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --needle and --tasks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Measure what compression costs: perplexity, divergence from the original, tasks."""
    from qoff.errors import ArgumentError
    from qoff.quant import QuantConfig

    if sum((sweep, peers, needle, tasks is not None)) > 1:
        raise ArgumentError("--sweep, --peers, --needle and --tasks are different evaluations")
    if tasks is not None:
        from .evaluate import kv_setting
        from .retrieval import run_named_tasks

        chosen = {
            "limit": limit,
            "num_fewshot": shots,
            "seed": seed,
            "device": device,
            "device_memory": device_memory,
            "activation_bits": activation_bits,
            "kv": kv_setting(kv, kv_window, attention_top, False).quant,
        }
        run_named_tasks(model, tasks.split(","), chosen, as_json)
        return
    if needle:
        from .retrieval import run_needle

        run_needle(
            model,
            lengths=lengths,
            repetitions=repetitions,
            seed=seed,
            cache_texts=caches,
            device=device,
            device_memory=device_memory,
            out=out,
            as_json=as_json,
        )
        return
    from . import evaluate as work

    options = work.TextOptions(text, dataset, window, stride, definition, limit)
    if peers:
        work.run_peers(model, options, as_json)
        return
    if sweep:
        work.run_sweep(model, options, grid=grid, out=out, reference=reference, as_json=as_json)
        return
    work.evaluate_one(
        model,
        options,
        work.kv_setting(kv, kv_window, attention_top, every_token),
        reference=reference,
        quant=QuantConfig(bits=bits, group_size=group_size, solver=solver),
        device=device,
        device_memory=device_memory,
        activation_bits=activation_bits,
        batch=batch,
        as_json=as_json,
    )
