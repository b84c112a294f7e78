"""The ops as one interface, and which implementation serves which device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from qoff.budgets import unusable_gpu
from qoff.errors import ArgumentError, BudgetError, OpError
from qoff.system_memory import left_by_limits, refused_tier

from .layout.delta import DeltaShape, DeltaWeights
from .layout.ending import PLAIN, Ending, Norm
from .layout.heads import HeadShape
from .layout.index import IndexShape
from .layout.latent import LatentShape
from .layout.low_rank import LowRanks
from .layout.mamba import MambaShape, MambaWeights
from .layout.qexperts import ExpertsMlp
from .layout.qtensor import QTensor
from .layout.ragged import Ragged
from .layout.routing import Routing
from .layout.short_conv import ShortConvShape
from .layout.streams import StreamRouter

_ADVICE = {  # by what the first launch of a kernel says
    "C compiler": "Triton needs one: install gcc, or name another with CC, ",
    "returned non-zero exit status": "its output is above; Triton needs gcc and Python's headers "
    "(python3-dev), ",
    "Permission denied": "have TRITON_CACHE_DIR name a folder that can be written, ",
    "Read-only file system": "have TRITON_CACHE_DIR name a folder that can be written, ",
    "No space left": "have TRITON_CACHE_DIR name a folder with room, ",
    "busy or unavailable": "end the process that has the GPU for itself (nvidia-smi names it), ",
    "no kernel image": "install a torch build for this GPU, ",
    "libcuda.so": "install the driver's libraries, ",
}
_COMPILING = 340 << 20  # bytes that compiling all kernels for a CPU takes, beside the libraries


class WorkReplay(Protocol):
    """Work that was recorded while it was done; calling it says whether it was done again."""

    @property
    def stale(self) -> bool:
        """Whether it can never be done again."""

    def __call__(self) -> bool: ...


class RecordWhileDone(Protocol):
    """Records work of some ops while it is done, or does it at once, later."""

    def __call__(self, work: Callable[[], None]) -> WorkReplay | None: ...

    def deferring(self) -> AbstractContextManager[None]:
        """Within, ops may return before they have computed; see `cpu.jit.recorder.deferring`."""

    def alike_layers(self, count: int) -> Any:
        """`cpu.jit.alike.AlikeLayers` of passes within `deferring`."""


class Scratch(Protocol):
    """Where ops on a GPU dequantize weights; see `triton.linear.scratch`."""

    def keep(self) -> None:
        """Keep what is made of weights from now on, as far as there is room."""

    def forget(self) -> None:
        """Keep nothing: weights are given back."""

    @property
    def uses(self) -> int:
        """Grows when something is dequantized that may be kept."""

    @property
    def key(self) -> Hashable:
        """What is kept: recorded work that dequantizes depends on it."""

    def snapshot(self) -> object:
        """What is kept after work that is recorded; a replay is followed by `restore`."""

    def restore(self, snapshot: Any) -> None: ...

    def release(self) -> None:
        """Give the memory back."""


class Ops(Protocol):
    """The ops a decoder is made of; `reference` says what each means."""

    PACKING: str  # of the weights these ops read
    ACTIVATION_BITS: tuple[int, ...]  # to which matmuls can round their inputs
    CACHE: str  # what attention takes: "host", a `LayerCache`, or "device", a `DeviceLayerCache`
    USES_OUT: bool  # whether `out` spares anything; otherwise results are copied there

    @property
    def RECORDER(self) -> Callable[[], RecordWhileDone] | None:  # noqa: N802 - as the others
        """Makes what records work of these ops while it is done: see `cpu.jit.recorder`."""

    def w4_linear(
        self,
        x: Tensor,
        weight: QTensor,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        end: Ending = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def norm(
        self,
        x: Tensor,
        by: Norm,
        *,
        scale: float = 1.0,
        residual: Tensor | None = None,
        sum_scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def low_rank(
        self,
        x: Tensor,
        ranks: LowRanks,
        which: Tensor,
        rows: slice,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
    ) -> Tensor: ...

    def route(
        self,
        scores: Tensor,
        routing: Routing,
        correction: Tensor | None = None,
        gains: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        mlp: ExpertsMlp,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        of: tuple[int, int] | None = None,
    ) -> Tensor: ...

    def add_experts(
        self, weighted: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...

    def absorb(
        self,
        q: Tensor,
        kv: Tensor,
        weight: QTensor,
        norm: Norm,
        shape: LatentShape,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def expand(
        self, x: Tensor, weight: QTensor, shape: LatentShape, *, out: Tensor | None = None
    ) -> Tensor: ...

    def delta(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: DeltaWeights,
        shape: DeltaShape,
        states: Any,  # as `cache` in `attention`: a `LayerStates`, or a `DeviceLayerStates`
        ragged: Ragged,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def short_conv(
        self,
        bcx: Tensor,
        weight: Tensor,
        shape: ShortConvShape,
        states: Any,  # as in `delta`
        ragged: Ragged,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def mamba(
        self,
        zxbcdt: Tensor,
        weights: MambaWeights,
        shape: MambaShape,
        states: Any,  # as in `delta`
        ragged: Ragged,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def gate(
        self, x: Tensor, by: Tensor, *, activation: str = "sigmoid", out: Tensor | None = None
    ) -> Tensor: ...

    def resize_heads(
        self, x: Tensor, dim: int, to: int, *, first: int = 0, out: Tensor | None = None
    ) -> Tensor: ...

    def predict(
        self, hidden: Tensor, router: StreamRouter, mixing: Tensor, out: Tensor
    ) -> Tensor: ...

    def correct(
        self, hidden: Tensor, found: Tensor, router: StreamRouter, mixing: Tensor, scale: Tensor
    ) -> Tensor: ...

    def matched(
        self,
        x: Tensor,
        like: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        sum_scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def sparse_gate(
        self, z: Tensor, deviations: float, activation: str, *, out: Tensor | None = None
    ) -> Tensor: ...

    def attention(
        self,
        qkv: Tensor,
        shape: HeadShape,
        cache: Any,  # see CACHE
        ragged: Ragged,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
        chosen: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def choose(
        self,
        qk: Tensor,
        weights: Tensor,
        shape: IndexShape,
        cache: Any,  # as in `attention`
        ragged: Ragged,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class ChangedOps:
    """Ops of which some attributes are others than those of `unchanged`."""

    def __init__(self, unchanged: Ops, **changed: Any) -> None:
        self.unchanged = unchanged
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unchanged, name)


class RoundedOps(ChangedOps):
    """Ops that round activations to fewer than 16 bits; `unchanged` are those that do not."""


def with_activation_bits(ops: Ops, activation_bits: int) -> Ops:
    """The ops with the inputs of matmuls rounded to 16 bits (per group), or to 8.

    Raises ArgumentError for other bits, and for those that these ops cannot round to.
    """
    if activation_bits not in (8, 16):
        raise ArgumentError(f"activation_bits is 8 or 16, not {activation_bits}")
    if activation_bits not in ops.ACTIVATION_BITS:
        raise ArgumentError(
            f"there are no {activation_bits}-bit activations on this device; use activation_bits=16"
        )
    if activation_bits == 16:
        return ops
    rounding = ("w4_linear", "experts", "attention")
    calls = {
        name: partial(getattr(ops, name), activation_bits=activation_bits) for name in rounding
    }
    return cast(Ops, RoundedOps(ops, ACTIVATION_BITS=(activation_bits,), **calls))


def new_scratch(device: torch.device, dtype: torch.dtype, bound: int | None) -> Scratch:
    """One for a GPU of which `bound` bytes may be used; nothing is kept in it."""
    from .triton.linear.scratch import Scratch, piece_bytes

    return Scratch(piece_bytes(device, dtype, bound))


def with_scratch(ops: Ops, scratch: Scratch) -> Ops:
    """The ops of a GPU, which dequantize weights there."""
    launch: Any = ops.w4_linear  # takes it with each call
    return cast(Ops, ChangedOps(ops, w4_linear=partial(launch, scratch=scratch)))


def exact(ops: Ops) -> Ops:
    """The same ops with 16-bit activations, for routers."""
    return ops.unchanged if isinstance(ops, RoundedOps) else ops


def ops_for(device: torch.device) -> Ops:
    """The fastest implementation for a device.

    Raises OpError where there is none, or none that runs; BudgetError where a cgroup's limit has no
    room to compile.
    """
    if device.type == "cpu":
        _check_room_to_compile()
        from .cpu import ops as cpu

        cpu.default_pool()  # takes as many threads as torch has now; torch may be given fewer later
        return cpu
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise OpError(
                "no GPU that torch can use; use device 'cpu', or look at the driver (nvidia-smi), "
                "CUDA_VISIBLE_DEVICES and torch, whose build has to be one for CUDA"
            )
        _check_gpu(device)
        from .triton import ops as triton_ops

        return triton_ops
    raise OpError(f"no ops for device {device.type!r}; use 'cpu' or 'cuda'")


@cache
def _check_gpu(device: torch.device) -> None:
    """Raise OpError where kernels do not run on a GPU: one is compiled and launched."""
    if why := unusable_gpu(device):
        raise OpError(f"{why}; use device='cpu'")
    try:
        from .triton.elementwise.rms_norm import rms_norm
    except ImportError as error:
        raise OpError(f"the ops for a GPU need Triton ({error}); install triton") from error
    try:
        with torch.cuda.device(device):
            ones = torch.ones(1, 128, dtype=torch.float16, device=device)
            rms_norm(ones, ones[0], 1e-6)
            torch.cuda.synchronize()
    except Exception as error:  # Triton raises many kinds
        if refused_tier(error) is not None:
            raise
        text = " ".join(str(error).split())
        advice = next((advice for part, advice in _ADVICE.items() if part in text), "")
        raise OpError(
            f"a kernel cannot be compiled or launched on {device}: {text[:300] or repr(error)}; "
            f"{advice}or use device='cpu' (see docs/troubleshooting.md)"
        ) from error


@cache
def _check_room_to_compile() -> None:
    """Raise BudgetError where kernels are to be compiled, and a limit would kill the process."""
    left = left_by_limits()
    if left is None or left >= _COMPILING:
        return
    from numba import config
    from numba.misc.appdirs import AppDirs

    from .cpu.jit.compiled import stamp

    here = Path(__file__).resolve().parent
    folder = Path("qoff", stamp(here / "cpu", here / "layout")[:16])
    kept = (config.CACHE_DIR, AppDirs(appname="numba", appauthor=False).user_cache_dir)
    places = [here / "cpu", *(Path(one) / folder for one in kept if one)]
    if any(any(place.rglob("*.nbi")) for place in places):
        return
    raise BudgetError(
        f"host memory: the CPU kernels are not compiled yet, which takes {_COMPILING:,} bytes, and "
        f"the limit of this process's cgroup leaves {left:,}; run once with a higher limit: what "
        "is compiled is kept (NUMBA_CACHE_DIR says where)"
    )


def release_scratch() -> None:
    """Give back the working memory that ops on the CPU share; the next op takes what it needs."""
    loaded = sys.modules.get(f"{__package__}.cpu.jit.pool")
    if loaded is not None:  # it is compiled when it is imported, and has none before
        loaded.default_pool().shrink()
