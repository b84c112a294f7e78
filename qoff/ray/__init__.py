"""Many machines: `build_processor`, a stage of Ray Data, shaped like that of `ray.data.llm`.

Ray starts processes that keep the ledger or read lines, and need no torch: names are imported when
they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qoff.errors import QoffError

if TYPE_CHECKING:
    from .processor import Processor, ProcessorConfig, build_processor

__all__ = ["Processor", "ProcessorConfig", "build_processor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'qoff.ray' has no attribute {name!r}")
    try:
        import_module("ray.data")
    except ModuleNotFoundError as error:
        raise QoffError(
            f"many machines need {error.name}, which is not installed; pip install 'qoff[ray]'"
        ) from error
    return getattr(import_module("qoff.ray.processor"), name)
