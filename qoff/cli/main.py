"""`qoff convert | generate | verify | env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qoff.errors import ArgumentError, QoffError
from qoff.units import format_size

from .output import errors_in_one_line, print_json, print_table, progress_bar

app = typer.Typer(
    help="Run language models that do not fit: 4-bit weights, streamed from disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_COLDEST = 0.01  # logits divided by less may overflow
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@app.command()
@errors_in_one_line
def convert(
    source: Annotated[str, typer.Argument(help="A safetensors directory, GGUF file or hub id.")],
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    bits: Annotated[int, typer.Option(help="Bits of linear weights: 4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64, 128.")] = 64,
    solver: Annotated[str, typer.Option(help="hqq, mse or rtn.")] = "hqq",
    head_bits: Annotated[int, typer.Option(help="Bits of embedding and head: 4 or 8.")] = 8,
    for_: Annotated[str, typer.Option("--for", help="Packing on disk for: any or cpu.")] = "any",
    requantize: Annotated[
        bool, typer.Option(help="Quantize anew what cannot be taken over exactly.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a model to a qoff checkpoint; GGUF codes are taken over bit for bit."""
    from qoff.checkpoint import Checkpoint
    from qoff.hf.load import local_source
    from qoff.models.convert import convert as run
    from qoff.quant import QuantConfig

    if for_ not in ("any", "cpu"):
        raise QoffError(f"--for is 'any' or 'cpu', not {for_!r}")
    quant = QuantConfig(bits=bits, group_size=group_size, solver=solver, head_bits=head_bits)
    with progress_bar("converting", quiet=as_json) as progress:
        run(
            local_source(source),
            out,
            quant=quant,
            for_cpu=for_ == "cpu",
            requantize=requantize,
            overwrite=overwrite,
            progress=progress,
        )
    checkpoint = Checkpoint.open(out)
    files = (*checkpoint.layers, checkpoint.outer)
    total = sum(file.nbytes for file in files)
    result = {"path": str(out), "layers": len(checkpoint.layers), "bytes": total}
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{out}: {len(checkpoint.layers)} layers, {format_size(total)}")


@app.command()
@errors_in_one_line
def generate(
    model: Annotated[str, typer.Argument(help="A qoff checkpoint, other model or hub id.")],
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    device_memory: Annotated[
        str | None, typer.Option(help="Bound of the weights in memory, like 24MiB or 8GB.")
    ] = None,
    slots: Annotated[int, typer.Option(min=2, help="Buffers for streamed layers.")] = 2,
    activation_bits: Annotated[
        int, typer.Option(help="16, or 8: faster prefill, less exact.")
    ] = 16,
    kv_bits: Annotated[
        str | None, typer.Option(help="Bits of the KV cache: 4, 8, or 8,4 for K and V.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    raw: Annotated[bool, typer.Option(help="No chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, printing text as it comes and then a table of what it cost."""
    from qoff.hf.load import load

    from .generate import answer

    if 0 < temperature < _COLDEST:
        raise ArgumentError(f"--temperature is 0 or at least {_COLDEST}, not {temperature}")
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    with progress_bar("converting", quiet=as_json) as progress:
        loaded, tokenizer = load(
            model,
            device_memory=device_memory,
            slots=slots,
            activation_bits=activation_bits,
            kv_bits=None if kv_bits is None else _bits(kv_bits),
            progress=progress,
        )
    try:
        result = answer(loaded, tokenizer, prompt, raw=raw, quiet=as_json, seed=seed, **options)
    finally:
        loaded.close()
    if as_json:
        print_json(result.as_dict())
    else:
        print_table("", result.rows())


def _bits(text: str) -> tuple[int, int]:
    """ "4" -> (4, 4), "8,4" -> (8, 4)."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(f"--kv-bits is a number, or two for K and V like 8,4, not {text!r}")
    return int(parts[0]), int(parts[-1])


@app.command()
@errors_in_one_line
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A qoff checkpoint directory.")],
    as_json: Json = False,
) -> None:
    """Read every byte of a checkpoint and compare it with the checksums in its index."""
    from qoff.checkpoint import verify as run

    with progress_bar("verifying", quiet=as_json) as progress:
        report = run(checkpoint, progress=progress)
    result = {"path": str(checkpoint), "files": report.files, "bytes": report.nbytes, "ok": True}
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{checkpoint}: {report.files} files, {format_size(report.nbytes)}, all intact")


@app.command()
@errors_in_one_line
def env(
    path: Annotated[Path, typer.Option(exists=True, help="Whose disk to look at.")] = Path(),
    as_json: Json = False,
) -> None:
    """Show what qoff found: versions, processor, memory, disk, GPU."""
    from .env import describe

    found = describe(path)
    if as_json:
        print_json(found)
    else:
        print_table("", [(name, str(value)) for name, value in found.items()])


if __name__ == "__main__":
    app()
