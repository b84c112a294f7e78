"""The ops on the CPU, compiled by numba for the processor at hand. Modules:

- `emit`: vector instructions for LLVM; `simd`: the same for numba; `compiled`: decorators and
  disk cache.
- `pool`: threads that run a compiled job within microseconds.
- `tile`, `linear_job`, `w4_linear`: the quantized matmul, inside out.
- `gates`, `experts_job`, `experts`: the MLP of a mixture of experts, likewise.
- `append`, `decode_attention`, `prefill_attention`, `attention`: the attention op.
- `operands`: checks before addresses are handed to compiled code.
"""

from .attention import attention
from .experts import experts
from .pool import default_pool
from .w4_linear import w4_linear

PACKING = "cpu16"  # what w4_linear reads
CACHE, USES_OUT = "host", True

__all__ = ["CACHE", "PACKING", "USES_OUT", "attention", "default_pool", "experts", "w4_linear"]
