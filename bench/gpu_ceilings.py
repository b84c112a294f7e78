"""What this GPU can do at most, measured: bytes read, bytes copied, products of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.cuda_timer import Timer
from bench.gpu_case import Call

_BYTES = 2 << 30
_SIZE = 8192  # of square matrices
_BUDGET_S = 4.0


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second (a copy counts bytes read and bytes written), operations per second."""

    read: float
    copy: float
    fp16: float
    bf16: float

    @property
    def bandwidth(self) -> float:
        """The best rate seen at which memory moved bytes at all."""
        return max(self.read, self.copy)


def measure(
    timer: Timer, device: torch.device, nbytes: int = _BYTES, size: int = _SIZE
) -> Ceilings:
    """Time large reductions, a copy and matmuls; each figure is the best of its ways."""
    read, copy = _bandwidths(timer, device, nbytes)
    rates = {}
    for dtype in (torch.float16, torch.bfloat16):
        a, b = torch.randn(2, size, size, device=device).to(dtype)
        product = timer.measure({"mm": lambda a=a, b=b: a @ b}, _BUDGET_S)["mm"]  # type: ignore[misc]
        rates[dtype] = 2.0 * size**3 / product.seconds
    return Ceilings(read, copy, rates[torch.float16], rates[torch.bfloat16])


def _bandwidths(timer: Timer, device: torch.device, nbytes: int) -> tuple[float, float]:
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "sum": source.sum,
        "max": source.max,
        "copy": lambda: target.copy_(source),
    }
    seconds = {k: t.seconds for k, t in timer.measure(calls, _BUDGET_S).items()}
    fastest = min(seconds["sum"], seconds["max"])
    return source.nbytes / fastest, 2 * source.nbytes / seconds["copy"]
