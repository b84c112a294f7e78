"""The registered ops: dispatch, checks, fake tensors, torch.compile. What they compute is tested
with each kernel."""

import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode

from qoff.errors import OpError
from qoff.kernels import library
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.library.define import Output, define, require
from qoff.kernels.reference import elementwise, kv_blocks
from tests.tolerances import assert_close

FORM = KVFormat(64)
SCALARS = (64, 4, 4, "channel", False)
OPS = torch.ops.qoff


def half(*shape):
    return torch.randn(*shape).half()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache_operands():
    """Two sequences of 70 and 3 tokens: rings, pool, block table, compressed."""
    recent = half(2, 64, 2, 64), half(2, 64, 2, 64)
    k, v = torch.randn(2, 4, 2, 64, 64)
    pool = kv_blocks.quantize_blocks(k, v, FORM)
    return *recent, pool, ints(0, 1, 2, 3).view(2, 2), ints(64, 0)


def samples():
    """Arguments of every op of this module."""
    recent_k, recent_v, pool, table, compressed = cache_operands()
    cos, sin = torch.rand(80, 32), torch.rand(80, 32)
    q, k, v = half(3, 4, 64), half(3, 2, 64), half(3, 2, 64)
    rows, start = ints(0, 2, 3), ints(70, 3)
    softmax = (0.125, 0.0, 0, torch.zeros(4))
    rings = recent_k, recent_v
    return {
        "rms_norm": (half(3, 40), half(40), 1e-5),
        "add_rms_norm": (half(3, 40), half(3, 40), half(40), 1e-5),
        "silu_mul": (half(3, 40),),
        "rope": (q, ints(5, 0, 7), cos, sin, False),
        "merge": (half(3, 2, 4, 64), torch.randn(3, 2, 4)),
        "kv_append": (
            k, v, cos, sin, start, rows, *rings, pool, table, compressed, compressed,
            2, 0, *SCALARS, False,
        ),
        "decode_attention": (
            q[:2], pool, table, compressed, start, *rings, *SCALARS, *softmax, 64,
        ),
        "prefill_attention": (
            q, k, v, rows, start, pool, table, compressed, *rings, *SCALARS, *softmax, 2, 64,
        ),
    }  # fmt: skip


NAMES = tuple(samples())


@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake_tensors_say_what_the_op_does(name):
    torch.library.opcheck(getattr(OPS, name).default, samples()[name])


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors(name):
    arguments = samples()[name]
    outputs = getattr(OPS, name)(*arguments)
    meta = getattr(OPS, name)(
        *(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments)
    )
    for one, other in zip(as_tuple(outputs), as_tuple(meta), strict=True):
        assert other.device.type == "meta"
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def as_tuple(outputs):
    if outputs is None:
        return ()
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


def test_fake_tensors_are_checked_too():
    with FakeTensorMode(), pytest.raises(OpError, match="gate_up has columns"):
        library.silu_mul(torch.empty(2, 7, dtype=torch.float16))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_with_ops_in_one_graph(dynamic):
    def layer(x, residual, weight, gate):
        y, residual = library.add_rms_norm(x, residual, weight, 1e-5)
        return library.silu_mul(y @ gate), residual

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (3, 5):
        operands = half(tokens, 32), half(tokens, 32), half(32), half(32, 8)
        for one, other in zip(compiled(*operands), layer(*operands), strict=True):
            assert torch.equal(one, other)


