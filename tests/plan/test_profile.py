"""Profiles come back as they were written; what no machine has is refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qoff.errors import ArgumentError, FormatError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.plan import machine as at_hand
from qoff.plan.profile import Link, MachineProfile, Processor

from .machines import machine


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine(True).text())
    assert MachineProfile.read(path) == machine(True)


@pytest.mark.parametrize(
    ("where", "value", "what"),
    [
        (("disk_read", "bytes_per_s"), 0, "above 0"),
        (("disk_read", "bytes_per_s"), 1e300, "1e\\+300"),
        (("disk_read", "cpu_s_per_byte"), -1.0, "from 0 up"),
        (("disk_read",), None, "disk_read"),
        (("device", "matmul"), {"4": [[4, 1.0], [1, 1.0]]}, "ascending"),
        (("device", "matmul"), {"x": 1}, "lists of pairs"),
        (("device", "speed"), 1, "speed"),
        (("usable",), {"device": "much"}, "device"),
        (("cores",), 0, "cores"),
        (("version",), 99, "version"),
    ],
)
def test_nonsense_in_a_file_is_one_line(
    tmp_path: Path, where: tuple[str, ...], value: Any, what: str
) -> None:
    path = tmp_path / "machine.json"
    found = json.loads(machine().text())
    inside = found
    for name in where[:-1]:
        inside = inside[name]
    inside[where[-1]] = value
    path.write_text(json.dumps(found))
    with pytest.raises(FormatError, match=what) as refusal:
        MachineProfile.read(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_rate_that_is_no_number_is_refused() -> None:
    with pytest.raises(ArgumentError, match="bytes_per_s"):
        Link(float("nan"))


def test_matmul_is_interpolated_and_grows_beyond_what_was_measured() -> None:
    one = Processor({"4": ((1.0, 1.0), (4.0, 2.0))}, {"4": ((1.0, 1.0),)}, 1.0, 1.0)
    seconds = one.matmul_s(8, np.array([0.5, 1.0, 2.0, 4.0, 8.0]))
    assert seconds == pytest.approx([1.0, 1.0, 2**0.5, 2.0, 4.0])


@pytest.mark.parametrize(("few", "wide"), [((4, 2), (4, 4)), ((2, 8), (4, 8)), ((3, 2), (4, 4))])
def test_codes_of_few_bits_take_as_long_as_codes_of_4(
    few: tuple[int, int], wide: tuple[int, int]
) -> None:
    curves = {"4": ((1.0, 3.0),), "8": ((1.0, 2.0),)}
    one, group = Processor({"4": ((1.0, 1.0),)}, curves, 1.0, 1.0), np.array(1.0)
    assert one.attention_s(KVFormat(64, *few), group) == one.attention_s(KVFormat(64, *wide), group)
    form, other = KVFormat(64, 4, 8), KVFormat(64, 8, 4)
    assert one.attention_s(form, group) == pytest.approx(
        3 * form.v_codes + 2 * (form.nbytes - form.v_codes)
    )
    assert one.attention_s(other, group) == pytest.approx(
        2 * other.v_codes + 3 * (other.nbytes - other.v_codes)
    )


def test_a_damaged_or_foreign_profile_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    cpu = torch.device("cpu")
    path = at_hand.profile_file(at_hand.fingerprint(cpu, tmp_path, tmp_path))
    assert at_hand.kept_profile(cpu, tmp_path, tmp_path) is None
    for text, what in (("{", "JSON"), (machine().text(), "another machine")):
        path.write_text(text)
        assert at_hand.kept_profile(cpu, tmp_path, tmp_path) is None
        assert what in caplog.text


def test_a_kept_profile_has_the_memory_that_is_free_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    monkeypatch.setattr(at_hand, "free_memory", lambda: 100 << 30)
    cpu = torch.device("cpu")
    found = at_hand.fingerprint(cpu, tmp_path, tmp_path)
    values = json.loads(machine().text()) | {"fingerprint": found}
    at_hand.profile_file(found).write_text(json.dumps(values))
    kept = at_hand.kept_profile(cpu, tmp_path, tmp_path)
    assert kept is not None
    assert kept.usable["device"] == 95 << 30
    assert kept.disk_read == machine().disk_read
