"""What is evaluated: something that reads windows of tokens and gives logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qoff.engine.schedule import Schedule
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import KVCache
from qoff.memory.plan import EMBEDDING, PER_LAYER
from qoff.models.convert.builder import Builder
from qoff.models.convert.layerwise import Layerwise
from qoff.models.convert.unconverted import Unconverted
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.structure import cache_argument
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from qoff.quant import QuantConfig

PIECE = 256  # tokens read at a time
_LOGITS = 1 << 26  # at a time, at most (256 MiB), where rows can be chosen


@dataclass(frozen=True)
class Predictions:
    """Logits of some neighbouring tokens of a window."""

    window: int  # its number among those that are read together
    place: int  # of the first token they predict
    logits: Tensor  # float32 [r, vocab_size]


@torch.inference_mode()
def read(
    runtime: Runtime, sequences: Sequence[Tensor], places: Sequence[int], piece: int
) -> Iterator[Predictions]:
    """Read sequences, int64 [T], the longest first, `piece` tokens of each at a time.

    Yields predictions of the tokens from a place >= 1 of each on, up to the one behind its last. A
    piece attends to those before it through the runtime's KV cache, in the form that it has.
    """
    for _, found in read_together(runtime, [Batch(sequences, places)], piece):
        yield found


class Batch(NamedTuple):
    """Sequences that are read in one pass, and the places from which their tokens are predicted."""

    sequences: Sequence[Tensor]
    places: Sequence[int]
    cache: KVCache | None = None  # an empty one; None: in the form that the runtime's have


@torch.inference_mode()
def read_together(
    runtime: Runtime, batches: Sequence[Batch], piece: int
) -> Iterator[tuple[int, Predictions]]:
    """As `read`, of several batches, each of which goes through a layer before the next is read.

    Yields the number of a batch and predictions of it.
    """
    longest = max(len(batch.sequences[0]) for batch in batches)
    caches = [
        runtime.new_cache(len(one.sequences), len(one.sequences[0]))
        if one.cache is None
        else one.cache
        for one in batches
    ]
    schedule, decoder = Schedule(runtime.decoder, runtime.store, "block"), runtime.decoder
    most = min(longest, piece) * max(len(batch.sequences) for batch in batches)
    shared = None
    if len(batches) > 1 and isinstance(decoder, Decoder):
        shared = decoder.new_workspace(most)
    for past in range(0, longest, piece):
        passes, asked = list[ForwardPass](), list[tuple[int, list[range]]]()
        for number, batch in enumerate(batches):
            if len(batch.sequences[0]) > past:
                run, wanted = _pass(batch, caches[number], past, piece)
                run.name, run.workspace = f"pass {number}", shared
                passes.append(run)
                asked.append((number, wanted))
        alone = len(passes) == 1
        found = [runtime.forward(passes[0])] if alone else schedule.round(passes)
        for (number, wanted), logits in zip(asked, found, strict=True):
            for window, mine in enumerate(wanted):
                if mine:
                    place = max(past + 1, batches[number].places[window])
                    yield number, Predictions(window, place, logits[: len(mine)])
                    logits = logits[len(mine) :]


def _pass(batch: Batch, cache: KVCache, past: int, piece: int) -> tuple[ForwardPass, list[range]]:
    """A pass over the next tokens of a batch, and the rows of each sequence whose logits it has."""
    parts = [tokens[past : past + piece] for tokens in batch.sequences if len(tokens) > past]
    ragged = Ragged.of([len(part) for part in parts], [past] * len(parts))
    wanted = [
        range(span.start + max(0, place - 1 - past), span.start + span.count)
        for span, place in zip(ragged.spans, batch.places, strict=False)
    ]
    rows = torch.tensor([*chain(*wanted)] or [0])  # a pass without any still asks for one
    return ForwardPass(torch.cat(parts), ragged, cache, rows), wanted


class Subject(Protocol):
    """A model that can be evaluated."""

    name: str
    vocab_size: int

    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        """Predictions of the tokens from `place` >= 1 on, of windows int64 [B, T], in order."""


class QoffSubject:
    """A qoff checkpoint. piece: tokens read at a time; None: a whole window, unpacked."""

    def __init__(self, runtime: Runtime, name: str, piece: int | None = PIECE) -> None:
        self.name, self._runtime, self._piece = name, runtime, piece
        self.vocab_size = runtime.spec.vocab_size

    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        read_at_once = self._piece or windows.shape[1]
        return read(self._runtime, [*windows[:, :-1]], [place] * len(windows), read_at_once)


class TransformersSubject:
    """A causal model of transformers, read in pieces through its own cache."""

    def __init__(self, model: Any, name: str) -> None:
        self.name, self._model = name, model.eval()
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        windows = windows.to(self._model.device)
        count, length = windows.shape
        from transformers import DynamicCache

        cache, name = DynamicCache(config=self._model.config), str(cache_argument(self._model))
        piece = max(1, min(length, _LOGITS // (count * self.vocab_size)))
        for past in range(0, length - 1, piece):
            end = min(past + piece, length - 1)
            kept = max(1, min(end - place + 1, end - past))
            options = {name: cache, "use_cache": True, "logits_to_keep": kept}
            out = self._model(windows[:, past:end], **options)
            if end >= place:
                for number, found in enumerate(out.logits.float().cpu()):
                    yield Predictions(number, end - kept + 1, found)


class LayerwiseSubject:
    """A model that is not converted, read from its files layer by layer, in float32.

    Memory holds the weights outside of layers, one layer and the hidden states of the windows that
    are read together. For models of a family that the native decoder runs.
    """

    def __init__(self, model: Unconverted, name: str) -> None:
        self.name, self._model = name, model
        self._builder = Builder(model.source, QuantConfig(), requantize=True)
        outer = {w.name: w for w in model.units[-1][1]}
        self._tables = dict(outer)
        outer.pop(PER_LAYER, None)  # of tables rows are read when they are wanted
        if not model.spec.tie_word_embeddings:
            del outer[EMBEDDING]
        self._outer = {name: self._builder.floats(w) for name, w in outer.items()}
        self.vocab_size = model.spec.vocab_size

    @staticmethod
    def nbytes(model: Unconverted) -> tuple[int, int]:
        """Bytes of all weights in float32, and of those that memory holds at a time."""
        *layers, outer = (
            sum(4 * w.rows * (w.columns or 1) for w in unit) for _, unit in model.units
        )
        return sum(layers) + outer, max(layers) + outer

    @torch.inference_mode()
    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        count, read_at_all = len(windows), windows.shape[1] - 1
        run = Layerwise(self._model.spec, windows[:, :-1])
        hidden = run.embedded(lambda name, ids: self._builder.rows(self._tables[name], ids))
        for index, (_, unit) in enumerate(self._model.units[:-1]):
            hidden = run.run(index, {w.name: self._builder.floats(w) for w in unit}, hidden)
        rows = hidden.view(count, read_at_all, -1)
        for first in range(place - 1, read_at_all, run.logit_rows):
            for number in range(count):
                some = rows[number, first : first + run.logit_rows]
                yield Predictions(number, first + 1, run.logits(self._outer, some))
