"""docs/architecture.md names every folder; docs/models.md is made from the specs."""

from __future__ import annotations

import re
from pathlib import Path

from docs.make_models import PATH, table

ROOT = Path(__file__).resolve().parents[1]


def test_every_folder_has_its_line() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    lines = text[text.index("## Folders") : text.index("## Decisions")].splitlines()
    named = [match[1] for line in lines if (match := re.match(r"- `([\w/]+)`: ", line))]
    packages = [
        path.parent for top in ("kernels", "qoff") for path in ROOT.glob(f"{top}/**/__init__.py")
    ]
    folders = {folder.relative_to(ROOT).as_posix() for folder in packages}
    assert sorted(named) == sorted(f for f in folders if not f.startswith("qoff/kernels"))


def test_the_table_of_models_is_that_of_the_specs() -> None:
    assert table() == PATH.read_text(), "run `python -m docs.make_models`"
