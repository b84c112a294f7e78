"""Quantized weights: made from floats (`matrix`, by the solvers of `solvers` and `compensated`),
imported from GGUF files (`gguf`) and quantized safetensors (`schemes`), and their rows moved
(`rows`).
"""

from qoff.kernels.layout.qtensor import QTensor

from .gguf import GGUFFile
from .grouped import widened
from .matrix import Format, QuantConfig, quantize, quantize_as
from .rows import concat_rows
from .schemes import CONFIG_FILES, CONFIG_KEYS, comes_as_floats, read_scheme, stated
from .stored import Scheme, TensorInfo

__all__ = [
    "CONFIG_FILES",
    "CONFIG_KEYS",
    "Format",
    "GGUFFile",
    "QTensor",
    "QuantConfig",
    "Scheme",
    "TensorInfo",
    "comes_as_floats",
    "concat_rows",
    "quantize",
    "quantize_as",
    "read_scheme",
    "stated",
    "widened",
]
