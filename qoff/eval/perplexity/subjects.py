"""What is evaluated: something that reads windows of tokens and gives logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from qoff.kernels.layout.ragged import Ragged
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime

PIECE = 256  # tokens read at a time
_LOGITS = 1 << 26  # at a time, at most (256 MiB), where rows can be chosen


@dataclass(frozen=True)
class Predictions:
    """Logits of some neighbouring tokens of a window."""

    window: int  # its number among those that are read together
    place: int  # of the first token they predict
    logits: Tensor  # float32 [r, vocab_size]


class Subject(Protocol):
    """A model that can be evaluated."""

    name: str
    vocab_size: int

    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        """Predictions of the tokens from `place` >= 1 on, of windows int64 [B, T], in order."""


class QoffSubject:
    """A qoff checkpoint. A window is read in pieces, each of which attends to those before it
    through the KV cache, in the form that the runtime has for it.

    piece: tokens of a piece; None reads a window whole, so that a packed cache takes no part.
    """

    def __init__(self, runtime: Runtime, name: str, piece: int | None = PIECE) -> None:
        self.name, self._runtime, self._piece = name, runtime, piece
        self.vocab_size = runtime.spec.vocab_size

    @torch.inference_mode()
    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        count, length = windows.shape
        piece = self._piece or length
        cache = self._runtime.new_cache(count, length)
        for past in range(0, length - 1, piece):
            tokens = windows[:, past : min(past + piece, length - 1)]
            width = tokens.shape[1]
            ragged = Ragged.of([width] * count, [past] * count)
            first = min(max(place - 1 - past, 0), width - 1)  # the first row that is wanted
            rows = torch.arange(count * width).view(count, width)[:, first:].flatten()
            batch = ForwardPass(tokens.flatten(), ragged, cache, rows)
            logits = self._runtime.forward(batch).view(count, width - first, -1)
            if past + width < place:
                continue
            for number, found in enumerate(logits):
                yield Predictions(number, past + first + 1, found)


class TransformersSubject:
    """A causal model of transformers, read in pieces through its own cache."""

    def __init__(self, model: Any, name: str) -> None:
        self.name, self._model = name, model.eval()
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    def predict(self, windows: Tensor, place: int) -> Iterator[Predictions]:
        windows = windows.to(self._model.device)
        count, length = windows.shape
        cache = DynamicCache(config=self._model.config)
        piece = max(1, min(length, _LOGITS // (count * self.vocab_size)))
        for past in range(0, length - 1, piece):
            tokens = windows[:, past : min(past + piece, length - 1)]
            end = past + tokens.shape[1]
            kept = max(1, min(end - place + 1, end - past))
            out = self._model(
                tokens, past_key_values=cache, use_cache=True, logits_to_keep=kept
            ).logits
            if end < place:
                continue
            for number, found in enumerate(out.float().cpu()):
                yield Predictions(number, end - kept + 1, found)
