"""What a conversion says it loses is what the checkpoint loses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

import qoff
from qoff.models.convert import loss
from qoff.models.convert.convert import convert
from qoff.models.convert.loss import LossProbe
from qoff.models.convert.module_loss import ModuleLoss
from qoff.models.layer_weights import layer_weights
from qoff.models.sources import open_source
from qoff.models.spec import DecoderSpec
from qoff.quant import QuantConfig
from tests.gguf_models import GGUFModel
from tests.module_models import module_source
from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_model

IDS = torch.randint(0, 100, (70,), generator=torch.Generator().manual_seed(0))
FOUR = QuantConfig(solver="rtn", group_size=32, head_bits=8)


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "gemma3n", "gpt-neox", "gpt2", "jamba", "vaultgemma", "deepseek_v4"],
)
def test_it_is_the_divergence_of_what_both_predict(
    family: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss, "_ROWS", 48)
    base = tmp_path_factory.getbasetemp()
    source = tiny_model(base, family) if family in FAMILIES else module_source(base, family)
    probe = LossProbe(IDS)
    out = convert(source, tmp_path / "out", quant=FOUR, probe=probe, for_cpu=True)
    truth = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model, _ = qoff.load(out, kv=None)
    with closing(model), torch.inference_mode():
        p, q = (m(IDS[None]).logits[0].double().log_softmax(-1) for m in (truth, model))
    each = (p.exp() * (p - q)).sum(-1)
    assert probe.loss is not None
    assert probe.loss.tokens == len(IDS)
    assert probe.loss.kl == pytest.approx(float(each.mean()), rel=0.01)
    assert probe.loss.error == pytest.approx(float(each.std()) / 70**0.5, rel=0.02)


def test_nothing_is_said_where_nothing_is_lost(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    codes = GGUFModel.of(tiny_model(base, "llama"))
    codes.kinds = {"weight": Kind.Q8_0}
    probe = LossProbe(IDS)
    convert(codes.write(tmp_path / "m.gguf"), tmp_path / "out", quant=FOUR, probe=probe)
    assert probe.loss is None
    assert probe.missed is None
    assert probe.lossless


def test_a_mixture_has_a_loss(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    probe = LossProbe(IDS)
    source = tiny_model(tmp_path_factory.getbasetemp(), "mixtral")
    convert(source, tmp_path / "out", quant=FOUR, probe=probe)
    assert probe.loss is not None
    assert probe.loss.kl > 0


def test_codes_that_are_taken_over_lose_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a file whose down projections alone are quantized anew."""
    model = GGUFModel.of(tiny_model(tmp_path_factory.getbasetemp(), "llama"))
    model.kinds = {"ffn_down": Kind.F16, "weight": Kind.Q4_1}
    eight = QuantConfig(bits=8, group_size=32, solver="rtn", head_bits=8)
    probe = LossProbe(IDS)
    convert(model.write(tmp_path / "m.gguf"), tmp_path / "out", quant=eight, probe=probe)
    assert probe.loss is not None
    assert 0 < probe.loss.kl < 1e-4


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"_MANY_PRODUCTS": 1}, "billion weights a token would take minutes"),
        ({"free_memory": lambda: 1024}, "more than half of the 1.0 KiB of memory"),
        ({}, "its tokenizer says 4096, and the model knows "),
    ],
)
def test_what_is_not_measured_has_a_reason(
    limits: dict[str, Any],
    said: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(loss, name, value)
    probe = LossProbe(IDS if limits else torch.tensor([4096]))
    source = tiny_model(tmp_path_factory.getbasetemp(), "llama")
    convert(source, tmp_path / "out", quant=FOUR, probe=probe)
    assert probe.loss is None
    assert probe.missed is not None
    assert said in probe.missed


def test_of_experts_those_of_a_token_count(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tmp_path_factory.getbasetemp(), "mixtral")
    spec = DecoderSpec.from_config(open_source(source).config())
    assert spec.experts is not None
    every = dense = 0
    for at in range(spec.num_layers):
        for weight in layer_weights(spec, at):
            count = weight.rows * (weight.columns or 0)
            every += count
            dense += 0 if "experts." in weight.name else count
    share = spec.experts.top_k / spec.experts.count
    head = 2 * spec.vocab_size * spec.hidden_size
    asked = list[int]()
    monkeypatch.setattr(LossProbe, "sample", lambda self, weights, *_: asked.append(weights))
    convert(source, tmp_path / "out", quant=FOUR, probe=LossProbe(IDS))
    assert asked == [pytest.approx(dense + head + share * (every - dense))]


def test_nothing_is_measured_where_logits_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(
        units=2, weights=1, weights_of=lambda _: 0, vocabulary=1 << 20, positions=None
    )
    model.head, model.run = "head", lambda *_, **__: pytest.fail("it is run")
    monkeypatch.setattr(loss, "free_memory", lambda: (len(IDS) << 24) - 2)  # half is for it
    probe = LossProbe(IDS)
    assert ModuleLoss.of(probe, model) is None
    assert probe.missed is not None
