"""`qoff plan`: which plan a machine should run a model with, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from qoff.errors import ArgumentError, QoffError
from qoff.units import parse_size

from .options import Json, Model, QuantOptions, command
from .output import print_json, print_table

if TYPE_CHECKING:
    from qoff.plan.pareto import Point
    from qoff.plan.profile import MachineProfile
    from qoff.plan.sizes import ModelSizes


@dataclass(frozen=True)
class MachineOptions:
    """A machine: the one at hand, one from a file, or one of given sizes and rates."""

    machine: Path | None = Option(None, help="A machine that qoff env --measure --save wrote.")
    gpu: str | None = Option(None, help="Memory of a GPU that need not be here, like 24GiB.")
    gpu_rates: str = Option("1TB/s,100T", help="Its memory, and its arithmetic in flop/s.")
    host: str | None = Option(None, help="Host memory that may be used, like 64GiB.")
    disk: str | None = Option(None, help="Free disk, like 1TB.")
    link: str | None = Option(None, help="From host to GPU, like 25GB/s.")
    disk_rate: str | None = Option(None, help="Reads of the disk, like 3GB/s.")
    device: str = Option("auto", help="What computes here: cpu, or a GPU such as cuda.")


@dataclass(frozen=True)
class WorkOptions:
    """What is to be computed."""

    prompt: str = Option("512", help="Tokens of a prompt; 100-900: all alike likely.")
    tokens: str = Option("128", help="Tokens of an answer, in the same way.")
    requests: int = Option(256, min=1, help="How many there are.")
    objective: str = Option("throughput", help="throughput, or latency of one request.")
    token_s: float | None = Option(None, help="Seconds to the next token at most.")


@dataclass(frozen=True)
class TrainingOptions:
    """For `--memory`."""

    batch: int = Option(1, min=1, help="With --memory: sequences of a micro-batch.")
    sequence: int = Option(2048, min=1, help="With --memory: tokens of a sequence.")
    checkpoint_every: int = Option(1, min=1, help="With --memory: layers between checkpoints.")
    peak: str = Option("100T", help="With --memory: arithmetic of the GPU in flop/s.")


@command
def plan(
    model: Model,
    on: MachineOptions,
    work: WorkOptions,
    weights: QuantOptions,
    training: TrainingOptions,
    kv: str = Option("4", help="Bits of the KV cache: 4, 8, or 8,4 for K and V."),
    spill_folder: Path | None = Option(None, help="Folder for what is on the disk tier."),
    save: Annotated[Path | None, Option(help="Write the plan, for --plan and qoff.LLM.")] = None,
    memory: bool = Option(False, "--memory", help="Print standard formulas' bytes instead."),
    plot: Annotated[
        Path | None, Option(help="Draw memory against tokens/s as FILE.svg and FILE.png.")
    ] = None,
    brief: bool = Option(False, "--brief", help="Do not look for what would be faster."),
    as_json: Json = False,
) -> None:
    """Choose batch sizes and placement for a model, and explain them. No weights are needed."""
    from qoff.engine.simulated import simulated
    from qoff.kvcache.quant import kv_quant
    from qoff.plan import Plan
    from qoff.plan.explain import explain
    from qoff.plan.pareto import pareto_front
    from qoff.plan.saved import plan_text
    from qoff.plan.workload import Lengths, Workload

    if memory:
        _print_memory(model, weights, training, on.link or "25GB/s", as_json)
        return
    folder = spill_folder or Path(tempfile.gettempdir())
    there = Path(model).absolute()
    machine = machine_of(on, there if there.exists() else Path(), folder)
    sizes = sizes_of(model, weights, machine.on_gpu)
    cache = kv_quant(kv)
    if cache is None:
        raise ArgumentError("the KV cache of a plan is packed; use --kv 4, 8 or 8,4")
    workload = Workload(
        Lengths.of(work.prompt),
        Lengths.of(work.tokens),
        work.requests,
        work.objective,  # type: ignore[arg-type]  # checked there
        work.token_s,
    )
    template = Plan(kv=cache, spill_folder=spill_folder)
    found = explain(
        sizes, machine, workload, template, lambda one: simulated(one, sizes, machine, workload)
    )
    if save is not None:
        save.write_text(plan_text(found.found.plan))
    if plot is not None:
        _draw(plot, lambda: pareto_front(sizes, machine, workload, template), machine.on_gpu)
    changes = [] if brief else found.changes()
    if as_json:
        print_json({**found.values(), "changes": [list(row) for row in changes]})
        return
    typer.echo(f"{machine.name}: {found.line()}")
    print_table("what lives where", found.tiers(), ("tier", "what", "bytes"))
    print_table("busy in a round", found.resources(), ("resource", "prompts", "decoding"))
    columns = ("change", "new tokens/s", "whole work")
    print_table("what would be faster, by the model alone", changes, columns)
    for warning in found.warnings():
        typer.echo(f"note: {warning}")


def sizes_of(model: str, weights: QuantOptions, on_gpu: bool) -> ModelSizes:
    """The sizes of a checkpoint, of a directory with config.json, or of a model on the hub.

    Raises QoffError for what has none.
    """
    from qoff.checkpoint import Checkpoint
    from qoff.hf.hub import download_config
    from qoff.hf.load import exists, is_checkpoint
    from qoff.plan.sizes import ModelSizes
    from qoff.quant import QuantConfig
    from qoff.schema import read_object

    path = Path(model)
    if exists(model) and path.is_dir() and is_checkpoint(path):
        return ModelSizes.of_checkpoint(Checkpoint.open(path))
    if exists(model):
        config = path / "config.json" if path.is_dir() else path
        if config.suffix != ".json":
            raise QoffError(
                f"{model}: has no config.json; convert it first (qoff convert), and plan that"
            )
    else:
        config = download_config(model, None)
    packing = "split32" if on_gpu else "rows16"
    quant = QuantConfig(**vars(weights), packing=packing)
    return ModelSizes.of(read_object(config), quant)


def machine_of(on: MachineOptions, model: Path, folder: Path) -> MachineProfile:
    """The machine that options describe; what they leave out is that of the one at hand.

    model, folder: where the model and the spill file are, whose disks count.
    """
    from qoff.budgets import memory_size, resolve_device
    from qoff.plan.machine import assumed_profile, kept_profile
    from qoff.plan.profile import MachineProfile

    if on.machine is not None:
        machine = MachineProfile.read(on.machine)
    else:
        device = resolve_device(on.device)
        machine = kept_profile(device, model, folder) or assumed_profile(device, folder)
    if on.gpu is not None:
        machine = _with_gpu(machine, on.gpu, on.gpu_rates)
    elif on.host is not None and not machine.on_gpu:
        machine = machine.with_memory(device=memory_size("--host", on.host))
    if machine.on_gpu:
        machine = machine.with_memory(host=memory_size("--host", on.host))
    machine = machine.with_memory(disk=memory_size("--disk", on.disk))
    if on.link is not None:
        rate = rate_of("--link", on.link)
        machine = replace(
            machine,
            to_device=replace(machine.to_device, bytes_per_s=rate),
            from_device=replace(machine.from_device, bytes_per_s=rate),
            # Memory is written and read beside what the link moves.
            host=replace(machine.host, bytes_per_s=max(machine.host.bytes_per_s, 3 * rate)),
        )
    if on.disk_rate is not None:
        rate = rate_of("--disk-rate", on.disk_rate)
        machine = replace(machine, disk_read=replace(machine.disk_read, bytes_per_s=rate))
    return machine


def _with_gpu(machine: MachineProfile, size: str, rates: str) -> MachineProfile:
    from qoff.budgets import memory_size
    from qoff.plan.profile import Link, Processor

    memory, comma, flops = rates.partition(",")
    if not comma:
        raise ArgumentError(f"--gpu-rates is written like 1TB/s,100T, not {rates!r}")
    gpu = Processor.of(rate_of("--gpu-rates", memory), rate_of("--gpu-rates", flops))
    link = Link(12e9, 1e-5)
    host = machine.usable["host"] if machine.on_gpu else machine.usable["device"]
    usable = {**machine.usable, "device": memory_size("--gpu", size) or 0, "host": host}
    note = f"the GPU is taken to read its memory with {memory} and to do {flops}flop/s"
    return replace(
        machine,
        name=f"a GPU of {size}",
        on_gpu=True,
        device=gpu,
        to_device=link,
        from_device=link,
        usable=usable,
        notes=(*machine.notes, note),
    )


def rate_of(option: str, text: str) -> float:
    """Units a second, of text like 25GB/s or 100T. Raises ArgumentError."""
    found = text.strip().removesuffix("/s").removesuffix("flop")
    try:
        rate = parse_size(found if found[-1:].lower() == "b" else f"{found}B")
    except QoffError as error:
        raise ArgumentError(f"{option}: {text!r} is not a rate; write it like 25GB/s") from error
    if rate <= 0:
        raise ArgumentError(f"{option}: {text!r} is not a rate above 0")
    return float(rate)


def _draw(path: Path, front: Callable[[], list[Point]], on_gpu: bool) -> None:
    """Draw a Pareto front. Raises QoffError without matplotlib."""
    from qoff.eval.charts import new_figure, save

    figure = new_figure(6.0, 4.0)
    axes, points = figure.subplots(), front()
    axes.plot([p.memory / 2**30 for p in points], [p.tokens_per_s for p in points], marker="o")
    axes.set_xlabel(f"{'host' if on_gpu else 'main'} memory, GiB")
    axes.set_ylabel("new tokens/s expected")
    axes.set_ylim(bottom=0)
    save(figure, path)


def _print_memory(
    model: str, weights: QuantOptions, how: TrainingOptions, link: str, as_json: bool
) -> None:
    from qoff.plan.training import Training

    sizes = sizes_of(model, weights, on_gpu=True)
    spec = sizes.spec
    training = Training(
        sizes.parameters,
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        how.batch,
        how.sequence,
        how.checkpoint_every,
    )
    found: dict[str, Any] = {"qoff: weights as converted": sizes.nbytes, **training.rows()}
    parts = training.efficiency(rate_of("--link", link), rate_of("--peak", how.peak))
    if as_json:
        print_json({"parameters": sizes.parameters, "bytes": found, "efficiency": parts})
        return
    rows = [(name, f"{nbytes / 1e9:,.1f} GB") for name, nbytes in found.items()]
    print_table(f"{sizes.parameters / 1e9:,.1f} billion parameters", rows)
    shares = [(name, f"{part:.0%}") for name, part in parts.items()]
    print_table(f"of {how.peak}flop/s, where it comes over {link}", shares)
