"""Adapters on packed weights that stream: PEFT's training in memory, and its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MambaConfig

from qoff import train
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, UnsupportedModelError
from qoff.hf.packed.experts import QoffExperts
from qoff.kernels.cpu.linear import dequantize
from qoff.train.finetune import Lora, adapted
from qoff.train.fused_lora import fuse
from tests.module_models import module_checkpoint
from tests.tiny_models import reference_model, tiny_checkpoint, tiny_model
from tests.tolerances import DECODER_LOGITS, assert_close

peft = pytest.importorskip("peft")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 20, 21], [9, 8, 7, 6, 5, 4, 3, 22, 23, 24]])
LR, EPS = 2e-3, 1e-6
CURVE = 4e-3  # of losses, relative: packed products have bfloat16 gradients


def lora(model: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def training_of(
    path: Path, optimizer: train.Optimizer | None = None, streams: bool = True, **options: Any
) -> train.Training:
    """Of adapters beside a packed model, with two micro-batches of 10 tokens a step."""
    places = {"device_map": "disk"} if streams else {}
    model = lora(AutoModelForCausalLM.from_pretrained(path, **places))
    optimizer = optimizer or train.AdamW(lr=LR)
    return train.offload(model, optimizer, tokens=IDS.shape[1], micro_batches=2, **options)


def batches(step: int) -> list[dict[str, Tensor]]:
    ids = IDS + step % 2
    return [{"input_ids": ids[i : i + 1], "labels": ids[i : i + 1]} for i in range(2)]


@pytest.mark.parametrize("family", ["llama", "phi3", "apertus"])
def test_losses_are_those_of_peft_on_dequantized_weights(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    reference = lora(reference_model(path)).train()
    training = training_of(path, train.AdamW(lr=LR, eps=EPS))
    optimizer = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=LR, eps=EPS
    )
    losses, wanted = [], []
    for step in range(8):
        before = training.stats.frozen_read
        losses.append(training.step(batches(step)))
        if step:  # what was read ahead is as much at the end as at the start
            layers = Checkpoint.open(path).layers
            read = training.stats.frozen_read - before
            assert 0 < read <= 2.6 * sum(file.nbytes for file in layers)
        total = torch.stack([reference(**b).loss for b in batches(step)]).mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(total.detach()))
    assert losses == pytest.approx(wanted, rel=CURVE)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        mean = float(torch.stack([reference(**b).loss for b in batches(0)]).mean())
    assert training.evaluate(batches(0)) == pytest.approx(mean, rel=CURVE)

    training.save_adapter(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(reference_model(path), tmp_path / "adapter").eval()
    model = training.model.eval()
    with torch.no_grad():
        assert_close(model(IDS).logits, again(IDS).logits, tolerance=5 * DECODER_LOGITS)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_streamed_adapters_learn_as_in_memory(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Where packed weights and adapters come from changes no bit."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    found = []
    for streams in (False, True):
        options: dict[str, Any] = {"host_memory": 0, "disk": tmp_path} if streams else {}
        training = training_of(path, train.AdamW(lr=LR, bits=8), streams, **options)
        losses = [training.step(batches(step)) for step in range(3)]
        found.append((losses, training.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(x, found[0][1][name]) for name, x in found[1][1].items())


@pytest.mark.parametrize(
    ("family", "checkpoint"),
    [
        ("mixtral", tiny_checkpoint),
        ("qwen3-moe", tiny_checkpoint),
        ("gpt2", module_checkpoint),  # transposed linear layers
        ("jamba", module_checkpoint),  # experts that no kernel knows, beside Mamba
    ],
)
def test_adapters_beside_streamed_layers_learn_as_with_torch(
    family: str,
    checkpoint: Callable[[Path, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dequantize, "DTYPES", (torch.float32,))  # gradients, everywhere
    path = checkpoint(tmp_path_factory.getbasetemp(), family)
    training = training_of(path, train.AdamW(lr=LR, eps=EPS), host_memory=0, disk=tmp_path)
    reference = lora(AutoModelForCausalLM.from_pretrained(path)).train()
    experts = any(isinstance(module, QoffExperts) for module in reference.modules())
    assert experts == (family != "gpt2")
    learned = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(learned.values(), lr=LR, eps=EPS)
    for step in range(3):
        loss = torch.stack([reference(**b).loss for b in batches(step)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert training.step(batches(step)) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert training.stats.frozen_read > 0
    found = training.state_dict()
    assert found.keys() == learned.keys()
    assert all(torch.allclose(x, learned[name], rtol=0, atol=2e-4) for name, x in found.items())


def test_packed_weights_are_not_saved_as_trained(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    with pytest.raises(ArgumentError, match="packed weights do not learn"):
        train.offload(path, tokens=64)
    training = train.offload(AutoModelForCausalLM.from_pretrained(path), tokens=64)  # its norms
    with pytest.raises(ArgumentError, match="has packed weights"):
        training.save_model(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_peft_refuses_is_said_in_a_line() -> None:
    config = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    learned = {n for n, p in adapted(model, Lora(4, 8.0)).named_parameters() if p.requires_grad}
    assert any(".in_proj." in name for name in learned)
    assert not any("out_proj" in name for name in learned)  # which PEFT refuses
    model = AutoModelForCausalLM.from_config(config)
    model.backbone.layers = torch.nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match="PEFT has no adapters for this model: "):
        adapted(model, Lora(4, 8.0))


@pytest.mark.parametrize("changes", [{}, {"lora_bias": True}, {"lora_dropout": 0.2}])
def test_fused_adapters_are_pefts(
    changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is not plain goes PEFT's own way."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **changes)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    layer = model.base_model.model.model.layers[0]
    q_proj = layer.self_attn.q_proj.train()
    found = []
    for fused in (False, True):
        if fused:
            assert (fuse(layer), fuse(layer)) == (1, 0)
        torch.manual_seed(0)
        x = torch.randn(2, 5, q_proj.in_features, requires_grad=True)
        y = q_proj(x)
        learned = [x, *(p for p in q_proj.parameters() if p.requires_grad)]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), learned)])
    assert ("_Fused" in str(y.grad_fn.next_functions)) is not bool(changes)
    for i, (ours, theirs) in enumerate(zip(found[1], found[0], strict=True)):
        through = i == 1  # the gradient of x, through the packed matrix
        assert_close(ours, theirs, dtype=torch.bfloat16 if through else torch.float32)


def test_routers_that_return_a_tuple_have_no_adapters(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama4")
    model = adapted(AutoModelForCausalLM.from_pretrained(path), Lora(r=4, alpha=8))
    model(input_ids=IDS, labels=IDS).loss.backward()
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("q_proj" in name for name in learned)
    assert not any("router" in name for name in learned)


@pytest.mark.filterwarnings("error:.*did not match any targeted module")
def test_experts_have_the_rank_that_was_asked_for(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_model(tmp_path_factory.getbasetemp(), "qwen3-moe")
    model = adapted(AutoModelForCausalLM.from_pretrained(path), Lora(r=4, alpha=8))
    found = {n: m for n, m in model.named_modules() if ".mlp.experts" in n and hasattr(m, "r")}
    ranks = {m.parameter_name: (m.r["default"], m.scaling["default"]) for m in found.values()}
    assert ranks == {"gate_up_proj": (8, 2.0), "down_proj": (4, 2.0)}  # of gate and of up 4 each
