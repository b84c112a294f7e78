"""The ops as `torch.ops.qoff.*`, and the same as typed functions.

Each call is checked before anything is launched (OpError says what was found and what was
expected), goes to a Triton kernel for CUDA tensors and to the CPU implementation or the reference
for others, and has a fake implementation, so that torch.compile and meta tensors work. None has a
derivative: these are ops for inference.
"""

from .attention import decode_attention, prefill_attention
from .cache import kv_append, merge
from .elementwise import add_rms_norm, rms_norm, rope, silu_mul
from .experts import experts
from .weights import dequantize, quantize, w4_linear

__all__ = [
    "add_rms_norm",
    "decode_attention",
    "dequantize",
    "experts",
    "kv_append",
    "merge",
    "prefill_attention",
    "quantize",
    "rms_norm",
    "rope",
    "silu_mul",
    "w4_linear",
]
