"""The decoder's ops on a GPU: the interface `ops.Ops` on Triton kernels.

Hidden states are float16 or bfloat16. Kernels are launched on the current stream of the operands'
GPU, and nothing waits for it, but for attention to blocks in host memory. The cache is a
`DeviceLayerCache`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.ending import PLAIN, XIELU, Ending, Norm
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import DeviceLayerStates, StateShape
from qoff.kernels.operands import require
from qoff.kernels.reference.delta import gate
from qoff.kernels.reference.elementwise import resize_heads
from qoff.kernels.reference.experts import route
from qoff.kernels.reference.linear import ended
from qoff.kernels.reference.low_rank import low_rank
from qoff.kernels.reference.ops import norm_all_heads
from qoff.kernels.reference.streams import correct, matched, predict, sparse_gate

from .attention.offloaded import joined_bytes
from .attention.op import attend_to_heads, heads_bytes
from .elementwise.rms_norm import rms_norm
from .elementwise.xielu import xielu
from .indexed import choose as indexed
from .latent.op import attend_to_latents, latents_bytes
from .latent.products import absorb, expand
from .linear import linear
from .linear.product import Epilogue
from .linear.scratch import Scratch
from .moe.experts import add_experts, experts
from .recurrent import delta as linear_attention
from .recurrent import mamba as state_space
from .recurrent import short_conv as convolution

PACKING = "split32"
CACHE = "device"
USES_OUT = False
RECORDER = None  # CUDA graphs are
ACTIVATION_BITS: tuple[int, ...] = (16,)

__all__ = [
    "ACTIVATION_BITS",
    "CACHE",
    "PACKING",
    "RECORDER",
    "USES_OUT",
    "absorb",
    "add_experts",
    "attention",
    "attention_bytes",
    "choose",
    "correct",
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
    "states_bytes",
    "w4_linear",
]


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    end: Ending = PLAIN,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return norm(x) @ W.T + bias with what `end` says of it, and of the residual.

    x: float16 or bfloat16 [M, K], contiguous; weight: [N, K], packing split32. norm [K], bias [N]
    or [M, N]: any float dtype. residual, out: like the result, [M, N] or [M, N / 2]; they may be
    the same, but share no memory with x. The norm and the result are rounded to the dtype of x;
    every step is where the kernel leaves them to others (`gemm`, a scratch, a bias of each row; all
    of `end` but gated SiLU).
    scratch: where weights are dequantized if they are, None for one of its own. Raises OpError.
    """
    rows = weight.shape[0]
    if end.gated and rows % 32:
        raise OpError(f"a gate needs a multiple of 32 rows, not {rows}")
    for name, tensor in (("residual", residual), ("out", None if out is residual else out)):
        if tensor is not None:
            shape = (x.shape[0], rows // 2 if end.gated else rows)
            require(name, tensor, (x.dtype,), shape, x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        y = x if norm is None else _normalized(x, norm)
        each = bias if bias is not None and bias.dim() == 2 else None  # by what adapters add
        added = None if bias is None or each is not None else bias.to(x.dtype)
        fused = end.only_gated_silu and each is None
        epilogue = Epilogue(residual, end.gated, out) if fused else Epilogue()
        y = linear.w4_linear(y, weight, added, end=epilogue, scratch=scratch)
        if fused:
            return y
        y = y if each is None else (y + each).to(x.dtype)
        y = _ended(y, end, residual)
        return y if out is None else out.copy_(y)


def norm(
    x: Tensor,
    by: Norm,
    *,
    scale: float = 1.0,
    residual: Tensor | None = None,
    sum_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return sum_scale * (scale * norm(x) + residual), each step in the dtype of x.

    out is not x.
    """
    with torch.cuda.device_of(x):
        y = _ended(x, Ending(post_norm=by, scale=scale, sum_scale=sum_scale), residual)
        return y if out is None else out.copy_(y)


def _ended(z: Tensor, end: Ending, residual: Tensor | None) -> Tensor:
    """`reference.linear.ended`, with norms and xIELU by the kernels that do them."""
    if end.activation == XIELU:
        assert end.xielu is not None
        z = xielu(z, end.xielu)
        end = end._replace(activation="", xielu=None)
    if end.post_norm is not None:
        z = _normalized(ended(z, end.by_element), end.post_norm)
        end = end._replace(activation="", gated=False, post_norm=None)
    if end.sum_norm is not None:
        return _normalized(ended(z, end.by_element, residual), end.sum_norm)
    return ended(z, end, residual)


def _normalized(x: Tensor, by: Norm) -> Tensor:
    if not by.centered:
        return rms_norm(x, by.weight, by.eps, by.scale)
    bias = None if by.bias is None else by.bias.to(x.dtype)
    weight = by.weight if by.scale == 1 else by.weight * by.scale
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias, by.eps)


def delta(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeviceLayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The rows for which the states were opened: see `recurrent.delta.delta`."""
    with torch.cuda.device_of(qkv):
        return linear_attention.delta(qkv, z, b, a, weights, shape, states, out=out)


def short_conv(
    bcx: Tensor,
    weight: Tensor,
    shape: ShortConvShape,
    states: DeviceLayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The rows for which the states were opened: see `recurrent.short_conv.short_conv`."""
    with torch.cuda.device_of(bcx):
        return convolution.short_conv(bcx, weight, shape, states, out=out)


def mamba(
    zxbcdt: Tensor,
    weights: MambaWeights,
    shape: MambaShape,
    states: DeviceLayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The rows for which the states were opened: see `recurrent.mamba.mamba`."""
    with torch.cuda.device_of(zxbcdt):
        return state_space.mamba(zxbcdt, weights, shape, states, out=out)


def states_bytes(tokens: int, shape: StateShape, sequences: int, dtype: torch.dtype) -> int:
    """The most bytes that the op of a recurrent layer allocates, as if it freed nothing."""
    if isinstance(shape, DeltaShape):
        return linear_attention.delta_bytes(tokens, shape, sequences, dtype)
    if isinstance(shape, MambaShape):
        return state_space.mamba_bytes(tokens, shape, dtype)
    assert isinstance(shape, ShortConvShape)
    return convolution.short_conv_bytes(tokens, shape, dtype)


def attention(
    qkv: Tensor,
    shape: HeadShape,
    cache: DeviceLayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, append keys and values to the cache, attend causally.

    qkv: float16 or bfloat16 [M, (heads + 2 kv_heads) * head_dim], the rows of `ragged`, for which
    the cache was opened; with latents [M, (heads + 1) * head_dim], and written over. rotary: cos
    and sin, float32 [positions, R / 2], on the device. q_norm, k_norm: [head_dim], any float dtype,
    or of all heads (see the reference). sinks: float32 [heads], scores of a key without a value.
    out: contiguous. Returns [M, heads * value_dim] in the dtype of qkv; with blocks in host memory,
    it returns when the CPU has attended to them. chosen: of `choose`, with latents. Raises OpError.
    """
    if chosen is not None and not shape.latent:
        raise OpError("tokens that an index chooses are attended to with latents")
    dtypes, device = (cache.recent_k.dtype,), cache.recent_k.device
    width = ("M", shape.qkv_width)
    require("qkv", qkv, dtypes, width, device, rows_apart=not shape.latent)
    step, tokens = cache.step, qkv.shape[0]
    if step.positions.shape[0] != tokens:
        raise OpError(f"{tokens} rows, but the cache was opened for {len(step.positions)}")
    if out is not None:
        require("out", out, (qkv.dtype,), (len(qkv), shape.out_width), qkv.device)
    with torch.cuda.device_of(qkv):
        if shape.norms_all(q_norm, k_norm):
            qkv, q_norm, k_norm = norm_all_heads(qkv, shape, q_norm, k_norm), None, None
        rows = qkv if step.order is None else qkv[step.order]
        if shape.latent:
            attended = attend_to_latents(rows, shape, cache, rotary, sinks, chosen).flatten(1)
        else:
            norms = (q_norm, k_norm)
            attended = attend_to_heads(rows, shape, cache, rotary, norms, sinks).flatten(1)
        if step.order is not None:
            out = torch.empty_like(attended) if out is None else out
            out[step.order] = attended
            return out
        return attended if out is None else out.copy_(attended)


def choose(
    qk: Tensor,
    weights: Tensor,
    shape: IndexShape,
    cache: DeviceLayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Choose tokens by an index, and append its new keys: see `indexed.choose.choose`."""
    with torch.cuda.device_of(qk):
        return indexed.choose(qk, weights, shape, cache, rotary, out)


def attention_bytes(
    tokens: int,
    sequences: int,
    blocks: int,
    shape: HeadShape,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
    *,
    offloaded: bool = False,
    values_rotated: bool = False,
    top: float = 1.0,
    chosen: int = 0,
) -> int:
    """The most bytes `attention` allocates, its result included, as if it freed nothing.

    For up to `tokens` tokens of `sequences` sequences that have up to `blocks` packed blocks each.
    offloaded: some are attended on the CPU. values_rotated: the cache's V are. top: of the cache.
    chosen: tokens that an index chooses for each, 0 without one.
    """
    joined = joined_bytes(tokens, shape, dtype) if offloaded else 0
    if shape.latent:
        how = offloaded, chosen
        return joined + latents_bytes(tokens, blocks, shape, form, dtype, device, *how)
    several = tokens, sequences, blocks
    of_heads = values_rotated, top, offloaded
    return joined + heads_bytes(*several, shape, form, dtype, device, *of_heads)
