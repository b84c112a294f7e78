"""Quantized weights: making them from floats, importing those of others, moving their rows.

- `solvers`: the scale and minimum of each group: round to nearest, MSE, HQQ.
- `matrix`: `quantize` a whole matrix; formats, and the configuration of a model's.
- `gguf`, `gguf_blocks`: read GGUF files, taking their codes over bit for bit.
- `gptq`, `awq`, `compressed_tensors`, `bitsandbytes`, `mxfp4`: read quantized safetensors;
  `schemes` chooses among them, `stored` is what they read from, `grouped` what they have in common.
- `rows`: join and reorder rows of quantized matrices.
"""

from qoff.kernels.layout.qtensor import QTensor

from .gguf import GGUFFile
from .grouped import widened
from .matrix import Format, QuantConfig, quantize
from .rows import concat_rows
from .schemes import CONFIG_FILES, SCHEMES, read_scheme
from .stored import Scheme, StoredTensors, TensorInfo

__all__ = [
    "CONFIG_FILES",
    "SCHEMES",
    "Format",
    "GGUFFile",
    "QTensor",
    "QuantConfig",
    "Scheme",
    "StoredTensors",
    "TensorInfo",
    "concat_rows",
    "quantize",
    "read_scheme",
    "widened",
]
