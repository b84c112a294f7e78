"""From a padded batch to ragged sequences and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.ragged import Ragged, Span


@dataclass(frozen=True)
class PaddedBatch:
    """Where the real tokens of a padded [B, T] batch are."""

    shape: tuple[int, int]  # (B, T)
    ragged: Ragged
    places: Tensor  # int64 [M], of the real tokens among all B * T

    @classmethod
    def of(
        cls, shape: tuple[int, int], mask: Tensor | None, pasts: list[int], past_columns: int
    ) -> PaddedBatch:
        """mask: [B, past_columns + T], 1 where a token is real, or None when all are.

        `pasts` is how many real tokens of each row are cached. Raises OpError when the real tokens
        of a row are not in one piece, there are none, or the cached ones are not as many.
        """
        batch, width = shape
        if not batch or not width:
            raise OpError(f"input_ids is {list(shape)}: there must be a token in each row")
        everywhere = torch.arange(batch * width)
        if mask is None:
            return cls(shape, Ragged.of([width] * batch, pasts), everywhere)
        if mask.shape != (batch, past_columns + width):
            raise OpError(
                f"attention_mask must be [{batch}, {past_columns + width}] for {past_columns} "
                f"columns in the cache and {width} new ones, not {list(mask.shape)}"
            )
        real = mask.bool()
        if past_columns and real[:, :past_columns].sum(1).tolist() != pasts:
            raise OpError(f"attention_mask must have ones for {pasts} cached tokens, as before")
        real = real[:, past_columns:]
        counts = real.sum(1)
        if bool((counts == 0).any()):
            raise OpError(
                "attention_mask has a row without a token among the new columns; give each row one "
                "and, where prompts of a padded batch are read in chunks, leave out "
                "prefill_chunk_size"
            )
        first = real.int().argmax(1)
        column = torch.arange(width)
        whole = (column >= first[:, None]) & (column < (first + counts)[:, None])
        if not torch.equal(real, whole):
            raise OpError(
                "the real tokens of each row must be one run of ones in attention_mask: "
                "pad on the left (tokenizer.padding_side = 'left') or on the right"
            )
        return cls(shape, Ragged.of(counts.tolist(), pasts), everywhere[real.flatten()])

    def tokens(self, input_ids: Tensor) -> Tensor:
        """Return the real tokens of [B, T] ids, row after row: int64 [M]."""
        return input_ids.reshape(-1)[self.places]

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Raise OpError if the caller wants other positions than those that follow from padding."""
        if position_ids is None:
            return
        wanted = self.tokens(position_ids.expand(self.shape))
        if not torch.equal(wanted, self.ragged.positions):
            raise OpError(
                "position_ids must count each row's real tokens from 0; qoff derives them from "
                "attention_mask, so leave them out"
            )

    def pieces(self, tokens: int) -> Iterator[tuple[Tensor, Ragged]]:
        """The pass in passes of at most `tokens` tokens of each row: their rows [m] of the M."""
        longest = max(span.count for span in self.ragged.spans)
        for done in range(0, longest, tokens):
            rows, spans, start = [], [], 0
            for span in self.ragged.spans:
                count = min(tokens, span.count - done)
                if count > 0:
                    first = span.start + done
                    rows.append(torch.arange(first, first + count))
                    spans.append(Span(span.slot, start, count, span.past + done))
                    start += count
            yield torch.cat(rows), Ragged(tuple(spans))

    def logit_rows(self, keep: int) -> tuple[Tensor, Tensor]:
        """Return the rows of the last `keep` columns (0: all), and where their logits go.

        Both int64 [R]: row among the M tokens, and index into [B * keep] of the result. Padding has
        no row, but of a last column alone: that is the last token of each row, which `generate`
        continues, wherever the padding is.
        """
        batch, width = self.shape
        kept = min(keep, width) if keep else width
        if keep == 1:
            return self.ragged.last_rows, torch.arange(batch)
        row, column = self.places // width, self.places % width - (width - kept)
        rows = (column >= 0).nonzero()[:, 0]
        return rows, (row * kept + column)[rows]
