"""Bits of the KV cache by layer: what is measured, kept, and chosen."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.errors import ArgumentError, QoffError, UnsupportedModelError
from qoff.eval import texts
from qoff.eval.kv import kv_name
from qoff.eval.mixing import kv_bits
from qoff.eval.mixing.kv_bits import KVSensitivity, chosen, kv_for_bits
from qoff.eval.mixing.mixing import choose
from qoff.eval.perplexity.subjects import Predictions
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from qoff.plan.saved import plan_text
from qoff.quant import QuantConfig
from tests.cli.test_cli import fail, succeed
from tests.module_models import module_checkpoint
from tests.tiny_models import tiny_checkpoint

NATIVE, MODULES = "llama-head64", "stablelm-head64"
LOSSES = {2: 1.0, 3: 0.25, 4: 0.05, 8: 0.0}


@pytest.fixture(params=[NATIVE])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A copy, for what is kept in its folder."""
    base, name = tmp_path_factory.getbasetemp(), request.param
    made = module_checkpoint(base, name) if name == MODULES else tiny_checkpoint(base, name)
    return Path(shutil.copytree(made, tmp_path / name))


def sensitivity(keys: list[float], values: list[float]) -> KVSensitivity:
    """Layers of head size 64 that lose so many times LOSSES."""
    lost = [tuple({b: x * by for b, x in LOSSES.items()} for by in all_) for all_ in (keys, values)]
    return KVSensitivity(((64, 2),) * len(keys), lost[0], lost[1])


def bits_of(kv: KVQuant, layers: int) -> float:
    return sum(sum(kv.bits(i)) + 1 for i in range(layers)) / (2 * layers)


def test_the_text_begins_as_texts_do(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kv_bits._text(checkpoint, trust_remote_code=False)
    monkeypatch.setattr(texts, "first_token", lambda tokenizer: 1)
    found = kv_bits._text(checkpoint, trust_remote_code=False)
    assert (found[0], len(found)) == (1, len(plain))
    assert torch.equal(found[1:], plain[1:])


@pytest.mark.parametrize("bits", [2.5, 3, 3.5, 4.25, 8.5, 20])
def test_no_more_bits_than_asked_for_go_where_they_pay(bits: float) -> None:
    keys, values = [9.0, 1, 20, 2], [3, 0.5, 1, 5]
    kv = chosen(sensitivity(keys, values), bits)
    assert bits - 0.5 < bits_of(kv, 4) <= bits or bits_of(kv, 4) == 8.5
    given = [kv.bits(layer)[place] for place in (0, 1) for layer in range(4)]
    by_loss = [b for _, b in sorted(zip(keys + values, given, strict=True))]
    assert by_loss == sorted(given)  # else two would change places


def test_fewer_bits_than_there_are_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"2\.4 bits a value .* 2 bits for all take 2\.5"):
        chosen(sensitivity([1, 1], [1, 1]), 2.4)
    for bits in (-1, 0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match=f"{bits:g} bits .* above 0"):
            chosen(sensitivity([1, 1], [1, 1]), bits)
    assert choose([[1.0, 0.0]], [[1.0, 2.0]], -1) is None


def test_recurrent_states_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    hybrid = module_checkpoint(tmp_path_factory.getbasetemp(), "jamba-head64")
    with pytest.raises(UnsupportedModelError, match="recurrent states"):
        kv_for_bits(hybrid, 3.5)


def test_predictions_that_are_no_numbers_are_refused_and_nothing_is_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(*args: Any) -> Iterator[tuple[int, Predictions]]:
        for number in range(len(args[1])):
            yield number, Predictions(0, 1, torch.tensor([[0.0, math.nan if number == 2 else 1]]))

    monkeypatch.setattr(kv_bits, "read_together", overflowing)
    with pytest.raises(QoffError, match="of 4 and 8 bits"):
        kv_for_bits(checkpoint, 3.5)
    assert KVSensitivity.read(checkpoint) is None


@pytest.mark.parametrize("checkpoint", [NATIVE], indirect=True)
def test_options_are_those_of_load(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = sensitivity([1, 1], [1, 1])
    monkeypatch.setattr(KVSensitivity, "read", lambda _: lost)  # as if it were kept
    with pytest.raises(TypeError, match="device_memry"):
        kv_for_bits(checkpoint, 3.5, device_memry="1GiB")  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="leave quant out"):
        kv_for_bits(checkpoint, 3.5, quant=QuantConfig())
    assert kv_for_bits(checkpoint, 8.5, cache_dir=checkpoint, revision="main") == KVQuant(8, 8)


@pytest.mark.parametrize("checkpoint", [NATIVE, MODULES], indirect=True)
def test_what_is_measured_is_kept_until_the_checkpoint_changes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    kv = kv_for_bits(checkpoint, 3.5, tell=lambda *x: told.append(x))
    found = KVSensitivity.read(checkpoint)
    assert found is not None
    layers = len(found.shapes)
    assert bits_of(kv, layers) <= 3.5
    assert told[-1][0] == told[-1][1] == 2 * layers + 4  # and with 3 and 4 bits for all
    for losses in (*found.keys, *found.values):
        assert losses[2] > losses[4] > losses[8] == 0
    with monkeypatch.context() as patched:
        patched.setattr(kv_bits, "measured", None)
        assert kv_for_bits(checkpoint, 3.5) == kv
    (checkpoint / "config.json").touch()
    assert KVSensitivity.read(checkpoint) is None


def test_commands_choose_the_bits(checkpoint: Path, tmp_path: Path) -> None:
    generate = ["generate", checkpoint, "a b", "--max-new-tokens", 2, "--kv-target-bits", 3.5]
    assert "measure once without a bound" in fail(*generate, "--device-memory", 1)
    assert "give one of them" in fail(*generate, "--kv", 4)
    assert KVSensitivity.read(checkpoint) is None
    succeed(*generate)
    found = KVSensitivity.read(checkpoint)
    assert found is not None
    name = json.loads(succeed("eval", checkpoint, "--limit", 1, "--json", *generate[-2:]))["kv"]
    assert name == kv_name(chosen(found, 3.5))
    prompts = tmp_path / "prompts"
    prompts.write_text("a b\n")
    answers = tmp_path / "answers"
    succeed("batch", checkpoint, prompts, "--max-tokens", 2, "-o", answers, *generate[-2:])
    header = json.loads((tmp_path / "answers.job").read_text())
    assert header["kv"] == json.loads(json.dumps(asdict(chosen(found, 3.5))))
    plan = tmp_path / "plan.json"
    plan.write_text(plan_text(Plan()))
    assert "says what --kv-target-bits would" in fail(*generate, "--plan", plan)


def test_more_bits_than_a_cache_can_take_are_told(caplog: pytest.LogCaptureFixture) -> None:
    losses = ({2: 1.0, 3: 0.5, 4: 0.1, 8: 0.0},) * 2
    found = KVSensitivity(((64, 2),) * 2, losses, losses)
    chosen(found, 8.5)
    assert not caplog.messages
    assert chosen(found, 20) == KVQuant(8, 8)
    assert caplog.messages == [
        "20 bits a value of the KV cache are more than it can take; 8 bits for all take 8.5, "
        "scales and minima included"
    ]
