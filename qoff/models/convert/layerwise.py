"""A model computed a layer at a time on all tokens of some texts, as calibration needs it.

Weights come from who calls, as floats or quantized, and may be others each time a layer is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from qoff.errors import ArgumentError
from qoff.kernels.embedding import rows_of_each
from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates
from qoff.kernels.ops import Ops, ops_for
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.experts import activate
from qoff.kernels.reference.linear import ended, normalized
from qoff.kvcache import CachePass, PlainCache
from qoff.kvcache.states import StateCache
from qoff.memory import Weights
from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, LayerWorkspace
from qoff.models.native.caches import head_shapes
from qoff.models.native.decoder import logits_ending
from qoff.models.native.experts import Experts
from qoff.models.native.layer import Layer
from qoff.models.native.linear import norm_of
from qoff.models.native.per_layer import table_scale
from qoff.models.native.rope import RotaryTable
from qoff.models.spec import DecoderSpec
from qoff.quant import QTensor

from .solving import Unsolved

Seen = Callable[[object, Tensor, Tensor], None]  # a matrix, its input [M, K], its output [M, N]


Given = QTensor | Tensor | Unsolved
_LOGITS = 1 << 24  # computed at a time


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise ArgumentError for what are no texts of tokens below `vocabulary`."""
    if ids.dim() != 2 or not ids.numel():
        raise ArgumentError(f"texts to calibrate on are [texts, tokens], not {list(ids.shape)}")
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        raise ArgumentError(
            f"token ids are 0 to {vocabulary - 1}, not {low} to {high}; use the model's "
            "own tokenizer"
        )


