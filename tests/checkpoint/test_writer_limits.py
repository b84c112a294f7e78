"""What a writer must not do: hold copies, touch other places, or leave directories behind."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from qoff.checkpoint import Checkpoint, CheckpointWriter
from qoff.errors import ConversionError
from qoff.quant import QTensor
from tests.checkpoint.samples import outer_weights, write


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_directories_made_for_a_failed_writer_are_removed(tmp_path: Path) -> None:
    with (
        pytest.raises(ConversionError, match="the disk is full"),
        CheckpointWriter(tmp_path / "a" / "b" / "model", expected_bytes=1 << 60),
    ):
        pass
    assert names(tmp_path) == []
    write(tmp_path / "a" / "b" / "model")
    assert names(tmp_path / "a" / "b") == ["model"]


def test_leftovers_of_a_place_whose_name_begins_alike_stay(tmp_path: Path) -> None:
    hidden = tmp_path / ".a.qoff-b.qoff-12345678"
    write(hidden / "old")
    write(tmp_path / "a")
    assert names(tmp_path) == [hidden.name, "a"]


def test_of_two_writers_of_one_place_the_first_to_finish_wins(tmp_path: Path) -> None:
    def late() -> None:
        with CheckpointWriter(tmp_path / "model") as writer:
            write(tmp_path / "model", layers=1)
            writer.write_outer(outer_weights())
            writer.finish({})

    with pytest.raises(ConversionError, match="exists already"):
        late()
    assert names(tmp_path) == ["model"]
    assert len(Checkpoint.open(tmp_path / "model").layers) == 1


def test_writing_holds_no_copy_of_the_weights(tmp_path: Path) -> None:
    first: dict[str, QTensor | Tensor] = {"a": torch.zeros(4 << 20)}  # 16 MiB
    second: dict[str, QTensor | Tensor] = {"b": torch.zeros(4 << 20)}
    with CheckpointWriter(tmp_path / "model") as writer:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            writer.write_outer(first)  # what first calls import is not counted
        tracemalloc.start()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as torch_memory:
            writer.write_layer(0, second)
        python_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert python_peak < 4 << 20
    events = torch_memory.events() or []
    assert sum(max(0, e.self_cpu_memory_usage) for e in events) < 1 << 20


@pytest.mark.parametrize("inside", [False, True])
def test_links_beside_the_place_are_not_followed(tmp_path: Path, inside: bool) -> None:
    """A link that is called like a leftover of a writer, to a directory that looks like one."""
    victim, place = tmp_path / "victim", tmp_path / "models" / "model"
    (victim / "old").mkdir(parents=True)
    (victim / "old" / "precious").write_text("x")
    place.parent.mkdir()
    (place.parent / ".model.qoff-abcd1234").symlink_to(victim, target_is_directory=True)
    if inside:
        (place.parent / ".model.qoff-efgh5678").symlink_to(tmp_path / "nothing")
    write(place)
    Checkpoint.open(place)
    assert (victim / "old" / "precious").read_text() == "x"
    assert (place.parent / ".model.qoff-abcd1234").is_symlink()


def test_directories_of_others_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / ".model.qoff-abcd1234"
    write(other / "old")
    with monkeypatch.context() as patched:
        patched.setattr("os.geteuid", lambda: other.stat().st_uid + 1)
        write(tmp_path / "model")
    assert (other / "old").is_dir()
