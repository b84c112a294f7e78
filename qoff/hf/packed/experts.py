"""The experts that transformers' models get: packed codes of all of them, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import common
from qoff.kernels.operands import FLOATS
from qoff.kernels.ops import ops_for
from qoff.kernels.reference.experts import activate
from qoff.kernels.reference.experts import experts as dense_experts
from qoff.models.row_order import from_halves, from_pairs

from .linear import packed_linear
from .module import CodesModule, packing_for, qtensor_of

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # of transformers' experts modules
UP = "up_proj"  # where there is no gate


def packed_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, mlp: ExpertsMlp) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [M, H] in the dtype of x.

    x: [M, H] of any float dtype, under autocast cast to its dtype. topk_ids: int64 [M, T].
    topk_weights: [M, T]. Differentiable in x and topk_weights; weights and biases are frozen. The
    forward pass is the device's `experts`, the backward pass takes one expert after another. Raises
    OpError.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        result: Tensor = _PackedExperts.apply(x, topk_ids, topk_weights, mlp)
        return result
    return _forward(x, topk_ids, topk_weights, mlp)


class _PackedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, mlp: ExpertsMlp
    ) -> Tensor:
        ctx.save_for_backward(x, topk_ids, topk_weights)
        ctx.mlp = mlp
        return _forward(x, topk_ids, topk_weights, mlp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, topk_ids, topk_weights = ctx.saved_tensors
        of_x, of_share = torch.zeros_like(x), torch.zeros_like(topk_weights)
        for e in topk_ids.unique().tolist():
            token, place = (topk_ids == e).nonzero(as_tuple=True)
            rows = x[token].detach().requires_grad_()
            weights = topk_weights[token, place].detach().requires_grad_()
            with torch.enable_grad():
                found = _expert(rows, ctx.mlp, e) * weights[:, None].to(x.dtype)
            by_rows, by_weights = torch.autograd.grad(found, (rows, weights), grad[token])
            of_x.index_add_(0, token, by_rows)
            of_share[token, place] = by_weights
        return of_x, None, of_share, None


def _expert(x: Tensor, mlp: ExpertsMlp, e: int) -> Tensor:
    """The MLP of expert e on rows x [m, H]."""
    of_gate_up, of_down = (
        None if bias is None else bias[e].detach() for bias in (mlp.gate_up_bias, mlp.down_bias)
    )
    z = packed_linear(x, mlp.gate_up.expert(e), of_gate_up)
    z = activate(z, mlp.activation, mlp.gated, mlp.limit)
    return packed_linear(z, mlp.down.expert(e), of_down)


def _forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, mlp: ExpertsMlp) -> Tensor:
    if not len(x):
        return torch.zeros_like(x)
    on_cpu = x.device.type == "cpu"
    taken = x.detach().float() if on_cpu else x.detach()
    if on_cpu or x.dtype in FLOATS:
        compute: Callable[..., Tensor] = ops_for(x.device).experts
    else:
        compute = dense_experts  # no kernel takes this dtype
    biases = [
        None if bias is None else bias.detach().to(taken.dtype)
        for bias in (mlp.gate_up_bias, mlp.down_bias)
    ]
    y = compute(
        taken.contiguous(),
        topk_ids.contiguous(),
        topk_weights.detach().float().contiguous(),
        replace(mlp, gate_up_bias=biases[0], down_bias=biases[1]),
    )
    return y.to(x.dtype)


class PackedExperts(CodesModule):
    """The matrices of all experts, [experts, N, K]."""

    def __init__(self, packed: QExperts, dtype: torch.dtype) -> None:
        """dtype: of the dense weight."""
        super().__init__()
        self.hold(packed, dtype)

    @property
    def qexperts(self) -> QExperts:
        """All of them, in the packing of the device that they are on."""
        found: QExperts = self._held(
            qexperts_of, lambda packed: stacked([packed.expert(e) for e in range(packed.count)])
        )
        return found


class QoffExperts(nn.Module):
    """Experts of a transformers model whose matrices are packed, rows of gate and up in blocks.

    Biases stay parameters, under transformers' names and in its order of rows.
    """

    def __init__(self, replaced: nn.Module, form: ExpertsForm) -> None:
        """replaced: an experts module of transformers."""
        super().__init__()
        module = self.__dict__["_replaced"] = cast(Any, replaced)  # its weights are on meta
        self.form = form
        for name in (f"{self.first}_bias", f"{DOWN}_bias") if form.has_bias else ():
            self.register_parameter(name, getattr(module, name))

    @property
    def first(self) -> str:
        """The parameter whose matrices are multiplied by first."""
        return GATE_UP if self.form.gated else UP

    @property
    def replaced(self) -> Any:
        """The module that this one stands for; without its weights."""
        return self.__dict__["_replaced"]

    @property
    def matrices(self) -> dict[str, PackedExperts]:
        """By the names of transformers' parameters, those that are there."""
        return {n: m for n, m in self.named_children() if isinstance(m, PackedExperts)}

    def dense_shape(self, name: str) -> tuple[int, int, int]:
        """Experts, rows and columns of the matrices of a parameter."""
        count, rows, columns = getattr(self.replaced, name).shape
        return (count, columns, rows) if self.form.transposed else (count, rows, columns)

    def hold(self, name: str, packed: QExperts) -> None:
        """Take the matrices of a parameter."""
        self.add_module(name, PackedExperts(packed, getattr(self.replaced, name).dtype))

    def packed_rows(self, name: str) -> Tensor:
        """For each row of a parameter's matrices, the row of the packed ones, int64 [N]."""
        rows = torch.arange(self.dense_shape(name)[1])
        if name != GATE_UP:
            return rows
        return from_halves(len(rows) // 2)(rows) if self.form.halves else from_pairs(rows)

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """hidden_states: [..., H]; topk_ids: int64 [M, T]; topk_weights: [M, T]. Same shape."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        found = packed_experts(x, topk_ids, topk_weights, self.mlp())
        return found.view(hidden_states.shape)

    def mlp(self) -> ExpertsMlp:
        """What it computes with."""
        found, form = self.matrices, self.form
        matrices = found[self.first].qexperts, found[DOWN].qexperts
        biases: tuple[Tensor, ...] = ()
        if form.has_bias:
            own, of_down = (getattr(self, f"{name}_bias") for name in (self.first, DOWN))
            biases = self._in_blocks(own) if form.gated else own, of_down
        limit = form.limit
        return ExpertsMlp(*matrices, form.activation, *biases, gated=form.gated, limit=limit)

    def dense(self, dtype: torch.dtype) -> nn.Module:
        """The module that it replaced, with dequantized weights."""
        module = self.replaced
        for name, packed in self.matrices.items():
            order, matrices = self.packed_rows(name), packed.qexperts
            rows = order.to(matrices.device)
            found = [matrices.expert(e).dequantize(dtype)[rows] for e in range(matrices.count)]
            weight = torch.stack([x.T if self.form.transposed else x for x in found])
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        for name, bias in self.named_parameters(recurse=False):
            module.register_parameter(name, bias)
        return cast(nn.Module, module.train(self.training))

    def _in_blocks(self, bias: Tensor) -> Tensor:
        """The bias of gate and up in the order of the packed rows; kept while it is the same."""
        key = (bias.data_ptr(), bias._version, bias.dtype)
        kept = self.__dict__.get("_bias")
        if kept is None or kept[0] != key:
            order = self.packed_rows(GATE_UP).argsort().to(bias.device)
            kept = self.__dict__["_bias"] = (key, bias.detach()[:, order].contiguous())
        blocks: Tensor = kept[1]
        return blocks

    def __getstate__(self) -> dict[str, Any]:
        """Without what addresses tell apart."""
        return {key: value for key, value in self.__dict__.items() if key != "_bias"}


class QoffWeighedExperts(QoffExperts):
    """Llama 4's experts, which get all tokens for each expert, times their weights."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """hidden_states: [experts * M, H]; 0 where a token did not choose an expert. Same shape."""
        x, count = hidden_states.reshape(-1, hidden_states.shape[-1]), self.dense_shape(DOWN)[0]
        chosen = x.detach().any(-1).nonzero()[:, 0]  # 0 becomes 0, as do gradients
        ids = (chosen // max(1, len(x) // count))[:, None]
        found = packed_experts(x[chosen], ids, torch.ones_like(ids, dtype=x.dtype), self.mlp())
        return torch.zeros_like(x).index_copy(0, chosen, found.to(x.dtype))


def qexperts_of(codes: Tensor, scale_min: Tensor, shape: tuple[int, int]) -> QExperts:
    """Return the QExperts [E, N, K] that two tensors are. Raises OpError for others."""
    first = qtensor_of(codes[0], scale_min[0], shape)
    return QExperts(codes, scale_min, shape, first.bits, first.group_size, first.packing)


def stacked(matrices: Sequence[QTensor]) -> QExperts:
    """Matrices of one form as one, copied, as their device's kernels read them."""
    scales = common(m.scale_min.dtype for m in matrices)
    here = [m.with_scales(scales).for_kernels(packing_for(m.device)) for m in matrices]
    codes = torch.stack([m.codes for m in here])
    scale_min = torch.stack([m.scale_min for m in here])
    return qexperts_of(codes, scale_min, here[0].shape)


class ExpertsForm(NamedTuple):
    """How a module of transformers stores its experts. activation: see `kernels.ops`."""

    has_bias: bool
    transposed: bool  # [experts, columns, rows]
    halves: bool  # rows of gate before those of up, else in turn
    activation: str
    kind: type[QoffExperts] = QoffExperts  # what takes its place
    gated: bool = True
    limit: float = 0.0  # of gate and up, see `kernels.layout.ending`


def form_of(module: nn.Module, activation: str | None) -> ExpertsForm | None:
    """That of experts of transformers' interface, without norms, and of Llama 4's and Step's.

    activation: of the model's experts, if it is known. None: a module is no such.
    """
    own: Any = module
    if type(module).__name__ == "Step3p7Experts":  # whose activation is in its code
        limit = own.limit if math.isfinite(own.limit) else 0.0
        return ExpertsForm(False, False, True, "silu", limit=limit)
    if activation is None:
        return None
    if type(module).__name__ == "Llama4TextExperts":
        return ExpertsForm(False, True, True, activation, QoffWeighedExperts)
    known = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    if not all(hasattr(own, x) for x in known):
        return None
    if getattr(own, "has_post_expert_norm", False):  # which transformers knows since 5.20
        return None
    flags = bool(own.has_bias), bool(own.is_transposed), bool(own.is_concatenated)
    return ExpertsForm(*flags, activation, gated=bool(own.has_gate))
