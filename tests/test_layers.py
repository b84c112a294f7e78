"""Imports point downwards only, by the layers of docs/architecture.md, and never in a circle.

Checked on the sources, with imports in functions and for type checkers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = frozenset(
    {
        "budgets",
        "dynamo",
        "errors",
        "interrupts",
        "log",
        "process",
        "schema",
        "settings",
        "standard_output",
        "system_memory",
        "units",
    }
)  # every layer may import these; they import no layer
RANK = {
    layer: rank
    for rank, row in enumerate(
        [
            {"kernels"},
            {"quant"},
            {"checkpoint"},
            {"memory"},
            {"kvcache"},
            {"models"},
            {"plan"},
            {"hf"},
            {"accelerate"},
            {"train"},
            {"engine"},
            {"api"},
            {"jobs"},
            {"ray"},
            {"measure"},
            {"eval"},
            {"serve"},
            {"cli"},
            {"__main__"},
            {"bench"},
        ]
    )
    for layer in row
}

FRONT = RANK["cli"] - 0.5  # names of qoff/__init__.py, which passes on what the front doors offer


def layer_of(module: str) -> str | None:
    """The layer of a dotted name: "qoff.hf.model" -> "hf", "bench.x" -> "bench", "os" -> None."""
    parts = module.split(".")
    if parts[0] in {"bench", "kernels"}:
        return parts[0]
    return parts[1] if parts[0] == "qoff" and len(parts) > 1 else None


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import anywhere in `source`, relative ones resolved."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of `module` that go up, sideways into another layer, or to a bare `kernels`."""
    here = layer_of(module)
    found = []
    for line, target in imported(source, module, is_package):
        there = layer_of(target)
        if target.split(".")[0] == "kernels":
            found.append(f"{module}:{line} imports {target}; its name is qoff.{target}")
        elif there is None or there == here or there in SHARED or here is None:
            continue
        elif here in SHARED or RANK.get(there, FRONT) >= RANK[here]:
            found.append(f"{module}:{line} imports {target}, which is not below {here}")
    return found


def sources() -> Iterator[tuple[Path, str, bool]]:
    """(file, module name, is it a package) of all sources; the ops by their import name."""
    for folder in ("qoff", "bench", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] == ("qoff", "kernels"):
                continue  # the link to kernels/
            parts = ["qoff"] * (folder == "kernels") + list(relative.with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            yield path, ".".join(parts[:-1] if is_package else parts), is_package


def circle(modules: Iterable[tuple[str, str, bool]]) -> list[str]:
    """Modules that import one another in a circle, if any do; each as (source, name, package)."""
    known = {module: (source, is_package) for source, module, is_package in modules}

    def home(target: str) -> str:
        while target and target not in known:
            target = target.rpartition(".")[0]
        return target

    graph = {
        module: {home(target) for _, target in imported(source, module, is_package)} - {module, ""}
        for module, (source, is_package) in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_go_in_a_circle() -> None:
    found = circle((path.read_text(), *module) for path, *module in sources())
    assert not found, " <- ".join(found)


@pytest.mark.parametrize(
    "back",
    [
        "from .a import A",
        "import qoff.memory.a",
        "if TYPE_CHECKING:\n    from qoff.memory import a",
        "def f():\n    from .a import A",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    package = ("from .a import A", "qoff.memory", True)
    there = [("from . import b", "qoff.memory.a", False), ("", "qoff.memory.c", False)]
    assert set(circle([package, *there, (back, "qoff.memory.b", False)])) == {
        "qoff.memory.a",
        "qoff.memory.b",
    }
    assert circle([package, *there, ("from . import c", "qoff.memory.b", False)]) == []


def test_every_import_points_downwards() -> None:
    checked = list(sources())
    assert checked, f"no sources under {ROOT}"
    found = [v for path, *module in checked for v in violations(path.read_text(), *module)]
    assert not found, "\n".join(found)


def test_every_folder_of_the_package_has_a_layer() -> None:
    folders = {p.name for p in (ROOT / "qoff").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(RANK), f"no layer for {sorted(folders - set(RANK))}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qoff.quant.solvers", "import qoff.memory.arena"),
        ("qoff.quant.solvers", "from qoff import checkpoint"),
        ("qoff.quant.solvers", "from ..models import spec"),
        ("qoff.quant.solvers", "from .. import hf"),
        ("qoff.memory.store", "def f():\n    from qoff.cli.main import app"),
        ("qoff.memory.store", "if TYPE_CHECKING:\n    from qoff.hf import model"),
        ("qoff.kvcache.host.plain", "from qoff.models import decoder"),
        ("qoff.kernels.cpu.linear", "from ...quant import QTensor"),
        ("qoff.hf.model", "from bench.timing import median"),
        ("qoff.models.native.decoder", "from qoff import load"),
        ("qoff.errors", "from qoff.kernels.layout.qtensor import QTensor"),
        ("qoff.quant.solvers", "from kernels.qtensor import QTensor"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qoff.quant.solvers", "from qoff.errors import OpError\nfrom ..kernels import packing"),
        ("qoff.quant.solvers", "from . import rows\nfrom qoff.quant.rows import chunks"),
        ("qoff.kernels.cpu.linear", "from ..qtensor import QTensor\nfrom ...errors import OpError"),
        ("qoff.hf.model", "from qoff.memory.store import WeightStore"),
        ("bench.decode", "import qoff\nfrom qoff import load\nfrom qoff.hf import pipeline"),
    ],
)
def test_a_downward_import_is_allowed(module: str, source: str) -> None:
    assert violations(source, module) == []
