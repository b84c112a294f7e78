"""The Triton matmul on packed weights against float64, every way of computing it."""

from dataclasses import replace

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.linear import gemm, gemv
from qoff.kernels.triton.linear import linear as op
from qoff.kernels.triton.linear.fma import FmaConfig
from qoff.kernels.triton.linear.gemm import GemmConfig
from qoff.kernels.triton.linear.gemv import GemvConfig
from qoff.kernels.triton.linear.linear import ScratchConfig, w4_linear
from qoff.kernels.triton.linear.product import Epilogue, sums_bytes
from qoff.kernels.triton.linear.skinny import SkinnyConfig
from tests.kernels.packed import quantized
from tests.tolerances import assert_close

DTYPES = [torch.float16, torch.bfloat16]
# bits, group, rows, columns: neither rows nor columns are multiples of any tile.
SHAPES = [(4, 32, 17, 160), (4, 64, 40, 192), (4, 128, 33, 640), (8, 64, 20, 384), (8, 32, 1, 96)]

WAYS = [  # with the smallest tiles
    GemvConfig(block_n=16),
    SkinnyConfig(block_n=16),
    GemmConfig(block_n=16, block_m=16),
    FmaConfig(),
    ScratchConfig(),
]


def expected(x, q, bias):
    y = x.double() @ q.dequantize().double().T
    return y if bias is None else y + bias.double()


def check(tokens, bits, group, rows, columns, dtype, config=None, scale_dtype=torch.float16):
    q = quantized(rows, columns, bits, group, scale_dtype)
    bias, found, wanted = torch.randn(rows).to(dtype), [], []
    for _ in range(max(1, 16 // (tokens * rows))):  # the mean error of a few numbers is chance
        x = torch.randn(tokens, columns).to(dtype)
        found.append(w4_linear(x, q, bias, config))
        wanted.append(expected(x, q, bias))
    assert found[0].dtype == dtype
    assert_close(torch.cat(found), torch.cat(wanted), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 65])
@pytest.mark.parametrize(("bits", "group", "rows", "columns"), SHAPES)
def test_equals_the_product_with_the_dequantized_matrix(tokens, bits, group, rows, columns, dtype):
    check(tokens, bits, group, rows, columns, dtype)


@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(block_n=16, warps=1, stages=2),
        GemvConfig(block_n=32, warps=2, splits=2),
        GemvConfig(block_n=16, splits=5),  # the last programs have nothing to do
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 16])
def test_gemv(tokens, config):
    check(tokens, 4, 64, 35, 1344, torch.float16, config)


@pytest.mark.parametrize(
    "config",
    [
        SkinnyConfig(block_n=32, block_m=64, row_bytes=32, parts=2, warps=2, stages=2),
        SkinnyConfig(block_n=32, block_m=8, parts=2, warps=2, stages=2, splits=2),
        SkinnyConfig(block_n=16, block_m=32, row_bytes=128, stages=2, splits=3),
    ],
)
@pytest.mark.parametrize(("group", "tokens"), [(32, 17), (64, 33), (128, 3)])
def test_skinny(group, tokens, config):
    check(tokens, 4, group, 35, 640, torch.float16, config)


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(block_n=64, block_m=16, row_bytes=128),
        GemmConfig(block_n=16, block_m=32, row_bytes=16, splits=5),  # splits and steps are uneven
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "rows", "columns"), SHAPES)
def test_gemm(bits, group, rows, columns, dtype, config):
    check(19, bits, group, rows, columns, dtype, config)


@pytest.mark.parametrize(("bits", "group", "rows", "columns"), SHAPES)
def test_fma(bits, group, rows, columns):
    check(3, bits, group, rows, columns, torch.float16, FmaConfig(8, 128))


@pytest.mark.parametrize("tokens", [1, 9])
def test_scratch_in_several_pieces(tokens):
    check(tokens, 4, 32, 300, 96, torch.float16, ScratchConfig(nbytes=1))


@pytest.mark.parametrize("config", WAYS)
@pytest.mark.parametrize(
    ("bits", "scale_dtype"), [(4, torch.float32), (4, torch.uint8), (8, torch.uint8)]
)
def test_other_scales(bits, scale_dtype, config):
    check(2, bits, 32, 20, 96, torch.float16, config, scale_dtype)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("config", WAYS)
def test_without_bias(config, splits):
    if hasattr(config, "splits"):
        config = replace(config, splits=splits)
    q = quantized(20, 512, 4, 64)
    x = torch.randn(2, 512).half()
    y = w4_linear(x, q, None, config)
    assert_close(y, expected(x, q, None), dtype=torch.float16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(block_n=16, warps=1),
        GemvConfig(block_n=32, splits=3),
        SkinnyConfig(block_n=32),
        SkinnyConfig(block_n=16, splits=2),
        GemmConfig(block_n=64, block_m=16),
        GemmConfig(block_n=64, block_m=16, splits=2),
        FmaConfig(),
        ScratchConfig(),
    ],
)
def test_gate_and_residual(config, bias):
    """At the end of the kernel, or of the sum of its parts."""
    q = quantized(96, 768, 4, 64)
    x, added = torch.randn(3, 768).half(), torch.randn(96).half() if bias else None
    z = expected(x, q, added)
    gate, up = z.view(3, -1, 2, 16).unbind(2)
    for silu_mul, y in ((False, z), (True, (gate * gate.sigmoid() * up).flatten(1))):
        residual = torch.randn(y.shape).half()
        wanted = y + residual.double()
        found = w4_linear(x, q, added, config, Epilogue(residual, silu_mul, residual))
        assert found is residual
        assert_close(found, wanted, dtype=torch.float16)


