"""Kernels cached on disk are compiled again after a change to any source that they inline."""

from pathlib import Path

import pytest

from qoff.kernels.cpu.jit import compiled
from qoff.kernels.cpu.packed_attention import job

CPU = Path(compiled.__file__).resolve().parents[1]


def test_the_stamp_of_a_function_in_a_subfolder_is_that_of_all_sources():
    locator = job._record._cache._impl._locator
    assert locator.get_source_stamp() == compiled.stamp(CPU, CPU.parent / "layout")
    assert CPU.name == "cpu"
    assert (CPU.parent / "layout" / "layer_cache.py").is_file()


@pytest.mark.parametrize("change", ["edit", "add", "rename"])
def test_a_change_in_a_subfolder_changes_the_stamp(tmp_path, change):
    source = tmp_path / "linear" / "tile.py"
    source.parent.mkdir()
    source.write_text("A = 1\n")
    before = compiled.stamp(tmp_path)
    compiled.stamp.cache_clear()
    assert compiled.stamp(tmp_path) == before
    compiled.stamp.cache_clear()
    if change == "edit":
        source.write_text("A = 2\n")
    elif change == "add":
        (source.parent / "job.py").write_text("")
    else:
        source.rename(source.with_name("other.py"))
    assert compiled.stamp(tmp_path) != before
