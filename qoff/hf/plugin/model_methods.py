"""Methods of a transformers model where weights are packed or stream: sizes, casts and moves."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qoff.errors import StreamedError
from qoff.hf.packed.derived import QoffEmbedding
from qoff.hf.packed.module import CodesModule, PackedModule
from qoff.memory import Residency

from .offloaded import OffloadedLayer, refusing_loads


def num_parameters(
    self: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """As transformers counts, and packed weights, which do not learn; tied ones once."""
    total = int(type(self).num_parameters(self, only_trainable, exclude_embeddings))
    for module in () if only_trainable else self.modules():
        left_out = exclude_embeddings and isinstance(module, QoffEmbedding)
        if isinstance(module, CodesModule) and "codes" in module._buffers and not left_out:
            matrices = 1 if isinstance(module, PackedModule) else len(module.codes)  # of experts
            total += matrices * math.prod(module.packed_shape)
    return total


class StreamedMethods:
    """Takes the place of two methods of a model, which it does not keep alive.

    One of them, `_apply`, is also that of the layers that stream and of all modules around them.
    """

    def __init__(self, model: nn.Module, device: torch.device, plan: Residency) -> None:
        """device: computes. plan: of what streams, which has its `OffloadedLayer`s already."""
        self._model, self._device = weakref.ref(model), device
        self._streams = plan.weight_bytes
        floats = (p.dtype for p in model.parameters() if p.is_floating_point())
        self._dtype = next(floats, torch.get_default_dtype())
        around = [m for m in model.modules() if any(map(_streams, m.modules()))]
        for module in around:
            module._apply = partial(self.apply, weakref.ref(module))  # type: ignore[method-assign]
        self.guards = refusing_loads(around)
        model.get_memory_footprint = self.footprint  # type: ignore[assignment]

    def apply(
        self, module: weakref.ref[nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> Any:
        """What `to`, `half` and the like of a module call: nothing where nothing changes.

        Raises StreamedError else: weights that are not there now would stay as they are.
        """
        was = torch.empty(0, dtype=self._dtype, device=self._device)
        now = fn(was)
        if now.dtype != was.dtype:
            raise StreamedError(
                f"a model whose layers stream cannot be cast from {was.dtype} to {now.dtype}; load "
                f"it again with dtype={now.dtype}"
            )
        if now.device != was.device:
            raise StreamedError(
                f"a model whose layers stream cannot be moved from {was.device} to {now.device}; "
                "load it again for that device"
            )
        return module()

    def footprint(self, return_buffers: bool = True) -> int:
        """Bytes of memory: of weights that stay, and of what the others stream through."""
        model = self._model()
        assert model is not None
        found = [*model.parameters(), *(model.buffers() if return_buffers else ())]
        return self._streams + sum(x.nbytes for x in found if not x.is_meta)


def _streams(module: nn.Module) -> bool:
    return isinstance(module.forward, OffloadedLayer)
