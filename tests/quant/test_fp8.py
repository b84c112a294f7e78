"""8-bit floats are read as the products of their values and scales, whatever shares a scale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import FormatError, QuantizationError, UnsupportedModelError
from qoff.models.convert.convert import convert
from qoff.plan.native_sizes import NativeSizes
from qoff.quant import QuantConfig, Scheme, TensorInfo, read_scheme
from tests.module_models import module_source
from tests.quant.packed_matrices import Tensors, joined, pieces
from tests.tiny_models import save_model

N, K = 80, 200  # blocks of 32 x 48 end beyond both
BLOCK = (32, 48)
EIGHT = QuantConfig(bits=8, group_size=32, solver="rtn")
LINEAR = ("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
FINE: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
WHOLE: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": None}
FBGEMM: dict[str, Any] = {"quant_method": "fbgemm_fp8"}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    group = {"weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**config, "config_groups": {"group_0": group}}


def groups(*each: dict[str, Any]) -> dict[str, Any]:
    """Groups of modules for a config."""
    return {"config_groups": dict(zip("ab", each, strict=False))}


SIZES = [compressed("block", block_structure=[n, n])["config_groups"]["group_0"] for n in (32, 64)]


def scheme(config: dict[str, Any]) -> Scheme:
    return read_scheme(config, "config: ")


def stored(n: int, k: int, block: tuple[int, int], powers: bool = False) -> tuple[Tensor, ...]:
    """Random codes [n, k], the scales of blocks, and the values, entry by entry."""
    codes = (torch.randn(n, k) * 100).to(torch.float8_e4m3fn)
    down, across = block
    shape = (-(-n // down), -(-k // across))
    scales = torch.rand(shape) / 1000 + 1e-6
    if powers:
        scales = 2.0 ** torch.randint(-9, 9, shape)
    values = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            values[row, column] = codes[row, column].float() * scales[row // down, column // across]
    return codes, scales, values


@pytest.mark.parametrize(
    ("config", "name", "block", "shape"),
    [
        (FINE, "weight_scale_inv", BLOCK, None),
        (WHOLE, "weight_scale_inv", (N, K), ()),
        (FBGEMM, "weight_scale", (1, K), None),
        (compressed("tensor"), "weight_scale", (N, K), (1,)),
        (compressed("channel"), "weight_scale", (1, K), (N,)),
        (compressed("block", block_structure=list(BLOCK)), "weight_scale", BLOCK, None),
    ],
)
def test_values_are_exact(
    config: dict[str, Any], name: str, block: tuple[int, int], shape: tuple[int, ...] | None
) -> None:
    codes, scales, values = stored(N, K, block)
    tensors = {"weight": codes, name: scales if shape is None else scales.view(shape)}
    assert scheme(config).info(Tensors(tensors), "m") == TensorInfo((N, K), None)
    assert torch.equal(joined(pieces(scheme(config), tensors)), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_of_other_dtypes(dtype: torch.dtype) -> None:
    codes, scales, values = stored(N, K, BLOCK, powers=True)
    narrow = scales.to(torch.float8_e8m0fnu).view(torch.uint8) if dtype == torch.uint8 else None
    tensors = {"weight": codes, "weight_scale_inv": scales.to(dtype) if narrow is None else narrow}
    found = pieces(scheme({**FINE, "scale_fmt": "ue8m0"}), tensors)
    assert torch.equal(joined(found), values)


def test_modules_of_floats_are_none_of_it() -> None:
    tensors = Tensors({"weight": torch.zeros(N, K, dtype=torch.bfloat16)})
    assert scheme(FINE).info(tensors, "m") is None


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (FINE, {"weight_scale_inv": None}, r"tensor m.weight_scale_inv is missing"),
        (
            FINE,
            {"weight_scale_inv": torch.ones(3, 4)},
            r"m.weight_scale_inv is float32 \[3, 4\]; expected .* \[3, 5\]",
        ),
        (FINE, {"weight_scale_inv": torch.ones(3, 5).long()}, r"is int64 \[3, 5\]"),
        (WHOLE, {"weight_scale_inv": torch.ones(N, 1).long()}, r"is int64 \[80, 1\]"),
        (WHOLE, {"weight_scale_inv": torch.ones(3, 5)}, r"expected .* \[80, 1\]"),
        (FINE, {"weight_scale_inv": torch.full((3, 5), torch.nan)}, r"inv holds NaN"),
        (
            FINE,
            {"weight_scale_inv": torch.full((3, 5), 255, dtype=torch.uint8)},
            r"m.weight_scale_inv holds NaN",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(
    config: dict[str, Any], change: dict[str, Tensor | None], message: str
) -> None:
    codes, scales, _ = stored(N, K, BLOCK)
    tensors = {"weight": codes, "weight_scale_inv": scales, **change}
    found = {name: x for name, x in tensors.items() if x is not None}
    with pytest.raises(FormatError, match=message):
        pieces(scheme(config), found)
    if "NaN" not in message:  # what is known without reading
        with pytest.raises(FormatError, match=message):
            scheme(config).info(Tensors(found), "m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FINE, "weight_block_size": [128]}, r"weight_block_size is \[128\]; supported: two"),
        ({**FINE, "weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\]"),
        ({**FINE, "expert_dtype": "fp6"}, r"expert_dtype is 'fp6'; supported: 'fp8', 'fp4'"),
        ({**FINE, "scale_fmt": "odd"}, r"scale_fmt is 'odd'"),
        (compressed("group"), r"group_0.weights.strategy is 'group'; supported: 'tensor'"),
        (compressed("tensor", type="int"), r"weights.type is 'int'; supported: 'float'"),
        (compressed("tensor", num_bits=4), r"weights.num_bits is 4; supported: 8"),
        (compressed("block"), r"block_structure is None; supported: two whole numbers"),
        ({**compressed("tensor"), "config_groups": {}}, r"config_groups is {}"),
        ({**compressed("tensor"), "config_groups": {"a": 7}}, r"config_groups.a is 7"),
        ({**compressed("tensor"), "transform_config": {"x": {}}}, r"transform_config is {'x': {}}"),
        (compressed("tensor") | groups({"format": "pack-quantized"}), r"a.format is 'pack-quantiz"),
        (compressed("tensor") | groups(*SIZES), r"config_groups is .*; supported: blocks of one"),
    ],
)
def test_configs_without_an_implementation_are_named(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        scheme(config)


def save(folder: Path, family: str) -> dict[str, Tensor]:
    """A tiny model whose linear layers are 8-bit floats; returns its tensors in float32."""
    save_model(folder, family, num_hidden_layers=2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    floats = dict(tensors)
    for name in [name for name in tensors if name.endswith(LINEAR)]:
        n, k = tensors[name].shape
        codes, scales, floats[name] = stored(n, k, BLOCK)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, file, {"format": "pt"})
    edit(folder, quantization_config=FINE)
    return floats


def edit(folder: Path, **changes: Any) -> None:
    """Change the config of a model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("family", ["deepseek-v3", "minimax-m2"])
