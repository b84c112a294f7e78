"""Kernels cached on disk are compiled again after a change to any source that they inline."""

import warnings
from pathlib import Path

import pytest
import torch

from qoff.errors import BudgetError
from qoff.kernels import ops
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


def test_compiling_is_refused_where_a_limit_has_no_room(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(ops, "left_by_limits", lambda: 100 << 20)
    ops._check_room_to_compile.cache_clear()
    assert ops.ops_for(cpu)  # what these tests run is compiled
    ops._check_room_to_compile.cache_clear()
    monkeypatch.setattr(compiled, "stamp", lambda *_: "none")
    with pytest.raises(BudgetError, match="not compiled yet"):
        ops.ops_for(cpu)


def test_that_nothing_can_be_kept_is_said_once():
    """Not for each of some hundred functions, at every start of a container."""

    def compiling(name):
        def compile_(cache):
            if cache:
                raise RuntimeError(f"cannot cache function {name!r}: no locator available")
            return name

        return compiled._with_disk_cache(compile_)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        assert [compiling(name) for name in "ab"] == ["a", "b"]
    (one,) = said
    assert "set NUMBA_CACHE_DIR" in str(one.message)
