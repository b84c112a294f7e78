"""`qoff eval`: what compression costs, on a text, in tasks, and in finding what a text hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from qoff.budgets import resolve_device
from qoff.checkpoint.layout import CONFIG_FILE
from qoff.errors import ArgumentError, FormatError
from qoff.eval.needle.prompts import NeedleSettings
from qoff.eval.needle.result import CacheSetting
from qoff.eval.needle.run import NeedleResources
from qoff.eval.needle.run import run as ask_for_needles
from qoff.eval.perplexity.models import model_stamps
from qoff.eval.sweep import cells as tables
from qoff.eval.sweep.grid import Grid
from qoff.eval.sweep.sweep import Sweep, decode_rate
from qoff.eval.tasks.run import manager_of, markdown, run_tasks
from qoff.eval.texts import CALIBRATION_TEXT, digest
from qoff.hf.checkpoints import is_checkpoint, local_source
from qoff.hf.tokenizer import load_tokenizer
from qoff.kvcache import KVPlacement, KVQuant
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED
from qoff.schema import read_object, replace_text

from .convert import calibration_ids
from .evaluate_text import stored, warn_of_windows
from .options import FormOptions, ReferenceOptions, RunOptions, TextOptions
from .output import print_json, progress_bar

_FLOAT = "float"
_CACHE = "float, or bits like 8,4 and then disk=0.5, host=0.5, top=0.25 or window=128"


def run_sweep(
    model: str, texts: TextOptions, grid: str, out: Path, original: ReferenceOptions, as_json: bool
) -> None:
    """Evaluate a grid, and write table.md, table.csv, results.json and plots to `out`.

    All cells are compared with what a file there has of the original's predictions.
    """
    content = texts.content()
    source = local_source(model)
    convertible = not is_checkpoint(source)
    if convertible:
        _check_floats(source)
    cells = Grid.parse(grid).cells(convertible)
    tokenizer = load_tokenizer(source)
    sample = texts.sample(tokenizer, content)
    named = local_source(original.reference) if original.reference else None
    named = source if named is None and convertible else named
    _make_folder(out)
    kinds = dict.fromkeys(cell.kv for cell in cells)
    warn_of_windows(sample, kinds, read_object(source / CONFIG_FILE))
    solvers = {cell.weights.solver for cell in cells if cell.weights is not None}
    with ExitStack() as stack:
        truth = None
        if named is not None:
            where = out / f"reference-{digest(model_stamps(named), sample.digest)}"
            truth = stack.enter_context(
                stored(named, sample, tokenizer, where, memory=original.memory)
            )
        calibrated = bool(solvers & set(CALIBRATED))
        calibration = calibration_ids(source, CALIBRATION_TEXT) if calibrated else None
        sweep = Sweep(
            source, sample, out, reference=truth, rate=decode_rate, calibration=calibration
        )
        with progress_bar(f"{len(cells)} cells", quiet=as_json) as progress:
            progress(0, len(cells))
            results = sweep.run(cells, progress)
    for name, text in (
        ("table.md", tables.markdown(results)),
        ("table.csv", tables.as_csv(results)),
        ("results.json", tables.as_json(results)),
    ):
        replace_text(out / name, text)
    pictures = tables.draw(results, out)
    if as_json:
        print(tables.as_json(results), end="")
    else:
        print(tables.markdown(results), end="")
        print(f"wrote table.md, table.csv, results.json and {len(pictures)} pictures to {out}")


def _make_folder(out: Path) -> None:
    """Raise ArgumentError, before what takes long, for a place where no folder can be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"--out {out}: cannot be made a folder ({error.strerror}); choose another place"
        ) from error


def _check_floats(source: Path) -> None:
    """Raise ArgumentError for a model whose weights are quantized already."""
    try:
        quantized = read_object(source / CONFIG_FILE).get("quantization_config") is not None
    except FormatError:
        quantized = True
    if quantized:
        raise ArgumentError(
            f"{source}: a sweep quantizes a model in floats, a directory with safetensors, or "
            "takes a qoff checkpoint as it is; convert this one first: qoff convert"
        )


def caches(text: str) -> dict[str, CacheSetting]:
    """Caches by their text, from texts with semicolons between: "float; 4; 8,4 disk=0.5 top=0.25".

    disk, host: parts of the packed blocks that lie there. Raises ArgumentError for other text.
    """
    found = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        bits, *options = part.split()
        if bits == _FLOAT and not options:
            found[part] = CacheSetting(None)
            continue
        values = {"disk": 0.0, "host": 0.0, "top": 1.0, "window": 64.0}
        given = [option.partition("=") for option in options]
        if len({name for name, *_ in given} & values.keys()) < len(given):
            raise ArgumentError(f"a cache is written as {_CACHE}, each once; not {part!r}")
        values |= {name: _number(value, part) for name, _, value in given}
        if values["window"] % 1:  # neither whole nor a number
            raise ArgumentError(f"a window is a whole number of tokens, in {part!r}")
        quant = KVQuant.of(bits, int(values["window"]), values["top"])
        device = 1 - values["disk"] - values["host"]
        found[part] = CacheSetting(quant, KVPlacement(device, values["host"]))
    return found


def run_needle(
    model: str,
    asked: tuple[str, int, int],
    cache_texts: str | None,
    quant: QuantConfig,
    how: RunOptions,
    out: Path,
    as_json: bool,
) -> None:
    """Hide keys in long texts, ask for them, print tables and draw heat maps to `out`.

    asked: lengths with commas between, keys for each length and depth, the seed.
    """
    lengths, repetitions, seed = asked
    try:
        counts = tuple(map(int, lengths.split(",")))
    except ValueError as error:
        raise ArgumentError(f"--lengths are whole numbers with commas, not {lengths!r}") from error
    settings = NeedleSettings(lengths=counts, repetitions=repetitions, seed=seed)
    if cache_texts is None:  # a GPU has packed caches alone
        cache_texts = "8,4; 4" if resolve_device(how.device).type == "cuda" else "float; 8,4; 4"
    wanted = caches(cache_texts)
    if not as_json:
        _make_folder(out)
    path = how.checkpoint(model, quant, as_json)
    with progress_bar("asking", quiet=as_json) as progress:
        resources = NeedleResources(how.opening())
        found = ask_for_needles(path, settings, wanted, resources=resources, progress=progress)
    if as_json:
        print_json({**found.as_dict(), "model": model})
        return
    print(found.markdown(), end="")
    paths = found.plot(out / "needle")
    print("wrote", " and ".join(map(str, paths)))


def run_named_tasks(
    model: str,
    names: Sequence[str],
    quant: QuantConfig,
    cache: FormOptions,
    how: RunOptions,
    chosen: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Run tasks of lm-evaluation-harness and print a table; chosen: more for `run_tasks`."""
    cache.check(how)
    manager = manager_of(names)
    path = how.checkpoint(model, quant, as_json)
    kv = cache.quant(path, how)
    found = run_tasks(path, names, manager=manager, kv=kv, **how.opening(), **chosen)
    if as_json:
        print_json({**found, "model": model})
    else:
        print(markdown(found), end="")


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentError(f"{text!r} is no number, in {whole!r}") from error
