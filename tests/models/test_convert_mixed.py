"""Matrices of one model in different formats: each as asked, and read as any other."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import qoff
from qoff.checkpoint import Checkpoint, QuantEntry, verify
from qoff.errors import QuantizationError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from qoff.quant import Format, QuantConfig, quantize
from tests.models.gguf_model import Model as GGUFModel
from tests.models.test_gguf_modules import written
from tests.module_models import dequantized, module_source, save_module_model
from tests.tiny_models import (
    budgets,
    read_all,
    reference_model,
    save_model,
    save_tokenizer,
    tiny_model,
)
from tests.tolerances import DECODER_LOGITS, assert_close

WIDE = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 130}
AMPLIFIED = 5e-3  # of logits, where a weight of 5000 amplifies what activations are rounded by
FORMATS = {
    "*.qkv_proj": Format(4, 128),
    "*.down_proj": Format(8, 32),
    "model.layers.0.*": Format(8, 64),  # the last one that matches
    "lm_head": Format(4, 32),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "model"
    save_model(path, "llama", **WIDE)
    save_tokenizer(path, 130)
    return path


@pytest.fixture(scope="module", params=[False, True])
def mixed(model: Path, request: pytest.FixtureRequest) -> Path:
    quant = QuantConfig(group_size=64, solver="rtn", weights=FORMATS)
    return convert(
        model, model.parent / f"mixed-{request.param}", quant=quant, for_cpu=request.param
    )


def logits(path: Path, **options: int) -> tuple[Tensor, int]:
    """Logits of a prompt, and the bytes that streamed through slots."""
    ids = torch.arange(3, 40)
    with Runtime(path, **options) as runtime:  # type: ignore[arg-type]
        ragged = Ragged.of([len(ids)], [0])
        batch = ForwardPass(ids, ragged, runtime.new_cache(1), torch.arange(len(ids)))
        return runtime.forward(batch), runtime.stats().slot_bytes


def test_each_matrix_has_the_format_of_the_last_pattern_that_matches(mixed: Path) -> None:
    verify(mixed)
    checkpoint = Checkpoint.open(mixed)
    found = {
        name: Format(entry.bits, entry.group_size)
        for file in checkpoint.files
        for name, entry in file.weights.items()
        if isinstance(entry, QuantEntry)
    }
    layer = "model.layers.{}.{}".format
    assert {found[layer(0, x)] for x in ("self_attn.qkv_proj", "mlp.down_proj")} == {Format(8, 64)}
    for i in (1, 2, 3):
        assert found[layer(i, "self_attn.qkv_proj")] == Format(4, 128)
        assert found[layer(i, "mlp.down_proj")] == Format(8, 32)
        assert found[layer(i, "self_attn.o_proj")] == Format(4, 64)
    assert found["lm_head"] == Format(4, 32)
    assert found["model.embed_tokens"] == Format(6, 64)
    described = checkpoint.config["quantization_config"]
    assert described["weights"]["*.down_proj"] == {"bits": 8, "group_size": 32}
    assert (described["bits"], described["group_size"]) == (4, 64)


def test_values_are_those_of_models_of_one_format(mixed: Path, model: Path, tmp_path: Path) -> None:
    found = read_all(mixed)
    for i, form in enumerate(dict.fromkeys([*FORMATS.values(), Format(4, 64)])):
        quant = QuantConfig(form.bits, form.group_size, "rtn", head_bits=form.bits)
        for name, weight in read_all(convert(model, tmp_path / str(i), quant=quant)).items():
            mine = found[name]
            if isinstance(mine, Tensor) or isinstance(weight, Tensor):
                continue
            if (mine.bits, mine.group_size) == (form.bits, form.group_size):
                assert torch.equal(mine.to_packing("split32").codes, weight.codes)


def test_streams_bit_identically(mixed: Path) -> None:
    wanted, _ = logits(mixed)
    least, everything = budgets(mixed)
    for memory in (least, (least + everything) // 2):
        found, streamed = logits(mixed, device_memory=memory)
        assert streamed > 0
        assert torch.equal(found, wanted)


def test_loads_and_generates(mixed: Path) -> None:
    model, _ = qoff.load(mixed)
    with model:
        ids = torch.arange(3, 12)[None]
        assert model.generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 12)


def test_loads_as_a_model_of_transformers(mixed: Path, tmp_path: Path) -> None:
    ids = torch.arange(3, 40)
    model = AutoModelForCausalLM.from_pretrained(mixed)
    wanted, _ = logits(mixed)
    assert_close(model(ids[None]).logits[0].detach(), wanted, tolerance=DECODER_LOGITS)
    model.save_pretrained(tmp_path / "again")
    before, after = (Checkpoint.open(path).config for path in (mixed, tmp_path / "again"))
    assert after["quantization_config"]["weights"] == before["quantization_config"]["weights"]
    found = read_all(tmp_path / "again")
    for name, weight in read_all(mixed).items():
        if isinstance(weight, QTensor):
            again = found[name]
            assert isinstance(again, QTensor)
            assert again.bits == weight.bits
            assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    "config", [{"solver": "gptq"}, {"weights": {"*": {"bits": 8, "group_size": 64}}}]
)
def test_from_pretrained_does_not_do_this_on_the_way(model: Path, config: dict[str, Any]) -> None:
    with pytest.raises(QuantizationError, match="`qoff convert`"):
        AutoModelForCausalLM.from_pretrained(model, quantization_config=qoff.QoffConfig(**config))


def test_load_converts_anew_for_other_formats(model: Path, tmp_path: Path) -> None:
    for count, weights in enumerate(({}, {"*.down_proj": Format(8, 64)}), 1):
        quant = QuantConfig(solver="rtn", weights=weights)
        loaded, _ = qoff.load(model, quant=quant, cache_dir=tmp_path)
        loaded.close()
        assert len(list(tmp_path.iterdir())) == count


def test_experts_of_a_kind_take_one_form(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tiny_model(tmp_path_factory.getbasetemp(), "mixtral")
    weights = {"*.experts.1.down_proj": Format(8, 32)}
    quant = QuantConfig(group_size=32, solver="rtn", weights=weights)
    found = read_all(convert(source, tmp_path / "out", quant=quant))
    kinds = {
        name.rpartition(".")[2]: (w.bits, w.group_size)
        for name, w in found.items()
        if ".experts." in name and not isinstance(w, Tensor)
    }
    assert kinds == {"gate_up_proj": (4, 32), "down_proj": (8, 32)}


def test_a_pattern_of_nothing_is_refused(model: Path, tmp_path: Path) -> None:
    quant = QuantConfig(weights={"*.down_proj": Format(), "layers.3.down": Format()})
    with pytest.raises(QuantizationError, match=r"no matrix is called 'layers.3.down'; .*qkv_proj"):
        convert(model, tmp_path / "out", quant=quant)
    assert not (tmp_path / "out").exists()


def test_a_group_that_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96)
    quant = QuantConfig(group_size=32, weights={"*.1.mlp.down_proj": Format(4, 64)})
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.down_proj: group size 64 .* 96"):
        convert(tmp_path / "model", tmp_path / "out", quant=quant)


@pytest.mark.parametrize("wide", [Format(8, 32), Format(4, 32)], ids=str)
def test_calibration_is_left_out_where_8_bits_are_given_to_what_was_quantized(
    wide: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a file of Q4_K_M, whose Q6_K cannot keep its codes; 4 bits of it are calibrated."""
    model = GGUFModel("llama-wide", {"down_proj": Kind.Q6_K, "_proj": Kind.Q4_K})
    file, ids = model.write(tmp_path / "m.gguf"), torch.randint(3, 40, (4, 32))
    chosen = {"*.down_proj": wide}
    quant = QuantConfig(solver="gptq", weights=chosen)
    plain = convert(file, tmp_path / "hqq", quant=QuantConfig(solver="hqq", weights=chosen))
    assert not caplog.messages
    out = convert(file, tmp_path / "gptq", quant=quant, calibration=ids)
    same = [a.sha256 for a in Checkpoint.open(out).layers] == [
        b.sha256 for b in Checkpoint.open(plain).layers
    ]
    assert same == (wide.bits == 8)
    said = [one for one in caplog.messages if "converted without calibration" in one]
    assert len(said) == (1 if wide.bits == 8 else 0)


