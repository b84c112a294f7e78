"""Many machines: `build_processor`, a stage of Ray Data, shaped like that of `ray.data.llm`."""

from __future__ import annotations

from qoff.errors import QoffError

try:
    import ray.data as _  # noqa: F401
except ModuleNotFoundError as error:
    raise QoffError(
        f"many machines need {error.name}, which is not installed; pip install 'qoff[ray]'"
    ) from error

from .processor import Processor, ProcessorConfig, build_processor

__all__ = ["Processor", "ProcessorConfig", "build_processor"]
