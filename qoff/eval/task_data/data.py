"""The data of the tasks in this folder, which lie beside them wherever qoff is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets


def load(file: str, **metadata: Any) -> Any:
    """Return a file of JSON lines as the split "test"; metadata: what lm_eval knows besides."""
    path = Path(__file__).with_name(file)
    return datasets.load_dataset("json", data_files={"test": str(path)})
