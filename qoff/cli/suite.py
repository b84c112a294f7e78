"""The benches of a source tree: finding them, saying what they are, running one."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import qoff
from qoff.errors import QoffError


def source_tree() -> Path | None:
    """The root of the source tree that this qoff is run from; None if it is installed alone."""
    root = Path(qoff.__file__).resolve().parents[1]
    return root if (root / "bench" / "__init__.py").is_file() else None


def benches(root: Path) -> dict[str, str]:
    """The first line of what each program of `bench/` says of itself, by its name."""
    found = {}
    folder = root / "bench"
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__main__.py")]):
        module = ast.parse(path.read_text())
        functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        if "main" in functions:
            name = path.stem if path.parent == folder else path.parent.name
            found[name] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def run_suite(name: str, arguments: Sequence[str]) -> None:
    """Run `python -m bench.<name>` with arguments, in this process; or "list" what there is.

    Raises QoffError without a source tree, or where no bench has that name.
    """
    root = source_tree()
    if root is None:
        raise QoffError(
            "the benches of --suite come with the source tree, and this qoff was installed without "
            "it; run it from a checkout"
        )
    known = benches(root)
    if name == "list":
        width = max(map(len, known))
        print("\n".join(f"{bench:<{width}}  {line}" for bench, line in known.items()))
        return
    if name not in known:
        raise QoffError(f"no bench is called {name!r}; there are {', '.join(known)}")
    if str(root) not in sys.path:
        sys.path.append(str(root))  # last: its folder `kernels` would hide the PyPI package
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
