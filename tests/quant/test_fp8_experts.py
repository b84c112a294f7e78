"""Experts in one tensor of 8-bit floats are read as the products of their values and scales."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import FormatError, UnsupportedModelError
from qoff.models.convert.convert import convert
from qoff.quant import TensorInfo
from qoff.quant.fp8 import FP8
from tests.module_models import changed, module_source
from tests.quant.packed_matrices import Tensors
from tests.quant.test_fp8 import BLOCK, EIGHT, FBGEMM, FINE, WHOLE, compressed, scheme
from tests.tiny_models import save_model

E, N, K = 3, 80, 200  # blocks of 32 x 48 end beyond both
SHAPES = {  # of scales, and of those of one expert that its values are multiplied by
    "one": ((), (1, 1)),
    "matrices": ((E,), (1, 1)),
    "halves": ((E, 2, 1), (2, 1)),
    "halves of columns": ((E, 1, 2), (1, 2)),
    "rows": ((E, N, 1), (N, 1)),
    "rows of all": ((E * N, 1), (N, 1)),
    "columns": ((E, 1, K), (1, K)),
    "columns, apart": ((E, K, 1), (1, K)),
}
Codes = dict[str, Tensor]


def fp8(config: dict[str, Any]) -> FP8:
    found = scheme(config)
    assert isinstance(found, FP8)
    return found


def random_codes(*shape: int) -> Tensor:
    return (torch.randn(shape) * 100).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("config", "name"),
    [(WHOLE, "w_scale_inv"), (FBGEMM, "w_scale"), (compressed("channel"), "w.weight_scale")],
)
def test_values_are_exact(config: dict[str, Any], name: str, kind: str) -> None:
    shape, each = SHAPES[kind]
    codes, scales = random_codes(E, N, K), torch.rand(shape) / 1000 + 1e-6
    tensors = Tensors({"w": codes, name: scales})
    assert fp8(config).stack(tensors, "m.w") == TensorInfo((E, N, K), None)
    for e in range(E):
        own = scales.expand(E) if kind == "one" else scales
        grid = own.reshape(E, *each)[e].repeat_interleave(N // each[0], 0)
        grid = grid.repeat_interleave(K // each[1], 1)
        wanted = codes[e].float() * grid
        assert torch.equal(fp8(config).item(tensors, "m.w", e), wanted)


@pytest.mark.parametrize("powers", [False, True])
def test_blocks_that_end_beyond_a_matrix(powers: bool) -> None:
    codes, (down, across) = random_codes(E, N, K), BLOCK
    scales = 2.0 ** torch.randint(-9, 9, (E, -(-N // down), -(-K // across)))
    stored = scales.to(torch.float8_e8m0fnu).view(torch.uint8) if powers else scales
    tensors = Tensors({"weight": codes, "weight_scale_inv": stored})
    each = scales.repeat_interleave(down, 1).repeat_interleave(across, 2)[:, :N, :K]
    for e in range(E):
        found = fp8(FINE).item(tensors, "m.weight", e)
        assert torch.equal(found, codes[e].float() * each[e])


def test_scales_of_square_matrices_are_not_guessed() -> None:
    square = {"w": random_codes(E, N, N), "w_scale": torch.ones(E, N)}
    with pytest.raises(FormatError, match=r"w_scale is float32 \[3, 80\]; expected scales of each"):
        fp8(compressed("channel")).stack(Tensors(square), "m.w")
    columns = torch.rand(E, N, 1)
    found = fp8(FBGEMM).item(Tensors(square | {"w_scale": columns}), "m.w", 1)
    assert torch.equal(found, square["w"][1].float() * columns[1].T)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, r"tensor m.w_scale_inv is missing"),
        (torch.ones(E, 7, 1), r"w_scale_inv is float32 \[3, 7, 1\]; expected scales of each"),
        (torch.ones(E).long(), r"w_scale_inv is int64 \[3\]"),
        (torch.full((E,), torch.nan), r"w_scale_inv holds NaN"),
    ],
)
def test_scales_that_do_not_fit_are_named(scales: Tensor | None, message: str) -> None:
    beside = {} if scales is None else {"w_scale_inv": scales}
    tensors = Tensors({"w": random_codes(E, N, K), **beside})
    with pytest.raises(FormatError, match=message):
        fp8(WHOLE).item(tensors, "m.w", 0)


def coded(values: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a stack, scales of a shape that can be broadcast, and the values that they mean."""
    codes, scales = (values * 100).to(torch.float8_e4m3fn), torch.rand(shape) / 50 + 1e-3
    return codes, scales, codes.float() * scales


