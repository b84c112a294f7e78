"""`qoff plan`: which plan a machine should run a model with, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from qoff.errors import ArgumentError

from .command import command, named, parsed
from .options import ACTIVATION_BITS, ATTENTION_TOP, Json, Model, QuantOptions, check_place
from .output import print_json, print_table
from .plan_machine import MachineOptions, machine_of, rate_of
from .plan_model import checkpoint_of, config_of, folder_of, sizes_of
from .plan_train import FinetuneOptions, print_training

if TYPE_CHECKING:
    from qoff.plan import Plan
    from qoff.plan.finalists import Simulate
    from qoff.plan.forms import WeightForm
    from qoff.plan.losses import Form
    from qoff.plan.pareto import Point
    from qoff.plan.profile import MachineProfile
    from qoff.plan.sizes import Sizes
    from qoff.plan.workload import Workload

_ASSUMED = (
    "losses are those of a model of 135M parameters (docs/accuracy.md); qoff eval MODEL --sweep "
    "measures this one's, --losses reads them"
)
_MIXED = (
    "which matrices have more bits only the weights tell: sizes are right, and losses are taken in "
    "proportion, though the matrices that lose most come first; qoff convert measures them"
)
_INFERENCE = (
    *("prompt", "tokens", "requests", "objective", "token_s", "routes", "max_kl", "losses", "kv"),
    *("save", "memory", "plot", "brief", "shared", "acceptance", "attention_top"),
    "activation_bits",
)
_OF_WEIGHTS = ("bits", "group_size", "solver")
# Options that --max-kl stands for, or whose losses it does not know.
_CHOSEN = ("kv", *_OF_WEIGHTS, "attention_top", "activation_bits")
_OF_FORMULAS = {"batch", "checkpoint_every", "peak", "sequence"}  # --train has the last, too
_FORMULAS = _OF_FORMULAS | {"model", "memory", "as_json", "link", *_OF_WEIGHTS}


@dataclass(frozen=True)
class WorkOptions:
    """What is to be computed."""

    prompt: str = Option("512", help="Tokens of a prompt, or a range like 100-900.")
    tokens: str = Option("128", help="Tokens of an answer, or a range.")
    requests: int = Option(256, min=1, help="Number of requests.")
    objective: str = Option("throughput", help="throughput, or latency of one request.")
    token_s: float | None = Option(None, help="Most seconds between two tokens.")
    shared: float = Option(
        0.0, min=0, max=0.99, help="Fraction of each prompt that others begin with, too."
    )
    acceptance: float = Option(
        0.0,
        min=0,
        max=0.99,
        help="Plan drafts: chance that a drafted token is right if those before it are.",
    )
    attention_top: float = ATTENTION_TOP
    activation_bits: int = ACTIVATION_BITS
    routes: Path | None = Option(
        None, exists=True, help="Mixture of experts: file of qoff bench --experts -o json."
    )
    max_kl: float | None = Option(
        None,
        min=0,
        help="Choose the bits of weights and KV cache for at most this loss, nats per token.",
    )
    losses: Path | None = Option(
        None,
        exists=True,
        help="With --max-kl: folder of a sweep of this model (qoff eval --sweep).",
    )


@dataclass(frozen=True)
class TrainingOptions:
    """For `--memory`; the second for `--train`, too."""

    batch: int = Option(1, min=1, help="With --memory: sequences per micro-batch.")
    sequence: int = Option(2048, min=1, help="With --memory or --train: tokens per sequence.")
    checkpoint_every: int = Option(1, min=1, help="With --memory: layers between checkpoints.")
    peak: str = Option("100T", help="With --memory: the GPU's flop/s.")


@command
def plan(
    context: typer.Context,
    model: Model,
    on: MachineOptions,
    work: WorkOptions,
    weights: QuantOptions,
    training: TrainingOptions,
    finetuning: FinetuneOptions,
    kv: str = Option("4", help="Bits of the KV cache: 2, 3, 4, 8, or 8,4 for K and V."),
    spill_folder: Path | None = Option(None, help="Folder of the disk tier."),
    save: Annotated[
        Path | None, Option(help="Write the plan to this file, for --plan and qoff.LLM.")
    ] = None,
    memory: bool = Option(False, "--memory", help="Print memory by the standard formulas instead."),
    plot: Annotated[
        Path | None, Option(help="Draw memory against tokens/s as FILE.svg and FILE.png.")
    ] = None,
    brief: bool = Option(False, "--brief", help="Skip what changes of the machine would do."),
    as_json: Json = False,
) -> None:
    """Choose batch sizes and placement for a model, and explain them. No weights are needed.

    With --train: what fine-tuning it takes.
    """
    from qoff.kernels.layout.packing import GROUP_SIZES
    from qoff.plan.explain import beside_checkpoint, explain
    from qoff.plan.pareto import pareto_front
    from qoff.plan.saved import plan_text
    from qoff.plan.tokenizer import tokenizer_bytes

    _check_bounds(context, work)
    _check_training(context, model, finetuning)
    _check_formulas(context, memory, finetuning.train)
    _check_weights(context, model, finetuning)
    check_place("--save", save)
    check_place("--plot", plot)
    if memory:
        _print_memory(model, weights, training, on.link or "25GB/s", as_json)
        return
    on.check(context)
    if not finetuning.train:
        on.check_packing(model)
    workload, template = _workload(work), _template(work, kv, spill_folder)
    folder = spill_folder or Path(tempfile.gettempdir())
    there = Path(model).absolute()
    machine = machine_of(on, there if there.exists() else Path(), folder)
    if finetuning.train:
        packed = None
        if finetuning.lora is not None:
            packed = checkpoint_of(model) or sizes_of(model, weights, machine.on_gpu).checkpoint
        config = config_of(model)
        print_training(config, finetuning, training.sequence, machine, packed, as_json)
        return
    _check_bits(template, machine.on_gpu)
    if work.max_kl is not None:
        weights = replace(weights, group_size=min(GROUP_SIZES))  # divides what any other does
    sizes = sizes_of(model, weights, machine.on_gpu)
    if work.acceptance and work.attention_top < 1:
        raise ArgumentError(
            "--acceptance plans drafted tokens, which --attention-top does not have; leave it out"
        )

    def is_beside(sizes: Sizes) -> bool:
        return on.disk is not None and not sizes.stored

    def left(sizes: Sizes) -> MachineProfile:
        return beside_checkpoint(machine, sizes) if is_beside(sizes) else machine

    chosen: Form | None = None
    if work.max_kl is not None:
        chosen, sizes = _form(model, work, weights, machine, left, workload, template, sizes.native)
        template = replace(template, kv=chosen.kv)
    beside, machine = is_beside(sizes), left(sizes)
    found = explain(sizes, machine, workload, template, _virtual_time(sizes, machine, workload))
    tokenizer = tokenizer_bytes(there if there.is_dir() else there.parent)
    found = replace(found, tokenizer=tokenizer, beside=beside)
    written = list[Path]()
    if save is not None:
        save.write_text(plan_text(found.found.plan, None if chosen is None else chosen.weights))
        written.append(save)
    if plot is not None:
        front = pareto_front(sizes, machine, workload, template)
        written += _draw(plot, front, machine.on_gpu)
    changes = [] if brief else found.changes()
    if as_json:
        form: dict[str, Any] | None = None
        if chosen is not None:
            form = {"form": str(chosen), "kl": chosen.loss, "assumed": chosen.assumed}
            form["weights"] = None if chosen.weights is None else vars(chosen.weights)
        print_json({**found.values(), "form": form, "changes": [list(row) for row in changes]})
        return
    typer.echo(f"{machine.name}: {found.line()}")
    if chosen is not None:
        typer.echo(f"{chosen}: loses {chosen.loss:.3g} nats a token")
        if chosen.assumed:
            typer.echo(f"note: {_ASSUMED}")
        if chosen.weights is not None and chosen.weights.target_bits is not None:
            typer.echo(f"note: {_MIXED}")
        if chosen.weights is not None:
            place = "" if machine.on_gpu else " --for cpu"
            typer.echo(f"to have it: qoff convert {model} FOLDER {chosen.weights.options}{place}")
    print_table("what lives where", found.tiers(), ("tier", "what", "bytes"))
    columns = ("resource", "prompts", "decoding")
    print_table("busy in a round, by the model", found.resources(), columns)
    if changes:
        columns = ("change", "new tokens/s", "whole work")
        print_table("what changes would do, by the model alone", changes, columns)
    typer.echo(found.bound())
    for warning in found.warnings():
        typer.echo(f"note: {warning}")
    for path in written:
        typer.echo(f"written: {path}")


def _workload(work: WorkOptions) -> Workload:
    """Raises ArgumentError for values out of range."""
    from qoff.memory.experts.routes import RecordedRoutes
    from qoff.plan.workload import Lengths, Workload

    return Workload(
        parsed("--prompt", Lengths.of, work.prompt),
        parsed("--tokens", Lengths.of, work.tokens),
        work.requests,
        work.objective,  # type: ignore[arg-type]  # checked there
        work.token_s,
        work.shared,
        routes=None if work.routes is None else RecordedRoutes.read(work.routes),
        acceptance=work.acceptance,
    )


def _template(work: WorkOptions, kv: str, spill_folder: Path | None) -> Plan:
    """What is given of the plan. Raises ArgumentError for values out of range."""
    from qoff.kvcache.quant import kv_quant
    from qoff.plan import Plan

    cache = kv_quant(kv)
    if cache is None:
        raise ArgumentError("the KV cache of a plan is packed; use --kv 2, 3, 4, 8 or 8,4")
    return Plan(
        kv=replace(cache, attention_top=work.attention_top),
        share_prefixes=work.shared > 0,
        activation_bits=work.activation_bits,
        spill_folder=spill_folder,
    )


def _check_bounds(context: typer.Context, work: WorkOptions) -> None:
    """Raise ArgumentError for options that a bound on the loss would make void, or its lack."""
    if work.max_kl is None:
        if work.losses is not None:
            raise ArgumentError("--losses needs --max-kl, the bound that they are held against")
        return
    for option in named(context, _CHOSEN).values():
        raise ArgumentError(
            f"--max-kl chooses the bits of weights and KV cache; leave out {option}"
        )


def _check_training(context: typer.Context, model: str, how: FinetuneOptions) -> None:
    """Raise ArgumentError for options of other plans, and for packed weights that shall learn."""
    for option in named(context, _INFERENCE if how.train else vars(how)).values():
        why = "plans no answers; leave out" if how.train else "is missing, and belongs to"
        raise ArgumentError(f"--train {why} {option}")
    if not how.train:
        return
    if how.lora is None and folder_of(model) is not None:
        raise ArgumentError(
            f"{model} is a qoff checkpoint, whose packed weights do not learn; use --lora, or plan "
            "the model that it was made of"
        )


def _check_formulas(context: typer.Context, memory: bool, train: bool) -> None:
    """Raise ArgumentError for options of formulas without --memory, and for others with it."""
    if memory:
        others = {p.name for p in context.command.params if p.name is not None} - _FORMULAS
        for option in named(context, others).values():
            raise ArgumentError(
                f"--memory prints formulas for any work and machine; leave out {option}"
            )
        return
    both = {"sequence"}  # which --train takes, too
    for name, option in named(context, _OF_FORMULAS - (both if train else set())).items():
        missing = "--memory or --train" if name in both else "--memory"
        raise ArgumentError(f"{missing} is missing, and belongs to {option}")


def _check_weights(context: typer.Context, model: str, how: FinetuneOptions) -> None:
    """Raise ArgumentError for options of a conversion where none is planned."""
    if folder_of(model) is not None:
        why = f"{model} is a qoff checkpoint, whose weights are quantized already"
    elif how.train and how.lora is None:
        why = "--train without --lora plans for all weights to learn, as floats"
    else:
        return
    for option in named(context, _OF_WEIGHTS).values():
        raise ArgumentError(f"{why}; leave out {option}")


def _check_bits(template: Plan, on_gpu: bool) -> None:
    """Raise ArgumentError for what the device does not do."""
    allowed = (16,) if on_gpu else (8, 16)
    if template.activation_bits not in allowed:
        raise ArgumentError(
            f"--activation-bits is {template.activation_bits}; this machine has "
            f"{' or '.join(map(str, allowed))}"
        )


def _virtual_time(sizes: Sizes, machine: MachineProfile, workload: Workload) -> Simulate | None:
    """What tells the seconds of a plan's rounds in virtual time; None for transformers' modules."""
    from qoff.plan.native_sizes import NativeSizes

    if not isinstance(sizes, NativeSizes):
        return None
    from qoff.engine.simulated import simulated  # takes seconds to import

    return partial(simulated, sizes=sizes, machine=machine, workload=workload)


def _form(
    model: str,
    work: WorkOptions,
    weights: QuantOptions,
    machine: MachineProfile,
    beside: Callable[[Sizes], MachineProfile],
    workload: Workload,
    template: Plan,
    native: bool,
) -> tuple[Form, Sizes]:
    """The bits that a bound on the loss allows, of the fastest plan, and the model in these.

    beside: the machine with what disk such a checkpoint leaves. native: whether qoff computes the
    model itself; else no matrices have other bits than others.
    """
    from qoff.plan.losses import assumed_forms, best_form, measured_forms

    converted = folder_of(model) is not None
    forms = assumed_forms(converted) if work.losses is None else measured_forms(work.losses)
    fitting = [form for form in forms if (form.weights is None) == converted]
    if not converted and not native:
        fitting = [x for x in fitting if x.weights is None or x.weights.target_bits is None]
    if not fitting:
        raise ArgumentError(f"{work.losses}: is a sweep of other weights than {model}'s")

    @cache
    def sizes(form: WeightForm | None) -> Sizes:
        if form is None:
            return sizes_of(model, weights, machine.on_gpu)
        own = replace(weights, bits=form.bits, group_size=form.group_size, solver=form.solver)
        if form.target_bits is None:
            return sizes_of(model, own, machine.on_gpu)
        mixed = form.mixed(sizes(replace(form, target_bits=None)))
        return sizes_of(model, own, machine.on_gpu, mixed)

    assert work.max_kl is not None
    found = best_form(fitting, work.max_kl, sizes, beside, workload, template)
    return found, sizes(found.weights)


def _draw(path: Path, points: list[Point], on_gpu: bool) -> list[Path]:
    """Draw a Pareto front; returns the files. Raises QoffError without matplotlib."""
    from qoff.eval.charts import new_figure, save

    figure = new_figure(6.0, 4.0)
    axes = figure.subplots()
    axes.plot([p.memory / 2**30 for p in points], [p.tokens_per_s for p in points], marker="o")
    axes.set_xlabel(f"{'host' if on_gpu else 'main'} memory, GiB")
    axes.set_ylabel("new tokens/s expected")
    axes.set_ylim(bottom=0)
    return save(figure, path)


def _print_memory(
    model: str, weights: QuantOptions, how: TrainingOptions, link: str, as_json: bool
) -> None:
    from qoff.plan.training import Training

    sizes = sizes_of(model, weights, on_gpu=True)
    training = Training(
        sizes.parameters,
        sizes.num_layers,
        sizes.hidden_size,
        sizes.heads,
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
