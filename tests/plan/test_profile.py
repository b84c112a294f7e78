"""Profiles come back as they were written; what no machine has is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qoff.errors import ArgumentError, FormatError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.plan import machine as at_hand
from qoff.plan.processor import Curve, Processor, Surface
from qoff.plan.profile import Link, MachineProfile, typical

from .machines import machine


def of_curves(matmul: Mapping[str, Curve] | None = None, **more: Any) -> Processor:
    """A processor of some curves; the others are of ones, twos and threes."""
    one: Curve = ((1.0, 1.0),)
    short: Curve = ((1.0, 4.0), (4.0, 8.0))
    long: Curve = ((1.0, 1.0), (4.0, 1.0))
    attention: dict[str, Surface] = {
        "4": ((1.0, ((1.0, 3.0),)),),
        "8": ((1.0, ((1.0, 2.0),)),),
        "32": ((64.0, short), (4096.0, long)),
    }
    prompts = ((64.0, 8.0), (512.0, 1.0))
    curves = {"16": one, "32": one, **(matmul or {"4": one})}
    return Processor(curves, attention, prompts, 1.0, **more)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine(True).text())
    assert MachineProfile.read(path) == machine(True)


def test_the_typical_one_of_some_profiles_has_the_median_of_each_rate() -> None:
    first = machine(True)
    read = [replace(first.disk_read, bytes_per_s=rate) for rate in (1e8, 9e8, 3e8)]
    found = typical(
        [
            replace(first, device=first.device.slower(times), disk_read=link)
            for times, link in zip((1.0, 2.0, 5.0), read, strict=True)
        ]
    )
    assert found == replace(first, device=first.device.slower(2.0), disk_read=read[2])


@pytest.mark.parametrize(
    ("where", "value", "what"),
    [
        (("disk_read", "bytes_per_s"), 0, "above 0"),
        (("disk_read", "bytes_per_s"), 1e300, "1e\\+300"),
        (("disk_read", "cpu_s_per_byte"), -1.0, "from 0 up"),
        (("disk_read",), None, "disk_read"),
        (("device", "matmul", "4"), [[4, 1.0], [1, 1.0]], "ascending"),
        (("device", "matmul"), {"x": 1}, "lists of pairs"),
        (("device", "speed"), 1, "speed"),
        (("device", "matmul"), {"4": [[1, 1.0]], "8": [[1, 1.0]]}, "for 16, 32, 4 bits"),
        (("device", "attention"), {"4": [[1, 1.0]], "32": [[1, 1.0]]}, "lists of pairs"),
        (("device", "attention", "4"), [[9, [[1, 1.0]]], [3, [[1, 1.0]]]], "ascending"),
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
    one = of_curves({"4": ((1.0, 1.0), (4.0, 2.0))})
    seconds = one.matmul_s(4, np.array([0.5, 1.0, 2.0, 4.0, 8.0]))
    assert seconds == pytest.approx([1.0, 1.0, 2**0.5, 2.0, 4.0])


@pytest.mark.parametrize(("few", "wide"), [((4, 2), (4, 4)), ((2, 8), (4, 8)), ((3, 2), (4, 4))])
def test_codes_of_few_bits_take_as_long_as_codes_of_4(
    few: tuple[int, int], wide: tuple[int, int]
) -> None:
    one, at = of_curves(), (np.array(1.0), np.array(64.0))
    assert one.attention_s(KVFormat(64, *few), *at) == one.attention_s(KVFormat(64, *wide), *at)
    form, other = KVFormat(64, 4, 8), KVFormat(64, 8, 4)
    assert one.attention_s(form, *at) == pytest.approx(
        3 * form.v_codes + 2 * (form.nbytes - form.v_codes)
    )
    assert one.attention_s(other, *at) == pytest.approx(
        2 * other.v_codes + 3 * (other.nbytes - other.v_codes)
    )


def test_attention_goes_by_context_and_by_queries_of_a_kv_head() -> None:
    one, queries = of_curves(), np.array([1.0, 2.0, 4.0, 8.0])
    of_short, of_long = (one.unpacked_s(queries, np.array(n)) for n in (64, 4096))
    assert of_short == pytest.approx([4.0, 4 * 2**0.5, 8.0, 16.0])  # beyond the last, with queries
    assert of_long == pytest.approx([1.0, 1.0, 1.0, 2.0])
    between = one.unpacked_s(queries, np.array(512))
    assert between == pytest.approx(np.sqrt(of_short * of_long))
    for shorter, longer in ((1, 64), (4096, 1 << 20)):  # beyond the ends as there
        near, far = (one.unpacked_s(queries, np.array(n)) for n in (shorter, longer))
        assert np.array_equal(near, far)
    assert one.prompt_s(np.array([32.0, 64.0, 512.0, 4096.0])) == pytest.approx([8, 8, 1, 1])


def test_activations_of_8_bits_are_never_slower() -> None:
    rows = np.array([1.0, 16.0, 256.0])
    curve = ((1.0, 2.0), (16.0, 2.0), (256.0, 8.0))
    one = of_curves({"4": curve}, narrow={"4": ((16.0, 3.0), (256.0, 4.0))})
    assert one.matmul_s(4, rows, 8) == pytest.approx([2.0, 2.0, 4.0])
    assert one.matmul_s(4, rows, 16) == pytest.approx([2.0, 2.0, 8.0])


def test_experts_have_their_own_curve_in_any_bits() -> None:
    rows, curve = np.array([1.0, 16.0, 32.0]), ((1.0, 2.0), (16.0, 2.0))
    one = of_curves({"4": curve, "8": ((1.0, 4.0), (16.0, 4.0))})
    assert np.array_equal(one.experts_s(4, rows), one.matmul_s(4, rows))
    slower = replace(one, experts={"4": ((1.0, 3.0), (16.0, 4.0))})
    assert slower.experts_s(4, rows) == pytest.approx([3.0, 4.0, 8.0])
    assert slower.experts_s(8, rows) == pytest.approx([6.0, 8.0, 16.0])


def test_a_damaged_or_foreign_profile_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    cpu = torch.device("cpu")
    path = at_hand.profile_file(at_hand.fingerprint(cpu, tmp_path, tmp_path))
    assert at_hand.kept_profile(cpu, tmp_path, tmp_path) is None
    old = json.dumps(json.loads(machine().text()) | {"version": 3})
    for text, what in (
        ("{", "JSON"),
        (machine().text(), "another machine"),
        (old, "it has version 3, and this qoff needs 6"),
    ):
        caplog.clear()
        path.write_text(text)
        assert at_hand.kept_profile(cpu, tmp_path, tmp_path) is None
        (record,) = caplog.records
        assert what in record.getMessage()
        assert "\n" not in record.getMessage()


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
