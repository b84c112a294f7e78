"""`qoff finetune`: train a model, or adapters beside it, on lines of JSON."""

from __future__ import annotations

import csv
import gc
import math
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from qoff.errors import ArgumentError, DiskWriteError, io_errors
from qoff.units import parse_size

from .command import command, parsed
from .progress import step_progress

_SHOWN = 10  # broken lines that are printed


@command
def finetune(
    model: Annotated[
        str,
        Argument(
            help="A transformers model, as directory or hub id; for --lora a qoff checkpoint."
        ),
    ],
    data: Annotated[
        Path,
        Argument(exists=True, dir_okay=False, help="Lines of JSON: messages, prompt, or text."),
    ],
    output: Path = Option(..., "-o", "--output", help="Folder for result, checkpoint and log."),
    lora: str | None = Option(None, help="Train adapters, like r=16 or r=16,alpha=32."),
    full: bool = Option(False, "--full", help="Train all weights."),
    sequence: int = Option(
        1024, min=2, help="Tokens per sequence; examples are packed into these."
    ),
    micro_batches: int = Option(8, min=1, help="Sequences per step."),
    epochs: float = Option(1.0, min=0, help="Passes over the data."),
    steps: int | None = Option(None, min=1, help="Steps of the whole run, instead of --epochs."),
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "lion"] = Option(
        "adamw",
        help="adamw-8bit: 8-bit moments; adafactor: moments of rows and columns; lion: one moment.",
    ),
    lr: float | None = Option(
        None, min=0, help="Learning rate; default: 2e-4 for adapters, 2e-5 for all weights."
    ),
    schedule: Literal["constant", "linear", "cosine"] = Option(
        "constant", help="How the learning rate falls to 0 at the last step; constant: not."
    ),
    warmup: int = Option(0, min=0, help="Steps in which the learning rate rises."),
    hold_out: float = Option(
        0.0, min=0, max=0.5, help="Fraction of the sequences kept for evaluation."
    ),
    max_norm: float | None = Option(None, min=0, help="Clip gradients to this global norm."),
    device_memory: str | None = Option(None, help="Limit of what a step takes."),
    host_memory: str | None = Option(None, help="Limit of what is kept between steps."),
    activation_memory: str = Option(
        "0", help="Limit of kept activations, on top of the other limits."
    ),
    activation_disk: str = Option(
        "0", help="Limit of activations kept on --disk, if that is faster."
    ),
    disk: Path | None = Option(None, help="Folder for what does not fit into memory."),
    delayed: bool = Option(
        False, "--delayed", help="Update weights one step late, while the next step runs."
    ),
    gradients: Literal["auto", "float32", "bfloat16"] = Option(
        "auto", help="Type of the layers' gradients; auto: bfloat16 if the weights are."
    ),
    device: str = Option("cpu", help="cpu, or a GPU such as cuda."),
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Option(
        "auto", help="Type of the weights; auto: the model's."
    ),
    seed: int = Option(
        0, min=0, max=(1 << 31) - 1, help="Seed of data order, adapters and dropout."
    ),
    save_every: int = Option(100, min=1, help="Steps between checkpoints."),
    tensorboard: Path | None = Option(None, help="Folder for TensorBoard logs."),
    plot: Path | None = Option(None, help="Draw the losses as FILE.svg and FILE.png."),
    packed: Path | None = Option(
        None,
        help="With --full: also write the result in 4 bits to this folder, as qoff convert does.",
    ),
    strict: bool = Option(False, "--strict", help="Stop at the first broken line."),
    overwrite: bool = Option(False, "--overwrite", help="Start over, whatever is in OUTPUT."),
) -> None:
    """Fine-tune a model whose weights or optimizer states need not fit into memory.

    Repeat the command to continue a stopped run from its last checkpoint.
    """
    from qoff.eval.charts import new_figure
    from qoff.hf.chat import ChatRenderer
    from qoff.hf.checkpoints import is_checkpoint, local_source, read_if_there
    from qoff.hf.tokenizer import load_tokenizer
    from qoff.train import data as lines
    from qoff.train import finetune as work
    from qoff.train import offload
    from qoff.train.gpu_link import device_for
    from qoff.train.logs import writer_class
    from qoff.train.room import Room, room_beside, room_of
    from qoff.train.same_model import model_digest

    if (lora is None) != full:
        raise ArgumentError("say what learns: --lora r=16, or --full")
    chosen = None if lora is None else work.Lora.parse(lora)
    where = device_for(device)
    work.check_place(output, overwrite)
    if packed is not None:
        _check_packed(packed, output, full, overwrite)
    if tensorboard is not None:
        writer_class()  # before a model is loaded
    if not 0 < epochs < math.inf:
        raise ArgumentError(f"--epochs is {epochs}; use a number above 0")
    if max_norm is not None and not max_norm > 0:
        raise ArgumentError(f"--max-norm is {max_norm}; use a number above 0, or leave it out")
    room = _size("--device-memory", device_memory)
    host = _size("--host-memory", host_memory)
    kept = parsed("--activation-memory", parse_size, activation_memory)
    swapped = parsed("--activation-disk", parse_size, activation_disk)
    if swapped and (disk is None or not kept):
        raise ArgumentError(
            "--activation-disk needs --disk, and --activation-memory for two stages"
        )
    if plot is not None:
        new_figure(1, 1)  # so is this
        _make_place(plot.parent, "--plot")
    path = local_source(model)
    if output.exists() and output.samefile(path):
        raise ArgumentError(f"--output {output} is the model itself; choose another")
    work.check_model(path, chosen)  # before the data are read
    _make_place(output if output.exists() else output.parent, "--output")
    if disk is not None:
        _make_place(disk, "--disk")
    tokenizer = load_tokenizer(path)
    broken = 0

    def report(number: int, reason: str) -> None:
        nonlocal broken
        if strict:
            raise ArgumentError(f"{data}: line {number}: {reason}")
        broken += 1
        if broken <= _SHOWN:
            print(f"{data}: line {number}: {reason}", file=sys.stderr)

    with ChatRenderer() as renderer:
        texts = lines.examples(data, lines.Encoder(tokenizer, renderer), report)
        found = lines.packed(texts, sequence)
    if broken:
        print(f"{data}: broken lines left out: {broken:,}", file=sys.stderr)
    if not found.rows:
        raise ArgumentError(f"{data} has no example that something is learned from")
    rate = lr if lr is not None else 2e-4 if full is False else 2e-5
    name = str(path.resolve()) if path == Path(model) else model
    held_out = None
    if hold_out:
        found, held_out = found.split(hold_out)
    total = work.steps_of(found, epochs, micro_batches) if steps is None else steps
    recipe = work.Recipe(
        name,
        chosen,
        sequence,
        micro_batches,
        rate,
        max_norm,
        seed,
        schedule,
        warmup,
        None if schedule == "constant" else total,
        hold_out,
        optimizer,
        delayed,
        gradients,
        None if chosen is None else model_digest(path),
    )
    if not overwrite:
        work.check_run(output, recipe, found)  # before the model is loaded, which takes long
    place = Room({}, room)
    if chosen is not None and is_checkpoint(path):
        place = room_of(path, chosen, recipe, where, room, host, kept, dtype, swapped)
    elif where.type == "cpu":
        place = room_beside(read_if_there(path / "config.json"), chosen, recipe, room, host, dtype)
    # So is this.
    stepping = work.OPTIMIZERS[optimizer](recipe.rate)
    training = offload(
        work.loaded(path, recipe, dtype, place.options),
        stepping,
        tokens=sequence,
        micro_batches=micro_batches,
        device_memory=place.device_memory,
        host_memory=host,
        disk=disk,
        max_norm=max_norm,
        activation_memory=kept,
        activation_disk=swapped,
        delayed=delayed,
        gradients=gradients,
        device=where,
    )
    run = work.Run(training, found, recipe, output, overwrite, held_out, tensorboard)
    if run.saved is not None:
        typer.echo(f"{run.checkpoint}: {run.resumed(total)}", err=True)
    try:
        with step_progress(run.steps, total) as tell:
            run.go(steps, epochs, save_every, tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after step {run.steps}; {run.where}") from None
    finally:
        if plot is not None:
            _draw(plot, run.log)
    run.export(tokenizer)
    what = "all weights" if full else "the adapter"
    typer.echo(f"{output}: {what} after {run.steps:,} steps")
    if packed is not None:
        del training, run
        _convert(output, packed)


def _size(option: str, text: str | None) -> int | None:
    return None if text is None else parsed(option, parse_size, text)


def _check_packed(folder: Path, output: Path, full: bool, overwrite: bool) -> None:
    """Raise ArgumentError where no model can be written, before any time is spent."""
    from qoff.hf.checkpoints import is_checkpoint
    from qoff.train.finetune import has_run

    if not full:
        raise ArgumentError("--packed is for --full: an adapter serves beside the packed model")
    place = output.resolve()
    if folder.resolve() in (place, *place.parents):
        raise ArgumentError(f"--packed {folder} has the output in it; choose a folder of its own")
    if not folder.exists():
        _make_place(folder.parent, "--packed")
        return
    if not (folder.is_dir() and is_checkpoint(folder)):
        raise ArgumentError(f"{folder} is there, and no qoff checkpoint; choose another --packed")
    if not overwrite and not has_run(output):
        raise ArgumentError(
            f"{folder} is there, and no result of this run; choose another --packed, or --overwrite"
        )


def _make_place(folder: Path, option: str) -> None:
    """Raise DiskWriteError where nothing can be written when the run ends."""
    with io_errors(folder, DiskWriteError, f"choose another {option}"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _convert(model: Path, out: Path) -> None:
    """As `qoff convert` does with its defaults; a checkpoint that is there is replaced."""
    from qoff.quant import QuantConfig
    from qoff.units import counted, format_size

    from . import convert as work

    gc.collect()  # the model that was trained
    found = work.run(
        str(model),
        out,
        work.Target(),
        QuantConfig(solver="gptq", head_bits=6),
        for_="any",
        trust_remote_code=False,
        quiet=False,
        measured=False,
        automatic=True,
        overwrite=True,
    )
    typer.echo(f"{out}: {counted(found['layers'], 'layer')}, {format_size(found['bytes'])}")


def _draw(path: Path, log: Path) -> None:
    """Losses by step, of what is learned and what is held out."""
    from qoff.eval.charts import new_figure, save

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    for name, style in (("loss", "-"), ("held_out_loss", "o--")):
        points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "))
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token")
    axes.legend()
    for file_name in save(figure, path):
        typer.echo(f"wrote {file_name}", err=True)
