"""What this GPU can do at most, measured: bytes moved, products of matrices, latencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bench.gpu.case import Call, SerialChain
from bench.gpu.timer import Timer

_BYTES = 2 << 30
_SIZE = 8192  # of square matrices
_HOPS = 256
_LAUNCHES = 64
_BUDGET_S = 4.0


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second (a copy counts bytes read and bytes written), operations per second, and
    seconds: of a kernel that waits for the one before it and does nothing, of a load from memory.
    """

    read: float
    copy: float
    fp16: float
    bf16: float
    link: float = 0.0  # bytes per second from pinned host memory
    launch: float = 0.0
    latency: float = 0.0

    @property
    def bandwidth(self) -> float:
        """The best rate seen at which memory moved bytes at all."""
        return max(self.read, self.copy)

    def chain_seconds(self, chain: SerialChain, nbytes: int) -> float:
        """The least that a call takes which does a chain in series and reads `nbytes`."""
        serial = chain.launches * self.launch + chain.loads * self.latency
        return serial + nbytes / self.bandwidth


@triton.jit
def nothing_kernel(out):  # type: ignore[no-untyped-def]
    """One number, so that a launch is one."""
    tl.store(out, 1)


@triton.jit
def chase_kernel(following, out, hops):  # type: ignore[no-untyped-def]
    """`hops` loads, each from where the one before says."""
    at = tl.load(out)
    for _ in range(hops):
        at = tl.load(following + at)
    tl.store(out, at)


def measure(
    timer: Timer, device: torch.device, nbytes: int = _BYTES, size: int = _SIZE, hops: int = _HOPS
) -> Ceilings:
    """Time large reductions, copies, matmuls and chains; each figure is the best of its ways."""
    read, copy, link = _bandwidths(timer, device, nbytes)
    rates = {}
    for dtype in (torch.float16, torch.bfloat16):
        a, b = torch.randn(2, size, size, device=device).to(dtype)
        product = timer.measure({"mm": [lambda a=a, b=b: a @ b]}, _BUDGET_S)["mm"]  # type: ignore[misc]
        rates[dtype] = 2.0 * size**3 / product.seconds
    launch, latency = _latencies(timer, device, nbytes // 8, hops)
    return Ceilings(read, copy, rates[torch.float16], rates[torch.bfloat16], link, launch, latency)


def _bandwidths(timer: Timer, device: torch.device, nbytes: int) -> tuple[float, float, float]:
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    host = torch.zeros(nbytes // 16, pin_memory=device.type == "cuda")
    calls: dict[str, list[Call]] = {
        "sum": [source.sum],
        "max": [source.max],
        "copy": [lambda: target.copy_(source)],
        "link": [lambda: target[: len(host)].copy_(host, non_blocking=True)],
    }
    seconds = {k: t.seconds for k, t in timer.measure(calls, _BUDGET_S).items()}
    fastest = min(seconds["sum"], seconds["max"])
    copied, linked = 2 * source.nbytes / seconds["copy"], host.nbytes / seconds["link"]
    return source.nbytes / fastest, copied, linked


def _latencies(timer: Timer, device: torch.device, entries: int, hops: int) -> tuple[float, float]:
    """Seconds of a launch that waits for one before, and of a load that does.

    The loads are at random places of a table far larger than L2, one row of memory apart at least.
    """
    order = torch.randperm(entries // 32, device=device) * 32
    following = torch.zeros(entries, dtype=torch.int32, device=device)
    following[order] = order.roll(-1).int()
    out = torch.zeros(1, dtype=torch.int32, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            nothing_kernel[(1,)](out)

    calls: dict[str, list[Call]] = {
        "launch": [launches],
        "chase": [lambda: chase_kernel[(1,)](following, out, hops)],
    }
    seconds = {k: t.seconds for k, t in timer.measure(calls, _BUDGET_S).items()}
    return seconds["launch"] / _LAUNCHES, seconds["chase"] / hops
