"""Mixtures of experts in transformers' models: packed experts, forward and backward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import qoff
from qoff.errors import FormatError, OpError, UnsupportedModelError
from qoff.hf.packed.derived import QoffRouter
from qoff.hf.packed.experts import PackedExperts, QoffExperts
from qoff.hf.packed.linear import QoffLinear
from qoff.hf.packed.own_experts import QoffOwnExperts
from tests.hf.plugin_models import CONFIG, IDS, load, logits
from tests.module_models import module_source
from tests.tiny_families import EXPERTS, KINDS_OF_EXPERTS
from tests.tiny_models import reference_model, tiny_checkpoint, tiny_model
from tests.tolerances import DECODER_LOGITS, RELATIVE_RMS, assert_close


def experts_of(model: Any) -> list[QoffExperts]:
    return [module for module in model.modules() if isinstance(module, QoffExperts)]


@pytest.mark.parametrize("family", EXPERTS)
def test_it_generates_what_qoff_load_does(base: Path, family: str) -> None:
    path = tiny_checkpoint(base, family)
    model = load(path)
    assert experts_of(model)
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    inputs = {"input_ids": torch.cat([IDS, IDS]), "attention_mask": mask}
    wanted = {"max_new_tokens": 12, "do_sample": False}
    with qoff.load(path)[0] as native:
        assert_close(logits(model), native(IDS).logits, tolerance=DECODER_LOGITS)
        assert torch.equal(model.generate(**inputs, **wanted), native.generate(**inputs, **wanted))


@pytest.mark.parametrize("family", EXPERTS)
def test_gradients_are_those_of_dequantized_experts(base: Path, family: str) -> None:
    path = tiny_checkpoint(base, family)
    reference = reference_model(path)
    embedded = reference.get_input_embeddings()(IDS).detach()
    grads = []
    packed = load(path)
    assert not any(isinstance(m, QoffOwnExperts) for m in packed.modules())
    for model in (packed, reference):
        x = embedded.clone().requires_grad_()
        model(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert_close(*grads, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_lora_learns(base: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    model = peft.get_peft_model(load(tiny_checkpoint(base, family)), config)
    learned = [p for p in model.parameters() if p.requires_grad]
    assert learned
    assert not any(p.requires_grad for m in experts_of(model) for p in m.parameters())
    optimizer = torch.optim.AdamW(learned, lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("family", EXPERTS)
def test_dequantize(base: Path, tmp_path: Path, family: str) -> None:
    path = tiny_checkpoint(base, family)
    model, reference = load(path), reference_model(path)
    model.dequantize(torch.float32)
    assert not any(isinstance(m, QoffExperts | QoffRouter) for m in model.modules())
    # transformers' product over all experts rounds by where they lie in memory
    assert_close(logits(model), logits(reference), tolerance=RELATIVE_RMS[torch.float32])
    for name, weight in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), weight)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    for name, weight in reference.named_parameters():
        assert torch.equal(again.get_parameter(name), weight)


ROUTERS = ["gate", "router", "gate.wg", "router.proj", "router.gate"]  # as families call them


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        *((family, [name]) for family in KINDS_OF_EXPERTS for name in ("lm_head", "experts")),
        *((family, ROUTERS) for family in EXPERTS),
    ],
)
def test_modules_that_stay_as_they_are(
    base: Path, tmp_path: Path, family: str, kept: list[str]
) -> None:
    config = qoff.QoffConfig(**CONFIG, modules_to_not_convert=kept)
    model = load(tiny_model(base, family), quantization_config=config)
    assert bool(experts_of(model)) == (kept != ["experts"])
    routers = [
        name
        for name, m in model.named_modules()
        if isinstance(m, QoffRouter)
        or (
            isinstance(m, QoffLinear)
            and name.endswith((".gate.wg", ".router.proj", ".router.gate"))
        )
    ]
    assert bool(routers) == (kept == ["lm_head"])
    model.save_pretrained(tmp_path)  # no qoff checkpoint can hold these
    # experts of torch round by where they lie in memory, and 16-bit activations behind them again
    tolerance = DECODER_LOGITS if kept == ["experts"] else 0.0
    assert_close(logits(load(tmp_path)), logits(model), tolerance=tolerance)
    with pytest.raises(FormatError, match=r"layout is 'state_dict'"):
        qoff.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_other_dtypes_leave_scales_alone(base: Path, family: str, dtype: torch.dtype) -> None:
    path = tiny_checkpoint(base, family)
    model, moved, wide = load(path, dtype=dtype), load(path).to(dtype), load(path)
    for narrow in (model, moved):
        for m, w in zip(experts_of(narrow), experts_of(wide), strict=True):
            for name, part in m.matrices.items():
                assert torch.equal(part.scale_min, w.matrices[name].scale_min)
        assert logits(narrow).dtype == dtype
        # one router in another order would show as a loss of this size, rounding alone does not
        assert_close(logits(narrow), logits(wide), tolerance=40 * RELATIVE_RMS[dtype])


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_a_copy_is_a_model_of_its_own(base: Path, family: str) -> None:
    model = load(tiny_checkpoint(base, family))
    expected = logits(model)
    made = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.codes.zero_()
    assert torch.equal(logits(made), expected)
    assert not torch.equal(logits(model), expected)


def test_a_bias_that_changes_is_used(base: Path) -> None:
    model = load(tiny_checkpoint(base, "gpt-oss"))
    before = logits(model)
    bias = experts_of(model)[0].gate_up_proj_bias
    with torch.no_grad():
        bias.add_(1)
    changed = logits(model)
    assert not torch.equal(changed, before)
    with torch.no_grad():
        bias.sub_(1)
    assert_close(logits(model), before, tolerance=DECODER_LOGITS)


def test_an_expert_that_is_not_there_is_refused(base: Path) -> None:
    experts = experts_of(load(tiny_checkpoint(base, "mixtral")))[0]
    x, share = torch.randn(2, 64), torch.ones(2, 1)
    with pytest.raises(OpError, match="experts 0 to 99 are chosen"):
        experts(x, torch.tensor([[0], [99]]), share)
    assert experts(x[:0], torch.zeros(0, 1, dtype=torch.int64), share[:0]).shape == (0, 64)


def test_experts_of_another_form_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.hf.plugin.experts_form.own_form", lambda module: None)
    config = qoff.QoffConfig(**CONFIG)
    with pytest.raises(UnsupportedModelError, match=r"modules_to_not_convert") as refusal:
        load(module_source(base, "jamba"), quantization_config=config)
    assert "\n" not in str(refusal.value)
    config = qoff.QoffConfig(**CONFIG, modules_to_not_convert=["experts"])
    model = load(module_source(base, "jamba"), quantization_config=config)
    assert not experts_of(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_close(logits(again), logits(model), tolerance=RELATIVE_RMS[torch.float32])
