"""Gradients through packed linears, and PEFT's LoRA on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qoff.errors import ArgumentError, OpError, QuantizationError
from qoff.hf.packed.linear import QoffLinear, packed_linear
from qoff.kernels import dequantize as module
from qoff.kernels.cpu.linear.dequantize import DTYPES
from qoff.kernels.layout.qtensor import QTensor
from qoff.quant import quantize
from tests.tiny_models import reference_model, tiny_checkpoint
from tests.tolerances import INT16_ACTIVATIONS, RELATIVE_RMS, assert_close

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 20, 21]])


def matrix(n: int, k: int, bits: int = 4) -> QTensor:
    torch.manual_seed(n)
    return quantize(torch.randn(n, k), bits, 32, "rtn", "rows16")


@pytest.mark.parametrize(("n", "k", "bits"), [(48, 64, 4), (130, 96, 8), (16, 32, 4)])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_dequantized_linear(
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    k: int,
    bits: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 64 * k)  # several pieces
    packed = matrix(n, k, bits)
    dense = torch.nn.Linear(k, n)
    dense.weight.data = packed.dequantize()
    bias = torch.nn.Parameter(dense.bias.detach().to(dtype))
    x = torch.randn(*shape, k).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    y, expected = packed_linear(x, packed, bias), dense(wide)
    tolerance = max(INT16_ACTIVATIONS, RELATIVE_RMS[dtype])
    assert_close(y.detach(), expected.detach(), tolerance=tolerance)
    grad = torch.randn(*shape, n).to(dtype)
    y.backward(grad)
    expected.backward(grad.float())
    assert isinstance(x.grad, Tensor)
    assert x.grad.dtype == dtype
    assert_close(x.grad, wide.grad, dtype=torch.bfloat16)  # in which a CPU multiplies
    assert_close(bias.grad, dense.bias.grad, dtype=dtype)


def test_no_whole_copy_of_the_weight_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = module.dequantize

    def counted(weight: QTensor, dtype: torch.dtype, kept: bool = False) -> Tensor:
        sizes.append(weight.shape[0])
        return original(weight, dtype, kept)

    monkeypatch.setattr(module, "_PIECE_BYTES", 32 * 64 * DTYPES[-1].itemsize)
    monkeypatch.setattr(module, "dequantize", counted)
    linear = QoffLinear(matrix(144, 64))
    x = torch.randn(5, 64, requires_grad=True)
    linear(x).sum().backward()
    assert sizes == [32, 32, 32, 32, 16]


def test_a_bias_alone_learns() -> None:
    bias = torch.nn.Parameter(torch.zeros(16))
    packed_linear(torch.randn(5, 32), matrix(16, 32), bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((16,), 5.0))


def test_autocast() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    linear = QoffLinear(matrix(48, 64))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert_close(x.grad, linear.dequantize().sum(0).expand(4, 64), dtype=torch.bfloat16)


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(OpError, match=r"x must be \[\.\.\., 64\], not \[2, 65\]"):
        QoffLinear(matrix(48, 64))(torch.randn(2, 65))


def test_gradients_through_a_whole_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "gemma2")
    reference = reference_model(path)
    embedded = reference.get_input_embeddings()(IDS).detach()
    grads = []
    for model in (AutoModelForCausalLM.from_pretrained(path), reference):
        x = embedded.clone().requires_grad_()
        model(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert_close(*grads, dtype=torch.bfloat16)


def lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    wanted = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **wanted))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt-neox", "gemma2"])
def test_lora_learns_as_on_dequantized_weights(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str
) -> None:
    peft = pytest.importorskip("peft")
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    models = [lora(AutoModelForCausalLM.from_pretrained(path)), lora(reference_model(path))]
    grads = []
    for model in models:
        model(IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) >= 2 * 8
    for name, grad in grads[0].items():
        assert_close(grad, grads[1][name], dtype=torch.bfloat16)

    trained = models[0]
    learned = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = trained(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]

    trained.save_pretrained(tmp_path)
    fresh = AutoModelForCausalLM.from_pretrained(path)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, trained(IDS).logits)


def test_merging_is_refused(checkpoint: Path) -> None:
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoint))
    for safe in (False, True):
        with pytest.raises(QuantizationError, match=r"adapter.*dequantize\(\)"):
            model.merge_and_unload(safe_merge=safe)


@pytest.mark.parametrize("family", ["llama-head64", "llama"])
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_an_adapter_for_other_shapes_names_the_weight(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Path,
    tmp_path: Path,
    family: str,
    low_cpu_mem_usage: bool,
) -> None:
    peft = pytest.importorskip("peft")
    trained = lora(AutoModelForCausalLM.from_pretrained(checkpoint))
    trained.save_pretrained(tmp_path)
    other = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    model = AutoModelForCausalLM.from_pretrained(other)
    options = {"low_cpu_mem_usage": low_cpu_mem_usage}
    if family == "llama":
        again = peft.PeftModel.from_pretrained(model, tmp_path, **options)
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, trained(IDS).logits)
        return
    key = r"^base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_B\.default\.weight: "
    with pytest.raises(ArgumentError, match=key + r"has shape \[64, 4\], but") as refusal:
        peft.PeftModel.from_pretrained(model, tmp_path, **options)
    assert "\n" not in str(refusal.value)


def test_transformers_own_way_to_load_an_adapter_names_the_weight_too(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, tmp_path: Path
) -> None:
    trained = lora(AutoModelForCausalLM.from_pretrained(checkpoint))
    trained.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.load_adapter(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, trained(IDS).logits)
    other = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        before = model(IDS).logits
    key = r"^model\.layers\.0\.self_attn\.[kqv]_proj\.lora_B\.default\.weight: has shape"
    with pytest.raises(ArgumentError, match=key) as refusal:
        model.load_adapter(tmp_path)
    assert "\n" not in str(refusal.value)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    model.load_adapter(tmp_path, ignore_mismatched_sizes=True)
    assert list(model.peft_config) == ["default"]


def test_lm_eval_takes_the_model(checkpoint: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    requests = [("abc", "def"), ("a", "bc")]
    scores = harness._loglikelihood_tokens(
        [((a, b), tokenizer(a).input_ids, tokenizer(b).input_ids) for a, b in requests]
    )
    for (a, b), (score, _) in zip(requests, scores, strict=True):
        ids = torch.tensor([tokenizer(a + b).input_ids])
        with torch.no_grad():
            logs = model(ids[:, :-1]).logits.log_softmax(-1)[0]
        tokens = ids[0, len(a) :]
        expected = logs[len(a) - 1 :].gather(1, tokens[:, None]).sum()
        assert score == pytest.approx(float(expected), rel=1e-3)