def test_compiled_function_that_writes_to_the_cache():
    def step(k, v, recent_k, recent_v, pool, table, start, rows, limit):
        library.kv_append(
            k, v, None, None, start, rows, recent_k, recent_v, pool, table, limit, limit, 1, 0, FORM
        )
        return library.decode_attention(
            k, pool, table, limit, start + 1, recent_k, recent_v, FORM, 0.125, max_compressed=64
        )[0]

    recent_k, recent_v, pool, table, compressed = cache_operands()
    tensors = half(2, 2, 64), half(2, 2, 64), recent_k, recent_v, pool, table
    counts = ints(70, 3), ints(0, 1, 2), compressed
    again = [x.clone() for x in tensors]
    expected = step(*tensors, *counts)
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(*again, *counts)
    assert_close(actual, expected)
    for one, other in zip(again, tensors, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(recent_k[0, 70 % 64], tensors[0][0])


def test_the_typed_functions_are_the_ops():
    x, weight, gate_up = half(3, 40), half(40), half(3, 40)
    assert torch.equal(library.rms_norm(x, weight, 1e-5), elementwise.rms_norm(x, weight, 1e-5))
    assert torch.equal(library.silu_mul(gate_up), elementwise.silu_mul(gate_up))
    outs, lses = half(2, 3, 4, 64), torch.randn(2, 3, 4)
    assert torch.equal(library.merge(outs, lses)[0], kv_blocks.merge(outs, lses)[0])
    cos, sin, positions = torch.rand(9, 32), torch.rand(9, 32), ints(8, 1, 0)
    q = half(3, 2, 64)
    for interleaved in (False, True):
        expected = elementwise.rope(q, positions, cos, sin, interleaved)
        assert torch.equal(library.rope(q, positions, cos, sin, interleaved), expected)


REFUSED = [
    ("rms_norm", 0, lambda x: x.long(), "x is float16 or bfloat16 or float32 .T, C., not int64"),
    ("rms_norm", 0, lambda x: x[0], r"x is .* \[T, C\], not float16 \[40\]"),
    ("rms_norm", 0, lambda x: x.T.contiguous().T, "x must be contiguous; its strides are"),
    ("rms_norm", 1, lambda x: x.float(), r"weight is float16 \[40\], not float32 \[40\]"),
    ("rms_norm", 1, lambda x: x[:8], r"weight is float16 \[40\], not float16 \[8\]"),
    ("rms_norm", 1, lambda x: x.to("meta"), "weight is on meta, other operands on cpu"),
    ("rms_norm", 2, lambda x: -1.0, "eps is 0 or more, not -1.0"),
    ("add_rms_norm", 1, lambda x: x[:2], r"residual is float16 \[3, 40\], not float16 \[2, 40\]"),
    ("silu_mul", 0, lambda x: x[:, :7].contiguous(), "as many of up, not 7"),
    ("rope", 0, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "x must have contiguous"),
    ("rope", 1, lambda x: x.float(), r"positions is int32 or int64 \[3\], not float32 \[3\]"),
    ("rope", 2, lambda x: x.half(), r"cos is float32 \[P, R/2\], not float16"),
    ("rope", 3, lambda x: x[:8], r"sin is float32 \[80, 32\], not float32 \[8, 32\]"),
    ("rope", (2, 3), lambda x: torch.rand(80, 33), "up to the head size 64, not 66"),
    ("merge", 0, lambda x: x.double(), "outs is float16 or bfloat16 or float32"),
    ("merge", 1, lambda x: x[:1], r"lses is float32 \[3, 2, 4\], not float32 \[1, 2, 4\]"),
    ("merge", (0, 1), lambda x: x[:0], "nothing to merge"),
    ("kv_append", 0, lambda x: x.bfloat16(), r"k is float16 \[T, 2, 64\], not bfloat16"),
    ("kv_append", 1, lambda x: x[:2], r"v is float16 \[3, 2, 64\], not float16 \[2, 2, 64\]"),
    ("kv_append", 3, lambda x: None, "cos and sin are both tables or both None"),
    ("kv_append", 4, lambda x: x.long(), r"start is int32 \[2\], not int64 \[2\]"),
    ("kv_append", 5, lambda x: x[:2], r"row_start is int32 \[3\], not int32 \[2\]"),
    ("kv_append", (6, 7), lambda x: x[:, :60].contiguous(), "64 slots or more, not 60"),
    ("kv_append", 8, lambda x: x[..., :100].contiguous(), r"pool is uint8 \[blocks, 2, 4608\]"),
    ("kv_append", 9, lambda x: x[:1], r"block_table is int32 \[2, max_blocks\]"),
    ("kv_append", 12, lambda x: -1, "max_rows is 0 or more, not -1"),
    ("kv_append", 13, lambda x: 3, "2 columns of block_table, not 3"),
    ("kv_append", 14, lambda x: 72, "heads of 72 channels"),
    ("kv_append", 18, lambda x: True, "rotation"),
    ("decode_attention", 0, lambda x: x[:, :3].contiguous(), "3 query heads are no multiple of 2"),
    ("decode_attention", 0, lambda x: x[:1], r"q is float16 \[2, Hq, 64\], not float16 \[1, 4"),
    ("decode_attention", 13, lambda x: -1.0, "soft_cap and window are 0"),
    ("decode_attention", 15, lambda x: x[:3], r"sinks is float32 \[4\], not float32 \[3\]"),
    ("decode_attention", 16, lambda x: 129, "128 tokens that block_table has room for, not 129"),
    ("prefill_attention", 0, lambda x: x[:2], r"q is float16 \[3, Hq, 64\], not float16 \[2, 4"),
    ("prefill_attention", 19, lambda x: -2, "max_rows is 0 or more, not -2"),
]


@pytest.mark.parametrize(("name", "places", "change", "message"), REFUSED)
def test_wrong_operands_are_refused_before_anything_runs(name, places, change, message):
    arguments = list(samples()[name])
    for place in (places,) if isinstance(places, int) else places:
        arguments[place] = change(arguments[place])
    with pytest.raises(OpError, match=message):
        getattr(OPS, name)(*arguments)


def test_a_pool_off_its_alignment_is_refused():
    arguments = list(samples()["kv_append"])
    pool = arguments[8]
    arguments[8] = torch.empty(pool.numel() + 1, dtype=torch.uint8)[1:].view(pool.shape)
    with pytest.raises(OpError, match="multiple of 16 bytes"):
        OPS.kv_append(*arguments)


@pytest.mark.parametrize("name", ["rms_norm", "decode_attention"])
def test_bfloat16_is_refused_on_turing(name, monkeypatch):
    arguments = [
        x.bfloat16() if isinstance(x, torch.Tensor) and x.dtype == torch.float16 else x
        for x in samples()[name]
    ]
    getattr(OPS, name)(*arguments)
    monkeypatch.setattr("qoff.kernels.library.define.capability", lambda device: 75)
    with pytest.raises(OpError, match=r"bfloat16, which a GPU of compute capability 7\.5 cannot"):
        getattr(OPS, name)(*arguments)


def test_rotating_keys_is_refused_on_turing(monkeypatch):
    arguments = list(samples()["kv_append"])
    arguments[8] = torch.zeros(4, 2, KVFormat(64, k_form="token").nbytes, dtype=torch.uint8)
    arguments[17:19] = "token", True
    OPS.kv_append(*arguments)
    monkeypatch.setattr("qoff.kernels.library.cache.capability", lambda device: 75)
    with pytest.raises(OpError, match=r"8\.0 or newer, not 7\.5"):
        OPS.kv_append(*arguments)


def test_define_checks_first_and_calls_the_implementation_of_the_device():
    calls = []

    def check(x, times):
        calls.append("check")
        require("x", x, (torch.float32,), ("N", 3), x.device, strided_rows=True)
        return Output(x, (x.shape[0],), torch.int32)

    op = define(
        "test_define(Tensor x, int times) -> Tensor",
        check=check,
        cuda=lambda: pytest.fail("no CUDA tensors here"),
        cpu=lambda x, times: (calls.append("cpu"), x.sum(1).int() * times)[1],
    )
    assert torch.equal(op(torch.ones(4, 6)[:, :3], 2), torch.full((4,), 6, dtype=torch.int32))
    assert calls == ["check", "cpu"]
    with pytest.raises(OpError, match="contiguous rows"):
        op(torch.ones(3, 4).T, 2)
    assert calls == ["check", "cpu", "check"]


def test_cuda_tensors_are_given_to_the_launcher_on_their_device(monkeypatch):
    calls = []

    @contextmanager
    def device_of(tensor):
        calls.append(tensor)
        yield
        calls.append("back")

    op = define(
        "test_device(int times, Tensor x) -> Tensor",
        check=lambda times, x: Output(x, (1,)),
        cuda=lambda: lambda times, x: (calls.append("launch"), x * times)[1],
        cpu=lambda times, x: pytest.fail("no CPU tensors here"),
    )
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = torch.ones(1)
    op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), 3, x)
    assert calls[0].data_ptr() == x.data_ptr()
    assert calls[1:] == ["launch", "back"]


def test_triton_is_not_imported_for_tensors_on_a_cpu():
    program = """
        import sys, torch
        from qoff.kernels import library
        x = torch.randn(3, 64)
        library.rms_norm(x, x[0], 1e-5)
        library.add_rms_norm(x, x, x[0], 1e-5)
        library.silu_mul(x)
        library.rope(x[:, None], torch.arange(3), torch.rand(3, 32), torch.rand(3, 32))
        library.merge(x[None, :, None], torch.zeros(1, 3, 1))
        assert "triton" not in sys.modules, "triton was imported"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
