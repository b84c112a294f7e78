"""What options take as whole numbers, and how documents of JSON are written."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qoff.engine import PoolingParams
from qoff.errors import ArgumentError
from qoff.plan import Plan
from qoff.schema import json_text, replace_text


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


def test_json_has_null_for_what_is_not_finite() -> None:
    value = {"a": [math.nan, 1.5], "b": {"c": (np.float64(-math.inf), "NaN")}, "d": None}
    wanted = {"a": [None, 1.5], "b": {"c": [None, "NaN"]}, "d": None}
    assert json.loads(json_text(value), parse_constant=pytest.fail) == wanted


def test_a_full_disk_is_said_with_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replace_text(path := tmp_path / "kept", "old")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/kept'"):
        replace_text(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("kept", "old")]
