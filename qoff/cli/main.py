"""`qoff`: convert, generate, chat, batch, serve, plan, bench, eval, finetune, verify, env, run."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import qoff
from qoff.errors import ArgumentError
from qoff.units import counted, format_size

from .batch import batch
from .bench import bench
from .command import Program, command, named
from .eval import evaluate
from .finetune import finetune
from .options import (
    CacheOptions,
    ConversionOptions,
    DrawOptions,
    Json,
    Model,
    Raw,
    RunOptions,
    Trace,
    TrustRemoteCode,
    check_place,
)
from .output import print_json, print_table, progress_bar
from .plan import plan
from .run import Passing, run
from .serve import serve

app = typer.Typer(cls=Program, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qoff {qoff.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Run language models larger than memory: 4-bit weights, streamed from disk."""


@app.command()
@command
def convert(
    context: typer.Context,
    source: Annotated[
        str,
        Argument(
            help="A directory with safetensors (floats, GPTQ, AWQ, compressed-tensors or "
            "bitsandbytes), a GGUF file, or a hub id."
        ),
    ],
    out: Annotated[Path, Argument(help="Directory to create.")],
    weights: ConversionOptions,
    head_bits: int = Option(6, help="Bits of embedding and head: 2 to 6, or 8."),
    weight: list[str] | None = Option(
        None, help="Bits and group size of some matrices, like '*.down_proj=8,64'; repeatable."
    ),
    target_bits: float | None = Option(
        None, help="Choose each matrix's format for this average size, in bits per weight."
    ),
    max_kl: float | None = Option(
        None, help="Choose each matrix's format for this loss, like 0.02 nats per token."
    ),
    plan: Annotated[
        Path | None,
        Option(
            exists=True,
            dir_okay=False,
            help="Use the bits of a plan that qoff plan --max-kl --save wrote.",
        ),
    ] = None,
    calibration: Path | None = Option(
        None, exists=True, dir_okay=False, help="Text for gptq, --target-bits and --max-kl."
    ),
    calibration_tokens: int | None = Option(
        None, min=512, help="Tokens of it for gptq; more lose less and take longer. Default: 8192."
    ),
    for_: str = Option("any", "--for", help="Device to pack for: any or cpu."),
    requantize: bool = Option(
        False, "--requantize", help="Requantize what cannot be kept exactly."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Replace a checkpoint at OUT."),
    trust_remote_code: TrustRemoteCode = False,
    measure: bool = Option(True, help="Measure the loss on a short text; takes seconds."),
    as_json: Json = False,
) -> None:
    """Convert a model to a qoff checkpoint. Quantized weights keep their codes."""
    from . import convert as work

    if plan is not None:
        weights, target_bits = work.planned(context, plan, weights)
    target = work.Target(target_bits, max_kl, calibration, calibration_tokens)
    if plan is None and target.given and named(context, ["bits"]):
        raise ArgumentError(
            "--target-bits and --max-kl choose the bits of all matrices in layers; leave out --bits"
        )
    quant = weights.quant(work.formats_of(weight or ()), target.given, head_bits=head_bits)
    found = work.run(
        source,
        out,
        target,
        quant,
        automatic=weights.solver == "auto",
        measured=measure,
        for_=for_,
        requantize=requantize,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        quiet=as_json,
    )
    work.warn_of_kept(source, found, context)
    if as_json:
        print_json(found)
        return
    typer.echo(f"{out}: {counted(found['layers'], 'layer')}, {format_size(found['bytes'])}")
    if target.given:
        typer.echo(work.sentence(found))
    if found.get("lossless"):
        typer.echo("KL divergence from the source: 0, as all quantized weights keep their codes")
    if "kl" in found:
        typer.echo(work.loss_sentence(found, quant, target))


@app.command()
@command
def generate(
    model: Model,
    prompt: Annotated[str, Argument(help='What to answer; "-" reads standard input.')],
    how: RunOptions,
    cache: CacheOptions,
    draw: DrawOptions,
    max_new_tokens: int = Option(128, min=1, help="Most tokens of the answer."),
    raw: Raw = False,
    trace: Trace = None,
    stats: bool = Option(False, "--stats", help="Print what each token waited for."),
    as_json: Json = False,
) -> None:
    """Answer a prompt, and print what it cost."""
    from qoff.engine import SamplingParams
    from qoff.memory.io.timeline import Timeline, checked_path

    from .generate import answer, open_for, read_prompt, rows

    timeline = None if trace is None else Timeline()
    if trace is not None:
        checked_path(trace)
    params = SamplingParams(**vars(draw), max_tokens=max_new_tokens)
    cache.check(how)
    prompt = read_prompt(prompt)
    path = how.checkpoint(model, quiet=as_json)
    opening = {**how.opening(), "kv": cache.quant(path, how)}
    opened, tokenizer, ids = open_for(path, prompt, max_new_tokens, raw, timeline, **opening)
    with ExitStack() as ends:  # whatever of it fails
        ends.callback(opened.runtime.close)
        if timeline is not None and trace is not None:
            ends.callback(timeline.write, trace)
        result = answer(opened, tokenizer, ids, params, quiet=as_json)
    if stats:
        times = [[f"{part * 1e3:.1f}" for part in one] for one in result["rounds"]]
        numbered = [(str(number), *one) for number, one in enumerate(times)]
        print_table("tokens", numbered, ("token", "ms", "waited for the disk"), stderr=True)
    if as_json:
        print_json(result)
    else:
        print_table("", rows(result))


@app.command()
@command
def chat(
    model: Model,
    how: RunOptions,
    cache: CacheOptions,
    draw: DrawOptions,
    max_new_tokens: int = Option(1024, min=1, help="Most tokens of an answer."),
    context: int = Option(4096, min=1, help="Most tokens of the conversation."),
    system: str = Option("", help="System message."),
) -> None:
    """Chat with a model. Ctrl-C stops an answer; /help lists commands."""
    from qoff.hf.chat import ChatRenderer
    from qoff.hf.load import open_runtime
    from qoff.hf.tokenizer import load_tokenizer

    from .chat import Conversation, params_of, talk, terminal

    cache.check(how)
    path = how.checkpoint(model)
    tokenizer = load_tokenizer(path, how.trust_remote_code)
    opened = open_runtime(path, context=context, kv=cache.quant(path, how), **how.opening())
    with closing(opened.runtime), ChatRenderer() as renderer:
        params = params_of(opened, vars(draw), max_new_tokens)
        conversation = Conversation(opened, tokenizer, params, context, renderer)
        if system:
            conversation.reset([{"role": "system", "content": system}])
        talk(conversation, *terminal())


app.command()(batch)
app.command()(serve)
app.command()(plan)
app.command()(bench)
app.command("eval")(evaluate)
app.command()(finetune)


@app.command()
@command
def verify(
    checkpoint: Annotated[Path, Argument(help="A qoff checkpoint.")],
    as_json: Json = False,
) -> None:
    """Compare every byte of a checkpoint with its checksums."""
    from qoff.checkpoint import verify as run

    with progress_bar("verifying", quiet=as_json) as progress:
        report = run(checkpoint, progress=progress)
    if as_json:
        print_json(
            {"path": str(checkpoint), "files": report.files, "bytes": report.nbytes, "ok": True}
        )
    else:
        typer.echo(f"{checkpoint}: {report.files} files, {format_size(report.nbytes)}, all intact")


@app.command()
@command
def env(
    path: Path = Option(Path(), exists=True, help="Folder whose disk is shown."),
    measure: bool = Option(False, "--measure", help="Measure the machine's rates, for qoff plan."),
    spill_folder: Path | None = Option(
        None,
        exists=True,
        help="Folder of the disk tier, also measured; default: that of temporary files.",
    ),
    save: Path | None = Option(None, help="With --measure: also write the machine to this file."),
    as_json: Json = False,
) -> None:
    """Show versions, processor, memory, disk and GPU."""
    if save is not None and not measure:
        raise ArgumentError("--save keeps what --measure finds; give both")
    check_place("--save", save)  # before minutes of measuring
    from .env import describe, measured

    spill = spill_folder or Path(tempfile.gettempdir())
    found = describe(path, spill)
    if measure:
        found |= measured(path, spill, save)
    if as_json:
        print_json(found)
    else:
        print_table("", [(name, str(value)) for name, value in found.items()])


app.command(cls=Passing)(run)

if __name__ == "__main__":
    app()
