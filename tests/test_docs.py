"""docs/architecture.md names every module."""

from __future__ import annotations

import re
from pathlib import Path

from docs.make_models import PATH, table

ROOT = Path(__file__).resolve().parents[1]


def test_every_module_has_its_bullet() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    modules = text[text.index("## Modules") : text.index("## Decisions")]
    named = set(re.findall(r"`([\w.]+)`", modules))
    missing = []
    for top in ("kernels", "qoff"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if path.name == "__init__.py" or (top == "qoff" and len(parts) == 1):
                continue
            if top == "qoff" and parts[0] == "kernels":
                continue  # the link to kernels/
            name = ".".join(parts if top == "kernels" else parts[1:])
            if name not in named:
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, f"docs/architecture.md does not name {missing}"


def test_the_table_of_models_is_that_of_the_specs() -> None:
    assert table() == PATH.read_text(), "run `python -m docs.make_models`"
