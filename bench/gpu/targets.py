"""The figures that the project wants reached on a GPU, as data; see `bench.gpu.report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

CUBLAS = "cuBLAS fp16"
TINYGEMM = "torch int4"
GEMLITE = "gemlite"
PLAIN_APPEND = "plain fp16 append"
DECODE = "decode attention"
SDPA = "sdpa "  # followed by the backend

Figure = Literal["eta", "eta of a copy", "chain", "speedup"]
_ANY = (0, 1 << 62)
MIB = 1 << 20


@dataclass(frozen=True)
class GpuTarget:
    """A lower bound on a figure of every case of an op that lies in the ranges (both inclusive).

    eta: bytes per second over measured read bandwidth (or that of a copy). chain: the least time
    of what the call does in series, over ours. speedup: time of the best peer whose name starts
    with `peer`, over ours. `wanted` is by compute capability, 0 for all others; None: no target
    there.
    """

    op: str
    what: str
    figure: Figure
    wanted: Mapping[int, float | None]
    peer: str = ""
    m: tuple[int, int] = _ANY
    tokens: tuple[int, int] = _ANY
    group: tuple[int, int] = _ANY
    stored: tuple[int, int] = _ANY
    ranges: tuple[str, ...] = field(default=("m", "tokens", "group", "stored"), repr=False)

    def bound(self, capability: int) -> float | None:
        return self.wanted.get(capability, self.wanted[0])


def _all(value: float) -> Mapping[int, float | None]:
    return MappingProxyType({0: value})


def _tensor_cores(value: float) -> Mapping[int, float | None]:
    """None on Turing, where Triton has no tensor cores and cuBLAS does; see bench/device.md."""
    return MappingProxyType({75: None, 0: value})


_LARGE = (64 * MIB, _ANY[1])
_LONG = (8192, _ANY[1])
# fp16 KV of which a quarter is read: below it takes a few microseconds, and latencies count.
_BOUND_BY_MEMORY, _BOUND_BY_LATENCY = (256 * MIB, _ANY[1]), (0, 256 * MIB - 1)
_PEERS = MappingProxyType({90: 1.3, 0: 1.0})

TARGETS = (
    GpuTarget("quantize", "copy bandwidth", "eta of a copy", _all(0.85)),
    GpuTarget("dequantize", "copy bandwidth", "eta of a copy", _all(0.85)),
    GpuTarget(
        "w4_linear",
        "M=1, 64 MiB packed and more: bandwidth",
        "eta",
        MappingProxyType({80: 0.92, 86: 0.92, 89: 0.92, 0: 0.85}),
        m=(1, 1),
        stored=_LARGE,
    ),
    GpuTarget(
        "w4_linear", "M=1, 64 MiB and more", "speedup", _all(3.0), CUBLAS, (1, 1), stored=_LARGE
    ),
    GpuTarget("w4_linear", "M=16", "speedup", _tensor_cores(3.0), CUBLAS, (16, 16)),
    GpuTarget("w4_linear", "M=64", "speedup", _tensor_cores(2.1), CUBLAS, (64, 64)),
    GpuTarget("w4_linear", "M=256 and more", "speedup", _tensor_cores(0.9), CUBLAS, (256, _ANY[1])),
    GpuTarget("w4_linear", "all M", "speedup", _PEERS, GEMLITE),
    GpuTarget("w4_linear", "all M", "speedup", _PEERS, TINYGEMM),
    GpuTarget(
        "decode_attention",
        "8k and more, 256 MiB of fp16 KV and more: bandwidth",
        "eta",
        _all(0.80),
        tokens=_LONG,
        stored=_BOUND_BY_MEMORY,
    ),
    GpuTarget(
        "decode_attention",
        "8k and more, less than 256 MiB of fp16 KV: latencies in series",
        "chain",
        _all(0.50),
        tokens=_LONG,
        stored=_BOUND_BY_LATENCY,
    ),
    GpuTarget(
        "decode_attention",
        "MHA, 8k and more",
        "speedup",
        _all(3.0),
        SDPA,
        tokens=_LONG,
        group=(1, 1),
    ),
    GpuTarget(
        "decode_attention",
        "GQA 4-8, 8k and more",
        "speedup",
        _all(2.3),
        SDPA,
        tokens=_LONG,
        group=(4, 8),
    ),
    GpuTarget(
        "decode_attention", "64 MiB of fp16 KV and more", "speedup", _all(1.0), SDPA, stored=_LARGE
    ),
    GpuTarget(
        "prefill_attention",
        "all, the best backend, cuDNN too",
        "speedup",
        _tensor_cores(0.97),
        SDPA,
    ),
    GpuTarget("kv_append", "at most 1.2 times as long", "speedup", _all(1 / 1.2), PLAIN_APPEND),
    GpuTarget("merge", "at most 5 % of its time", "speedup", _all(20.0), DECODE),
)