def test_a_model_becomes_what_its_values_become(family: str, tmp_path: Path) -> None:
    """With scales of ragged blocks, experts and latent attention."""
    floats = save(tmp_path / "model", family)
    sizes = NativeSizes.of(json.loads((tmp_path / "model" / "config.json").read_text()), EIGHT)
    found = Checkpoint.open(convert(tmp_path / "model", tmp_path / "out", quant=EIGHT))
    save_file(floats, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "model", quantization_config=None)
    wanted = Checkpoint.open(convert(tmp_path / "model", tmp_path / "wanted", quant=EIGHT))
    for ours, theirs in zip(found.files, wanted.files, strict=True):
        assert ours.path.read_bytes() == theirs.path.read_bytes()
    assert sizes.nbytes == NativeSizes.of_checkpoint(found).nbytes


def stored_in_4_bits(n: int, k: int) -> tuple[Tensor, ...]:
    """Random pairs of E2M1 [n, k / 2], the scales of 32 columns, and the values, one by one."""
    codes = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    scales = (2.0 ** torch.randint(-6, 0, (n, k // 32))).to(torch.float8_e8m0fnu)
    values = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            nibble = (int(codes[row, column // 2]) & 255) >> 4 * (column % 2) & 15
            sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
            size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            values[row, column] = (-1) ** sign * size * scales[row, column // 32].float()
    return codes, scales, values


FP4 = {**FINE, "expert_dtype": "fp4"}


def test_values_of_4_bits_are_exact() -> None:
    codes, scales, values = stored_in_4_bits(N, 192)
    tensors = {"weight": codes, "scale": scales}
    assert scheme(FP4).info(Tensors(tensors), "m") == TensorInfo((N, 192), None)
    assert torch.equal(joined(pieces(scheme(FP4), tensors)), values)
    assert scheme(FINE).info(Tensors(tensors), "m") is None
    with pytest.raises(FormatError, match=r"scale is float8_e8m0fnu \[80, 5\]; expected .*80, 6"):
        scheme(FP4).info(Tensors({"weight": codes, "scale": scales[:, :5]}), "m")


@pytest.mark.parametrize("name", ["scale", "qscale_weight"])
def test_other_names_of_scales(name: str) -> None:
    codes, scales, values = stored(N, K, BLOCK)
    assert torch.equal(joined(pieces(scheme(FINE), {"weight": codes, name: scales})), values)


def test_a_published_deepseek_v4_becomes_what_its_values_become(base: Path, tmp_path: Path) -> None:
    """Attention of 8 bits, experts of 4, and names as DeepSeek has them."""
    source = tmp_path / "model"
    shutil.copytree(module_source(base, "deepseek_v4"), source)
    file = source / "model.safetensors"
    tensors = {name.removeprefix("model."): x for name, x in load_file(file).items()}
    floats = dict(tensors)
    matrices = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", ".w1.", ".w2.", ".w3.")
    for name in [x for x in tensors if any(one in x for one in matrices)]:
        small = ".experts." in name
        n, k = tensors[name].shape
        codes, scales, floats[name] = stored_in_4_bits(n, k) if small else stored(n, k, BLOCK)
        tensors |= {name: codes, f"{name.removesuffix('.weight')}.scale": scales}
    save_file(tensors, file, {"format": "pt"})
    edit(source, quantization_config=FINE, expert_dtype="fp4")
    found = Checkpoint.open(convert(source, tmp_path / "out", quant=EIGHT))
    save_file(floats, file, {"format": "pt"})
    edit(source, quantization_config=None)
    wanted = Checkpoint.open(convert(source, tmp_path / "wanted", quant=EIGHT))
    assert any(".experts." in name for name in found.layers[1].weights)
    for ours, theirs in zip(found.files, wanted.files, strict=True):
        assert ours.path.read_bytes() == theirs.path.read_bytes()
    kinds = {n: type(x).__name__ for n, x in found.layers[1].weights.items() if "_a_proj" in n}
    assert set(kinds.values()) == {"QuantEntry"}


def test_8_bit_floats_without_scales_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "model", "llama")
    edit(tmp_path / "model", quantization_config=None)
    with pytest.raises(FormatError, match=r"_proj.weight is of 8-bit floats, and quantization_con"):
        convert(tmp_path / "model", tmp_path / "out", quant=EIGHT)


def test_nan_among_the_values_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model", "llama")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=rf"{name}.*NaN"):
        convert(tmp_path / "model", tmp_path / "out", quant=EIGHT)
