"""`qoff eval --needle` and `--tasks`: what a compressed model still finds, and still knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qoff.errors import ArgumentError
from qoff.eval.needle.prompts import NeedleSettings
from qoff.eval.needle.result import CacheSetting
from qoff.eval.needle.run import NeedleResources, run
from qoff.eval.tasks.run import markdown, run_tasks
from qoff.kvcache import KVPlacement, KVQuant
from qoff.units import parse_size

from .output import print_json, progress_bar

_FLOAT = "float"
_CACHE = "float, or bits like 8,4 and then disk=0.5, host=0.5, top=0.25 or window=128"


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
        for option in options:
            name, _, value = option.partition("=")
            if name not in values:
                raise ArgumentError(f"a cache is written as {_CACHE}; not {part!r}")
            values[name] = _number(value, part)
        quant = KVQuant.of(bits, int(values["window"]), values["top"])
        device = 1 - values["disk"] - values["host"]
        found[part] = CacheSetting(quant, KVPlacement(device, values["host"]))
    return found


def run_needle(
    model: str,
    *,
    lengths: str,
    repetitions: int,
    seed: int,
    cache_texts: str,
    device: str,
    device_memory: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Hide keys in long texts, ask for them, print tables and draw heat maps to `out`."""
    counts = tuple(int(_number(length, lengths)) for length in lengths.split(","))
    settings = NeedleSettings(lengths=counts, repetitions=repetitions, seed=seed)
    memory = None if device_memory is None else parse_size(device_memory)
    resources = NeedleResources(device, memory)
    asked = caches(cache_texts)
    with progress_bar("asking", quiet=as_json) as progress:
        found = run(model, settings, asked, resources=resources, progress=progress)
    if as_json:
        print_json(found.as_dict())
        return
    print(found.markdown(), end="")
    paths = found.plot(out / "needle")
    print("wrote", " and ".join(map(str, paths)))


def run_named_tasks(
    model: str, names: Sequence[str], options: Mapping[str, Any], as_json: bool
) -> None:
    """Run tasks of lm-evaluation-harness and print a table."""
    found = run_tasks(model, names, **options)
    show: Callable[[Any], None] = print_json if as_json else _print_table
    show(found)


def _print_table(found: Mapping[str, Any]) -> None:
    print(markdown(found), end="")


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentError(f"{text!r} is no number, in {whole!r}") from error
