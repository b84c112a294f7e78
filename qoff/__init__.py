"""qoff runs language models that do not fit: 4-bit weights, streamed while it computes.

    model, tokenizer = qoff.load("path-or-hub-id", device_memory="4GiB")
    llm = qoff.LLM("path-or-hub-id", qoff.Plan(batch_size=32, batches=4))

These names and what they need are imported on first use; `import qoff` alone is fast. It also
makes transformers know qoff checkpoints and `qoff.QoffConfig` (see `hf.plugin.register`):

    model = AutoModelForCausalLM.from_pretrained("path-or-hub-id-of-a-qoff-checkpoint")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qoff.hf.plugin.register import register_with_transformers

if TYPE_CHECKING:
    from qoff.engine import LLM, SamplingParams
    from qoff.hf.cache import QoffCache
    from qoff.hf.load import load
    from qoff.hf.plugin.config import QoffConfig
    from qoff.kvcache import KVPlacement, KVQuant
    from qoff.plan import Plan
    from qoff.quant import Format, QuantConfig

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Format",
    "KVPlacement",
    "KVQuant",
    "Plan",
    "QoffCache",
    "QoffConfig",
    "QuantConfig",
    "SamplingParams",
    "__version__",
    "load",
]

_MODULES = {
    "Format": "qoff.quant",
    "QoffCache": "qoff.hf.cache",
    "KVPlacement": "qoff.kvcache",
    "KVQuant": "qoff.kvcache",
    "LLM": "qoff.engine",
    "Plan": "qoff.plan",
    "QoffConfig": "qoff.hf.plugin.config",
    "QuantConfig": "qoff.quant",
    "SamplingParams": "qoff.engine",
    "load": "qoff.hf.load",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'qoff' has no attribute {name!r}")
    return getattr(import_module(module), name)


register_with_transformers()
