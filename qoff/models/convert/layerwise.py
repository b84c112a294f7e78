"""A model computed a layer at a time on all tokens of some texts, as calibration needs it.

Weights come from who calls, as floats or quantized, and may be others each time a layer is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from qoff.errors import ArgumentError, UnsupportedModelError
from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape, cache_shapes
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kvcache import CachePass, PlainCache
from qoff.memory.plan import EMBEDDING, LM_HEAD
from qoff.models.forward_pass import ForwardPass, LayerWorkspace
from qoff.models.native.decoder import head_shapes
from qoff.models.native.layer import Layer
from qoff.models.native.norms import normalized
from qoff.models.native.rope import RotaryTable
from qoff.models.spec import DecoderSpec

from .dense_ops import DenseOps, Seen

LayerWeights = Mapping[str, QTensor | Tensor]  # by the names inside a layer
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

    def embedded(self, table: QTensor | Tensor) -> Tensor:
        """Hidden states before the first layer, float32 [texts * tokens, hidden_size]."""
        matrix = table.dequantize() if isinstance(table, QTensor) else table
        rows = matrix[self.ids.flatten()]
        return rows * self.spec.embedding_scale if self.spec.embedding_scale != 1 else rows

    def run(
        self, layer: int, weights: LayerWeights, hidden: Tensor, seen: Seen | None = None
    ) -> Tensor:
        """Return the hidden states after a layer; those before it stay as they are."""
        ops = cast(Ops, DenseOps(seen))
        ragged = self._ragged
        run = ForwardPass(
            self.ids.flatten(),
            ragged,
            PlainCache((), len(ragged.spans)),
            ragged.last_rows,
            workspace=LayerWorkspace(),
            cached=_OneLayer(self._shapes, ragged),
            rotary=self._rotary,
            hidden=hidden.clone(),
        )
        steps = Layer(self.spec, ops, self._shapes).steps(layer, dict(weights), run)
        unit = next(steps, None)
        assert unit is None  # waits for no tile
        return run.input

    def logits(self, outer: LayerWeights, rows: Tensor) -> Tensor:
        """Logits of some final hidden states [R, hidden_size]: float32 [R, vocab_size].

        outer: the weights outside of the layers. Best called on `logit_rows` rows at a time.
        """
        spec = self.spec
        if spec.final_norm:
            rows = normalized(spec, rows, dict(outer), "model.norm")
        head = outer[EMBEDDING if spec.tie_word_embeddings else LM_HEAD]
        matrix = head.dequantize() if isinstance(head, QTensor) else head
        found = rows @ matrix.T
        if spec.logit_scale != 1:
            found = found * spec.logit_scale
        if spec.logit_soft_cap:
            found = spec.logit_soft_cap * torch.tanh(found / spec.logit_soft_cap)
        return found

    @property
    def logit_rows(self) -> int:
        """Rows whose logits take 64 MiB."""
        return max(1, _LOGITS // self.spec.vocab_size)


class _OneLayer(CachePass):
    """Fresh memory for the keys and values of whichever layer is at work."""

    def __init__(self, shapes: Sequence[HeadShape], ragged: Ragged) -> None:
        self._shapes, self._ragged = shapes, ragged

    def end(self) -> None:
        """Nothing is remembered."""

    def open(self, layer: int) -> LayerCache:
        positions, longest = self._ragged.positions, self._ragged.longest
        capacity = -(-(longest + 1) // KEYS_PER_VECTOR) * KEYS_PER_VECTOR
        keys, values = cache_shapes(len(self._ragged.spans), self._shapes[layer], capacity)
        return LayerCache(torch.zeros(keys), torch.zeros(values), positions, longest)
