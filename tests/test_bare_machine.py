"""A machine with a GPU may have torch, Triton, numba, einops and transformers, and little else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from bench.gpu.stages import gpu_tests

ROOT = Path(__file__).resolve().parents[1]
THERE = {"torch", "triton", "numba", "numpy", "safetensors", "transformers", "huggingface-hub"}
TOOLS = {"build", "mypy", "pre-commit", "pytest", "ruff", "setuptools"}  # nothing imports them
IMPORTS = {"lm-eval": "lm_eval", "pytest-timeout": "pytest_timeout", "pytest-xdist": "xdist"}
# What needs one of the others by its nature.
NEEDS = re.compile(
    r"qoff\.(accelerate|cli|eval|measure|ray|serve|train|engine\.simulated)\b"
    r"|qoff\.(models\.modules\.passes|memory\.io\.virtual)$"
)


def absent() -> list[str]:
    """The modules of all other packages that qoff, its benches and its tests depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    wanted = [*project["dependencies"], *extras]
    names = {re.split(r"[^\w-]", text)[0] for text in wanted}
    return sorted(IMPORTS.get(name, name) for name in names - THERE - TOOLS)


def run_bare(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code, with arguments, where none of `absent` can be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({absent()!r}))\n{code}"
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def modules() -> list[str]:
    """What a GPU needs of qoff and its benches."""
    found = []
    for folder in ("qoff", "bench/gpu", "bench/gpu_models"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if not NEEDS.match(name) and "__main__" not in name:
                found.append(name.removesuffix(".__init__"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gpus_modules_and_tests_are_imported_without_other_packages() -> None:
    """All modules that it needs. Of all tests those of files that need another package are left
    out, and say so; `bench.gpu` runs the files that have tests for a GPU, and no others.
    """
    assert {"gguf", "greenlet", "hypothesis", "psutil", "rich", "scipy", "typer"} <= {*absent()}
    assert {"qoff.engine.llm", "qoff.hf.load", "bench.gpu.campaign"} <= {*modules()}
    options = [
        "-m",
        "gpu",
        "--collect-only",
        "-q",
        "-rs",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
    ]
    code = (
        f"import importlib\nfor name in {modules()!r}: importlib.import_module(name)\n"
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    run = run_bare(code, *options, "--import-mode=importlib", "tests")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    found = {line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line}
    assert {"tests/engine/test_llm_device.py", "tests/models/test_triton_decoder.py"} <= found
    assert found <= {*gpu_tests()}
    reasons = {*re.findall(r"needs the package (\w+)", run.stdout)}
    assert {"hypothesis", "gguf"} <= reasons <= {*absent()}
