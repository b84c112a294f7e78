"""Quantized weights: making them from floats, importing them from GGUF, moving their rows.

- `solvers`: the scale and minimum of each group: round to nearest, MSE, HQQ.
- `matrix`: `quantize` a whole matrix, and its configuration.
- `gguf`: read GGUF files, taking their codes over bit for bit.
- `rows`: join and reorder rows of quantized matrices.
"""

from qoff.kernels.qtensor import QTensor

from .gguf import GGUFFile
from .matrix import QuantConfig, quantize
from .rows import concat_rows, unpermute_rows

__all__ = ["GGUFFile", "QTensor", "QuantConfig", "concat_rows", "quantize", "unpermute_rows"]
