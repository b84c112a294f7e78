"""What the kernels are measured beside, each made from the same operands.

A function here returns a call that does the peer's work once; it raises where the peer is not
installed or does not take the operands, and the bench reports that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.case import Call
from qoff.kernels.layout.packing import unpack_codes, unpack_scale_min
from qoff.kernels.layout.qtensor import QTensor

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# cuDNN where it does not take grouped heads, or causal queries after earlier keys.
REPEATED, IN_TWO_PARTS = "cudnn, KV heads repeated", "cudnn, past and present merged"
_INNER_TILES = 8

Attention = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def tinygemm(x: Tensor, q: QTensor) -> Call:
    """torch.ops.aten._weight_int4pack_mm, which takes bfloat16: w = (code - 8) * scale + zero."""
    x = x.bfloat16()
    codes = unpack_codes(q.codes, q.shape, q.bits, q.packing)
    pairs = (codes[:, ::2] << 4) | codes[:, 1::2]  # the even column is in the high nibble
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _INNER_TILES)
    scale, minimum = q.scale_min.float().unbind(2)
    scales = torch.stack((scale, minimum + 8 * scale), 2).bfloat16().contiguous()
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, q.group_size, scales)


def gemlite(x: Tensor, q: QTensor) -> Call:
    """gemlite's linear layer: w = (code - zero) * scale."""
    core = importlib.import_module("gemlite.core")
    half = core.DType.FP16
    layer = core.GemLiteLinearTriton(
        W_nbits=q.bits,
        group_size=q.group_size,
        in_features=q.shape[1],
        out_features=q.shape[0],
        input_dtype=half,
        output_dtype=half,
    )
    scale, minimum = unpack_scale_min(q.scale_min, q.shape, q.packing)
    codes = unpack_codes(q.codes, q.shape, q.bits, q.packing)
    layer.pack(codes, scale, -minimum / scale, None)
    return lambda: layer(x)


def sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """torch's attention by one backend. q [S, Hq, T, D]; k, v [S, Hkv, L, D], L at least T.

    A causal mask ends at the last key: query t sees keys up to L - T + t.
    """
    mask = None
    if causal and k.shape[2] != q.shape[2]:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[2], k.shape[2])
    backend, grouped = BACKENDS[name], q.shape[1] != k.shape[1]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped
            )

    return call


def cudnn_in_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Causal attention of T queries to L keys, L > T, at cuDNN's speed: torch has no mask for it.

    Attention to the keys before the queries, and causal attention to the others, merged by their
    log-sum-exp. q [S, H, T, D]; k, v [S, H, L, D].
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )
        return found[0], found[1].view(q.shape[:3])

    return lambda: in_two_parts(attend, q, k, v)


def in_two_parts(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention from that of the last keys and that of those before.

    attend: q, k, v and whether it is causal -> output and log-sum-exp [S, H, T].
    """
    past = k.shape[2] - q.shape[2]
    before, before_lse = attend(q, k[:, :, :past], v[:, :, :past], False)
    present, present_lse = attend(q, k[:, :, past:], v[:, :, past:], True)
    share = torch.sigmoid(before_lse - present_lse)[..., None].to(q.dtype)
    return torch.lerp(present, before, share)
