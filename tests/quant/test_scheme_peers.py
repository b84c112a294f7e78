"""Imports of what the defining packages wrote are exactly what these packages read.

The packages are no dependencies. With their files on PYTHONPATH (`pip install --no-deps --target`)
the tests run; of AutoGPTQ and AutoAWQ, whose packages need much to be imported, only the module
with the format is run.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qoff.quant import QTensor, Scheme, read_scheme
from tests.quant.packed_matrices import Tensors, joined, pieces, random_matrix

N, K = 64, 256


def module_of(package: str, path: str) -> ModuleType:
    """One module of a package, without its `__init__`; skips the test where there is none."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    file = Path(found.submodule_search_locations[0]) / path
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(scheme: Scheme, tensors: dict[str, Tensor], target: tuple[int, int] | None) -> Tensor:
    info = scheme.info(Tensors(tensors), "m")
    assert info is not None
    assert (info.shape, info.quantized) == ((N, K), target)
    found = pieces(scheme, tensors)
    assert all(isinstance(x, QTensor) == (target is not None) for x in found)
    return joined(found)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_gptq_is_what_auto_gptq_reads(bits: int, group: int) -> None:
    peer = module_of("auto_gptq", "nn_modules/qlinear/qlinear_cuda_old.py")
    matrix = random_matrix(N, K, bits, group)
    matrix.zeros.clamp_(min=1)  # AutoGPTQ's writer damages the neighbours of a 0
    if bits == 3:
        matrix.zeros.clamp_(max=6)  # and its reader does not wrap
    linear = nn.Linear(K, N, bias=False)
    linear.weight.data = matrix.value()
    packed = peer.QuantLinear(bits, group, K, N, bias=False, weight_dtype=torch.float32)
    packed.pack(linear, matrix.scales.float(), matrix.zeros.float(), None)
    read = packed(torch.eye(K)).T  # its own unpacking, in float32
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    tensors = {**packed.state_dict(), "scales": packed.scales.half()}
    target = (bits, 32 if group == 32 else 128)
    found = imported(read_scheme(config, "config: "), tensors, target)
    assert torch.equal(found, matrix.value())
    assert torch.equal(found, read)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_is_what_auto_awq_reads(group: int) -> None:
    peer = module_of("awq", "utils/packing_utils.py")
    torch.manual_seed(group)
    tensors = {
        "qweight": torch.randint(-(2**31), 2**31, (K, N // 8)).int(),
        "qzeros": torch.randint(-(2**31), 2**31, (K // group, N // 8)).int(),
        "scales": (torch.rand(K // group, N) * 0.02).half(),
    }
    read = peer.dequantize_gemm(
        tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group
    )
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    found = imported(read_scheme(config, "config: "), tensors, (4, group))
    assert torch.equal(found, read.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors_are_what_the_package_reads(
    bits: int, strategy: str, symmetric: bool
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = 64 if strategy == "group" else -1
    matrix = random_matrix(N, K, bits, group, sym=symmetric)
    options: dict[str, Any] = {"group_size": 64} if strategy == "group" else {}
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    zeros = (matrix.zeros - (1 << (bits - 1))).to(torch.int8)
    state = {
        "weight": matrix.value(),
        "weight_scale": matrix.scales.float(),
        "weight_zero_point": zeros,
    }
    packed = PackedQuantizationCompressor.compress(state, scheme)
    read = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    target = (bits, 64 if strategy == "group" else 128)
    found = imported(read_scheme(config, "config: "), packed, target)
    assert torch.equal(found, matrix.value())
    assert torch.equal(found, read)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_bitsandbytes_is_what_the_package_reads(kind: str, nested: bool, block: int) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(
        torch.randn(N, K), blocksize=block, compress_statistics=nested, quant_type=kind
    )
    read = functional.dequantize_4bit(packed, state)
    tensors = {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = imported(read_scheme(config, "config: "), {**tensors, "weight": packed}, None)
    assert torch.equal(found, read)


def test_llm_int8_is_what_the_package_reads() -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(torch.randn(N, K).half())
    read = functional.int8_vectorwise_dequant(codes, scales)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {"weight": codes, "SCB": scales}
    found = imported(read_scheme(config, "config: "), tensors, None)
    assert torch.allclose(found, read, rtol=1e-6, atol=0)  # it multiplies by 1/127, rounded
