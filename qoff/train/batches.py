"""Micro-batches as a step takes them, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qoff.errors import ArgumentError
from qoff.models.modules.configs import position_limit
from qoff.models.modules.structure import has_position_table

IGNORED = -100  # as a label: this token has no loss


@dataclass(frozen=True)
class Limits:
    """Of micro-batches. tokens: of each. vocabulary: ids. positions: of a sequence, None: any."""

    tokens: int
    vocabulary: int
    positions: int | None

    @classmethod
    def of(cls, model: Any, tokens: int) -> Limits:
        """Those of a model; it has a last position if positions are rows of a table."""
        config = model.config.get_text_config(decoder=True)
        words = model.get_input_embeddings()
        most = position_limit(config)
        ends = has_position_table(model, most, [words])
        vocabulary = max(config.vocab_size, getattr(words, "num_embeddings", 0))
        return cls(tokens, vocabulary, most if ends else None)

    def checked(self, batch: Any) -> dict[str, Any]:
        """A micro-batch with labels: those it has, or the ids that are not masked.

        Raises ArgumentError.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            raise ArgumentError("a micro-batch is a dictionary with input_ids [B, T]")
        ids = batch["input_ids"]
        if ids.dim() != 2 or ids.numel() > self.tokens:
            raise ArgumentError(
                f"a micro-batch has {ids.numel():,} tokens {list(ids.shape)}; this training is for "
                f"[B, T] of up to {self.tokens:,}: raise tokens"
            )
        for name in ("labels", "attention_mask", "position_ids"):
            if not isinstance(batch.get(name), Tensor | None):
                kind = type(batch[name]).__name__
                raise ArgumentError(f"{name} of a micro-batch must be a tensor, not {kind}")
        labels = batch.get("labels")
        if "position_ids" not in batch:
            self.check_length(ids.shape[1])
        self._check_words("input_ids", ids)
        if labels is None:
            mask = batch.get("attention_mask")
            labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
        if labels.shape != ids.shape:
            raise ArgumentError(
                f"labels {list(labels.shape)} of a micro-batch of {list(ids.shape)}; each token "
                "has one, itself or -100 (models shift them)"
            )
        self._check_words("labels", labels[labels != IGNORED])
        return {**batch, "labels": labels}

    def check_length(self, found: int) -> None:
        """Raise ArgumentError for a sequence of more tokens than there are positions."""
        if self.positions is not None and found > self.positions:
            raise ArgumentError(
                f"a sequence has {found:,} tokens, and this model has positions for "
                f"{self.positions:,}; use shorter sequences"
            )

    def _check_words(self, name: str, ids: Tensor) -> None:
        if ids.is_floating_point():
            raise ArgumentError(f"{name} of a micro-batch are whole numbers, not {ids.dtype}")
        low, high = (0, 0) if not ids.numel() else map(int, ids.aminmax())
        if low < 0 or high >= self.vocabulary:
            raise ArgumentError(
                f"{name} of a micro-batch have {low if low < 0 else high}; this model's vocabulary "
                f"is 0 to {self.vocabulary - 1:,}"
            )