class Layerwise:
    """Runs layers of a native model on texts, int64 [texts, tokens], from their first token on.

    Texts are cut to the model's positions. Raises ArgumentError for what are no texts of tokens.
    """

    def __init__(self, spec: DecoderSpec, ids: Tensor) -> None:
        check_ids(ids, spec.vocab_size)
        ids = ids[:, : spec.position_limit]
        self.spec, self.ids = spec, ids
        self._shapes = head_shapes(spec)
        count, tokens = ids.shape
        self._ragged = Ragged.of([tokens] * count, [0] * count)
        ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        tables = {rope: RotaryTable(spec, rope).upto(tokens) for rope in ropes if rope is not None}
        self._rotary = [None if rope is None else tables[rope] for rope in ropes]
        # Of the last time that layers were run which later ones take something from:
        self._table: Tensor | None = None  # embeddings of layers, before the first and after it
        self._per_layer: Tensor | None = None
        self._lent = dict[int, LayerCache]()
        self._chosen: Tensor | None = None  # by an index, where texts have as many tokens
        if 0 < spec.chosen_width < tokens:
            self._chosen = torch.empty(count * tokens, spec.chosen_width, dtype=torch.int32)

    def embedded(self, rows_of: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Hidden states before the first layer, float32 [texts * tokens, spec.hidden_width].

        rows_of: rows of a table of the outer weights, by its name and their numbers, int64 [n].
        """
        ids = self.ids.flatten()
        if self.spec.per_layer is not None:
            each, known = self.spec.num_layers, self.spec.per_layer.vocab_size
            found = rows_of(PER_LAYER, rows_of_each(ids, each, each * known))
            self._table = found.view(len(ids), -1) * table_scale(self.spec.per_layer)
        rows = rows_of(EMBEDDING, ids)
        rows = rows * self.spec.embedding_scale if self.spec.embedding_scale != 1 else rows
        return pad(rows, (0, self.spec.hidden_width - rows.shape[1]))

    def run(
        self,
        layer: int,
        weights: Mapping[str, Given],
        hidden: Tensor,
        seen: Seen | None = None,
    ) -> Tensor:
        """Return the hidden states after a layer; those before it stay as they are.

        weights: by the names inside a layer; with unsolved ones the second half of the texts has to
        be the first one again. seen: is told every product with floats before a bias or an
        activation.
        """
        ragged = self._ragged
        run = ForwardPass(
            self.ids.flatten(),
            ragged,
            PlainCache((), len(ragged.spans)),
            ragged.last_rows,
            workspace=LayerWorkspace(),
            cached=_OneLayer(self.spec, self._shapes, ragged, self._lent, layer),
            rotary=self._rotary,
            positions=ragged.positions,
            hidden=hidden.clone(),
            per_layer=self._per_layer,
            chosen=self._chosen,
        )
        if layer == 0 and self._table is not None:
            self._per_layer = run.per_layer = self._table.clone()
        decoder_layer = _WholeLayer(
            self.spec, cast(Ops, _DenseOps(seen, len(hidden))), self._shapes
        )
        unit = next(decoder_layer.steps(layer, cast(Weights, weights), run), None)
        assert unit is None  # waits for no tile
        return run.input

    def logits(self, outer: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Logits of some final hidden states [R, spec.hidden_width]: float32 [R, vocab_size].

        outer: the weights outside of the layers. Best called on `logit_rows` rows at a time.
        """
        spec, rows = self.spec, rows[:, : self.spec.hidden_size]
        if spec.final_norm:
            by = norm_of(spec, dict(outer), names.NORM.removesuffix(".weight"))
            assert by is not None
            rows = normalized(rows, by)
        head = outer[EMBEDDING if spec.tie_word_embeddings else LM_HEAD]
        products = rows @ head.T
        if spec.head_bias:
            products = products + outer[names.HEAD_BIAS]
        return ended(products, logits_ending(spec))

    @property
    def logit_rows(self) -> int:
        """Rows whose logits take 64 MiB."""
        return max(1, _LOGITS // self.spec.vocab_size)


class _DenseExperts(Experts):
    """Computes experts one after another, whose matrices are what `_DenseOps` takes."""

    def compute(
        self,
        layer: int,
        x: Tensor,
        scores: Tensor,
        weights: Weights,
        hidden: Tensor,
        into: Tensor | None = None,
    ) -> None:
        """See `Experts.compute`."""
        if into is not None:
            hidden = into.zero_()
        ids, shares = self.route(scores, weights)
        biases = self._biases(weights)
        for e in ids.unique().tolist():
            token, place = (ids == e).nonzero(as_tuple=True)
            matrices = [weights[f"mlp.experts.{e}.{name}"] for name in self.spec.matrices]
            own = [None if bias is None else bias[e] for bias in biases]
            if isinstance(matrices[0], Unsolved):
                unsolved = cast(list[Unsolved], matrices)
                self._products(layer, x, token, shares[token, place], unsolved, own, hidden)
                continue
            gate_up, down = (
                partial(self._ops.w4_linear, weight=cast(QTensor, matrix), bias=bias)
                for matrix, bias in zip(matrices, own, strict=True)
            )
            rows, share = x[token], shares[token, place, None]
            rows = rows * share if self.spec.weighs_input else rows
            y = down(self._activate(layer, gate_up(rows)))
            hidden.index_add_(0, token, y if self.spec.weighs_input else y * share)

    def _activate(self, layer: int, z: Tensor) -> Tensor:
        return activate(z, self.spec.activation, self.spec.gated, self.spec.limit(layer))

    def _products(
        self,
        layer: int,
        x: Tensor,
        token: Tensor,
        share: Tensor,
        matrices: Sequence[Unsolved],
        biases: Sequence[Tensor | None],
        hidden: Tensor,
    ) -> None:
        """hidden += what an unsolved expert gives to its tokens, as `Unsolved.products` takes them.

        The source's model sends other tokens to it: in place of those of the first half it has them
        as well, for the solver alone.
        """
        half, count = len(x) // 2, int((token < len(x) // 2).sum())
        rows = torch.cat((token[:count], token[:count] + half, token[count:]))
        shares = torch.cat((share[:count], share[:count], share[count:]))[:, None]
        y = x[rows] * shares if self.spec.weighs_input else x[rows]
        for number, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            y = matrix.products(self._activate(layer, y) if number else y, count)
            y = y if bias is None else y + bias
        y = y if self.spec.weighs_input else y * shares
        hidden.index_add_(0, token, torch.cat((y[:count], y[2 * count :])))


class _WholeLayer(Layer):
    """All tokens go through each matrix at once, whatever memory that takes."""

    MIXTURE = _DenseExperts

    def _together(self, count: int, weights: Weights) -> int:
        return count


class _DenseOps:
    """`kernels.ops.Ops`, but for experts, of matrices that are `Given`, float tensors [N, K] too.

    Differentiable, but for what is unsolved. Without gradients, packed matrices and attention are
    left to the CPU's own ops.
    """

    PACKING, CACHE, USES_OUT, RECORDER = "split32", "host", False, None
    norm = staticmethod(reference_ops.norm)
    route = staticmethod(reference_ops.route)

    def __init__(self, seen: Seen | None, rows: int) -> None:
        self._seen, self._rows = seen, rows

    def w4_linear(
        self,
        x: Tensor,
        weight: Given,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        end: Ending = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.reference.ops.w4_linear`."""
        if norm is not None:
            x = normalized(x, norm)
        if isinstance(weight, QTensor) and not torch.is_grad_enabled():
            packed = weight.to_packing("rows16")
            y = ops_for(x.device).w4_linear(x, packed, bias=bias, residual=residual, end=end)
            return _into(out, y)
        if isinstance(weight, Unsolved):
            assert weight.twice
            assert len(x) == self._rows
            y = weight.products(x, len(x) // 2, _gap(residual, end))
        else:
            matrix = weight.dequantize() if isinstance(weight, QTensor) else weight
            y = x @ matrix.T
            if self._seen is not None:
                self._seen(weight, x, y)
        if bias is not None:
            y = y + bias
        return _into(out, ended(y, end, residual))

    def absorb(
        self,
        q: Tensor,
        kv: Tensor,
        weight: Given,
        norm: Norm,
        shape: LatentShape,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.reference.latent.absorb`; the matrix is solved for latents."""
        latents = normalized(kv[:, : shape.latent].contiguous(), norm)
        if self._seen is not None or isinstance(weight, Unsolved):
            self.w4_linear(latents, weight)

        def op(q: Tensor, kv: Tensor, matrix: QTensor) -> Tensor:
            return reference_ops.absorb(q, kv, matrix, norm, shape)

        return _by_matrix(op, weight, out, q, kv)

    def expand(
        self, x: Tensor, weight: Given, shape: LatentShape, *, out: Tensor | None = None
    ) -> Tensor:
        """See `kernels.reference.latent.expand`."""

        def op(x: Tensor, matrix: QTensor) -> Tensor:
            return reference_ops.expand(x, matrix, shape)

        return _by_matrix(op, weight, out, x)

    def delta(self, *operands: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """See `kernels.reference.delta.delta`."""
        ops = reference_ops if torch.is_grad_enabled() else ops_for(operands[0].device)
        return _into(out, ops.delta(*operands, **options))

    def short_conv(self, *operands: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """See `kernels.reference.short_conv.short_conv`."""
        ops = reference_ops if torch.is_grad_enabled() else ops_for(operands[0].device)
        return _into(out, ops.short_conv(*operands, **options))

    def mamba(self, *operands: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """See `kernels.reference.mamba.mamba`."""
        ops = reference_ops if torch.is_grad_enabled() else ops_for(operands[0].device)
        return _into(out, ops.mamba(*operands, **options))

    gate = staticmethod(reference_ops.gate)
    resize_heads = staticmethod(reference_ops.resize_heads)
    predict = staticmethod(reference_ops.predict)
    correct = staticmethod(reference_ops.correct)
    matched = staticmethod(reference_ops.matched)
    sparse_gate = staticmethod(reference_ops.sparse_gate)

    def choose(self, qk: Tensor, weights: Tensor, *operands: Any, **options: Any) -> Tensor:
        """See `kernels.reference.index.choose`; a choice has no gradient."""
        with torch.no_grad():
            return ops_for(qk.device).choose(qk.clone(), weights, *operands, **options)

    def attention(self, *operands: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """See `kernels.reference.ops.attention`."""
        ops = reference_ops if torch.is_grad_enabled() else ops_for(operands[0].device)
        return _into(out, ops.attention(*operands, **options))


def _gap(residual: Tensor | None, end: Ending) -> Tensor | None:
    """What products of the first half of the rows should have more for sums like the second's."""
    if residual is None or end.post_norm is not None or end.score is not None:
        return None
    mine, others = residual.chunk(2)
    return (others - mine) / end.scale


def _by_matrix(
    op: Callable[..., Tensor], weight: Given, out: Tensor | None, *operands: Tensor
) -> Tensor:
    """What an op makes of rows and a matrix; of an unsolved one, each half of them has another."""
    if isinstance(weight, Unsolved):
        mine, others = zip(*(x.chunk(2) for x in operands), strict=True)
        solved, own = (_Floats.of(x) for x in (weight.dequantize(), weight.read()))
        found = torch.cat((op(*mine, solved), op(*others, own)))
    else:
        found = op(*operands, weight if isinstance(weight, QTensor) else _Floats.of(weight))
    return _into(out, found)


def _into(out: Tensor | None, found: Tensor) -> Tensor:
    """A result in the memory for it, if any. Kernels do not tell torch that they write there."""
    return found if out is None else out.copy_(found)


@dataclass(frozen=True)
class _Floats:
    """A matrix of floats that code can dequantize."""

    matrix: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> QTensor:
        """One that ops take for packed."""
        return cast(QTensor, cls(matrix))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix."""
        return self.matrix.to(dtype)


class _OneLayer(CachePass):
    """Fresh memory for the keys and values, or the states, of whichever layer is at work."""

    def __init__(
        self,
        spec: DecoderSpec,
        shapes: Sequence[HeadShape],
        ragged: Ragged,
        lent: dict[int, LayerCache],
        layer: int,
    ) -> None:
        self._spec, self._ragged, self._lent, self._layer = spec, ragged, lent, layer
        self._shapes = dict(zip(spec.cached_layers, shapes, strict=True))

    def end(self) -> None:
        """Nothing is remembered."""

    def open(self, layer: int) -> LayerCache | LayerStates:
        ragged, shape = self._ragged, self._spec.state_shape
        if shape is not None and layer not in self._shapes:
            states = StateCache([shape], len(ragged.spans))
            return states.begin(ragged).open(0)
        if layer in self._lent and layer != self._layer:
            return self._lent[layer]
        cache = PlainCache([self._shapes[layer]], len(ragged.spans), ragged.longest + 1)
        opened = cache.begin(ragged).open(0)
        assert isinstance(opened, LayerCache)
        if layer in self._spec.lent_layers:
            self._lent[layer] = opened
        return opened
