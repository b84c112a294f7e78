"""Quantized checkpoints that are damaged, or of no kind that is read: what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError
from qoff.quant import Scheme, read_scheme
from tests.quant.packed_matrices import (
    Tensors,
    awq,
    bnb4,
    bnb8,
    compressed,
    gptq,
    pieces,
    random_matrix,
)
from tests.quant.test_schemes import (
    K,
    N,
    awq_scheme,
    bnb_scheme,
    compressed_config,
    compressed_scheme,
    gptq_scheme,
)


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


def _nested() -> dict[str, Tensor]:
    return bnb4(N, K, nested=True)[0]


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
            _set("qweight", _int(48, 0)),
            r"qweight is int32 \[48, 0\]; .* \[any, any",
        ),
        (
            gptq_scheme,
            _gptq,
            _set("g_idx", torch.arange(K).int()),
            r"m.g_idx holds group 12; expected 0 to 11",
        ),
        (
            gptq_scheme,
            _gptq,
            _set("g_idx", _int(K) - 2),
            r"m.g_idx holds group -2; expected 0 to 11",
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
            _set("weight_shape", torch.tensor([N])),
            r"m.weight_shape is int64 \[1\]; expected int32 or int64 \[2\]",
        ),
        (
            compressed_scheme,
            _compressed,
            _set("weight_scale", torch.ones(N + 1, 12)),
            r"m.weight_scale is float32 \[81, 12\]; expected .* \[80, any\]",
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
        (
            bnb_scheme,
            _bnb,
            _set("weight", torch.zeros(1, N * K // 2, dtype=torch.uint8)),
            r"m.weight is 15360 bytes of shape \[1, 15360\]; expected 15360 of shape \[any, 1\]",
        ),
        (
            bnb_scheme,
            _bnb,
            _state('{"shape": [2048, 15], "blocksize": 64}'),  # whose rows end within a byte
            r"expected 15360 of shape \[any, 1\] for a 4-bit matrix \[2048, 15\]",
        ),
        (
            bnb_scheme,
            _bnb,
            _set("weight.absmax", torch.zeros(_BLOCKS, dtype=torch.uint8)),
            rf"m.weight.absmax is uint8 \[{_BLOCKS}\]; expected float16",
        ),
        (
            bnb_scheme,
            _nested,
            _set("weight.nested_absmax", torch.ones(1)),
            r"m.weight.nested_absmax is float32 \[1\]; expected .*\[2\]",
        ),
        (
            bnb_scheme,
            _nested,
            _set("weight.nested_quant_map", torch.ones(255)),
            r"m.weight.nested_quant_map is float32 \[255\]; expected .*\[256\]",
        ),
        (
            bnb_scheme,
            _nested,
            _state('{"shape": [80, 384], "blocksize": 64, "nested_blocksize": 0}'),
            r"does not describe a matrix: ValueError 0 where a whole number",
        ),
        (bnb_scheme, _bnb, _state("{"), r"bitsandbytes__nf4 does not describe a matrix: JSON"),
        (bnb_scheme, _bnb, _state("[]"), r"does not describe a matrix: TypeError"),
        (bnb_scheme, _bnb, _state("{}"), r"does not describe a matrix: KeyError 'shape'"),
        (bnb_scheme, _bnb, _state('{"shape": [80, 0]}'), r"matrix: ValueError 0 where a whole"),
        (bnb_scheme, _bnb, _state('{"shape": [80, 384.0]}'), r"ValueError 384.0 where a whole"),
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
    of_group = ("input_activations", "output_activations", "format")
    where = group if key in of_group else group["weights"]
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
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, r"group_size is -2"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            r"checkpoint_format is 'marlin'; supported: 'gptq', 'gptq_v2'",
        ),
        ({"quant_method": "gptq", "is_marlin_format": True}, r"is_marlin_format is True"),
        ({"quant_method": "gptq", "pack_dtype": "int8"}, r"pack_dtype is 'int8'; supported: 'in"),
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
        (_inner("output_activations", {"num_bits": 8}), r"output_activations is .*null"),
        (
            _inner("format", "float-quantized"),
            r"group_0.format is 'float-quantized'; supported: 'p",
        ),
    ],
)
def test_configs_without_an_implementation_are_named(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_scheme(config, "config: ")
