"""The ops on the CPU, as the decoder calls them; see `kernels.ops`."""

from __future__ import annotations

from qoff.kernels.reference.experts import add_experts

from .attention.attention import attention
from .attention.gate import gate
from .attention.latent import absorb, expand
from .attention.resize import resize_heads
from .indexed.choose import choose
from .jit.pool import default_pool
from .jit.recorder import JobRecorder
from .linear.linear import w4_linear
from .linear.low_rank import low_rank
from .linear.norm import norm
from .moe.experts import experts
from .moe.route import route
from .recurrent.delta import delta
from .recurrent.mamba import mamba
from .recurrent.short_conv import short_conv
from .streams.matched import matched
from .streams.mixing import correct, predict
from .streams.sparse_gate import sparse_gate

PACKING = "rows16"  # what w4_linear reads
CACHE, USES_OUT, RECORDER = "host", True, JobRecorder
ACTIVATION_BITS: tuple[int, ...] = (8, 16)

__all__ = [
    "ACTIVATION_BITS",
    "CACHE",
    "PACKING",
    "RECORDER",
    "USES_OUT",
    "absorb",
    "add_experts",
    "attention",
    "choose",
    "correct",
    "default_pool",
    "delta",
    "expand",
    "experts",
    "gate",
    "low_rank",
    "mamba",
    "matched",
    "norm",
    "predict",
    "resize_heads",
    "route",
    "short_conv",
    "sparse_gate",
    "w4_linear",
]