def test_no_tokens():
    q = quantized(8, 64, 4, 32)
    assert w4_linear(torch.empty(0, 64).half(), q).shape == (0, 8)


@pytest.mark.parametrize("start", [63, 64])
def test_rows_of_x_may_lie_apart(start):
    q = quantized(20, 64, 4, 32)
    x = torch.randn(3, 3 * 64 + start % 2).half()[:, start : start + 64]
    y = w4_linear(x, q)
    assert_close(y, expected(x, q, None), dtype=torch.float16)


def test_large_mean_of_x_does_not_swamp_the_codes():
    """The offset that rides on the codes is taken off again with the sums of x."""
    q = quantized(16, 1024, 4, 64, offset=0.0)
    x = (torch.randn(1, 1024) + 8).half()
    y = w4_linear(x, q, None, GemvConfig(block_n=16))
    exact = expected(x, q, None)
    size = x.double().abs() @ q.dequantize().double().abs().T
    assert bool(((y.double() - exact).abs() <= size * 2.0**-11).all())


def test_splits_give_the_same_bits_each_time():
    q = quantized(16, 1024, 4, 64)
    x = torch.randn(2, 1024).half()
    results = [w4_linear(x, q, None, GemvConfig(block_n=16, splits=2)) for _ in range(2)]
    assert torch.equal(*results)


def test_the_rule():
    assert op.way(1, 32, 75) is FmaConfig
    assert op.way(5, 32, 75) is ScratchConfig
    assert [op.way(m, 32, 89) for m in (1, 16)] == [GemvConfig] * 2
    assert [op.way(m, 16, 89) for m in (4, 5)] == [GemvConfig, SkinnyConfig]
    assert [op.way(m, 32, 89) for m in (17, 64, 65)] == [SkinnyConfig] * 2 + [ScratchConfig]
    assert [op.way(m, 32, 90) for m in (1, 2, 3)] == [GemvConfig] * 2 + [GemmConfig]
    assert [op.way(m, 32, 90) for m in (512, 513)] == [GemmConfig, ScratchConfig]


def test_a_block_of_rows_is_large_where_each_processor_has_one():
    chosen = [gemm.choose(64, rows, 2048, 32, Gpu(90, 132)) for rows in (16895, 16896)]
    assert [(c.block_n, c.splits) for c in chosen] == [(64, 1), (128, 1)]
    assert gemm.choose(16, 4096, 2048, 32, Gpu(90, 132)).splits == 4


@pytest.mark.parametrize("tokens", [1, 4, 17, 64, 100, 256, 1000])
@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 64), (1184, 28672), (1536, 2048), (4096, 14336), (28672, 4096)]
)
@pytest.mark.parametrize("processors", [78, 132])
def test_sums_of_splits_stay_within_what_is_said(tokens, rows, columns, processors, monkeypatch):
    gpu = Gpu(90, processors)
    monkeypatch.setattr(Gpu, "of", staticmethod(lambda device: gpu))
    way = gemv if op.way(tokens, 32, 90) is GemvConfig else gemm
    splits = way.choose(tokens, rows, columns // 2, 32, gpu).splits
    assert splits in (1, 2, 4, 8, 16)
    nbytes = 4 * splits * tokens * rows if splits > 1 else 0
    assert nbytes <= sums_bytes(tokens, rows, columns, torch.device("cpu"))


def test_what_was_measured_decides_the_way(monkeypatch):
    found = {"w4_skinny": {"block_n": 32, "splits": 2}}
    monkeypatch.setattr(tuned, "lookup", lambda op, device, key: found.get(op))
    op.configured.cache_clear()
    try:
        config = op.configured(torch.device("cpu"), torch.float16, 4, 64, 128, 32, 64)
    finally:
        op.configured.cache_clear()
    assert config == SkinnyConfig(block_n=32, splits=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(2, 128)}, "x is float16 or bfloat16"),
        ({"x": torch.randn(2, 64).half()}, r"x is float16 or bfloat16 \[M, 128\]"),
        ({"x": torch.randn(128, 2).half().T}, "contiguous rows"),
        ({"x": torch.randn(2, 128, device="meta").half()}, "x is on meta, other operands on cpu"),
        ({"weight": quantized(16, 128, 4, 64).to_packing("rows16")}, "packing split32"),
        ({"weight": quantized(16, 128, 6, 64)}, "codes of 6 bits are none for a GPU"),
        ({"bias": torch.zeros(7).half()}, "bias is float16"),
        ({"bias": torch.zeros(8)}, "bias is float16"),
    ],
)
def test_wrong_operands_are_refused(changes, message):
    operands = {"x": torch.randn(2, 128).half(), "weight": quantized(8, 128, 4, 64), "bias": None}
    with pytest.raises(OpError, match=message):
        w4_linear(**{**operands, **changes})
