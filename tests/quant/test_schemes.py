"""Quantized checkpoints: codes and values exactly those written; what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.kernels.layout.packing import unpack_codes
from qoff.quant import QTensor, Scheme, TensorInfo, read_scheme
from tests.quant.packed_matrices import (
    Matrix,
    Tensors,
    awq,
    bnb4,
    bnb8,
    compressed,
    gptq,
    joined,
    pieces,
    random_matrix,
)

N, K = 80, 384  # five pieces of 16 rows; divided by groups of 32, 64, 96, 128 and 192


def gptq_scheme(bits: int = 4, group: int = 32, **more: Any) -> Scheme:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}
    return read_scheme(config, "config: ")


def awq_scheme(group: int = 32, **more: Any) -> Scheme:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, **more}
    return read_scheme({"version": "gemm", **config}, "config: ")


def compressed_config(bits: int = 4, strategy: str = "group", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", **more}
    return {"config_groups": {"group_0": group}, "ignore": ["lm_head"], **config}


def compressed_scheme(bits: int = 4, **more: Any) -> Scheme:
    return read_scheme(compressed_config(bits, **more), "config: ")


def bnb_scheme() -> Scheme:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return read_scheme(config, "config: ")


def check_exact(
    scheme: Scheme, tensors: dict[str, Tensor], matrix: Matrix, target: tuple[int, int]
) -> None:
    """The codes as written, and exactly the values."""
    assert scheme.info(Tensors(tensors), "m") == TensorInfo((N, K), target)
    found = pieces(scheme, tensors)
    assert torch.equal(joined(found), matrix.value())
    codes = []
    for piece in found:
        assert isinstance(piece, QTensor)
        assert (piece.bits, piece.group_size) == target
        codes.append(unpack_codes(piece.codes, piece.shape, piece.bits, piece.packing))
    assert torch.equal(torch.cat(codes).long(), matrix.codes)


def check_floats(scheme: Scheme, tensors: dict[str, Tensor], matrix: Matrix, obstacle: str) -> None:
    """No codes, exactly the values, and a reason."""
    info = scheme.info(Tensors(tensors), "m")
    assert info is not None
    assert (info.shape, info.quantized) == ((N, K), None)
    assert obstacle in (info.obstacle or "")
    found = pieces(scheme, tensors)
    assert all(isinstance(x, Tensor) and x.dtype == torch.float32 for x in found)
    assert torch.equal(joined(found), matrix.value())


# groups of other sizes fall into the largest of ours that divides them
GROUPS = {32: 32, 64: 64, 128: 128, 96: 32, 192: 64, -1: 128}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_is_exact(bits: int, group: int, version: int) -> None:
    stored = "gptq" if version == 1 else "gptq_v2"
    scheme = gptq_scheme(bits, group, checkpoint_format=stored)
    assert scheme == gptq_scheme(bits, group, format=stored)
    for sym in (False, True):
        matrix = random_matrix(N, K, bits, group, sym=sym)
        tensors = gptq(matrix, version)
        for g_idx in (True, False):
            if not g_idx:
                del tensors["g_idx"]
            check_exact(scheme, tensors, matrix, (bits, GROUPS[group]))


def test_gptq_reads_bits_and_groups_of_modules_with_their_own() -> None:
    scheme = gptq_scheme(4, 128, dynamic={"+:.*": {"bits": 8, "group_size": 32}})
    for bits, group in ((8, 32), (4, 128), (3, 64)):
        matrix = random_matrix(N, K, bits, group)
        check_exact(scheme, gptq(matrix), matrix, (bits, group))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_act_order_and_small_groups_come_as_floats(bits: int) -> None:
    matrix = random_matrix(N, K, bits, 64, shuffled=True)
    scheme = gptq_scheme(bits, 64, desc_act=True)
    check_floats(scheme, gptq(matrix), matrix, "another order (desc_act, tensor m.g_idx)")
    matrix = random_matrix(N, K, bits, 16)
    check_floats(gptq_scheme(bits, 16), gptq(matrix), matrix, "has group_size 16")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("version", ["gemm", "GEMM"])
def test_awq_is_exact(group: int, version: str) -> None:
    matrix = random_matrix(N, K, 4, group)
    check_exact(awq_scheme(group, version=version), awq(matrix), matrix, (4, GROUPS[group]))


def test_awq_takes_the_keys_of_older_versions_and_refuses_small_groups() -> None:
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    matrix = random_matrix(N, K, 4, 64)
    check_exact(read_scheme(old, "quant_config.json: ", "awq"), awq(matrix), matrix, (4, 64))
    matrix = random_matrix(N, K, 4, 16)
    check_floats(awq_scheme(16), awq(matrix), matrix, "has group_size 16")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compressed_tensors_are_exact(bits: int, group: int, dtype: torch.dtype) -> None:
    strategy = "channel" if group == -1 else "group"
    scheme = read_scheme(compressed_config(bits, strategy), "config: ")
    for sym in (False, True):
        matrix = random_matrix(N, K, bits, group, sym=sym, dtype=dtype)
        target = (bits, GROUPS[group])
        tensors = compressed(matrix, sym=sym)
        check_exact(scheme, tensors, matrix, target)
        tensors["weight_g_idx"] = torch.full((K,), -1, dtype=torch.int32)  # not set
        check_exact(scheme, tensors, matrix, target)
        if not sym:  # as written before version 0.9
            signed = matrix.zeros - (1 << (bits - 1))
            tensors["weight_zero_point"] = signed.to(torch.int8)
            check_exact(scheme, tensors, matrix, target)


def test_compressed_tensors_of_several_widths_are_told_apart_by_their_words() -> None:
    groups = {
        name: {**compressed_config(bits)["config_groups"]["group_0"], "format": "pack-quantized"}
        for name, bits in (("a", 8), ("b", 2))
    }
    config = compressed_config(format="mixed-precision", config_groups=groups)
    for bits in (2, 8):
        matrix = random_matrix(N, K, bits, 32)
        tensors = compressed(matrix, sym=False)
        check_exact(read_scheme(config, "config: "), tensors, matrix, (bits, 32))


def test_compressed_tensors_with_actorder_come_as_floats() -> None:
    matrix = random_matrix(N, K, 4, 128, shuffled=True)
    tensors = compressed(matrix, sym=False, shuffled=True)
    check_floats(compressed_scheme(), tensors, matrix, "(actorder, tensor m.weight_g_idx)")


def test_rows_that_fill_no_word() -> None:
    """Zero points are packed along rows, of which there may be any number."""
    matrix = random_matrix(37, 64, 4, 32)
    tensors = compressed(matrix, sym=False)
    assert torch.equal(joined(pieces(compressed_scheme(), tensors)), matrix.value())
    found = joined(pieces(gptq_scheme(), gptq(matrix)))
    assert torch.equal(found, matrix.value())


def test_scales_are_float16_where_that_is_exact() -> None:
    for sym, dtype in ((True, torch.float16), (False, torch.float32)):
        matrix = random_matrix(16, 64, 4, 32, sym=sym)
        (piece,) = pieces(gptq_scheme(), gptq(matrix))
        assert isinstance(piece, QTensor)
        assert piece.scale_min.dtype == dtype


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 4096])
def test_bitsandbytes_comes_as_its_values(kind: str, nested: bool, block: int) -> None:
    tensors, value = bnb4(N, 54, kind=kind, nested=nested, block=block)  # blocks across rows
    scheme = bnb_scheme()
    assert scheme.info(Tensors(tensors), "m") == TensorInfo((N, 54), None)
    assert torch.equal(joined(pieces(scheme, tensors)), value)
    for dtype in (torch.bfloat16, torch.float32):  # bnb_4bit_quant_storage
        stored = tensors["weight"].view(-1).view(dtype)[:, None]
        assert torch.equal(joined(pieces(scheme, {**tensors, "weight": stored})), value)


def test_llm_int8_comes_as_its_values() -> None:
    tensors, value = bnb8(N, K)
    assert bnb_scheme().info(Tensors(tensors), "m") == TensorInfo((N, K), None)
    assert torch.equal(joined(pieces(bnb_scheme(), tensors)), value)


def test_modules_that_are_not_quantized_are_left_alone() -> None:
    tensors = Tensors({"weight": torch.randn(4, 4)})
    for scheme in (gptq_scheme(), awq_scheme(), compressed_scheme(), bnb_scheme()):
        assert scheme.info(tensors, "m") is None
        assert scheme.info(tensors, "n") is None
