"""`qoff bench`: rates of a model, the benches of the source tree, and comparing results."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from qoff.errors import ArgumentError

from .output import Format, errors_in_one_line, print_json, progress_bar

if TYPE_CHECKING:
    from qoff.measure.cases import Case, Setup
    from qoff.measure.model_report import ModelReport

_SEVERAL = "Several: separated by commas."


@errors_in_one_line
def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A qoff checkpoint, another model or a hub id; or --suite's own.",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option("-p", "--prompt", help=f"Prompt tokens read in one pass, or none. {_SEVERAL}"),
    ] = "512",
    new: Annotated[
        str, typer.Option("-n", "--new", help=f"Tokens to generate, or none. {_SEVERAL}")
    ] = "128",
    depth: Annotated[
        str, typer.Option("-d", "--depth", help=f"Tokens already in the cache. {_SEVERAL}")
    ] = "0",
    batch_size: Annotated[
        str, typer.Option("-b", "--batch-size", help=f"Sequences processed together. {_SEVERAL}")
    ] = "1",
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help="Bits of the KV cache: none (float32), 4, 8, or 8,4 for K and V; repeatable. "
            "Default: none, on a GPU 8."
        ),
    ] = None,
    device_memory: Annotated[
        str,
        typer.Option(help=f"Bound of the weights on the device, like 48MiB, or all. {_SEVERAL}"),
    ] = "all",
    activation_bits: Annotated[
        str, typer.Option(help=f"Bits of activations: 16 or 8. {_SEVERAL}")
    ] = "16",
    device: Annotated[str, typer.Option(help="cpu, or a GPU such as cuda.")] = "cpu",
    repetitions: Annotated[
        int,
        typer.Option(
            "-r", "--repetitions", min=1, max=100, help="Runs of each case, after a warm-up."
        ),
    ] = 5,
    output: Annotated[
        Format, typer.Option("-o", "--output", help="Markdown, CSV, or a result as JSON.")
    ] = "md",
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result in a new file in --results.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of results; default bench/results of the source tree."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="List the results in --results.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Print what has changed from A to B."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, help="Percent by which medians must differ (--compare). Default: 10."),
    ] = None,
    fail_on_slower: Annotated[
        bool,
        typer.Option("--fail-on-slower", help="Exit with 1 if anything is slower (--compare)."),
    ] = False,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Run a bench of the source tree; 'list' prints their names."
        ),
    ] = None,
) -> None:
    """Measure a model's tokens per second, run other benches, keep and compare results.

    qoff bench MODEL -p 512 -n 128 -d 0,4096 --kv none --kv 4

    qoff bench --suite cpu_matmul -- --quick
    """
    given = arguments or []
    if sum([compare is not None, history, suite is not None, bool(given) and suite is None]) != 1:
        raise ArgumentError("give one of MODEL, --suite, --compare and --history; see --help")
    if suite is not None:
        from .suite import run_suite

        run_suite(suite, given)
        return
    if compare is not None or history:
        from .results import print_comparison, print_history, results_folder

        if compare is None:
            print_history(results_folder(results), output)
        elif print_comparison(*compare, threshold, output) and fail_on_slower:
            raise typer.Exit(1)
        return
    if len(given) > 1:
        raise ArgumentError(f"{len(given)} models; one is measured at a time")
    asked = _Asked(
        prompt, new, depth, batch_size, kv or [], device_memory, activation_bits, repetitions
    )
    from .results import results_folder

    folder = results_folder(results) if save else None  # one that is missing is known before
    _measure(given[0], asked, device, output, folder)


@dataclass(frozen=True)
class _Asked:
    """The options that say what to measure, as they were given."""

    prompt: str
    new: str
    depth: str
    batch_size: str
    kv: list[str]
    device_memory: str
    activation_bits: str
    repetitions: int


def _measure(model: str, asked: _Asked, device: str, output: Format, folder: Path | None) -> None:
    """Measure a model, print its rates, and keep them if there is a folder."""
    report = _report(model, asked, device)
    if output == "json":
        print_json(report.result().content())
    else:
        print(report.markdown() if output == "md" else report.csv())
    for note in report.notes:
        print(note, file=sys.stderr)
    if folder is not None:
        print(f"kept {report.result().add_to(folder)}", file=sys.stderr)


def _report(model: str, asked: _Asked, device: str) -> ModelReport:
    """Measure all combinations; what cannot be is refused before anything is measured."""
    from qoff.checkpoint import Checkpoint
    from qoff.hf.load import exists, find_checkpoint
    from qoff.kernels.processor import usable_threads
    from qoff.measure.model_rates import backend_of, check, rates
    from qoff.measure.model_report import ModelReport
    from qoff.measure.samples import foreign_cpu_s

    backend = backend_of(device)
    setups, cases = _combinations(asked, backend)
    with progress_bar("converting") as progress:
        path = find_checkpoint(model, progress=progress, for_cpu=backend == "cpu")
    check(path, setups, cases, device)
    before, start = foreign_cpu_s(), perf_counter()
    with progress_bar("measuring") as progress:
        total = len(setups) * len(cases) * (1 + asked.repetitions)
        steps = count(1)
        found = [
            rate
            for setup in setups
            for rate in rates(
                path, setup, cases, asked.repetitions, device, lambda: progress(next(steps), total)
            )
        ]
    others = (foreign_cpu_s() - before) / (perf_counter() - start)
    nbytes = sum(file.nbytes for file in Checkpoint.open(path).files)
    name = Path(model).resolve().name if exists(model) else model
    settings = {**asdict(asked), "threads": usable_threads()}
    return ModelReport(name, nbytes, backend, settings, found, others)


def _combinations(asked: _Asked, backend: str) -> tuple[list[Setup], list[Case]]:
    from qoff.measure.cases import FLOAT, grid_of_cases, grid_of_setups, numbers

    cases = grid_of_cases(
        numbers("-p", asked.prompt, 1, may_be_none=True),
        numbers("-n", asked.new, 1, may_be_none=True),
        numbers("-d", asked.depth, 0),
        numbers("-b", asked.batch_size, 1),
    )
    setups = grid_of_setups(
        [size.strip() for size in asked.device_memory.split(",")],
        asked.kv or [FLOAT if backend == "cpu" else "8"],
        numbers("--activation-bits", asked.activation_bits, 1),
    )
    return setups, cases
