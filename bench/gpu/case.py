"""What the modules `bench.gpu.ops.<op>` list: checks against the reference, and cases to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from qoff.kernels.triton.launch.gpu import Gpu

# Largest relative RMS error, by the lowest precision on the way.
BOUNDS: Mapping[torch.dtype, float] = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

Call = Callable[[], object]


@dataclass(frozen=True)
class Check:
    """One comparison with the reference on fresh random inputs. `error` runs both."""

    op: str
    name: str
    error: Callable[[], float]
    bound: float


@dataclass(frozen=True)
class SerialChain:
    """What one call does one after the other, however little it has to do.

    loads: from memory, each of which waits for the one before.
    """

    launches: int
    loads: int


@dataclass(frozen=True)
class PreparedCase:
    """A case in memory. Peers are made on first use: one that raises is reported as missing.

    Where the results of peers are `comparable`, so is one whose result is not that of `call`.
    """

    call: Call
    peers: Mapping[str, Callable[[], Call]] = field(default_factory=dict)
    comparable: bool = False
    chain: SerialChain | None = None


@dataclass(frozen=True)
class CaseSize:
    """A size of one op. `nbytes` counts each byte of memory once, `flops` a multiply-add as two."""

    op: str
    model: str
    name: str
    nbytes: int
    _: KW_ONLY
    flops: float = 0.0
    m: int = 0  # tokens, of the ops that have few or many
    tokens: int = 0  # cached ones of a sequence
    group: int = 0  # query heads for a KV head
    stored: int = 0  # bytes of packed weights or fp16 KV that the targets speak of

    @property
    def key(self) -> str:
        """Its name among all cases of all ops."""
        return f"{self.op} {self.model} {self.name}"

    @property
    def size(self) -> dict[str, Any]:
        """The fields of a `CaseSize`."""
        return {f.name: getattr(self, f.name) for f in fields(CaseSize)}


@dataclass(frozen=True)
class TimedCase(CaseSize):
    """A size to be timed."""

    build: Callable[[torch.device], PreparedCase]
    footprint: int = field(default=0, kw_only=True)  # bytes on the device, of its peers, too


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over that of `expected`; infinite for NaN or another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    reference = expected.double()
    difference = (actual.double() - reference).square().mean().sqrt()
    error = float(difference / reference.square().mean().sqrt().clamp_min(1e-30))
    return error if error == error else float("inf")


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that kernels take on a device: no bfloat16 before compute capability 8.0."""
    old = Gpu.of(device).capability < 80
    return (torch.float16,) if old else (torch.float16, torch.bfloat16)


def short(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")
