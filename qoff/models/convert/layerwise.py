"""A model computed a layer at a time on all tokens of some texts, as calibration needs it.

Weights come from who calls, as floats or quantized, and may be others each time a layer is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qoff.errors import ArgumentError, UnsupportedModelError
from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.linear import ended, normalized
from qoff.kvcache import CachePass, PlainCache
from qoff.memory.plan import EMBEDDING, LM_HEAD
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, LayerWorkspace
from qoff.models.native.decoder import head_shapes, logits_ending
from qoff.models.native.layer import Layer
from qoff.models.native.linear import norm_of
from qoff.models.native.rope import RotaryTable
from qoff.models.spec import DecoderSpec
from qoff.quant import QTensor
from qoff.quant.compensated import compensated

from .builder import Builder
from .unconverted import Unconverted

Seen = Callable[[object, Tensor, Tensor], None]  # a matrix, its input [M, K], its output [M, N]
_LOGITS = 1 << 24  # computed at a time


class Layerwise:
    """Runs layers of a native model on texts, int64 [texts, tokens], from their first token on.

    Raises UnsupportedModelError for mixtures of experts, ArgumentError for texts that are empty or
    longer than the model's positions.
    """

    def __init__(self, spec: DecoderSpec, ids: Tensor) -> None:
        if spec.experts is not None:
            raise UnsupportedModelError(
                f"{spec.model_type}: a mixture of experts cannot be calibrated; convert it with "
                "hqq, mse or rtn, and formats of your choice"
            )
        if ids.dim() != 2 or not ids.numel():
            raise ArgumentError(f"texts to calibrate on are [texts, tokens], not {list(ids.shape)}")
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= spec.vocab_size:
            raise ArgumentError(
                f"token ids are 0 to {spec.vocab_size - 1}, not {low} to {high}; use the model's "
                "own tokenizer"
            )
        spec.check_positions(ids.shape[1])
        self.spec, self.ids = spec, ids
        self._shapes = head_shapes(spec)
        count, tokens = ids.shape
        self._ragged = Ragged.of([tokens] * count, [0] * count)
        ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        tables = {rope: RotaryTable(spec, rope).upto(tokens) for rope in ropes if rope is not None}
        self._rotary = [None if rope is None else tables[rope] for rope in ropes]

    def embedded(self, table: Tensor, ids: Tensor | None = None) -> Tensor:
        """Hidden states before the first layer, float32 [texts * tokens, hidden_size].

        ids: the row of each token, int64 [texts * tokens], where it is not its number.
        """
        rows = table[self.ids.flatten() if ids is None else ids]
        return rows * self.spec.embedding_scale if self.spec.embedding_scale != 1 else rows

    def run(
        self,
        layer: int,
        weights: Mapping[str, QTensor | Tensor],
        hidden: Tensor,
        seen: Seen | None = None,
    ) -> Tensor:
        """Return the hidden states after a layer; those before it stay as they are.

        weights: by the names inside a layer. seen: is told every product before a bias or an
        activation.
        """
        ragged = self._ragged
        run = ForwardPass(
            self.ids.flatten(),
            ragged,
            PlainCache((), len(ragged.spans)),
            ragged.last_rows,
            workspace=LayerWorkspace(),
            cached=_OneLayer(self._shapes, ragged),
            rotary=self._rotary,
            positions=ragged.positions,
            hidden=hidden.clone(),
        )
        decoder_layer = Layer(self.spec, cast(Ops, _DenseOps(seen)), self._shapes)
        unit = next(decoder_layer.steps(layer, dict(weights), run), None)
        assert unit is None  # waits for no tile
        return run.input

    def logits(self, outer: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Logits of some final hidden states [R, hidden_size]: float32 [R, vocab_size].

        outer: the weights outside of the layers. Best called on `logit_rows` rows at a time.
        """
        spec = self.spec
        if spec.final_norm:
            by = norm_of(spec, dict(outer), names.NORM.removesuffix(".weight"))
            assert by is not None
            rows = normalized(rows, by)
        head = outer[EMBEDDING if spec.tie_word_embeddings else LM_HEAD]
        return ended(rows @ head.T, logits_ending(spec))

    @property
    def logit_rows(self) -> int:
        """Rows whose logits take 64 MiB."""
        return max(1, _LOGITS // self.spec.vocab_size)


class Calibration:
    """Solves the matrices of a model on what goes into them, layer after layer.

    The inputs of a layer are those behind layers that are quantized already, so that each layer
    makes up for what those before it lost. ids: int64 [texts, tokens]. Besides one layer in float32
    and as it is written, memory holds the hidden states of all tokens twice, and the second moments
    of the inputs of each matrix of a layer, [K, K] float32; of one of them a few times over. Raises
    as `Layerwise` does.
    """

    def __init__(self, model: Unconverted, builder: Builder, ids: Tensor) -> None:
        self._builder, self._units = builder, model.units
        self._run = Layerwise(model.spec, ids)
        _, outer = model.units[-1]
        table = next(w for w in outer if w.name == EMBEDDING)
        self._hidden = self._run.embedded(builder.floats(table))

    @torch.no_grad()
    def layer(self, index: int) -> dict[str, QTensor | Tensor]:
        """Return a layer's weights by their full names, as they are written. Layers go in order."""
        prefix, weights = self._units[index]
        builder = self._builder
        solved = [w for w in weights if builder.calibrates(prefix, w)]
        built: dict[str, QTensor | Tensor] = {
            w.name: builder.floats(w) if w in solved else builder.build(prefix, w) for w in weights
        }
        moments = self._moments(index, built, [w.name for w in solved])
        for weight in solved:
            values = built[weight.name]
            assert isinstance(values, Tensor)
            built[weight.name] = compensated(
                values,
                moments.pop(weight.name),
                builder.note(prefix, weight),
                scale_dtype=builder.quant.scale_dtype,
                name=f"{prefix}{weight.name}",
            )
        self._hidden = self._run.run(index, built, self._hidden)
        packing = builder.quant.packing
        return {
            f"{prefix}{name}": x.to_packing(packing) if isinstance(x, QTensor) else x
            for name, x in built.items()
        }

    def _moments(
        self, index: int, weights: dict[str, QTensor | Tensor], matrices: list[str]
    ) -> dict[str, Tensor]:
        """The mean of x x^T over the inputs of each of some matrices, float32 [K, K]."""
        called = {id(weights[name]): name for name in matrices}
        total: dict[str, Tensor] = {}

        def seen(found: object, x: Tensor, _: Tensor) -> None:
            name = called.get(id(found))
            if name is not None:
                into = total.setdefault(name, x.new_zeros(x.shape[1], x.shape[1]))
                into.addmm_(x.T, x)

        self._run.run(index, weights, self._hidden, seen)
        return {name: sums.div_(len(self._hidden)) for name, sums in total.items()}


class _DenseOps:
    """`kernels.ops.Ops`, but for experts, of matrices that are QTensors or float tensors [N, K].

    Differentiable. Without gradients, attention is the CPU's own op.
    """

    PACKING, CACHE, USES_OUT, RECORDER = "split32", "host", False, None
    norm = staticmethod(reference_ops.norm)

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen

    def w4_linear(
        self,
        x: Tensor,
        weight: QTensor | Tensor,
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
        matrix = weight.dequantize() if isinstance(weight, QTensor) else weight
        y = x @ matrix.T
        if self._seen is not None:
            self._seen(weight, x, y)
        if bias is not None:
            y = y + bias
        y = ended(y, end, residual)
        return y if out is None else out.copy_(y)

    def attention(self, *operands: Any, **options: Any) -> Tensor:
        """See `kernels.reference.ops.attention`."""
        if torch.is_grad_enabled():
            return reference_ops.attention(*operands, **options)
        from qoff.kernels.cpu import ops as cpu

        return cpu.attention(*operands, **options)


class _OneLayer(CachePass):
    """Fresh memory for the keys and values of whichever layer is at work."""

    def __init__(self, shapes: Sequence[HeadShape], ragged: Ragged) -> None:
        self._shapes, self._ragged = shapes, ragged

    def end(self) -> None:
        """Nothing is remembered."""

    def open(self, layer: int) -> LayerCache:
        ragged = self._ragged
        cache = PlainCache([self._shapes[layer]], len(ragged.spans), ragged.longest + 1)
        opened = cache.begin(ragged).open(0)
        assert isinstance(opened, LayerCache)
        return opened
