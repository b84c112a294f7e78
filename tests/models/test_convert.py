"""Checkpoints hold the quantized rows of the Hugging Face tensors, fused; damage is named."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from qoff.checkpoint import Checkpoint
from qoff.errors import (
    ConversionError,
    FormatError,
    QoffError,
    QuantizationError,
    UnsupportedModelError,
)
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.convert.convert import convert
from qoff.quant import QuantConfig, quantize
from qoff.units import counted
from tests.module_models import save_module_model
from tests.tiny_models import interleave16, read_all

TINY: dict[str, Any] = {
    "vocab_size": 100,  # no multiple of 16
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": False},
    "smollm3-tied": {"model_type": "smollm3"},
}
QUANT = QuantConfig(group_size=32, solver="rtn")


def save_model(directory: Path, family: str, **kwargs: Any) -> dict[str, Tensor]:
    """Save a random bfloat16 model of a family; return its tensors."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family], **TINY))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases as well, which are constant
            parameter.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(directory, **kwargs)
    return {name: value.detach() for name, value in model.state_dict().items()}


def fused(tensors: dict[str, Tensor], layer: int, kind: str) -> dict[str, Tensor]:
    """The matrices of a layer (or with kind "bias" its biases), from Hugging Face tensors."""
    prefix = f"model.layers.{layer}."

    def get(name: str) -> Tensor | None:
        return tensors.get(f"{prefix}{name}.{kind}")

    def join(names: str, how: Callable[..., Tensor]) -> Tensor | None:
        parts = [x for name in names.split() if (x := get(name)) is not None]
        return how(parts) if parts else None

    found = {
        "self_attn.qkv_proj": join("self_attn.q_proj self_attn.k_proj self_attn.v_proj", torch.cat),
        "self_attn.o_proj": get("self_attn.o_proj"),
        "mlp.gate_up_proj": join("mlp.gate_proj mlp.up_proj", lambda p: interleave16(*p)),
        "mlp.down_proj": get("mlp.down_proj"),
    }
    suffix = "" if kind == "weight" else f".{kind}"
    return {f"{prefix}{name}{suffix}": x for name, x in found.items() if x is not None}


def expected(tensors: dict[str, Tensor], tied: bool, quant: QuantConfig) -> dict[str, Tensor]:
    """What a checkpoint of these tensors must hold, dequantized."""

    def rounded(x: Tensor, bits: int) -> Tensor:
        return quantize(x, bits, quant.group_size, quant.solver).dequantize()

    out = {}
    for layer in range(TINY["num_hidden_layers"]):
        out |= {k: rounded(x, quant.bits) for k, x in fused(tensors, layer, "weight").items()}
        out |= {k: x.float() for k, x in fused(tensors, layer, "bias").items()}
    for name in ("model.embed_tokens",) if tied else ("model.embed_tokens", "lm_head"):
        out[name] = rounded(tensors[f"{name}.weight"], quant.head_bits)
    return out | {k: x.float() for k, x in tensors.items() if "norm" in k}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("for_cpu", [False, True])
