"""Attention of transformers' modules by qoff's op: what transformers calls under the name `NAME`.

transformers' attention interface hands over queries, keys and values after the rotation; its mask
interface says which pattern they are for. Both ask the pass that is being computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qoff.errors import OpError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kvcache import CachePass

from .passes import ModulePass

NAME = "qoff_packed"
_MASK = "qoff_mask"  # what a mask that `masked` made is known by, with the window as its value


class Attention(Protocol):
    """What a pass does where transformers attends."""

    def mask(
        self, mask_function: Callable[..., Tensor], window: int | None, shape: tuple[int, ...]
    ) -> Tensor:
        """What modules hand on as their mask; shape: [B, 1, T, all columns]."""
        ...

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        """What new tokens attend to: [B, T, heads, D].

        q: [B, heads, T, D]; k, v: [B, KV heads, T, D].
        """
        ...


def register() -> None:
    """Let transformers know `NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


class PackedAttention:
    """Appends the new tokens of a pass to a cache of qoff's, and attends to it.

    places: the layer of the cache, by transformers' number of the layer. new: bool [B, T], which
    columns are tokens; they are the rows of `ragged`.
    """

    def __init__(
        self,
        ops: Ops,
        shapes: dict[int, HeadShape],
        places: dict[int, int],
        cache: CachePass,
        ragged: Ragged,
        new: Tensor,
    ) -> None:
        self._ops, self._shapes, self._places = ops, shapes, places
        self._cache, self._ragged, self._new = cache, ragged, new

    def mask(
        self, mask_function: Callable[..., Tensor], window: int | None, shape: tuple[int, ...]
    ) -> Tensor:
        """A mask without content: the op knows which token is where."""
        return masked(window, (0,))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        layer: Any = module.layer_idx
        place, new = self._places[layer], self._new
        rows = [x.transpose(1, 2)[new].flatten(1) for x in (q, k, v)]
        sinks = more.get("s_aux")
        found = self._ops.attention(
            torch.cat(rows, 1),
            self._shapes[layer],
            self._cache.open(place),
            self._ragged,
            sinks=None if sinks is None else sinks.float().contiguous(),
        )
        self._cache.close(place)
        batch, heads, columns, dim = q.shape
        out = q.new_zeros(batch, columns, heads, dim)
        out[new] = found.view(-1, heads, dim)
        return out


def masked(window: int | None, shape: tuple[int, ...]) -> Tensor:
    """A mask without content for a window of so many tokens; None: all."""
    mask = torch.empty(shape, dtype=torch.bool)
    setattr(mask, _MASK, window)
    return mask


def window_of(mask: object) -> int | None:
    """The window that a mask is for. Raises LookupError for what `masked` has not made."""
    if not hasattr(mask, _MASK):
        raise LookupError("not a mask of transformers' mask interface, as it was made")
    window: int | None = getattr(mask, _MASK)
    return window


def _current() -> Attention:
    from greenlet import getcurrent

    here = getcurrent()
    if not isinstance(here, ModulePass) or here.attention is None:
        raise OpError(f"attention {NAME!r} is for models of qoff.load(kv=...) only")
    attention: Attention = here.attention
    return attention


def _mask(mask_function: Callable[..., Tensor], **about: Any) -> Tensor:
    shape = (about["batch_size"], 1, about["q_length"], about["kv_length"])
    return _current().mask(mask_function, about.get("local_size"), shape)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    return _current().attend(module, query, key, value, mask, **more), None
