"""What a conversion loses: how far the checkpoint's predictions are from its source's, on a text.

Two streams of hidden states follow the conversion layer by layer, one through the source's weights
and one through those that were written. So it takes one layer more in memory, in float32, and no
second reading of what was written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER
from qoff.models.names import HEAD_BIAS, Weight
from qoff.models.spec import DecoderSpec
from qoff.quant import QTensor
from qoff.quant.rows import reordered
from qoff.system_memory import free_memory
from qoff.units import format_size

from .builder import Builder
from .layerwise import Layerwise
from .unconverted import Unconverted

_FEWEST, _MOST = 64, 512  # tokens
_PRODUCTS = 4e11  # of a stream, about: seconds on a few cores
_MANY_PRODUCTS = 1e12  # that would take minutes
_ROWS = 1 << 13  # of the head at a time


@dataclass(frozen=True)
class Loss:
    """The mean of KL(source || checkpoint) over `tokens` predictions, in nats; its standard error.

    Predictions of one text are not independent, so of another text it may differ by more.
    """

    kl: float
    error: float
    tokens: int


class LossProbe:
    """Measures the loss of one conversion. ids: int64 [n], a text, of which it takes the beginning.

    loss: once the conversion is done; None where nothing is quantized, for a text with tokens that
    the model has not, and where it would take minutes, or a layer in float32 much of the memory
    that is free. missed: why it is None, and what another try needs; None where nothing is
    quantized. lossless: whether that is because all matrices keep the codes of the source.
    """

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self.loss: Loss | None = None
        self.missed: str | None = None
        self.lossless = False
        self._run: Layerwise | None = None  # of the source's weights

    @torch.no_grad()
    def begin(self, model: Unconverted, builder: Builder) -> None:
        """Before the first layer is built."""
        matrices = [(at, w) for at, unit in model.units for w in unit if w.columns is not None]
        self.lossless = all(builder.keeps(at, w) for at, w in matrices)
        if self.lossless:
            return
        weights = sum(_products(w, model.spec) for _, w in matrices)
        layer = max(sum(_floats(w) for w in unit) for at, unit in model.units if at)
        held = layer + 2 * max(_floats(w) for at, w in matrices if at)
        ids = self.sample(weights, model.spec.vocab_size, model.spec.position_limit, held)
        if ids is None:
            return
        self._run, self._run_written = (Layerwise(model.spec, ids[None]) for _ in range(2))
        self._builder, self._units = builder, model.units
        tables = {w.name: w for w in model.units[-1][1]}
        found = dict[str, Tensor]()

        def rows(name: str, ids: Tensor) -> Tensor:
            found[name] = builder.rows(tables[name], ids)
            return found[name]

        def written(name: str, ids: Tensor) -> Tensor:
            form, imported = builder.format("", tables[name])
            # Codes that are taken over have the source's values.
            own = found.pop(name)
            return own if imported else builder.quantized(own, form, name).dequantize()

        self._own = self._run.embedded(rows)
        self._written = self._run_written.embedded(written)

    def sample(
        self, weights: int, vocabulary: int, limit: int | None, held: int, held_each: int = 0
    ) -> Tensor | None:
        """The beginning of the text that a model is run on; None, and `missed`: on none.

        weights: those that a token is multiplied by. limit: the model's positions. held: bytes that
        measuring takes beside the conversion, and more for each token.
        """
        tokens = min(_MOST, max(_FEWEST, int(_PRODUCTS / weights)))
        ids, free = self._ids[: min(tokens, limit or tokens)], free_memory()
        last, held = int(ids.max()), held + held_each * len(ids)
        if last >= vocabulary:
            self.missed = (
                f"its tokenizer says {last}, and the model knows {vocabulary} tokens; with the "
                "tokenizer of the model"
            )
        elif len(ids) * weights > _MANY_PRODUCTS:
            self.missed = f"{weights / 1e9:.1f} billion weights a token would take minutes; later"
        elif free is not None and held > free // 2:
            self.missed = (
                f"it takes {format_size(held)}, which is more than half of the {format_size(free)} "
                "of memory that are free; with more"
            )
        return None if self.missed else ids

    def done(self, divergence: Tensor) -> None:
        """What each prediction lost, [tokens], is known."""
        error = float(divergence.std()) / math.sqrt(len(divergence))
        self.loss = Loss(float(divergence.mean()), error, len(divergence))

    @torch.no_grad()
    def layer(self, index: int, built: Mapping[str, QTensor | Tensor]) -> None:
        """After a layer was built; built: its weights by their full names."""
        if self._run is None:
            return
        prefix, weights = self._units[index]
        own = {w.name: self._builder.floats(w) for w in weights}
        self._own = self._run.run(index, own, self._own)
        del own
        written = {w.name: built[f"{prefix}{w.name}"] for w in weights}
        self._written = self._run_written.run(index, written, self._written)

    @torch.no_grad()
    def outer(self, built: Mapping[str, QTensor | Tensor]) -> None:
        """After the weights outside of layers were built, the last ones."""
        if self._run is None:
            return
        vectors = {name: x for name, x in built.items() if isinstance(x, Tensor)}
        name = EMBEDDING if self._run.spec.tie_word_embeddings else LM_HEAD
        head = next(w for w in self._units[-1][1] if w.name == name)
        divergence = Divergence(len(self._own))
        bias = vectors.get(HEAD_BIAS)
        for rows, own, written in self._heads(head, built[name]):
            some = vectors if bias is None else {**vectors, HEAD_BIAS: bias[rows]}
            divergence.add(
                self._run.logits({**some, name: own}, self._own),
                self._run.logits({**some, name: written}, self._written),
            )
        self.done(divergence.result())

    def _heads(
        self, head: Weight, built: QTensor | Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Numbers of some rows of the head at a time, the source's rows and those written."""
        written = built.to_packing("split32") if isinstance(built, QTensor) else built
        for rows, piece in self._builder.pieces(head):
            for at, own in zip(rows.split(_ROWS), piece.split(_ROWS), strict=True):
                chosen = reordered(written, at) if isinstance(written, QTensor) else written[at]
                yield at, own, chosen.dequantize() if isinstance(chosen, QTensor) else chosen