def test_holds_the_quantized_rows(family: str, for_cpu: bool, tmp_path: Path) -> None:
    tensors = save_model(tmp_path / "model", family)
    seen: list[tuple[int, int]] = []
    out = convert(
        tmp_path / "model",
        tmp_path / "out",
        quant=QUANT,
        for_cpu=for_cpu,
        progress=lambda done, total: seen.append((done, total)),
    )
    found = read_all(out)
    wanted = expected(tensors, "tied" in family, QUANT)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        weight = found[name]
        if isinstance(weight, QTensor):
            assert weight.packing == ("rows16" if for_cpu else "split32")
            weight = weight.dequantize()
        assert weight.dtype == torch.float32
        assert torch.equal(weight, value), name
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_pieces_do_not_change_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 16 rows at a time gives what reading whole tensors gives."""
    save_model(tmp_path / "model", "llama-biased-tied")
    for name in ("whole", "pieces"):
        for for_cpu in (False, True):
            convert(tmp_path / "model", tmp_path / f"{name}{for_cpu}", quant=QUANT, for_cpu=for_cpu)
        monkeypatch.setattr("qoff.models.convert.builder.PIECE", 1)
    for for_cpu in (False, True):
        whole, pieces = (read_all(tmp_path / f"{name}{for_cpu}") for name in ("whole", "pieces"))
        for name, a in whole.items():
            b = pieces[name]
            if isinstance(a, QTensor) and isinstance(b, QTensor):
                assert torch.equal(a.codes, b.codes)
                assert torch.equal(a.scale_min, b.scale_min)
            else:
                assert torch.equal(a, b)


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3-tied")
    save_model(tmp_path / "many", "qwen3-tied", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = (
        read_all(convert(tmp_path / name, tmp_path / f"{name}-out", quant=QUANT))
        for name in ("one", "many")
    )
    assert one.keys() == many.keys()
    for name, a in one.items():
        b = many[name]
        both = [x.dequantize() if isinstance(x, QTensor) else x for x in (a, b)]
        assert torch.equal(*both)


def test_config_keeps_its_keys_and_files_come_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    save_model(tmp_path / "model", "llama")
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="c").save_pretrained(
        tmp_path / "model"
    )
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    out = convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    after = json.loads((out / "config.json").read_text())
    assert after.pop("quantization_config") == {
        "quant_method": "qoff",
        "version": 1,
        "bits": 4,
        "group_size": 32,
        "solver": "rtn",
        "packing": "split32",
    }
    assert after == before
    assert AutoTokenizer.from_pretrained(out)("cab").input_ids == [2, 0, 1]
    generation = (tmp_path / "model" / "generation_config.json").read_bytes()
    assert (out / "generation_config.json").read_bytes() == generation


def test_a_head_that_differs_is_not_tied(tmp_path: Path) -> None:
    """As in transformers, a head that is stored and differs wins over tie_word_embeddings."""
    tensors = save_model(tmp_path / "model", "llama-biased-tied")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    for change, tied in ((0.0, True), (1.0, False)):
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + change
        save_file(stored, file, {"format": "pt"})
        out = convert(tmp_path / "model", tmp_path / "out", quant=QUANT, overwrite=True)
        assert ("lm_head" in read_all(out)) != tied
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == tied
    head = read_all(out)["lm_head"]
    assert isinstance(head, QTensor)
    shifted = tensors["model.embed_tokens.weight"] + 1.0
    assert torch.equal(head.dequantize(), quantize(shifted, 6, 32, "rtn").dequantize())


def _drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def _poke(tensors: dict[str, Tensor], name: str, value: float) -> None:
    tensors[name].view(-1)[3] = value


_Q, _UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
_NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda t: _drop(t, _UP), FormatError, rf"no tensor {_UP}"),
        (lambda t: _drop(t, "lm_head.weight"), FormatError, r"no tensor lm_head.weight"),
        (lambda t: t.update({_Q: t[_Q][:64]}), FormatError, rf"{_Q} has shape \(64, 64\).*\(128,"),
        (lambda t: t.update({_Q: t[_Q].to(torch.int8)}), FormatError, rf"{_Q} is not in floats"),
        (lambda t: t.update({_Q: t[_Q].to(torch.float8_e5m2)}), FormatError, rf"{_Q} is not in"),
        (lambda t: t.update({_NORM: t[_NORM].int()}), FormatError, rf"{_NORM} is not in floats"),
        (lambda t: _poke(t, _UP, torch.nan), QuantizationError, rf"{_UP}: 1 of \d+ weights are"),
        (lambda t: _poke(t, _Q, -torch.inf), QuantizationError, rf"{_Q}: 1 of \d+ weights are"),
        (
            lambda t: _poke(t, _NORM, torch.nan),
            QuantizationError,
            rf"{_NORM}: holds NaN",
        ),
    ],
)
def test_damaged_weights_are_named(
    damage: Callable[[dict[str, Tensor]], None],
    error: type[QoffError],
    message: str,
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(error, match=message):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def _edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "t5"}, UnsupportedModelError, r"model_type is 't5'"),
        ({"hidden_act": "relu6"}, UnsupportedModelError, r"hidden_act is 'relu6'"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            UnsupportedModelError,
            r"config.json: quantization_config.quant_method is 'hqq'; supported: awq, .*gptq",
        ),
        ({"intermediate_size": 112}, FormatError, r"gate_proj.weight has shape \(96, 64\)"),
    ],
)
def test_configs_that_cannot_be_converted(
    change: dict[str, Any], error: type[QoffError], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", "llama")
    _edit_json(tmp_path / "model" / "config.json", lambda c: c.update(change))
    with pytest.raises(error, match=message):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    assert not (tmp_path / "out").exists()


def _layers(model: Path) -> int:
    count: int = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return count


@pytest.fixture(params=["llama", "stablelm"])
def cut(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose config.json has a layer less; one that runs through modules, too."""
    model = tmp_path / "model"
    if request.param == "llama":
        save_model(model, "llama")
    else:
        save_module_model(model, request.param)
    _edit_json(model / "config.json", lambda c: c.update(num_hidden_layers=_layers(model) - 1))
    return model


