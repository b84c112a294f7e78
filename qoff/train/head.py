"""Head and loss as one: the logits of some tokens at a time, and gradients with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.nn import functional

from qoff.budgets import device_guard
from qoff.errors import UnsupportedModelError
from qoff.hf.packed.linear import QoffLinear, packed_linear
from qoff.kernels.dequantize import times_matrix
from qoff.kernels.ops import ops_for

from .batches import IGNORED
from .gradients import add_into
from .passes import TrainingPass
from .tiled import TiledLinear, loss_of_tiles

# Bytes that are there at once; one token's, if that is more. Each piece goes through all gradients
# of a head that learns, and dequantizes one that is packed.
_LOGITS, _OF_PACKED, _LEARNING = 16 << 20, 32 << 20, 64 << 20
_WHOLE: Mapping[nn.Module, int] = MappingProxyType({})


class FusedHead:
    """The output embeddings of a model and its loss, for `TrainingPass`es alone.

    The head gives hidden states on, and the loss function computes both: a piece of tokens at a
    time, of those with a label, their logits, loss and gradients, so that neither logits nor their
    gradients are there for all tokens, and nothing is computed twice. As Liger Kernel (arXiv
    2410.10989) does on GPUs.

    Only for the loss that transformers has for causal models. A model that does more to logits is
    found at its first pass that learns, and computes them on its own from then on. fused: None
    until then.
    """

    def __init__(self, model: Any) -> None:
        own = model.get_base_model() if hasattr(model, "get_base_model") else model
        head: Any = getattr(own, "get_output_embeddings", lambda: None)()
        fits = isinstance(head, nn.Module) and _is_causal(getattr(own, "loss_function", None))
        self.fused: bool | None = None if fits else False
        self._model, self._head = own, head
        self._memory = torch.empty(0)
        self._sum_of: Callable[[Tensor], Tensor] = _no_sum
        self._tiled: TiledLinear | None = None

    def logits_bytes(
        self, tokens: int, packed: bool | None = None, rows: Mapping[nn.Module, int] = _WHOLE
    ) -> int:
        """Of memory for `begin`, where a micro-batch has so many tokens.

        packed: whether the head will be, None: as it is. rows: of modules in tiles, at once.
        """
        if not self._is_linear:
            return 0
        if packed is None:
            packed = type(self._head) is QoffLinear
        each, most = (
            4 * rows.get(self._head, self._head.out_features),
            _OF_PACKED if packed else _LOGITS,
        )
        if type(self._head) is nn.Linear and self._head.weight.requires_grad:
            most = _LEARNING
        return each * min(tokens, max(1, most // each))

    def begin(self, memory: Tensor, sum_of: Callable[[Tensor], Tensor]) -> None:
        """Take the places of head and loss. sum_of: where a parameter's gradients are summed."""
        self._memory, self._sum_of = memory.view(torch.float32), sum_of
        tiled = getattr(self._head, "forward", None)
        self._tiled = tiled if isinstance(tiled, TiledLinear) else None
        if self.fused is None:
            self._forward, self._loss = self._head.forward, self._model.loss_function
            self._head.forward = self._given_on
            self._model.loss_function = self._computed

    def share_of(self, loss: Tensor, share: float) -> Tensor:
        """A pass's part of the loss of a step. Raises UnsupportedModelError for another's loss."""
        here = getcurrent()
        if not self._takes(here):
            return loss * share
        if loss is not here.loss:
            raise UnsupportedModelError("this model has another loss in some steps only")
        here.loss = None  # else a pass that is over would keep hidden states and their gradients
        self.fused = True
        return loss

    def give_up(self, one: TrainingPass, error: Exception) -> bool:
        """Leave logits and loss to the model, if its first pass failed as it changes either."""
        changes = isinstance(error, UnsupportedModelError) or one.hidden is not None
        if self.fused is not None or not changes:
            return False
        self.fused = False
        return True

    @property
    def _is_linear(self) -> bool:
        return self.fused is not False and type(self._head) in (nn.Linear, QoffLinear)

    def _takes(self, here: object) -> TypeGuard[TrainingPass]:
        """Whether a pass is computed here. One without gradients is if others were."""
        if self.fused is False or not isinstance(here, TrainingPass):
            return False
        return here.learns or self.fused is True

    def _given_on(self, hidden: Tensor) -> Any:
        here = getcurrent()
        if not self._takes(here):
            return self._forward(hidden)
        here.hidden = hidden
        return hidden

    def _computed(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
        here = getcurrent()
        if not self._takes(here):
            return self._loss(logits, labels, *args, **kwargs)
        if logits is not here.hidden:
            raise UnsupportedModelError("this model changes logits in some steps only")
        here.hidden = None
        here.loss = self._of_tokens(logits, labels, here.share, here.learns, **kwargs)
        return here.loss

    def _of_tokens(
        self,
        hidden: Tensor,
        labels: Tensor,
        share: float,
        learns: bool,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Tensor:
        """`share` of the loss: the mean over tokens [B, T] of `labels`, each the next one's."""
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        wanted = shift_labels.reshape(-1)
        used = (wanted != IGNORED).nonzero()[:, 0]
        count = len(used) if num_items_in_batch is None else float(num_items_in_batch)
        flat, factor = hidden.detach().reshape(-1, hidden.shape[-1]), share / count
        total = torch.zeros((), device=flat.device)
        grad = torch.zeros_like(flat) if learns else None
        compute = self._of_linear if self._is_linear else self._of_any
        at_once = self._head.out_features if self._tiled is None else self._tiled.most_rows
        piece = max(1, self._memory.numel() // at_once) if self._is_linear else 256
        with torch.no_grad(), device_guard(flat.device):  # Triton launches on the current GPU
            for at in used.split(piece):
                loss, of_hidden = compute(flat[at], wanted[at], factor, learns)
                total += loss
                if grad is not None and of_hidden is not None:
                    grad[at] = of_hidden
        if grad is None:
            return total
        found: Tensor = _Known.apply(hidden, grad.view_as(hidden), total)
        return found

    def _of_linear(
        self, x: Tensor, wanted: Tensor, factor: float, learns: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Loss and gradient of hidden states [n, K], times `factor`; adds that of the weights."""
        if self._tiled is not None:
            return loss_of_tiles(self._tiled, x, wanted, factor, learns, self._memory, self._sum_of)
        weight, bias = self._head.weight, self._head.bias
        packed = self._head.qtensor if type(self._head) is QoffLinear else None
        logits = self._memory[: len(x) * self._head.out_features].view(len(x), -1)
        if packed is not None and x.is_cpu:
            ops_for(x.device).w4_linear(x.float().contiguous(), packed, out=logits)
        elif packed is not None:
            logits.copy_(packed_linear(x, packed))
        elif weight.dtype == torch.float32:
            torch.mm(x, weight.t(), out=logits)
        else:
            logits.copy_(x @ weight.t())
        if bias is not None:
            logits += bias
        logits -= logits.amax(1, keepdim=True)
        picked = logits.gather(1, wanted[:, None])
        sums = logits.exp_().sum(1, keepdim=True)
        loss = (sums.log() - picked).sum() * factor
        if not learns:
            return loss, None
        logits *= factor / sums
        logits.scatter_add_(1, wanted[:, None], torch.full_like(picked, -factor))
        if bias is not None and bias.requires_grad:
            self._sum_of(bias).add_(logits.sum(0))
        if packed is not None:
            given = logits if x.is_cpu else logits.to(x.dtype)
            return loss, times_matrix(given, packed).to(x.dtype)
        narrow = logits.to(weight.dtype)
        if weight.requires_grad:
            place = self._sum_of(weight)
            if weight.dtype == torch.float32:
                place.addmm_(narrow.t(), x)
            else:
                add_into(place, narrow.t() @ x)
        return loss, narrow @ weight

    def _of_any(
        self, x: Tensor, wanted: Tensor, factor: float, learns: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same of another kind of head, by autograd."""
        with torch.set_grad_enabled(learns):
            leaf = x.requires_grad_(learns)
            logits = self._forward(leaf).float()
            loss = functional.cross_entropy(logits, wanted, reduction="sum") * factor
            if learns:
                loss.backward()
        return loss.detach(), leaf.grad


class _Known(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad: Tensor, loss: Tensor) -> Tensor:
        ctx.grad = grad
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return ctx.grad.mul_(upstream[0]), None, None


def _is_causal(loss: Any) -> bool:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return loss is LOSS_MAPPING["ForCausalLM"]


def _no_sum(_: Tensor) -> Tensor:
    raise AssertionError("`begin` comes first")
