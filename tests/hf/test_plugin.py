"""transformers' `from_pretrained` and `save_pretrained` with qoff checkpoints and `QoffConfig`."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_utils, pipeline
from transformers.integrations import accelerate
from transformers.quantizers import auto

import qoff
from qoff.checkpoint import Checkpoint, read_weight
from qoff.errors import (
    ArgumentError,
    FormatError,
    QoffError,
    QuantizationError,
)
from qoff.hf.packed.derived import QoffEmbedding, QoffRouter
from qoff.hf.packed.linear import QoffLinear
from qoff.hf.plugin.install import packed_modules
from qoff.hf.plugin.register import register_with_transformers
from qoff.kernels.layout.qtensor import QTensor
from tests.hf.plugin_models import CONFIG, IDS, load, logits
from tests.mtp_models import tiny_with_mtp
from tests.tiny_families import FAMILIES, KINDS_OF_EXPERTS
from tests.tiny_models import reference_model, tiny_checkpoint, tiny_model
from tests.tolerances import DECODER_LOGITS, LINEAR_LOGITS, RELATIVE_RMS, assert_close


def weights(path: Path) -> dict[str, QTensor | Tensor]:
    checkpoint = Checkpoint.open(path)
    return {n: read_weight(f, e) for f in checkpoint.files for n, e in f.weights.items()}


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """The same weights, in the same order, bit for bit."""
    first, second = weights(a), weights(b)
    assert list(first) == list(second)
    for name, x in first.items():
        y = second[name]
        if isinstance(x, QTensor):
            assert isinstance(y, QTensor)
            assert torch.equal(x.codes, y.codes), name
            assert torch.equal(x.scale_min, y.scale_min), name
        else:
            assert isinstance(y, Tensor)
            assert torch.equal(x, y), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_as_the_model_of_its_family(base: Path, family: str) -> None:
    path = tiny_checkpoint(base, family)
    model, reference = load(path), reference_model(path)
    assert type(model) is type(reference)
    kinds = FAMILIES[family].get("layer_types", ())
    recurrent = not {"conv", "linear_attention"}.isdisjoint(kinds)
    tolerance = LINEAR_LOGITS if recurrent else DECODER_LOGITS
    assert_close(logits(model), logits(reference), tolerance=tolerance)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linears
    packed = (QoffLinear, QoffRouter)
    assert all(isinstance(m, packed) for n, m in linears.items() if ".altup." not in n)
    floats = re.compile(r"_bias$|A_log$|conv(1d)?\.weight$|\.altup\.")
    matrices = [n for n, p in model.named_parameters() if p.dim() > 1 and not floats.search(n)]
    assert matrices == []  # no matrix but codes
    for name, module in packed_modules(model).items():  # the same codes, with the same values
        assert torch.equal(module.dequantize(), reference.get_submodule(name).weight)


def test_a_layer_for_multi_token_prediction_is_no_surprise(base: Path) -> None:
    """transformers has no module for it."""
    path = tiny_with_mtp(base, "glm4-moe")
    assert Checkpoint.open(path).mtp is not None
    model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(found.values())
    assert_close(logits(model), logits(reference_model(path)), tolerance=DECODER_LOGITS)


@pytest.mark.parametrize("packing", ["rows16", "split32"])
@pytest.mark.parametrize(
    "family",
    ["llama-gqa-tied", "qwen3-tied", "gemma2", "phi3", "gpt-neox", "opt", "glm", *KINDS_OF_EXPERTS],
)
def test_what_is_saved_is_the_checkpoint_again(
    base: Path, tmp_path: Path, family: str, packing: str
) -> None:
    path = tiny_checkpoint(base, family, packing)
    model = load(path)
    model.save_pretrained(tmp_path)
    assert_same_checkpoint(tiny_checkpoint(base, family), tmp_path)
    again = load(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id
    shutil.copy(path / "tokenizer.json", tmp_path)
    shutil.copy(path / "tokenizer_config.json", tmp_path)
    with qoff.load(tmp_path)[0] as native, qoff.load(tiny_checkpoint(base, family))[0] as original:
        assert torch.equal(native(IDS).logits, original(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantizing_while_loading_equals_a_conversion(
    base: Path, tmp_path: Path, family: str
) -> None:
    model = load(tiny_model(base, family), quantization_config=qoff.QoffConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    assert_same_checkpoint(tiny_checkpoint(base, family), tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_each_weight_is_quantized_when_it_arrives(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qoff.hf.plugin import operations

    left: list[int] = []
    original = operations.install

    def counted(model: Any, *args: Any) -> set[str]:
        done = original(model, *args)
        float_matrices = [p for p in model.parameters() if p.dim() == 2 and not p.is_meta]
        left.append(len(float_matrices))
        return done

    monkeypatch.setattr(operations, "install", counted)
    load(tiny_model(base, "llama"), quantization_config=qoff.QoffConfig(**CONFIG))
    assert len(left) == 4 * 7 + 2
    assert set(left) == {0}


@pytest.mark.parametrize("kept", [["lm_head"], ["model.layers.1"], ["q_proj", "embed_tokens"]])
def test_modules_that_stay_as_they_are(base: Path, tmp_path: Path, kept: list[str]) -> None:
    source = tiny_model(base, "qwen3-tied")
    config = qoff.QoffConfig(**CONFIG, head_bits=4, modules_to_not_convert=kept)
    model = load(source, quantization_config=config)
    full = load(source)
    for name, module in full.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            found = model.get_submodule(name)
            tied = name in ("lm_head", "model.embed_tokens") and kept != ["model.layers.1"]
            stays = tied or any(name.startswith(f"{x}.") or name.endswith(x) for x in kept)
            assert isinstance(found, QoffLinear | QoffEmbedding) != stays, name
    model.save_pretrained(tmp_path)  # no qoff checkpoint can hold these
    again = load(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.config.quantization_config.modules_to_not_convert == kept
    with pytest.raises(FormatError, match=r"layout is 'state_dict'.*AutoModelForCausalLM"):
        qoff.load(tmp_path)


def test_a_model_without_a_spec_is_saved_module_by_module(tmp_path: Path) -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    torch.manual_seed(0)
    config = GPTJConfig(
        vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, rotary_dim=8
    )
    GPTJForCausalLM(config).save_pretrained(tmp_path / "float")
    model = load(tmp_path / "float", quantization_config=qoff.QoffConfig(**CONFIG))
    for folder in (tmp_path / "one", tmp_path / "two"):
        model.save_pretrained(folder)
        again = load(folder)
        assert torch.equal(logits(again), logits(model))
        model = again


def test_a_head_that_differs_from_the_embedding_is_not_tied(base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model(base, "qwen3-tied"), tmp_path / "odd")
    file = tmp_path / "odd/model.safetensors"
    state = load_file(file)
    embedding = state["model.embed_tokens.weight"]
    config = qoff.QoffConfig(**CONFIG, head_bits=8)
    tied = load(tmp_path / "odd", quantization_config=config)
    assert tied.lm_head.owner is tied.model.embed_tokens
    for head, shared in ((embedding.clone(), True), (embedding.flip(0).contiguous(), False)):
        save_file({**state, "lm_head.weight": head}, file, {"format": "pt"})
        model = load(tmp_path / "odd", quantization_config=config)
        assert (model.lm_head.owner is model.model.embed_tokens) == shared
        assert model.config.tie_word_embeddings == shared
        assert_close(model.lm_head.dequantize(), head, tolerance=1e-2)
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_generate(base: Path, device_map: str | None) -> None:
    path = tiny_checkpoint(base, "gemma2")
    reference = reference_model(path)
    model = load(path, device_map=device_map)
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    ids = torch.cat([IDS, IDS]).masked_fill(mask == 0, 0)
    for options in ({}, {"num_beams": 3}):
        wanted = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **options}
        assert torch.equal(model.generate(ids, **wanted), reference.generate(ids, **wanted))


def test_pipeline(base: Path) -> None:
    path = tiny_checkpoint(base, "llama")
    model, tokenizer = load(path), AutoTokenizer.from_pretrained(path)
    run = {"max_new_tokens": 6, "do_sample": False}
    text = pipeline("text-generation", model=model, tokenizer=tokenizer)("abc", **run)
    assert text[0]["generated_text"].startswith("abc")
    assert pipeline("text-generation", model=str(path))("abc", **run) == text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_leave_scales_alone(base: Path, dtype: torch.dtype) -> None:
    path = tiny_checkpoint(base, "llama")
    model, moved, wide = load(path, dtype=dtype), load(path).to(dtype), load(path)
    scales = {m.scale_min.dtype for m in packed_modules(wide).values()}
    for narrow in (model, moved):
        assert {m.scale_min.dtype for m in packed_modules(narrow).values()} == scales
        assert logits(narrow).dtype == dtype
        # a rounding after each of some twenty operations
        assert_close(logits(narrow), logits(wide), tolerance=5 * RELATIVE_RMS[dtype])
    assert model.lm_head.weight.dtype == dtype


def test_norms_are_rounded_once(base: Path) -> None:
    path = tiny_checkpoint(base, "gemma")
    narrow, wide = load(path, dtype=torch.bfloat16), load(path, dtype=torch.float32)
    given = {name: x for name, x in wide.named_parameters() if "norm" in name}
    assert any(not torch.equal(x, x.bfloat16().float()) for x in given.values())
    for name, x in given.items():
        assert torch.equal(narrow.get_parameter(name), x.bfloat16()), name


def test_a_copy_is_a_model_of_its_own(base: Path, tmp_path: Path) -> None:
    model = load(tiny_checkpoint(base, "qwen3-tied"))
    expected = logits(model)
    made = copy.deepcopy(model)
    assert made.lm_head.owner is made.model.embed_tokens
    model.model.embed_tokens.codes.zero_()
    assert torch.equal(logits(made), expected)
    made.save_pretrained(tmp_path)
    assert_same_checkpoint(tiny_checkpoint(base, "qwen3-tied"), tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "opt", "llama"])
def test_dequantize(base: Path, tmp_path: Path, family: str) -> None:
    path = tiny_checkpoint(base, family)
    model, reference = load(path), reference_model(path)
    model.dequantize(torch.float32)
    assert not packed_modules(model)
    assert torch.equal(logits(model), logits(reference))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(reference))


def test_the_weight_is_read_but_not_written(base: Path) -> None:
    linear = load(tiny_checkpoint(base, "llama")).model.layers[0].mlp.up_proj
    weight, dense = linear.weight, linear.dequantize()
    assert (weight.shape, weight.dtype, weight.device) == (dense.shape, dense.dtype, dense.device)
    assert torch.equal(weight + 0, dense)
    assert torch.equal(weight[3], dense[3])
    assert torch.equal(weight.data.clone(), dense)
    for write in (
        lambda: weight.add_(1),
        lambda: weight.data.copy_(dense),
        lambda: setattr(weight, "data", dense),
        lambda: weight.__setitem__(0, 0.0),
    ):
        with pytest.raises(QuantizationError, match=r"^weight: .*model\.dequantize\(\)"):
            write()


def test_memory_is_that_of_the_codes(base: Path) -> None:
    path = tiny_checkpoint(base, "qwen3-tied")
    stored = sum(w.nbytes for w in weights(path).values())
    held = load(path).get_memory_footprint()
    assert stored <= held <= stored + 4096  # and tables of rotary embeddings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "bits 7 is not"),
        ({"head_bits": 7}, "head_bits 7 is not"),
        ({"group_size": 48}, "group_size 48 is not"),
        ({"solver": "magic"}, "solver 'magic' is not"),
        ({"packing": "loose"}, "packing 'loose' is not"),
        ({"layout": "heap"}, "layout 'heap' is none"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head' is not"),
        ({"colour": 1}, "colour is unknown"),
        ({"version": 2}, "version is 2; this qoff reads version 1"),
    ],
)
def test_a_bad_configuration_names_its_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QoffError, match=message) as error:
        qoff.QoffConfig(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [{"version": 2}, {"bits": 7}, {"group_size": 48}])
def test_a_checkpoint_of_another_kind_names_the_key(
    checkpoint: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(checkpoint, copied)
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"].update(changes)
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(QoffError, match=f"{min(changes)} .*{changes[min(changes)]}"):
        load(copied)


def test_a_group_that_does_not_divide_names_the_weight(base: Path) -> None:
    message = r"^model\.layers\.0\.mlp\.down_proj\.weight: group_size 64 does not divide its 96"
    with pytest.raises(QuantizationError, match=message):
        load(tiny_model(base, "llama"), quantization_config=qoff.QoffConfig(group_size=64))


def test_not_a_number_names_the_weight(base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model(base, "llama"), tmp_path / "nan")
    file = tmp_path / "nan/model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(state, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: .*NaN"):
        load(tmp_path / "nan", quantization_config=qoff.QoffConfig(**CONFIG))


def test_imported_codes_are_no_way_to_quantize(base: Path) -> None:
    config = qoff.QoffConfig(group_size=32, solver="imported")
    with pytest.raises(QuantizationError, match="solver 'imported'"):
        load(tiny_model(base, "llama"), quantization_config=config)


def test_a_file_that_is_missing_or_cut_short_is_named(checkpoint: Path, tmp_path: Path) -> None:
    name = "model-layer-00002.safetensors"
    for damage in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-7])):
        copied = tmp_path / "copy"
        shutil.copytree(checkpoint, copied, dirs_exist_ok=True)
        damage(copied / name)
        with pytest.raises((FormatError, OSError), match=name):
            load(copied)


def test_offloading_what_is_no_qoff_checkpoint_is_refused(source: Path) -> None:
    options = {"quantization_config": qoff.QoffConfig(**CONFIG), "device_map": {"": "disk"}}
    with pytest.raises(ArgumentError, match=r"qoff\.load\(\.\.\., device_memory='8GiB'\) streams"):
        load(source, **options)


def test_a_bound_of_memory_is_compared_with_packed_weights(base: Path) -> None:
    path = tiny_checkpoint(base, "llama")
    held = load(path).get_memory_footprint()
    model = load(path, device_map="auto", max_memory={"cpu": 2 * held})  # half of that of floats
    assert torch.equal(logits(model), logits(load(path)))


def test_memory_of_a_gpu_that_is_not_there_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(ArgumentError, match="max_memory names 0, but the model runs on 'cpu'"):
        load(
            tiny_checkpoint(base, "llama"),
            device_map="auto",
            max_memory={0: "1GiB", "cpu": "1GiB"},
        )


@pytest.mark.parametrize("family", ["qwen3-tied", "mixtral"])
def test_packed_weights_count_as_parameters(base: Path, family: str) -> None:
    path = tiny_checkpoint(base, family)
    model, streamed = load(path), load(path, device_map="disk")
    for exclude in (False, True):
        wanted = reference_model(path).num_parameters(exclude_embeddings=exclude)
        for found in (model, streamed):
            assert found.num_parameters(exclude_embeddings=exclude) == wanted
    assert streamed.num_parameters(only_trainable=True) == 0
    whole = model.num_parameters()
    assert model.dequantize().num_parameters() == whole


def test_importing_qoff_imports_nothing_and_registers_it_later() -> None:
    code = """
import sys
import qoff
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs
assert configs["qoff"] is qoff.QoffConfig
assert quantizers["qoff"].__name__ == "QoffHfQuantizer"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_where_transformers_is_imported_already_it_is_registered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    for table in (configs, quantizers):
        monkeypatch.delitem(table, "qoff")
    for module in (accelerate, modeling_utils):  # what is registered beside; put back at the end
        monkeypatch.setattr(module, "check_and_set_device_map", lambda device_map: device_map)
    register_with_transformers()
    assert configs["qoff"] is qoff.QoffConfig
    assert quantizers["qoff"].__name__ == "QoffHfQuantizer"
    for module in (accelerate, modeling_utils):
        assert module.check_and_set_device_map("disk") == {"": "disk"}
