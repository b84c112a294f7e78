"""`qoff bench`: rates of a model, the benches of the source tree, and comparing results."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import typer
from typer import Argument, Context, Option

from qoff.errors import ArgumentError

from .command import command, named
from .options import OF_PLANS, ModelOptions
from .output import Format, print_json, progress_bar

if TYPE_CHECKING:
    from qoff.measure.cases import Case, Setup
    from qoff.measure.model_report import ModelReport

_SEVERAL = "Separate several by commas."


@dataclass(frozen=True)
class GridOptions:
    """What to measure: all combinations."""

    prompt: str = Option("512", "-p", "--prompt", help=f"Prompt tokens, or none. {_SEVERAL}")
    new: str = Option("128", "-n", "--new", help=f"Tokens to generate, or none. {_SEVERAL}")
    depth: str = Option("0", "-d", "--depth", help=f"Tokens already in the cache. {_SEVERAL}")
    batch_size: str = Option("1", "-b", "--batch-size", help=f"Sequences per batch. {_SEVERAL}")
    kv: list[str] | None = Option(
        None,
        help=(
            "Bits of the KV cache: none (float32), 2, 3, 4, 8, or 8,4 for K and V; auto: 4 if the "
            "model allows it (default). Repeatable."
        ),
    )
    device_memory: str = Option(
        "all", help=f"Limit of device memory, like 48MiB, or all. {_SEVERAL}"
    )
    activation_bits: str = Option("16", help=f"Bits of activations: 16 or 8. {_SEVERAL}")
    repetitions: int = Option(
        5, "-r", "--repetitions", min=1, max=100, help="Runs of each case after a warm-up."
    )

    def combinations(self, bound: int | None) -> tuple[list[Setup], list[Case]]:
        """Where weights and cache are, and what is timed. Raises ArgumentError for other text.

        bound: of the device's memory where this names none, in bytes.
        """
        from qoff.measure.cases import AUTO, RESIDENT, grid_of_cases, grid_of_setups, numbers

        cases = grid_of_cases(
            numbers("-p", self.prompt, 1, may_be_none=True),
            numbers("-n", self.new, 1, may_be_none=True),
            numbers("-d", self.depth, 0),
            numbers("-b", self.batch_size, 1),
        )
        sizes = [size.strip() for size in self.device_memory.split(",")]
        if sizes == [RESIDENT] and bound is not None:
            sizes = [_size(bound)]
        bits = numbers("--activation-bits", self.activation_bits, 1)
        return grid_of_setups(sizes, self.kv or [AUTO], bits), cases


def _size(nbytes: int) -> str:
    """Bytes as text like 24MiB that means just as many, if it can be written so."""
    whole = [shift for shift in (30, 20, 10) if nbytes and nbytes % (1 << shift) == 0]
    return f"{nbytes >> whole[0]}{'KMG'[whole[0] // 10 - 1]}iB" if whole else str(nbytes)


@command
def bench(
    called: Context,
    how: ModelOptions,
    grid: GridOptions,
    arguments: list[str] | None = Argument(
        None,
        metavar="[MODEL]",
        help="A qoff checkpoint, another model or a hub id; with --suite, its arguments.",
    ),
    output: Format = Option("md", "-o", "--output", help="Markdown, CSV or JSON."),
    save: bool = Option(False, "--save", help="Save the result as a new file in --results."),
    results: Path | None = Option(
        None, help="Folder for --save and --history; default: bench/results of the source tree."
    ),
    history: bool = Option(False, "--history", help="List the results in --results."),
    compare: tuple[Path, Path] | None = Option(
        None, metavar="A.json B.json", help="Print what changed from A to B."
    ),
    threshold: float | None = Option(
        None, min=0, help="With --compare: percent by which medians must differ; default: 10."
    ),
    fail_on_slower: bool = Option(
        False, "--fail-on-slower", help="With --compare: exit with 1 if anything is slower."
    ),
    suite: str | None = Option(
        None, metavar="NAME", help="Run a benchmark of the source tree; 'list' prints their names."
    ),
    experts: bool = Option(
        False,
        "--experts",
        help="Record which experts the tokens of a text use (-p, -n), within --device-memory, and "
        "the hit rates of caches of several sizes.",
    ),
    text: Path | None = Option(
        None, help="With --experts: text file; default: prose that comes with qoff."
    ),
    plan: Path | None = Option(
        None, help="Use limits, slots and KV cache of a plan that qoff plan --save wrote."
    ),
) -> None:
    """Measure a model's tokens per second, save and compare results, run other benchmarks.

    qoff bench MODEL -p 512 -n 128 -d 0,4096 --kv none --kv 4

    qoff bench --suite cpu_matmul -- --quick

    qoff bench MIXTURE --experts --device-memory 4GiB -p 64 -n 256
    """
    from .results import place_for_results, print_comparison, print_history, results_folder
    from .suite import run_suite

    given = arguments or []
    if sum([compare is not None, history, suite is not None, bool(given) and suite is None]) != 1:
        raise ArgumentError("give one of MODEL, --suite, --compare and --history; see --help")
    if plan is not None and (suite is not None or compare is not None or history):
        raise ArgumentError("--plan is for measuring MODEL; leave it out")
    if save and (suite is not None or compare is not None or history or experts):
        raise ArgumentError("--save keeps the rates of MODEL; leave it out")
    if results is not None and not save and not history:
        raise ArgumentError("--results is for --save and --history; give one of them, too")
    if compare is None and (threshold is not None or fail_on_slower):
        raise ArgumentError("--threshold and --fail-on-slower are for --compare; leave them out")
    if text is not None and not experts:
        raise ArgumentError("--text is for --experts; leave it out")
    if suite is not None:
        run_suite(suite, given)
    elif compare is not None:
        if print_comparison(*compare, threshold, output) and fail_on_slower:
            raise typer.Exit(1)
    elif history:
        print_history(results_folder(results), output)
    elif len(given) > 1:
        raise ArgumentError(f"{len(given)} models; one is measured at a time")
    else:
        if plan is not None:
            how, grid = _planned(called, how, grid, plan)
        if experts:
            _record_experts(given[0], how, grid, output, text)
            return
        folder = place_for_results(results) if save else None  # known before it is measured
        _measure(given[0], how, grid, output, folder)


def _planned(
    called: Context, how: ModelOptions, grid: GridOptions, file: Path
) -> tuple[ModelOptions, GridOptions]:
    """The options with what a saved plan says in their place.

    Raises ArgumentError where they say it, too, and for a KV cache that is more than its bits, as
    attention to a part of it, which is not measured here; FormatError for a file that is no plan.
    """
    from qoff.kvcache.quant import kv_quant
    from qoff.plan.saved import read_plan

    for option in named(called, OF_PLANS).values():
        raise ArgumentError(f"--plan says what {option} would; leave one of them out")
    plan = read_plan(file)
    if plan.kv.attention_top < 1:
        raise ArgumentError(f"{file}: attends to a part of the KV cache, which bench does not time")
    bits = [(plan.kv.k_bits, plan.kv.v_bits), *plan.kv.layers.values()]
    where = ["", *(f"/{layer}:" for layer in plan.kv.layers)]
    form = "".join(f"{x}{k},{v}" for x, (k, v) in zip(where, bits, strict=True))
    if kv_quant(form) != plan.kv:
        raise ArgumentError(
            f"{file}: its KV cache is more than the bits {form}, which are all that bench times"
        )
    bound = "all" if plan.device_memory is None else _size(plan.device_memory)
    host = None if plan.host_memory is None else str(plan.host_memory)
    return replace(how, host_memory=host, slots=plan.slots), replace(
        grid, device_memory=bound, kv=[form], activation_bits=str(plan.activation_bits)
    )


def _measure(
    model: str, how: ModelOptions, grid: GridOptions, output: Format, folder: Path | None
) -> None:
    """Measure a model, print its rates, and keep them if there is a folder."""
    report = _report(model, how, grid)
    if output == "json":
        print_json(report.result().content())
    else:
        print(report.markdown() if output == "md" else report.csv())
    for note in report.notes:
        print(note, file=sys.stderr)
    if folder is not None:
        print(f"kept {report.result().add_to(folder)}", file=sys.stderr)


def _record_experts(
    model: str, how: ModelOptions, grid: GridOptions, output: Format, text: Path | None
) -> None:
    """Print how often caches of several sizes have the experts that a text takes."""
    from qoff.eval.texts import encode, read_text
    from qoff.hf.tokenizer import load_tokenizer
    from qoff.measure.expert_routes import record

    setups, cases = grid.combinations(None)
    lengths = [case.tokens for case in cases if not case.depth and case.batch == 1]
    if len(setups) != 1 or [case.kind for case in cases] != ["pp", "tg"] or len(lengths) != 2:
        raise ArgumentError("--experts takes one -p, one -n and one setup, without -d and -b")
    (prompt, new), setup, content = lengths, setups[0], read_text(text)
    path = how.checkpoint(model)
    ids = encode(load_tokenizer(path, how.trust_remote_code), content)
    if len(ids) < prompt + new:
        raise ArgumentError(f"the text has {len(ids)} tokens, and {prompt + new} are asked for")
    options = {**how.opening(), "kv": setup.kv, "activation_bits": setup.activation_bits}
    found = record(path, ids[: prompt + new], prompt, device_memory=setup.budget, **options)
    if output == "json":
        print_json(asdict(found))
        return
    print(found.markdown() if output == "md" else found.csv())
    print(
        f"{new} tokens with {found.slots} slots: {100 * found.hit_rate:.1f} % were there",
        file=sys.stderr,
    )


def _report(model: str, how: ModelOptions, grid: GridOptions) -> ModelReport:
    """Measure all combinations; what cannot be is refused before anything is measured."""
    from qoff.budgets import memory_bounds, resolve_device
    from qoff.checkpoint import Checkpoint
    from qoff.hf.hub import exists
    from qoff.kernels.processor import usable_threads
    from qoff.measure.model_rates import backend_of, check, rates
    from qoff.measure.model_report import ModelReport
    from qoff.measure.samples import foreign_cpu_s

    backend, options = backend_of(how.device), how.opening()
    bound, _ = memory_bounds(None, None, options["max_memory"], resolve_device(how.device))
    setups, cases = grid.combinations(bound)
    path = how.checkpoint(model)
    check(path, setups, cases, **options)
    before, start = foreign_cpu_s(), perf_counter()
    with progress_bar("measuring") as progress:
        total = len(setups) * len(cases) * (1 + grid.repetitions)
        steps, found = count(1), []

        def step() -> None:
            progress(next(steps), total)

        for setup in setups:
            found += rates(path, setup, cases, grid.repetitions, step, **options)
    others = (foreign_cpu_s() - before) / (perf_counter() - start)
    nbytes = sum(file.nbytes for file in Checkpoint.open(path).files)
    name = Path(model).resolve().name if exists(model) else model
    more = {name: getattr(how, name) for name in ("dtype", "host_memory", "max_memory", "slots")}
    settings = {**asdict(grid), **more, "threads": usable_threads()}
    return ModelReport(name, nbytes, backend, settings, found, others)
