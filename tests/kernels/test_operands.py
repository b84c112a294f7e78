"""Operands that do not fit are refused before a kernel is launched, on whatever device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.ending import Xielu
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.attention.append import kv_append
from qoff.kernels.triton.attention.decode import decode_attention
from qoff.kernels.triton.attention.merge import merge
from qoff.kernels.triton.attention.prefill import prefill_attention
from qoff.kernels.triton.elementwise.gated_silu import gated_silu
from qoff.kernels.triton.elementwise.rms_norm import rms_norm
from qoff.kernels.triton.elementwise.rope import rope
from qoff.kernels.triton.elementwise.xielu import xielu
from qoff.kernels.triton.launch.gpu import Gpu
from tests.kernels.attention_operands import ints, random_cache


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def some_cache() -> DeviceLayerCache:
    """Two sequences of 70 and 3 tokens with 2 and 1 new ones."""
    return random_cache(KVFormat(64), 2, [(1, 6), (0, 3)], rows=[2, 1])


def samples() -> dict[Callable[..., Any], dict[str, Any]]:
    """Operands of every op by name."""
    shape, sinks = HeadShape(4, 2, 64, 0.125), torch.zeros(4)
    attend = {"cache": some_cache(), "shape": shape, "sinks": sinks}
    fresh = {"k": half(3, 2, 64), "v": half(3, 2, 64)}
    cos, sin = torch.rand(80, 32), torch.rand(80, 32)
    turn = {"x": half(3, 4, 64), "positions": ints([5, 0, 7]), "cos": cos, "sin": sin}
    return {
        rms_norm: {"x": half(3, 40), "weight": half(40), "eps": 1e-5},
        gated_silu: {"z": half(3, 64)},
        xielu: {"z": half(3, 40), "by": Xielu(1.0, 1.0, 0.5, -1e-6)},
        rope: turn,
        merge: {"outs": half(3, 2, 4, 64), "lses": torch.randn(3, 2, 4)},
        kv_append: {**fresh, "cache": some_cache()},
        decode_attention: {"q": half(2, 4, 64), **attend},
        prefill_attention: {"q": half(3, 4, 64), **fresh, **attend},
    }


REFUSED = [
    (rms_norm, "x", lambda x: x.long(), "x is float16 or bfloat16 or float32 .T, C., not int64"),
    (rms_norm, "x", lambda x: x[0], r"x is .* \[T, C\], not float16 \[40\]"),
    (rms_norm, "x", lambda x: x.T.contiguous().T, "x must be contiguous; its strides are"),
    (rms_norm, "weight", lambda x: x[:8], r"weight is .* \[40\], not float16 \[8\]"),
    (rms_norm, "weight", lambda x: x.to("meta"), "weight is on meta, other operands on cpu"),
    (gated_silu, "z", lambda x: x[:, :48].contiguous(), "not 48 columns"),
    (xielu, "z", lambda x: x.T.contiguous().T, "z must be contiguous"),
    (rope, "x", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "x must have contiguous"),
    (rope, "x", lambda x: x[..., :32].contiguous(), "up to the head size 32, not 64"),
    (rope, "positions", lambda x: x.float(), r"positions is int32 or int64 \[3\], not float32"),
    (rope, "cos", lambda x: x.half(), r"cos is float32 \[P, R/2\], not float16"),
    (rope, "sin", lambda x: x[:8], r"sin is float32 \[80, 32\], not float32 \[8, 32\]"),
    (merge, "outs", lambda x: x.double(), "outs is float16 or bfloat16 or float32"),
    (merge, "lses", lambda x: x[:1], r"lses is float32 \[3, 2, 4\], not float32 \[1, 2, 4\]"),
    (kv_append, "k", lambda x: x.bfloat16(), r"k is float16 \[T, 2, 64\], not bfloat16"),
    (kv_append, "v", lambda x: x[:2], r"v is float16 \[3, 2, 64\], not float16 \[2, 2, 64\]"),
    (
        decode_attention,
        "shape",
        lambda x: replace(x, heads=3),
        "fit a cache of 2 KV heads",
    ),
    (decode_attention, "q", lambda x: x[:1], "a row for each of 2 sequences, not 1"),
    (
        decode_attention,
        "q",
        lambda x: x[:, :2],
        r"q is float16 \[rows, 4, 64\], not",
    ),
    (decode_attention, "sinks", lambda x: x[:3], r"sinks is float32 \[4\], not float32 \[3\]"),
    (prefill_attention, "q", lambda x: x[:2], "2 rows of queries, but 3 of keys"),
]


@pytest.mark.parametrize(("op", "name", "change", "message"), REFUSED)
def test_wrong_operands(op: Callable, name: str, change: Callable, message: str) -> None:
    operands = samples()[op]
    operands[name] = change(operands[name])
    with pytest.raises(OpError, match=message):
        op(**operands)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": torch.zeros(2).long()}, r"start is int32 \[2\], not int64 \[2\]"),
        ({"row_start": ints([0, 1])}, r"row_start is int32 \[3\], not int32 \[2\]"),
        ({"table": torch.zeros(1, 2).int()}, r"table is int32 \[2, blocks\]"),
        ({"max_packed": 129}, "128 tokens that the block table has room for, not 129"),
        ({"max_rows": -1}, "max_rows is 0 or more, not -1"),
        ({"max_new_blocks": 3}, "2 columns of the block table, not 3"),
    ],
)
def test_wrong_passes(changes: dict, message: str) -> None:
    with pytest.raises(OpError, match=message):
        replace(some_cache().step, **changes)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("recent_k", lambda x: x.double(), "recent_k is float16 or bfloat16"),
        ("recent_v", lambda x: x[:, :60].contiguous(), "recent_v is float16"),
        (("recent_k", "recent_v"), lambda x: x[:, :60].contiguous(), "64 slots or more, not 60"),
        ("pool", lambda x: x[..., :100].contiguous(), r"pool is uint8 \[blocks, 2, 4608\]"),
        ("pool", lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape), "16 bytes"),
        ("form", lambda x: KVFormat(80), r"recent_k is .* \[2, W, kv_heads, 80\]"),
    ],
)
def test_wrong_caches(name: str | tuple[str, ...], change: Callable, message: str) -> None:
    cache = some_cache()
    names = (name,) if isinstance(name, str) else name
    with pytest.raises(OpError, match=message):
        replace(cache, **{n: change(getattr(cache, n)) for n in names})


def test_a_gpu_before_8_0_refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "of", lambda device: Gpu(75, 4))
    with pytest.raises(OpError, match=r"bfloat16, which a GPU of compute capability 7\.5 cannot"):
        gated_silu(torch.zeros(2, 32).bfloat16())
