"""qoff runs language models larger than memory: 4-bit weights, streamed while it computes.

    model, tokenizer = qoff.load("path-or-hub-id", device_memory="4GiB")
    llm = qoff.LLM("path-or-hub-id", qoff.Plan(batch_size=32, batches=4))

All but the errors is imported on first use, so `import qoff` is fast. It also registers qoff
checkpoints and `qoff.QoffConfig` with transformers (see `hf.plugin.register`):

    model = AutoModelForCausalLM.from_pretrained("path-or-hub-id-of-a-qoff-checkpoint")

Imported before torch, it has torch's idle threads sleep early (`settings.shorten_openmp_spins`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qoff.errors import (
    ArgumentError,
    BudgetError,
    ChecksumError,
    ClosedError,
    ContextLengthError,
    ConversionError,
    DiskReadError,
    DiskWriteError,
    FormatError,
    OpError,
    QoffError,
    QuantizationError,
    StreamedError,
    TrainingError,
    UnsupportedModelError,
)
from qoff.hf.plugin.register import register_with_transformers
from qoff.settings import shorten_openmp_spins

if TYPE_CHECKING:
    from qoff.engine import LLM, Completion, SamplingParams
    from qoff.eval.mixing.kv_bits import kv_for_bits
    from qoff.hf.cache import QoffCache
    from qoff.hf.dispatch import dispatch
    from qoff.hf.load import load
    from qoff.hf.plugin.config import QoffConfig
    from qoff.kvcache import KVPlacement, KVQuant
    from qoff.models.convert.convert import convert
    from qoff.plan import Plan
    from qoff.quant import Format, QuantConfig

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ArgumentError",
    "BudgetError",
    "ChecksumError",
    "ClosedError",
    "Completion",
    "ContextLengthError",
    "ConversionError",
    "DiskReadError",
    "DiskWriteError",
    "Format",
    "FormatError",
    "KVPlacement",
    "KVQuant",
    "OpError",
    "Plan",
    "QoffCache",
    "QoffConfig",
    "QoffError",
    "QuantConfig",
    "QuantizationError",
    "SamplingParams",
    "StreamedError",
    "TrainingError",
    "UnsupportedModelError",
    "__version__",
    "convert",
    "dispatch",
    "kv_for_bits",
    "load",
    "train",
]

_MODULES = {
    "Completion": "qoff.engine",
    "Format": "qoff.quant",
    "KVPlacement": "qoff.kvcache",
    "KVQuant": "qoff.kvcache",
    "LLM": "qoff.engine",
    "Plan": "qoff.plan",
    "QoffCache": "qoff.hf.cache",
    "QoffConfig": "qoff.hf.plugin.config",
    "QuantConfig": "qoff.quant",
    "SamplingParams": "qoff.engine",
    "convert": "qoff.models.convert.convert",
    "dispatch": "qoff.hf.dispatch",
    "kv_for_bits": "qoff.eval.mixing.kv_bits",
    "load": "qoff.hf.load",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("qoff.train")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'qoff' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
shorten_openmp_spins()
