"""Converting a model without a spec, a layer at a time, under transformers' own tensor names.

transformers' loader renames and joins tensors of a source to those of its modules (the matrices of
experts, say). It is given the tensors of one layer at a time here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from qoff.errors import ConversionError, FormatError, QuantizationError
from qoff.models.modules.configs import DTYPE, LAYOUT, build, language_alone, read_config
from qoff.models.modules.structure import Matrix, Structure, UnitWeight, matrices_of
from qoff.models.sources import ModulesSource
from qoff.quant import Format, QTensor, QuantConfig, quantize
from qoff.quant.matrix import ROUTER_BITS

from .layerwise import check_ids
from .module_calibration import ModuleCalibration
from .solving import Moments, Unsolved, results

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Later:
    """A tensor of the source as transformers' loader wants it: `[...]` reads it."""

    source: ModulesSource
    name: str

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self.source.whole(self.name)


class ModulesJob:
    """A conversion to a checkpoint of layout "modules"; see `convert._NativeJob`.

    Linear layers and experts of decoder layers, embedding and head are quantized, where the group
    divides their columns; all else stays as it is. Raises as `convert` does.
    """

    def __init__(
        self,
        source: ModulesSource,
        config: Mapping[str, Any],
        quant: QuantConfig,
        trust_remote_code: bool,
        calibration: Tensor | None = None,
    ) -> None:
        self._source, self._quant = source, quant
        self._config = language_alone(config)
        self._trust = trust_remote_code
        self._open()
        if self._structure.head is None and self._has_other_head():
            self._config["tie_word_embeddings"] = False  # as transformers decides, too
            self._open()
        self.units = len(self._structure.layers) + 1
        weights = self._structure.model.parameters()
        self.expected = sum(x.numel() * quant.bits // 8 for x in weights)
        self._calibration = None if calibration is None else self._calibrated(calibration)

    def build(self, unit: int) -> dict[str, QTensor | Tensor]:
        """Return the weights of a unit by their names, floats first."""
        structure, group, outer = self._structure, self._quant.group_size, unit + 1 == self.units
        calibration = None if outer else self._calibration
        moments = Moments()
        tables = structure.tables
        places = [*structure.outer(), *tables] if outer else structure.layer(unit)
        loaded = self._load(None if outer else unit, places)
        floats: dict[str, QTensor | Tensor] = {}
        packed: dict[str, QTensor | Unsolved] = {}
        for place in places:
            name, weight = structure.stored_as(place), loaded[place.name]
            if place in tables:
                rows, columns = weight.shape
                fits = columns % group == 0
                matrices = [Matrix(name, (rows, columns))] if fits else []
            else:
                matrices = [] if outer else matrices_of(place, group)
            bits = self._quant.head_bits if place in tables else self._quant.bits
            for matrix in matrices:
                if calibration is not None and not matrix.routes:
                    packed[matrix.name] = self._unsolved(matrix, weight, moments)
                else:
                    matrix_bits = ROUTER_BITS if matrix.routes else bits
                    packed[matrix.name] = self._quantized(matrix, weight, matrix_bits)
            if not matrices:
                floats[name] = _as_narrow_as_exact(weight)
        given: dict[str, QTensor | Tensor | Unsolved] = {**floats, **packed}
        if calibration is not None:
            calibration.layer(unit, given)
        elif self._calibration is not None:
            self._calibration.close()
        return results(given, self._quant.packing)

    def config(self) -> dict[str, Any]:
        """The `config.json` of the checkpoint."""
        quant = self._quant
        return {
            **self._config,
            "quantization_config": {
                "layout": LAYOUT,
                "bits": quant.bits,
                "group_size": quant.group_size,
                "solver": quant.solver,
                "packing": quant.packing,
            },
        }

    def _open(self) -> None:
        self._structure = self._described()
        self._units = self._units_of_sources()

    def _described(self) -> Structure:
        """The model without weights."""
        source, tensors = self._source, len(self._source.names())
        full = read_config(self._config, source.path, self._trust, tensors=tensors)
        return Structure.of(build(full, self._trust))

    def _calibrated(self, ids: Tensor) -> ModuleCalibration:
        """What solves the matrices of layers on texts."""
        structure, group = self._structure, self._quant.group_size
        quantized = [
            {matrix.name for place in structure.layer(i) for matrix in matrices_of(place, group)}
            for i in range(len(structure.layers))
        ]
        tables = [table for table in structure.tables if table is not structure.head]
        outer, seen = self._load(None, [*structure.outer(), *tables]), ids.unique()
        check_ids(ids, len(outer[structure.embedding.name]))
        rows = [outer.pop(table.name)[seen] for table in tables]
        of_ids = [lambda x, of=of: of[torch.searchsorted(seen, x)] for of in rows]
        return ModuleCalibration(self._described(), outer, of_ids, quantized, ids)

    def _unsolved(self, matrix: Matrix, weight: Tensor, moments: Moments) -> Unsolved:
        quant = self._quant
        form = Format(quant.bits, quant.group_size)
        read = partial(matrix.of, weight)
        return Unsolved(matrix.name, matrix.shape, form, quant.scale_dtype, moments, read)

    def _quantized(self, matrix: Matrix, weight: Tensor, bits: int) -> QTensor:
        quant = self._quant
        return quantize(
            matrix.of(weight),
            bits,
            quant.group_size,
            quant.data_free,
            quant.packing,
            quant.scale_dtype,
            name=matrix.name,
        )

    def _units_of_sources(self) -> dict[int | None, list[str]]:
        """The source's tensors by the layer that they belong to; None: outside of layers."""
        from transformers.core_model_loading import WeightConverter, rename_source_key

        model, mapping = self._structure.model, self._mapping()
        converters = [x for x in mapping if isinstance(x, WeightConverter)]
        renamings = [x for x in mapping if not isinstance(x, WeightConverter)]
        state = model.state_dict()
        found: dict[int | None, list[str]] = {}
        self._targets: dict[str, str] = {}  # from the names of modules to the source's
        for name in self._source.names():
            target, _ = rename_source_key(
                name, renamings, converters, model.base_model_prefix, state
            )
            if target not in state and name in state:
                target = name
            self._targets[target] = name
            found.setdefault(self._structure.unit_of(target), []).append(name)
        return found

    def _mapping(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self._structure.model))

    def _load(self, unit: int | None, places: list[UnitWeight]) -> dict[str, Tensor]:
        """Tensors of a unit by their names in the model, float32 where they are floats."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        structure, empty = self._structure, {place.name: place.tensor for place in places}
        state = {name: _Later(self._source, name) for name in self._units.get(unit, [])}
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

    def _has_other_head(self) -> bool:
        """Whether the source has a head that differs from the embedding it should be tied to."""
        structure = self._structure
        named = structure.model.named_modules()
        path = next(name for name, module in named if module is structure.outputs)
        head = self._targets.get(f"{path}.weight")
        table = self._targets.get(structure.embedding.name)
        if head is None or table is None:
            return False
        return not torch.equal(self._source.whole(head), self._source.whole(table))


def _as_narrow_as_exact(value: Tensor) -> Tensor:
    """A float32 tensor in the 16-bit type that holds it exactly, if one does."""
    if value.dtype == torch.bool:
        raise ConversionError("buffers of bools cannot be stored in a checkpoint")
    for dtype in _NARROW if value.is_floating_point() else ():
        narrow = value.to(dtype)
        if torch.equal(narrow.to(value.dtype), value):
            return narrow.contiguous()
    return value.contiguous()


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
