"""Quantized checkpoints: codes and values exactly those written; what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError
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
    for sym in (False, True):
        matrix = random_matrix(N, K, bits, group, sym=sym)
        tensors = gptq(matrix, version)
        for g_idx in (True, False):
            if not g_idx:
                del tensors["g_idx"]
            check_exact(scheme, tensors, matrix, (4 if bits <= 4 else 8, GROUPS[group]))


def test_gptq_reads_bits_and_groups_of_modules_with_their_own() -> None:
    scheme = gptq_scheme(4, 128, dynamic={"+:.*": {"bits": 8, "group_size": 32}})
    for bits, group in ((8, 32), (4, 128), (3, 64)):
        matrix = random_matrix(N, K, bits, group)
        check_exact(scheme, gptq(matrix), matrix, (4 if bits <= 4 else 8, group))


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
        target = (4 if bits <= 4 else 8, GROUPS[group])
        tensors = compressed(matrix, sym=sym)
        check_exact(scheme, tensors, matrix, target)
        tensors["weight_g_idx"] = torch.full((K,), -1, dtype=torch.int32)  # not set
        check_exact(scheme, tensors, matrix, target)
        if not sym:  # as written before version 0.9
            signed = matrix.zeros - (1 << (bits - 1))
            tensors["weight_zero_point"] = signed.to(torch.int8)
            check_exact(scheme, tensors, matrix, target)


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


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return damage


def _set(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value

    return damage


def _int(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


_STATE = "weight.quant_state.bitsandbytes__nf4"
_BLOCKS = N * K // 64


def _state(text: str) -> Callable[[dict[str, Tensor]], None]:
    return _set(_STATE, torch.tensor(list(text.encode()), dtype=torch.uint8))


def _gptq() -> dict[str, Tensor]:
    return gptq(random_matrix(N, K, 4, 32))


def _awq() -> dict[str, Tensor]:
    return awq(random_matrix(N, K, 4, 32))


def _compressed() -> dict[str, Tensor]:
    return compressed(random_matrix(N, K, 4, 32), sym=False)


def _bnb() -> dict[str, Tensor]:
    return bnb4(N, K)[0]


@pytest.mark.parametrize(
    ("scheme", "make", "damage", "message"),
    [
        (gptq_scheme, _gptq, _drop("scales"), r"model: tensor m.scales is missing"),
        (gptq_scheme, _gptq, _drop("qzeros"), r"tensor m.qzeros is missing"),
        (
            gptq_scheme,
            _gptq,
            _set("scales", torch.ones(12, 79).half()),
            r"m.scales is float16 \[12, 79\]; expected .*float16.* \[any, 80\]",
        ),
        (
            gptq_scheme,
            _gptq,
            _set("scales", torch.ones(11, N).half()),
            r"m.qzeros is int32 \[12, 10\]; expected int32 \[11, 10\]",
        ),
        (
            gptq_scheme,
            _gptq,
            _set("qweight", _int(47, N)),
            r"m.g_idx is int32 \[384\]; expected int32 or int64 \[376\]",
        ),
        (gptq_scheme, _gptq, _set("qweight", torch.ones(48, N)), r"m.qweight is float32"),
        (
            gptq_scheme,
            _gptq,
            _set("g_idx", torch.arange(K).int()),
            r"m.g_idx holds group 12; expected 0 to 11",
        ),
        (gptq_scheme, _gptq, _set("g_idx", _int(K + 1)), r"m.g_idx is int32 \[385\]"),
        (
            lambda: gptq_scheme(3),
            _gptq,
            _set("qweight", _int(47, N)),
            r"m.qzeros is int32 \[12, 10\]; expected int32 \[12, 8\]",
        ),
        (
            lambda: gptq_scheme(4, 64),
            _gptq,
            lambda t: None,
            r"m.scales has 12 groups; expected 6 for 384 inputs of group_size 64",
        ),
        (
            lambda: gptq_scheme(dynamic={"+:x": {}}),
            _gptq,
            _set("qzeros", _int(12, 7)),
            r"m.qzeros has 7 columns for 80 outputs",
        ),
        (awq_scheme, _awq, _drop("scales"), r"tensor m.scales is missing"),
        (awq_scheme, _awq, _drop("qzeros"), r"tensor m.qzeros is missing"),
        (
            awq_scheme,
            _awq,
            _set("qzeros", _int(12, 9)),
            r"m.qzeros is int32 \[12, 9\]; expected int32 \[12, 10\]",
        ),
        (
            lambda: awq_scheme(80),
            _awq,
            lambda t: None,
            r"m.qweight has 384 inputs; expected a multiple of group_size 80",
        ),
        (compressed_scheme, _compressed, _drop("weight_scale"), r"m.weight_scale is missing"),
        (compressed_scheme, _compressed, _drop("weight_shape"), r"m.weight_shape is missing"),
        (
            compressed_scheme,
            _compressed,
            _set("weight_shape", torch.tensor([N, 2 * K])),
            r"m.weight_packed has 48 columns for 768 inputs; expected those of 4 bits",
        ),
        (
            compressed_scheme,
            _compressed,
            _set("weight_shape", torch.tensor([N + 8, K])),
            r"m.weight_packed is int32 \[80, 48\]; expected int32 \[88, any\]",
        ),
        (
            compressed_scheme,
            _compressed,
            _set("weight_scale", torch.ones(N, 11)),
            r"m.weight_scale has 11 groups, which do not divide 384",
        ),
        (
            compressed_scheme,
            _compressed,
            _set("weight_zero_point", _int(N, 12)),
            r"m.weight_zero_point is int32 \[80, 12\]; expected .* \[10, 12\]",
        ),
        (bnb_scheme, _bnb, _drop("weight.absmax"), r"m.weight.absmax is missing"),
        (bnb_scheme, _bnb, _drop("weight.quant_map"), r"m.weight.quant_map is missing"),
        (bnb_scheme, _bnb, _drop(_STATE), r"m.weight.quant_state.* is missing"),
        (
            bnb_scheme,
            _bnb,
            _set("weight.absmax", torch.ones(_BLOCKS - 1)),
            rf"m.weight.absmax is float32 \[{_BLOCKS - 1}\]; expected .*\[{_BLOCKS}\]",
        ),
        (
            bnb_scheme,
            _bnb,
            _set("weight", torch.zeros(7, 1, dtype=torch.uint8)),
            r"m.weight is 7 bytes of shape \[7, 1\]; expected 15360",
        ),
        (bnb_scheme, _bnb, _state("{"), r"bitsandbytes__nf4 does not describe a matrix: JSON"),
        (bnb_scheme, _bnb, _state("[]"), r"does not describe a matrix: TypeError"),
        (bnb_scheme, _bnb, _state("{}"), r"does not describe a matrix: KeyError 'shape'"),
        (bnb_scheme, _bnb, _state('{"shape": [80, -1]}'), r"matrix: ValueError -1 where a whole"),
        (
            bnb_scheme,
            _bnb,
            _state('{"shape": [80, 384], "blocksize": 1000000000}'),
            r"matrix: ValueError 1000000000 where a whole number from 1 to 4096 is expected",
        ),
        (
            bnb_scheme,
            lambda: bnb8(N, K)[0],
            _drop("SCB"),
            r"tensor m.SCB is missing",
        ),
        (
            bnb_scheme,
            lambda: bnb8(N, K)[0],
            _set("SCB", torch.ones(3)),
            r"m.SCB is float32 \[3\]; expected float32 \[80\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    scheme: Callable[[], Scheme],
    make: Callable[[], dict[str, Tensor]],
    damage: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    tensors = make()
    damage(tensors)
    with pytest.raises(FormatError, match=message):
        scheme().info(Tensors(tensors), "m")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("scheme", "make", "name"),
    [
        (gptq_scheme, _gptq, "scales"),
        (awq_scheme, _awq, "scales"),
        (compressed_scheme, _compressed, "weight_scale"),
        (bnb_scheme, _bnb, "weight.absmax"),
        (bnb_scheme, lambda: bnb8(N, K)[0], "SCB"),
    ],
)
def test_scales_that_are_not_numbers_are_named(
    scheme: Callable[[], Scheme], make: Callable[[], dict[str, Tensor]], name: str, bad: float
) -> None:
    tensors = make()
    tensors[name].view(-1)[3] = bad
    with pytest.raises(FormatError, match=rf"model: tensor m.{name} holds NaN or infinity"):
        pieces(scheme(), tensors)


def _inner(key: str, value: Any) -> dict[str, Any]:
    config = compressed_config()
    group = config["config_groups"]["group_0"]
    where = group if key in ("input_activations", "format") else group["weights"]
    where[key] = value
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (7, r"^config is 7; supported: an object"),
        ({}, r"config: quant_method is None; supported: awq, bitsandbytes, compressed-tensors, f"),
        ({"quant_method": "hqq"}, r"quant_method is 'hqq'; supported: awq, .* are not quantized"),
        ({"quant_method": ["gptq"]}, r"quant_method is \['gptq'\]"),
        ({"quant_method": "gptq"}, r"config: bits is None; supported: 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 5}, r"bits is 5; supported: 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": True}, r"bits is True"),
        ({"quant_method": "gptq", "bits": 4}, r"group_size is None; supported: -1 or a whole"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size is 0"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            r"checkpoint_format is 'marlin'; supported: 'gptq', 'gptq_v2'",
        ),
        ({"quant_method": "gptq", "is_marlin_format": True}, r"is_marlin_format is True"),
        ({"quant_method": "awq", "version": "gemv"}, r"version is 'gemv'; supported: 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, r"bits is 8; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, r"zero_point is False"),
        (compressed_config(3), r"config_groups.group_0.weights.num_bits is 3; supported: 2, 4, 8"),
        (compressed_config(strategy="block"), r"weights.strategy is 'block'; supported: 'group'"),
        (compressed_config(format="nvfp4-pack-quantized"), r"format is 'nvfp4-pack-quantized'"),
        (compressed_config(format="mixed-precision"), r"group_0.format is None"),
        (compressed_config(config_groups={}), r"config_groups is {}"),
        (compressed_config(config_groups={"a": 7}), r"config_groups.a is 7; supported: an object"),
        (compressed_config(transform_config={"x": {}}), r"transform_config is {'x': {}}"),
        (compressed_config(sparsity_config={"format": "2:4"}), r"sparsity_config.format is '2:4'"),
        (_inner("type", "float"), r"weights.type is 'float'; supported: 'int'"),
        (_inner("input_activations", {"num_bits": 8}), r"input_activations is .*null"),
    ],
)
def test_configs_without_an_implementation_are_named(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_scheme(config, "config: ")