def in_one_tensor(tensors: Codes) -> Codes:
    """The same with experts in one tensor, gate above up, as transformers has them in memory."""
    found, stacks = Codes(), dict[str, dict[tuple[int, str], Tensor]]()
    for name, values in tensors.items():
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if one is None:
            found[name] = values
        else:
            which = "down_proj" if one[3] == "down" else "gate_up_proj"
            stacks.setdefault(f"{one[1]}.{which}", {})[int(one[2]), one[3]] = values
    for name, parts in stacks.items():
        experts = range(1 + max(e for e, _ in parts))
        kinds = ("down",) if "down" in name else ("gate", "up")
        found[name] = torch.stack([torch.cat([parts[e, x] for x in kinds]) for e in experts])
    return found


def by_matrix(values: Tensor) -> tuple[int, ...]:
    return len(values), 1, 1


def by_row(values: Tensor) -> tuple[int, ...]:
    return (*values.shape[:2], 1)


def by_column(values: Tensor) -> tuple[int, ...]:
    return len(values), 1, values.shape[2]


def assert_becomes_the_same(
    source: Path, config: dict[str, Any], tensors: Codes, values: Codes, tmp_path: Path
) -> None:
    """Compare the checkpoints of codes and of the floats that they mean."""
    file = source / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    changed(source, quantization_config=config)
    found = Checkpoint.open(convert(source, tmp_path / "found", quant=EIGHT))
    save_file(values, file, {"format": "pt"})
    changed(source, quantization_config=None)
    wanted = Checkpoint.open(convert(source, tmp_path / "wanted", quant=EIGHT))
    for ours, theirs in zip(found.files, wanted.files, strict=True):
        assert ours.path.read_bytes() == theirs.path.read_bytes()


@pytest.mark.parametrize(
    ("family", "config", "suffix", "shape"),
    [
        ("qwen3-moe", WHOLE, "_scale_inv", by_matrix),
        ("qwen3.5-moe", compressed("channel"), ".weight_scale", by_row),
        ("llama4", FBGEMM, "_scale", by_column),
        ("gpt-oss", compressed("channel"), "_weight_scale", by_column),
        ("granite-moe", compressed("channel"), "_scale", by_row),
    ],
)
def test_a_model_becomes_what_its_values_become(
    family: str,
    config: dict[str, Any],
    suffix: str,
    shape: Callable[[Tensor], tuple[int, ...]],
    tmp_path: Path,
) -> None:
    """Whether its family has experts in one tensor or apart, and rows of outputs or columns."""
    source = tmp_path / "model"
    save_model(source, family)
    values = in_one_tensor(load_file(source / "model.safetensors"))
    tensors = dict(values)
    stacks = [name for name in values if values[name].dim() == 3 and "conv1d" not in name]
    assert stacks
    for name in stacks:
        codes, scales, values[name] = coded(values[name], shape(values[name]))
        tensors |= {name: codes, f"{name}{suffix}": scales}
    assert_becomes_the_same(source, config, tensors, values, tmp_path)


def test_experts_of_llama_4_that_a_tool_took_apart(tmp_path: Path) -> None:
    source = tmp_path / "model"
    save_model(source, "llama4")
    tensors, values = Codes(), Codes()
    for name, stored in load_file(source / "model.safetensors").items():
        parts = {name: stored}
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate", "up"), stored.chunk(2, dim=2), strict=True)
            parts = {name.replace("gate_up", x): half for x, half in halves}
        for part, stack in parts.items():
            if ".experts." not in part:
                tensors[part] = values[part] = stack
                continue
            for e, matrix in enumerate(stack):
                own = part.replace(".experts.", f".experts.{e}.") + ".weight"
                rows = matrix.T.contiguous()
                tensors[own], scales, values[own] = coded(rows, (len(rows), 1))
                tensors[f"{own}_scale"] = scales
                tensors[own.replace("weight", "input_scale")] = torch.ones(1)
    assert_becomes_the_same(source, compressed("channel"), tensors, values, tmp_path)


def test_models_without_a_spec(base: Path, tmp_path: Path) -> None:
    """Through transformers' modules: linear layers, and experts of either form."""
    values = in_one_tensor(load_file(module_source(base, "jamba") / "model.safetensors"))
    source = tmp_path / "model"
    source.mkdir()
    for file in module_source(base, "jamba").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = dict(values)
    for name in [name for name in values if values[name].dim() == 3 and "conv1d" not in name]:
        codes, scales, values[name] = coded(values[name], by_row(values[name]))
        tensors |= {name: codes, f"{name}_scale": scales}
    for name in [name for name in values if name.endswith("self_attn.q_proj.weight")]:
        codes, scales, values[name] = coded(values[name], (len(values[name]), 1))
        tensors |= {name: codes, f"{name}_scale": scales}
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    stored = Tensors(tensors)
    scales_of_all = {f"m.{name}" for name in tensors if name not in values}
    assert fp8(compressed("channel")).beside(stored, stored.tensors) == scales_of_all != set()
    assert_becomes_the_same(source, compressed("channel"), tensors, values, tmp_path)
    changed(source, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(UnsupportedModelError, match=r"for which no quantized weights but 8-bit"):
        convert(source, tmp_path / "out", quant=EIGHT)
