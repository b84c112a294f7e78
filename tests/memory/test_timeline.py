"""A trace that cannot be written leaves no part of it, and takes away nothing that is no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from qoff.errors import DiskWriteError
from qoff.memory.io.timeline import Timeline


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
def test_a_device_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.symlink_to("/dev/full")
    with pytest.raises(DiskWriteError, match="No space left"):
        Timeline().write(path)
    assert path.is_char_device()