def _products(weight: Weight, spec: DecoderSpec) -> int:
    """Of a token with a matrix, on average; of experts those that it goes to count."""
    count = weight.rows * (weight.columns or 0) if weight.name != PER_LAYER else 0
    if spec.experts is not None and weight.name.startswith("mlp.experts."):
        return count * spec.experts.top_k // spec.experts.count
    return count


def _floats(weight: Weight) -> int:
    """Bytes of a weight in float32."""
    return 4 * weight.rows * (weight.columns or 1)


class Divergence:
    """KL(p || q) of rows of logits that come some columns at a time."""

    def __init__(self, rows: int) -> None:
        self._most = [torch.full((rows,), -math.inf, dtype=torch.float64) for _ in range(2)]
        self._sums = [torch.zeros(rows, dtype=torch.float64) for _ in range(2)]
        self._apart = torch.zeros(rows, dtype=torch.float64)  # of exp(p) (p - q)

    def add(self, own: Tensor, other: Tensor) -> None:
        p, q = own.double(), other.double()
        for i, logits in enumerate((p, q)):
            most = torch.maximum(self._most[i], logits.amax(1))
            shrink = (self._most[i] - most).exp()
            self._sums[i] = self._sums[i] * shrink + (logits - most[:, None]).exp().sum(1)
            self._most[i] = most
            if i == 0:
                self._apart *= shrink
        self._apart += ((p - self._most[0][:, None]).exp() * (p - q)).sum(1)

    def result(self) -> Tensor:
        logs = [most + total.log() for most, total in zip(self._most, self._sums, strict=True)]
        return self._apart / self._sums[0] - logs[0] + logs[1]
