"""The model that is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qoff.eval.perplexity.models import open_runtime
from qoff.models.runtime import Runtime

FAMILY = "llama-head64"


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Iterator[Runtime]:
    with open_runtime(checkpoint) as runtime:
        yield runtime
