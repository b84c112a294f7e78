"""A wheel built from the sources is a whole qoff, with the ops inside it and nothing beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qoff

ROOT = Path(__file__).resolve().parents[1]
BUILD_INPUTS = ["pyproject.toml", "LICENSE", "README.md", "qoff", "kernels"]


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """The stdout of a command that has to succeed; PYTHONPATH and the like do not leak into it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | env
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(source: Path, out: Path, kind: str) -> Path:
    """Build `kind` ("wheel" | "sdist") of the tree at `source` into `out`; the file built."""
    run(
        sys.executable,
        "-m",
        "build",
        f"--{kind}",
        "--no-isolation",
        "-o",
        out,
        source,
        cwd=out.parent,
    )
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, links kept, so that a build leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("wheel"), "wheel")


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_ops_are_reached_through_a_link() -> None:
    link = ROOT / "qoff" / "kernels"
    assert link.is_symlink()
    assert link.readlink() == Path("../kernels")


def test_the_wheel_holds_every_source_and_no_top_level_kernels(wheel: Path) -> None:
    found = members(wheel)
    assert {name.split("/")[0] for name in found} == {"qoff"}
    package = ROOT / "qoff"
    expected = {f"qoff/{p.relative_to(package)}" for p in package.rglob("*.py")}
    expected |= {
        f"qoff/kernels/{p.relative_to(ROOT / 'kernels')}" for p in ROOT.glob("kernels/**/*.py")
    }
    expected |= {
        f"qoff/{p.relative_to(package)}" for p in package.glob("eval/*data/*") if p.is_file()
    }
    assert found == expected | {"qoff/py.typed", "qoff/serve/page.html"}


def test_a_wheel_built_from_the_sdist_is_the_same(tree: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    sdist = build(tree, tmp_path / "sdist", "sdist")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert members(build(source, tmp_path / "out", "wheel")) == members(wheel)


@pytest.mark.timeout(300)  # it imports every module and compiles kernels
def test_the_installed_wheel_imports_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            site,
            wheel,
        ),
        cwd=elsewhere,
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    # PYTHONPATH stands before the environment's own packages, an editable qoff among them.
    report = run(
        sys.executable,
        "-c",
        "import json, pkgutil, importlib, runpy, sys, qoff, qoff.kernels;"
        "names = [m.name for m in pkgutil.walk_packages(qoff.__path__, 'qoff.')];"
        "print(json.dumps({n: importlib.import_module(n).__file__ for n in ['qoff', *names]}));"
        "runpy.run_path(sys.argv[1], run_name='__main__')",
        ROOT / "examples/one_kernel.py",
        cwd=elsewhere,
        PYTHONPATH=str(site),
    )
    listed, *rest = report[report.index('{"qoff": ') :].splitlines()
    assert any("error of the op" in line for line in rest)
    files = json.loads(listed)
    assert "qoff.kernels.cpu" in files
    assert {name for name, path in files.items() if not Path(path).is_relative_to(site)} == set()
    said = run(site / "bin" / "qoff", "--version", cwd=elsewhere, PYTHONPATH=str(site))
    assert said == f"qoff {qoff.__version__}\n"
    assert f"qoff-{qoff.__version__}-" in wheel.name


def test_the_tree_imports_without_an_installation(tree: Path, tmp_path: Path) -> None:
    code = "import qoff, qoff.kernels; print(qoff.__file__, qoff.kernels.__file__)"
    paths = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tree)).split()
    assert paths == [str(tree / "qoff/__init__.py"), str(tree / "qoff/kernels/__init__.py")]
