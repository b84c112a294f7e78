"""qoff runs language models that do not fit: 4-bit weights, streamed while it computes.

    model, tokenizer = qoff.load("path-or-hub-id", device_memory="4GiB")

`qoff.load` and what it needs are imported on first use; `import qoff` alone is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qoff.hf.load import load
    from qoff.quant import QuantConfig

__version__ = "0.1.0"
__all__ = ["QuantConfig", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from qoff.hf.load import load

        return load
    if name == "QuantConfig":
        from qoff.quant import QuantConfig

        return QuantConfig
    raise AttributeError(f"module 'qoff' has no attribute {name!r}")
