"""Quantized safetensors convert code for code where our formats hold them, else on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from qoff.errors import FormatError, QuantizationError, UnsupportedModelError
from qoff.eval.perplexity.models import opened_original
from qoff.eval.perplexity.scoring import Sample, evaluate
from qoff.eval.perplexity.windows import cut
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.plan.native_sizes import NativeSizes
from qoff.quant import QuantConfig, quantize
from tests.quant.packed_matrices import (
    Matrix,
    awq,
    bnb4,
    bnb8,
    compressed,
    gptq,
    random_matrix,
)
from tests.tiny_models import PlainRun, interleave16, read_all
from tests.tolerances import DECODER_LOGITS, assert_close

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QUANT = QuantConfig(group_size=32, solver="rtn")
Stored = tuple[dict[str, Tensor], Tensor]  # tensors of a module, and the weight they stand for


def _matrix(write: Callable[[Matrix], dict[str, Tensor]], **options: Any) -> Callable[..., Stored]:
    def store(n: int, k: int) -> Stored:
        matrix = random_matrix(n, k, **options)
        return write(matrix), matrix.value()

    return store


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EXACT: dict[str, tuple[dict[str, Any], Callable[..., Stored]]] = {
    "gptq": (GPTQ, _matrix(gptq)),
    "gptq-sym": (GPTQ, _matrix(gptq, sym=True)),
    "awq": (AWQ, _matrix(awq)),
    "compressed-tensors": (COMPRESSED, _matrix(lambda m: compressed(m, sym=False))),
}
REQUANTIZED: dict[str, tuple[dict[str, Any], Callable[..., Stored]]] = {
    "nf4": (BNB, bnb4),
    "fp4-nested": (BNB, lambda n, k: bnb4(n, k, kind="fp4", nested=True)),
    "int8": ({**BNB, "load_in_4bit": False}, bnb8),
}
ACT_ORDER = ({**GPTQ, "desc_act": True}, _matrix(gptq, shuffled=True))


def save_model(
    path: Path, config: dict[str, Any], store: Callable[..., Stored], quantized: str = "_proj"
) -> dict[str, Tensor]:
    """Save a random Llama whose linear weights are stored so; return what its weights are worth."""
    torch.manual_seed(1)
    hf = AutoConfig.for_model("llama", **TINY)
    model = AutoModelForCausalLM.from_config(hf)
    stored, values = {}, {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().normal_(std=0.1)
        if quantized in name:
            tensors, value = store(*value.shape)
            module = name.removesuffix("weight")
            stored |= {f"{module}{key}": x.contiguous() for key, x in tensors.items()}
        else:
            stored[name] = value
        values[name] = value
    path.mkdir()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    text = json.dumps({**hf.to_dict(), "quantization_config": config})
    (path / "config.json").write_text(text)
    return values


def matrices(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of the layers, fused as in a checkpoint."""
    out = {}
    for layer in range(TINY["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        q, k, v = (values[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
        gate, up = (values[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        out |= {
            f"{at}self_attn.qkv_proj": torch.cat((q, k, v)),
            f"{at}self_attn.o_proj": values[f"{at}self_attn.o_proj.weight"],
            f"{at}mlp.gate_up_proj": interleave16(gate, up),
            f"{at}mlp.down_proj": values[f"{at}mlp.down_proj.weight"],
        }
    return out


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("for_cpu", [False, True])
def test_codes_are_taken_over(
    kind: str, for_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.models.convert.builder.PIECE", 48 * 128)  # several pieces a matrix
    config, store = EXACT[kind]
    values = save_model(tmp_path / "model", config, store)
    out = convert(tmp_path / "model", tmp_path / "out", quant=QUANT, for_cpu=for_cpu)
    found = read_all(out)
    for name, value in matrices(values).items():
        weight = found[name]
        assert isinstance(weight, QTensor)
        assert (weight.bits, weight.group_size) == (4, 32)
        assert weight.scale_min.dtype == (torch.float16 if "sym" in kind else torch.float32)
        assert torch.equal(weight.dequantize(), value), name
    for name in ("model.embed_tokens", "lm_head"):  # which are floats
        weight = found[name]
        assert isinstance(weight, QTensor)
        wanted = quantize(values[f"{name}.weight"], 6, 32, "rtn").dequantize()
        assert torch.equal(weight.dequantize(), wanted)
    assert torch.equal(torch.as_tensor(found["model.norm.weight"]), values["model.norm.weight"])
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {
        "quant_method": "qoff",
        "version": 1,
        "bits": 4,
        "group_size": 32,
        "solver": "imported",
        "packing": "rows16" if for_cpu else "split32",
    }


def test_a_model_that_sees_may_say_it_of_its_text_alone(tmp_path: Path) -> None:
    """As Kimi K2.5 does."""
    config, store = EXACT["compressed-tensors"]
    save_model(tmp_path / "model", config, store)
    text = json.loads((tmp_path / "model" / "config.json").read_text())
    wanted = read_all(convert(tmp_path / "model", tmp_path / "text", quant=QUANT))
    whole = json.dumps({"model_type": "llava", "text_config": text})
    (tmp_path / "model" / "config.json").write_text(whole)
    found = read_all(convert(tmp_path / "model", tmp_path / "whole", quant=QUANT))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        same = found[name]
        if isinstance(weight, QTensor):
            assert isinstance(same, QTensor)
            weight, same = weight.codes, same.codes
        assert torch.equal(same, weight)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        NativeSizes.of(json.loads(whole))


@pytest.mark.parametrize("kind", REQUANTIZED)
def test_bitsandbytes_is_quantized_anew(kind: str, tmp_path: Path) -> None:
    config, store = REQUANTIZED[kind]
    values = save_model(tmp_path / "model", config, store)
    out = convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    found = read_all(out)
    for name, value in matrices(values).items():
        weight = found[name]
        assert isinstance(weight, QTensor)
        assert torch.equal(weight.dequantize(), quantize(value, 4, 32, "rtn").dequantize()), name
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["solver"]) == ("qoff", "rtn")


def test_modules_of_different_widths_join_in_the_widest(tmp_path: Path) -> None:
    """As GPTQModel's `dynamic` makes them: 8 bits and group 32 for V, 4 bits and 64 for others."""
    values = save_model(
        tmp_path / "model",
        {**GPTQ, "group_size": 64, "dynamic": {"+:.*v_proj": {"bits": 8, "group_size": 32}}},
        lambda n, k: _matrix(gptq, bits=8 if n == 64 else 4, group=32 if n == 64 else 64)(n, k),
    )
    found = read_all(convert(tmp_path / "model", tmp_path / "out", quant=QUANT))
    for name, value in matrices(values).items():
        weight = found[name]
        assert isinstance(weight, QTensor)
        assert (weight.bits, weight.group_size) == ((8, 32) if "qkv" in name else (4, 64))
        assert torch.equal(weight.dequantize(), value), name


@pytest.mark.parametrize("ops", [cpu, reference_ops], ids=lambda ops: ops.PACKING)
@torch.no_grad()
def test_logits_are_those_of_the_model(ops: ModuleType, tmp_path: Path) -> None:
    """Of transformers with the values that GPTQ stores: 4 and 8 bits, minima in float32."""
    values = save_model(
        tmp_path / "model",
        {**GPTQ, "dynamic": {"+:.*v_proj": {"bits": 8}}},
        lambda n, k: _matrix(gptq, bits=8 if n == 64 else 4)(n, k),
    )
    out = convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    found = read_all(out)
    for name in ("model.embed_tokens", "lm_head"):
        weight = found[name]
        assert isinstance(weight, QTensor)
        values[f"{name}.weight"] = weight.dequantize()
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    model.load_state_dict(values)
    run, ids = PlainRun(out, ops), torch.randint(100, (21,))
    cache = run.decoder.new_cache(1)
    logits = run.forward(ForwardPass(ids, Ragged.of([21], cache.lengths), cache, torch.arange(21)))
    assert_close(logits, model(ids[None]).logits[0], tolerance=DECODER_LOGITS)


@torch.no_grad()
def test_a_reference_with_packed_weights_is_read_without_their_package(tmp_path: Path) -> None:
    values = save_model(tmp_path / "model", GPTQ, _matrix(gptq))
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    model.load_state_dict(values)
    ids = torch.randint(100, (40,))
    text = Sample(ids, cut(len(ids), len(ids)))
    with opened_original(tmp_path / "model", text) as subject:
        found = evaluate(subject, text).nll
    wanted = cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    np.testing.assert_allclose(np.ravel(found)[-len(wanted) :], wanted.numpy(), atol=1e-4)


def test_a_head_may_be_quantized_too(tmp_path: Path) -> None:
    values = save_model(tmp_path / "model", GPTQ, _matrix(gptq), "lm_head")
    head = read_all(convert(tmp_path / "model", tmp_path / "out", quant=QUANT))["lm_head"]
    assert isinstance(head, QTensor)
    assert (head.bits, head.group_size) == (4, 32)
    assert torch.equal(head.dequantize(), values["lm_head.weight"])


@pytest.mark.parametrize(
    ("config", "store", "message"),
    [
        (*ACT_ORDER, r"0.self_attn.q_proj.weight has its inputs in another order \(desc_act"),
        ({**GPTQ, "group_size": 16}, _matrix(gptq, group=16), r"has group_size 16, not a mult"),
    ],
)
def test_what_no_format_holds_is_quantized_anew_only_on_request(
    config: dict[str, Any], store: Callable[..., Stored], message: str, tmp_path: Path
) -> None:
    values = save_model(tmp_path / "model", config, store)
    with pytest.raises(QuantizationError, match=rf"{message}.*--requantize"):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    assert not (tmp_path / "out").exists()
    out = convert(tmp_path / "model", tmp_path / "out", quant=QUANT, requantize=True)
    found = read_all(out)
    for name, value in matrices(values).items():
        weight = found[name]
        assert isinstance(weight, QTensor)
        assert torch.equal(weight.dequantize(), quantize(value, 4, 32, "rtn").dequantize()), name


@pytest.mark.parametrize(
    ("file", "config", "kind"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "awq"),
    ],
)
def test_configs_in_a_file_of_their_own(
    file: str, config: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """And weights in one file of any name, as AutoGPTQ writes them."""
    model = tmp_path / "model"
    values = save_model(model, {}, EXACT[kind][1])
    (model / file).write_text(json.dumps(config))
    (model / "model.safetensors").rename(model / "gptq_model-4bit-32g.safetensors")
    found = read_all(convert(model, tmp_path / "out", quant=QUANT))
    for name, value in matrices(values).items():
        weight = found[name]
        assert isinstance(weight, QTensor)
        assert torch.equal(weight.dequantize(), value)
    (model / file).write_text(json.dumps({**config, "version": "gemv", "group_size": 0}))
    with pytest.raises(UnsupportedModelError, match=rf"{file}: (version|group_size) is "):
        convert(model, tmp_path / "other")


_UP = "model.layers.1.mlp.up_proj"


def test_damage_is_named_before_anything_is_written(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(model, *EXACT["gptq"])
    tensors = load_file(model / "model.safetensors")
    scales = tensors.pop(f"{_UP}.scales")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(FormatError, match=rf"tensor {_UP}.scales is missing"):
        convert(model, tmp_path / "out", quant=QUANT)
    scales[0, 0] = torch.inf
    save_file({**tensors, f"{_UP}.scales": scales}, model / "model.safetensors")
    with pytest.raises(FormatError, match=rf"tensor {_UP}.scales holds NaN or infinity"):
        convert(model, tmp_path / "out", quant=QUANT)
    del tensors[f"{_UP}.qweight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(FormatError, match=rf"no tensor {_UP}.weight"):
        convert(model, tmp_path / "out", quant=QUANT)
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(FormatError, match=r"model\.safetensors: .* ends at byte"):
        convert(model, tmp_path / "out", quant=QUANT)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_matrices_of_another_model_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", AWQ, lambda n, k: _matrix(awq)(n + 16, k))
    with pytest.raises(FormatError, match=r"q_proj.weight has shape \(144, 128\), but config.json"):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
