"""What an `LLM` runs on where transformers' modules compute on a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from qoff.checkpoint import Checkpoint
from qoff.kvcache.quant import UnpackableError
from qoff.models.modules.slots import DeviceModuleSlots
from qoff.models.runtime import Runtime
from qoff.plan import Memory, Plan
from qoff.plan.gpu_modules import memory_of_modules_on_gpu

from .executor import Executor
from .gpu_executor import GpuExecutor
from .module_executor import ModuleExecutor, OfModules


def modules_on_gpu(checkpoint: Checkpoint, plan: Plan, own: ExitStack, **options: Any) -> Executor:
    """With packed K and V where the attention of the modules can be replaced, or else without."""
    with ExitStack() as tried:
        try:
            executor = GpuModuleExecutor(checkpoint, plan, tried, **options)
        except UnpackableError:
            tried.close()
            return ModuleExecutor(checkpoint, plan, own, **options)
        own.push(tried.pop_all())
    return executor


class GpuModuleExecutor(OfModules, GpuExecutor):
    """A GPU whose attention replaces that of the modules. Raises UnpackableError where none can."""

    def new_cache(self) -> DeviceModuleSlots:
        lent, states = self._decoder.lent, self._states()
        return self._new_cache(DeviceModuleSlots, lent=lent, states=states)

    def _new_scratch(self) -> None:
        return None

    def _runtime(self, checkpoint: Checkpoint, **options: Any) -> Runtime:
        return Runtime(checkpoint, kv=self.plan.kv, **options)

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        return memory_of_modules_on_gpu(plan, self._decoder, self._held, tiled)
