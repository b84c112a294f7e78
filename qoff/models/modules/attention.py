"""Attention of transformers' modules by qoff's op: what transformers calls under the name `NAME`.

transformers' attention interface hands over queries, keys and values after the rotation; its mask
interface says which pattern they are for. Both ask the pass that is being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qoff.errors import OpError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kvcache import CachePass

NAME = "qoff_packed"
MASK = "qoff_mask"  # what a mask that `masked` made is known by, with the window as its value


def register() -> None:
    """Let transformers know `NAME`: it calls `mask` and `attend` of the pass's attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def mask(mask_function: Callable[..., Tensor], **about: Any) -> Tensor:
        shape = (about["batch_size"], 1, about["q_length"], about["kv_length"])
        found: Tensor = _current().mask(mask_function, about.get("local_size"), shape)
        return found

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        return _current().attend(module, q, k, v, attention_mask, **more), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """Appends the new tokens of a pass to a cache of qoff's, and attends to it.

    layers: by transformers' numbers, the layer of the cache that one attends to, and how. new:
    int64, sequences and columns of what is a token among [B, T], the rows of `ragged`; None: all
    are. dtype: of the cache.
    """

    ops: Ops
    layers: Mapping[int, tuple[int, HeadShape]]
    cache: CachePass
    ragged: Ragged
    new: tuple[Tensor, ...] | None
    dtype: torch.dtype

    def mask(
        self, mask_function: Callable[..., Tensor], window: int | None, shape: tuple[int, ...]
    ) -> Tensor:
        """What modules hand on as their mask, without content: the op knows what is where.

        shape: [B, 1, T, all columns].
        """
        return masked(window, (0,))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        """What new tokens attend to: [B, T, heads, D].

        q: [B, heads, T, D]; k, v: [B, KV heads, T, D].
        """
        layer: Any = module.layer_idx
        place, shape = self.layers[layer]
        operands = (q, k, v) if shape.appends else (q,)
        rows = [self._rows(x.transpose(1, 2)).flatten(1) for x in operands]
        sinks = more.get("s_aux")
        found = self.ops.attention(
            torch.cat(rows, 1).to(self.dtype),
            shape,
            self.cache.open(place),
            self.ragged,
            sinks=None if sinks is None else sinks.float().contiguous(),
        )
        self.cache.close(place)
        batch, heads, columns, dim = q.shape
        found = found.to(q.dtype).view(-1, heads, dim)
        if self.new is None:
            return found.unflatten(0, (batch, columns))
        out = q.new_zeros(batch, columns, heads, dim)
        out[self.new] = found
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """The tokens of [B, T, heads, D]."""
        return x.flatten(0, 1) if self.new is None else x[self.new]


def masked(window: int | None, shape: tuple[int, ...]) -> Tensor:
    """A mask without content for a window of so many tokens; None: all."""
    mask = torch.empty(shape, dtype=torch.bool)
    setattr(mask, MASK, window)
    return mask


def _current() -> Any:
    from greenlet import getcurrent

    from .passes import ModulePass

    here = getcurrent()
    if not isinstance(here, ModulePass) or here.attention is None:
        raise OpError(f"attention {NAME!r} is for models of qoff.load(kv=...) only")
    return here.attention
