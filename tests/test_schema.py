"""What options take as whole numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qoff.engine import PoolingParams
from qoff.errors import ArgumentError
from qoff.plan import Plan


@pytest.mark.parametrize(
    ("options", "name"),
    [(Plan(), "batches"), (Plan(), "context"), (PoolingParams(), "dimensions")],
)
def test_whole_numbers_of_numpy_are_pythons(options: Any, name: str) -> None:
    found = replace(options, **{name: np.int32(7)})
    assert found == replace(options, **{name: 7})
    assert type(getattr(found, name)) is int
    for wrong in (np.int64(0), np.float64(2), np.bool_(True), True):
        with pytest.raises(ArgumentError, match=f"{name} is .*; use a whole number from 1"):
            replace(options, **{name: wrong})
