"""A source's tensors as transformers' loader renames and joins them, a layer at a time.

It joins the matrices of experts, for example, into one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError, QuantizationError
from qoff.models.modules.configs import DTYPE
from qoff.models.modules.structure import Structure, UnitWeight
from qoff.models.sources import ModulesSource

from .expert_tensors import ExpertTensors, joined_experts


@dataclass(frozen=True)
class _Later:
    """A tensor of the source as transformers' loader wants it: `[...]` reads it."""

    source: ModulesSource
    name: str

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self.source.whole(self.name)


class ModuleTensors:
    """Reads the tensors of `source` for a model, `structure`, that has no weights."""

    def __init__(self, source: ModulesSource, structure: Structure) -> None:
        self._source, self._structure = source, structure
        self._units = self._units_of_sources()

    def _units_of_sources(self) -> dict[int | None, list[str]]:
        """The source's tensors by the layer that they belong to; None: outside of layers."""
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        model, mapping = self._structure.model, self._mapping()
        converters = [x for x in mapping if isinstance(x, WeightConverter)]
        renamings = [x for x in mapping if not isinstance(x, WeightConverter)]
        state = model.state_dict()
        found: dict[int | None, list[str]] = {}
        self._converters = converters
        # From the names of modules to the source's, by the pattern that a converter knows them by.
        self._targets: dict[str, dict[str | None, list[str]]] = {}
        for name in sorted(self._source.names(), key=dot_natural_key):
            target, pattern = rename_source_key(
                name, renamings, converters, model.base_model_prefix, state
            )
            if target not in state and name in state:
                target, pattern = name, None
            self._targets.setdefault(target, {}).setdefault(pattern, []).append(name)
            found.setdefault(self._structure.unit_of(target), []).append(name)
        return found

    def layers(self) -> dict[int, list[str]]:
        """The source's tensors by layer, but those that transformers leaves out on purpose."""
        ignored = self._structure.model._keys_to_ignore_on_load_unexpected or ()
        found = {
            unit: [name for name in names if not any(re.search(one, name) for one in ignored)]
            for unit, names in self._units.items()
            if unit is not None
        }
        return {unit: names for unit, names in found.items() if names}

    def _mapping(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self._structure.model))

    def experts(self, place: UnitWeight) -> ExpertTensors | None:
        """A weight of all experts of a layer, read one by one; None: `load` has to join them."""
        tensors, shape = self._targets.get(place.name, {}), place.tensor.shape
        return joined_experts(self._source, place.name, shape, tensors, self._converters)

    def load(
        self, unit: int | None, places: Sequence[UnitWeight], without: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Tensors of a unit by their names in the model, float32 where they are floats.

        places: what is wanted of it. without: names of weights of it that are not.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        structure, empty = self._structure, {place.name: place.tensor for place in places}
        left = {x for name in without for xs in self._targets[name].values() for x in xs}
        names = [name for name in self._units.get(unit, []) if name not in left]
        state = {name: _Later(self._source, name) for name in names}
        config = LoadStateDictConfig(weight_mapping=self._mapping(), dtype=DTYPE)
        with _without_progress_bars():
            info, _ = convert_and_load_state_dict_in_model(structure.model, state, config)
        if info.mismatched_keys or info.conversion_errors:
            what = sorted(map(str, (*info.mismatched_keys, *info.conversion_errors)))[0]
            raise FormatError(
                f"{self._source.path}: {what}: not what its config.json asks for; they are not of "
                "one model"
            )
        loaded = {}
        for place in places:
            value = place.tensor.detach()
            place.put(empty[place.name])
            if value.is_meta and place is structure.embedding and structure.head is None:
                value = structure.outputs.weight.detach()  # the source has the head alone
            if value.is_meta:
                raise FormatError(
                    f"{self._source.path}: no tensor {place.name}, which its config.json asks for; "
                    "the model is incomplete, get it again"
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise QuantizationError(f"{place.name}: holds NaN or infinity; get the model again")
            loaded[place.name] = value
        return loaded

    def has_other_head(self) -> bool:
        """Whether the source has a head that differs from the embedding it should be tied to."""
        structure = self._structure
        named = structure.model.named_modules()
        path = next(name for name, module in named if module is structure.outputs)
        head, table = (
            [x for names in self._targets.get(name, {}).values() for x in names]
            for name in (f"{path}.weight", structure.embedding.name)
        )
        if not head or not table:
            return False
        return not torch.equal(self._source.whole(head[-1]), self._source.whole(table[-1]))


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers' loader shows a bar each time, which would be one a layer."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
