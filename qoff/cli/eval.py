"""The options of `qoff eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import errors_in_one_line

_GRID = "bits=4,8 group=64,128 solver=hqq kv=float,4:4,8:4 form=channel,rotated window=every,64"


@errors_in_one_line
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A qoff checkpoint, other model or hub id; the latter quantized.")
    ],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text; by default one that comes with qoff.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Instead of a text: wikitext2.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    stride: Annotated[
        int | None, typer.Option(min=1, help="From window to window; by default no overlap.")
    ] = None,
    definition: Annotated[
        str, typer.Option(help="Which tokens of a window count: strided, llama.cpp or lm_eval.")
    ] = "strided",
    limit: Annotated[int | None, typer.Option(min=1, help="Windows, at most.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="The original model: divergence from it. Computed once, kept on disk."),
    ] = None,
    bits: Annotated[int, typer.Option(help="Of the weights of a model that is quantized.")] = 4,
    group_size: Annotated[int, typer.Option(help="32, 64 or 128.")] = 64,
    solver: Annotated[str, typer.Option(help="hqq, mse or rtn.")] = "hqq",
    kv_bits: Annotated[
        str | None, typer.Option(help="Bits of the KV cache: 4, 8, or 8,4; without: float32.")
    ] = None,
    kv_form: Annotated[
        str, typer.Option(help="What shares a scale of K: channel, token, or rotated (token).")
    ] = "channel",
    kv_window: Annotated[int, typer.Option(min=0, help="Newest tokens that are unpacked.")] = 64,
    every_token: Annotated[
        bool, typer.Option("--every-token", help="Pack all tokens, down to the newest.")
    ] = False,
    before_rope: Annotated[
        bool, typer.Option("--before-rope", help="With it: pack K before it is rotated.")
    ] = False,
    attention_top: Annotated[
        float, typer.Option(help="Part of the packed KV blocks a new token attends to; 1: all.")
    ] = 1.0,
    device: Annotated[str, typer.Option(help="cpu, or a GPU like cuda.")] = "cpu",
    device_memory: Annotated[
        str | None, typer.Option(help="Bound of the weights on it, like 24MiB or 8GB.")
    ] = None,
    activation_bits: Annotated[int, typer.Option(help="16 or 8.")] = 16,
    batch: Annotated[
        int, typer.Option(min=1, help="Windows read together, when weights stream.")
    ] = 1,
    sweep: Annotated[bool, typer.Option("--sweep", help="Evaluate a grid of settings.")] = False,
    grid: Annotated[
        str, typer.Option(help=f"Of --sweep, like '{_GRID}'; axes left out have a default.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Of --sweep: folder for tables, plots and finished cells.")
    ] = Path("qoff-sweep"),
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare the installed packages that quantize weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Measure what compression costs: perplexity, and divergence from the original."""
    from qoff.quant import QuantConfig

    from . import evaluate as work

    options = work.TextOptions(text, dataset, window, stride, definition, limit)
    if peers:
        work.run_peers(model, options, as_json)
        return
    if sweep:
        work.run_sweep(model, options, grid=grid, out=out, reference=reference, as_json_=as_json)
        return
    work.evaluate_one(
        model,
        options,
        work.kv_setting(kv_bits, kv_form, kv_window, attention_top, every_token, before_rope),
        reference=reference,
        quant=QuantConfig(bits=bits, group_size=group_size, solver=solver),
        device=device,
        device_memory=device_memory,
        activation_bits=activation_bits,
        batch=batch,
        as_json=as_json,
    )