def test_layers_that_the_config_has_not_are_told(
    cut: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(cut, tmp_path / "out", quant=QUANT)
    (said,) = caplog.messages
    count = _layers(cut)
    assert said.startswith(f"{cut}: model.layers.{count}.")
    assert f"is not used, as config.json says that it has {counted(count, 'layer')}" in said


@pytest.mark.parametrize("ahead", ["config", "tensor"])
def test_layers_that_predict_further_ahead_are_not_missed(
    ahead: str, cut: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if ahead == "config":
        _edit_json(cut / "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    else:
        file = cut / "model.safetensors"
        tensors = {
            **load_file(file),
            f"model.layers.{_layers(cut)}.eh_proj.weight": torch.zeros(64),
        }
        save_file(tensors, file, {"format": "pt"})
    convert(cut, tmp_path / "out", quant=QUANT)
    assert not caplog.messages


def test_a_group_that_does_not_divide_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    message = r"mlp.down_proj: group size 64 .* 96 columns; group sizes that do: 32$"
    with pytest.raises(QuantizationError, match=message):
        convert(tmp_path / "model", tmp_path / "out", quant=QuantConfig(group_size=64))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../one.safetensors", r"index.json: names the file '../one.safetensors'"),
        ("/etc/passwd", r"index.json: names the file '/etc/passwd'"),
        ("..", r"names the file '..'"),
        ("", r"names the file ''"),
        (7, r"names the file 7"),
        ("gone.safetensors", r"gone.safetensors: no such file"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(
    file: object, message: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", "llama", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    _edit_json(index, lambda c: c["weight_map"].update({_Q: file}))
    with pytest.raises(FormatError, match=message):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a":{}}}',
        (200000).to_bytes(8, "little") + b"[" * 200000,
    ],
)
def test_headers_that_are_not_safetensors(content: bytes, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"model\.safetensors: "):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)


@pytest.mark.parametrize("keep", [0.99, 0.5])
def test_a_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(FormatError, match=r"model\.safetensors: .* ends at byte"):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)


def test_pickles_and_strangers_are_not_opened(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FormatError, match=r"found pytorch_model.bin, which is pickled"):
        convert(model, tmp_path / "out")
    with pytest.raises(FormatError, match=r"expected a .gguf file"):
        convert(model / "pytorch_model.bin", tmp_path / "out")
    with pytest.raises(FormatError, match=r"no such file or directory"):
        convert(tmp_path / "gone", tmp_path / "out")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model", "llama")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_after_first_layer(done: int, total: int) -> None:
        monkeypatch.setattr("os.fsync", full)

    with pytest.raises(ConversionError, match=r"out: the disk is full"):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT, progress=fill_after_first_layer)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_is_too_small_is_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", "llama")
    out = convert(tmp_path / "model", tmp_path / "whole", quant=QUANT)
    needed = sum(
        entry.nbytes for file in Checkpoint.open(out).files for entry in file.weights.values()
    )
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: usage._replace(free=free))
        if fits:
            convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
        else:
            with pytest.raises(ConversionError, match=r"out: the disk is full"):
                convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
