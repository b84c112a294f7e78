"""The pages for people: their links lead somewhere, and the options they name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from qoff.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])

# Of benches, lm_eval, llama.cpp, and what every command has.
OTHERS = {
    "--help",
    "--model",
    "--windows",
    "--plot",
    "--quick",
    "--peer-minutes",
    "--large",
    "--any",
    "--only",
    "--plans",
    "--options",
    "--seconds",
    "--seed",
    "--override-tensor",
    "--unshared",
    "--address",
    "--threads",
    "--layers",
    "--rows",
    "--texts",
    "--pieces",
    "--hidden",
    "--seeds",
    "--rounds",
    "--warm",
    "--clients",
    "--pause",
    "--requests",
    "--gguf",
    "--like",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    paths = re.findall(r"`((?:kernels|qoff|tests|bench|docs|examples)/[\w/.]+\.(?:py|md))`", text)
    missing = [str(path) for path in [*links, *map(ROOT.joinpath, paths)] if not path.exists()]
    assert missing == []


def test_options_exist() -> None:
    command: Any = get_command(app)
    commands = [command, *command.commands.values()]
    known = {
        option for each in commands for p in each.params for option in (*p.opts, *p.secondary_opts)
    }
    named = {
        option: page.name
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())
    }
    assert {o: page for o, page in named.items() if o not in known | OTHERS} == {}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600
