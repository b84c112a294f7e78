"""`qoff env --measure`: what is timed, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from qoff.errors import DiskReadError
from qoff.kernels.cpu import ops
from qoff.kernels.cpu.jit.recorder import JobReplay
from qoff.measure import links, processor
from qoff.measure.moves import Move
from qoff.memory import DiskReader
from qoff.plan.profile import Link, MachineProfile
from tests.cli.commands import fail, run
from tests.plan.machines import machine


def test_prompts_and_floats_are_measured() -> None:
    assert processor._prompt(ops, 16) > 0
    assert [queries for queries, seconds in processor._floats(ops, 64) if seconds > 0] == [1, 8]


def test_experts_are_timed_as_jobs_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Mock(return_value=1.0)
    monkeypatch.setattr(processor, "seconds_of", timed)
    monkeypatch.setattr(processor, "_EXPERT", (64, 64, 32))
    monkeypatch.setattr(processor, "_OF_EXPERTS", (1, 4))
    processor._experts(ops)
    assert [type(one.args[0]) for one in timed.call_args_list] == [JobReplay, JobReplay]


def test_a_stale_recording_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would do nothing, at once."""
    stale, work = Mock(stale=True), Mock()
    monkeypatch.setattr("qoff.kernels.cpu.jit.recorder.JobRecorder", lambda: lambda _: stale)
    assert processor._in_list(work) > 0
    assert work.called
    assert not stale.called


@pytest.mark.parametrize(("on_gpu", "way"), [(False, "submit_list"), (True, "submit")])
def test_reads_are_measured_as_rounds_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, way: str
) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        file.write_bytes(bytes(1 << 20))
    spies = {name: Mock(wraps=getattr(DiskReader, name)) for name in ("submit", "submit_list")}
    for name, spy in spies.items():
        monkeypatch.setattr(DiskReader, name, lambda *args, spy=spy: spy(*args))
    read = list[int]()

    def link(move: Move, *_: Any, **__: Any) -> Link:
        move(128 << 10, 1 << 20)
        read.append(sum(spy.call_count for name, spy in spies.items() if name == way))
        files[1].write_bytes(b"short")
        with pytest.raises(DiskReadError, match=r"b\.safetensors"):
            move(128 << 10, 1 << 20)
        return Link(1e9)

    monkeypatch.setattr(links, "link_of", link)
    assert links.file_reads(files, on_gpu).bytes_per_s == 1e9
    assert read == [1 if way == "submit_list" else 8]


def test_measuring_keeps_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(processor, "of_cpu", lambda: machine().device)
    monkeypatch.setattr(links, "link_of", lambda *_: Link(1e9))
    out = tmp_path / "machine.json"
    found = run("env", "--measure", "--path", tmp_path, "--save", out, "--json")
    assert found.exit_code == 0, found.output
    printed = json.loads(found.stdout)
    assert MachineProfile.read(out) == MachineProfile.read(Path(printed["profile"]))
    assert "1.00 GB/s" in printed["disk reads"]
    assert "device" in printed["plans may use"]
    assert "give both" in run("env", "--save", out).output


def test_a_place_for_what_is_measured_is_checked_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processor, "of_cpu", Mock(side_effect=AssertionError("measured")))
    for place, why in ((tmp_path / "gone" / "m.json", "is no folder"), (tmp_path, "is a folder")):
        assert why in fail("env", "--measure", "--save", place)
