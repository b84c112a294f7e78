"""The experts of a layer as transformers' loader would join them, read one by one.

Together they may be larger than memory: a layer of DeepSeek V4 Flash has 26 GB of them in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qoff.errors import FormatError, QuantizationError
from qoff.models.sources import ModulesSource

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter


@dataclass(frozen=True)
class ExpertTensors:
    """A weight [experts, ...] of a layer, of which `[e]` reads the part of an expert, float32.

    parts: of each expert, the tensors of the source that are its rows, one above the other; one
    name alone is of a tensor of all experts. name: what the model calls the weight. shape: of a
    part. Raises FormatError for another, QuantizationError for NaN and infinity.
    """

    source: ModulesSource
    name: str
    parts: Sequence[Sequence[str]] | str
    shape: tuple[int, ...]

    def __getitem__(self, expert: int) -> Tensor:
        if isinstance(self.parts, str):
            found = self.source.item(self.parts, expert).float()  # type: ignore[union-attr]
        else:
            found = torch.cat([self.source.whole(one).float() for one in self.parts[expert]])
        if tuple(found.shape) != self.shape:
            raise FormatError(
                f"{self.source.path}: expert {expert} of {self.name} is {list(found.shape)}, not "
                f"{list(self.shape)}, as its config.json asks for; they are not of one model"
            )
        if not bool(torch.isfinite(found).all()):
            raise QuantizationError(
                f"{self.name}, expert {expert}: holds NaN or infinity; get the model again"
            )
        return found


def joined_experts(
    source: ModulesSource,
    name: str,
    shape: Sequence[int],
    tensors: Mapping[str | None, Sequence[str]],
    converters: Sequence[WeightConverter],
) -> ExpertTensors | None:
    """A weight of all experts of a layer; None: it is made in a way that only transformers knows.

    name: the model's. shape: of all. tensors: of the source, that it is made of, by the pattern
    that a converter knows them by, in their order; None: of no converter.
    """
    count, part = shape[0], tuple(shape[1:])
    if not hasattr(source, "item"):  # GGUF files
        return None
    if [*tensors] == [None]:
        alone = tensors[None]
        return ExpertTensors(source, name, alone[0], part) if len(alone) == 1 else None
    known = [one for one in converters if {*tensors} == {*one.source_patterns}]
    if len(known) != 1 or not _stacks_rows(known[0].operations):
        return None
    each = [tensors[pattern] for pattern in known[0].source_patterns]
    if any(len(names) != count for names in each):
        return None
    return ExpertTensors(source, name, [*zip(*each, strict=True)], part)


def _stacks_rows(operations: Sequence[Any]) -> bool:
    """Whether a converter stacks matrices, and puts those of an expert one above the other."""
    kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in operations]
    stack, rows = ("MergeModulelist", 0), ("Concatenate", 1)
    return kinds in ([stack], [stack, rows])
