"""The bench of families counts what a token takes, and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import families
from bench.random_model import GROUP
from qoff.errors import ArgumentError
from qoff.models.families import FAMILIES
from qoff.models.spec import DecoderSpec

LENGTHS = families.Lengths(decode=2, prompt=8)


def _matrix(rows: int, columns: int, bits: int) -> int:
    return rows * columns * bits // 8 + 4 * rows * columns // GROUP


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_only_what_a_token_touches_counts(family: str) -> None:
    subject = families.Subject(families.config_of(family, quick=True), LENGTHS, 16)
    subject.runtime.close()
    spec = subject.runtime.spec
    hidden, q, kv, inner = spec.hidden_size, spec.q_rows, spec.kv_rows, 2304
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    read_bytes = sum(_matrix(*shape, 4) for shape in layer)
    read_bytes += 2 * 4 * hidden  # norms, float32
    read_bytes += 2 * 4 * kv * (families.START + 1)
    macs = sum(rows * columns for rows, columns in layer) + 2 * q * LENGTHS.prompt // 2
    if family == "mixtral":  # two of eight experts of 1152, and the router
        read_bytes += _matrix(16, hidden, 8)
        macs += 8 * hidden
    head = spec.vocab_size * hidden
    assert subject.size.read_bytes == 4 * read_bytes + _matrix(512, hidden, 6) + 4 * hidden
    assert subject.size.macs == 4 * macs + head / LENGTHS.prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_a_shape_of_every_family(family: str) -> None:
    assert DecoderSpec.from_config(families.config_of(family)).num_layers == 16


@torch.inference_mode()
def test_families_are_measured_beside_llama(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families.main(["--quick", "--only", "gemma2", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ratios"].keys() == {
        f"{kind}, {name}" for kind in ("decode", "prefill") for name in ("llama", "gemma2")
    }
    assert len(written["bars"]) == 1
    assert "gemma2" in capsys.readouterr().out


def test_ratios_are_to_what_was_measured_in_turn() -> None:
    turns: list[str] = []

    def once(name: str, *each: float) -> Iterator[float]:
        for value in each:
            turns.append(name)
            yield value

    found = families.in_turn(lambda: once("own", 6, 8, 7), lambda: once("base", 2, 1, 7), 1)
    assert turns == ["own", "base"] * 3
    assert (found.own.median, found.ratios.median) == (7, 3.5)
    size, settings = families.Size(1e6, 2e6), {"threads": 2, "bits": 16}
    made = families.report({"opt": size}, {"opt": dict.fromkeys(families.KINDS, found)}, settings)
    assert made.ratios == {"decode, opt": 3.5, "prefill, opt": 3.5}
    assert made.bars[0].measured == 1 / 3.5


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no family is called 'lama'"):
        families.chosen("qwen2,lama")