def test_codes_that_are_taken_over_only_become_wider(tmp_path: Path) -> None:
    source = GGUFModel("llama").write(tmp_path / "model.gguf")  # Q4_1: 4 bits, group 32
    wide = QuantConfig(weights={"*.o_proj": Format(8, 32)})
    plain, wider = (
        read_all(convert(source, tmp_path / name, quant=quant))
        for name, quant in (("plain", QuantConfig()), ("wide", wide))
    )
    name = "model.layers.0.self_attn.o_proj"
    before, after = plain[name], wider[name]
    assert isinstance(before, QTensor)
    assert isinstance(after, QTensor)
    assert (after.bits, after.group_size) == (8, 32)
    assert torch.equal(after.dequantize(), before.dequantize())
    coarse = QuantConfig(weights={"*.o_proj": Format(8, 64)})
    with pytest.raises(QuantizationError, match=r"o_proj: keeps its codes .*--requantize"):
        convert(source, tmp_path / "coarse", quant=coarse)
    again = read_all(convert(source, tmp_path / "coarse", quant=coarse, requantize=True))[name]
    assert isinstance(again, QTensor)
    wanted = quantize(before.dequantize(), 8, 64)
    assert torch.equal(again.dequantize(), wanted.dequantize())


@torch.no_grad()
def test_models_of_transformers_modules_have_formats_by_name(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = module_source(tmp_path_factory.getbasetemp(), "gpt2")
    formats = {"*.c_attn.weight": Format(8, 64), "*.h.1.*.c_fc.weight": Format(6, 64)}
    quant = QuantConfig(group_size=32, solver="rtn", weights=formats)
    path = convert(source, tmp_path / "out", quant=quant, for_cpu=True)
    for file in Checkpoint.open(path).layers:
        for name, entry in file.weights.items():
            if isinstance(entry, QuantEntry):
                wanted = quant.chosen(name) or Format(4, 32)
                assert (entry.bits, entry.group_size) == (wanted.bits, wanted.group_size)
    ids = torch.arange(3, 40)[None]
    model, _ = qoff.load(path, kv=None)
    with closing(model):
        assert_close(
            model(ids).logits, dequantized(source, path)(ids).logits, tolerance=DECODER_LOGITS
        )
    for wrong, message in (("*.c_proj.weight", "do not divide the 80 columns"), ("*.q", "called")):
        quant = QuantConfig(weights={wrong: Format(8, 64)})
        with pytest.raises(QuantizationError, match=message):
            convert(source, tmp_path / "wrong", quant=quant)


def test_quantized_files_for_modules_lose_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.models.sources.gguf_modules.DENSE", ())  # all is quantized then
    source = written("bloom", tmp_path / "m.gguf")
    quant = QuantConfig(group_size=32, solver="rtn", weights={"*.0.*": Format(4, 32)})
    with pytest.raises(QuantizationError, match="pass requantize=True"):
        convert(source, tmp_path / "wrong", quant=quant)
    again = convert(source, tmp_path / "again", quant=quant, requantize=True)
    first = Checkpoint.open(again).layers[0].weights.values()
    assert {entry.bits for entry in first if isinstance(entry, QuantEntry)} == {4}


@pytest.mark.parametrize("wrong", [{"bits": 7}, {"group_size": 16}])
def test_a_format_that_does_not_exist_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(QuantizationError, match="is not supported; use one of"):
        Format(**wrong)


@torch.no_grad()
@pytest.mark.parametrize("solver", ["hqq", "gptq"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "stablelm", "aria"])
def test_a_matrix_that_compact_scales_do_not_hold(family: str, solver: str, tmp_path: Path) -> None:
    """Some matrices of a layer, and some of its experts, have other scales than the rest."""
    source, out, ids = tmp_path / "model", tmp_path / "out", torch.arange(48).view(3, 16)
    modules = family in ("stablelm", "aria")
    (save_module_model if modules else save_model)(source, family)
    save_tokenizer(source)
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = next(x for x in tensors if re.search(r"\.1\..*(up_proj|w1|fc1)", x))
    tensors[name].view(-1)[3] = 5e3
    save_file(tensors, file, {"format": "pt"})
    quant = QuantConfig(group_size=32, solver=solver)
    convert(source, out, quant=quant, calibration=ids if solver == "gptq" else None)
    entries = [x for file in Checkpoint.open(out).files for x in file.weights.values()]
    assert len({x.scale_min.dtype for x in entries if isinstance(x, QuantEntry)}) == 2
    wanted = (dequantized(source, out) if modules else reference_model(out))(ids).logits
    model, _ = qoff.load(out, kv=None)
    with closing(model):
        assert_close(model(ids).logits, wanted, tolerance=AMPLIFIED)
