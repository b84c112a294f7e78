"""Every script of examples/ runs, on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_checkpoint, tiny_model

ROOT = Path(__file__).resolve().parents[1]
FAMILY = "llama-head64"


@pytest.fixture
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """What each script is given."""
    base = tmp_path_factory.getbasetemp()
    checkpoint = tiny_checkpoint(base, FAMILY)
    return {
        "generate": [checkpoint, "16MiB"],
        "many_prompts": [checkpoint],
        "from_pretrained": [tiny_model(base, FAMILY)],
        "one_kernel": [],
        "accuracy": [checkpoint, ROOT / "README.md"],
    }


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_it_runs_and_prints(
    path: Path,
    arguments: dict[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments[path.stem])])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["accuracy", "from_pretrained", "generate", "many_prompts"])
def test_without_arguments_it_says_what_it_needs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(path, run_name="__main__")
    assert "the following arguments are required: model" in capsys.readouterr().err
