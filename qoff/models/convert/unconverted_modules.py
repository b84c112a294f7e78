"""A model for transformers' modules that is to be converted: what is in it, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qoff.errors import ConversionError
from qoff.memory.plan import EMBEDDING, LM_HEAD
from qoff.models.modules.configs import build, position_limit, read_config
from qoff.models.modules.probe import check_text
from qoff.models.modules.stored_layout import StoredLayout
from qoff.models.modules.structure import Matrix, Structure
from qoff.models.modules.text_part import sees
from qoff.models.sources import GGUFModulesSource, ModulesSource
from qoff.quant import Format, QTensor, QuantConfig, quantize_as

from .expert_tensors import ExpertTensors
from .layerwise import check_ids
from .module_run import ModuleRun, Seen
from .module_tensors import ModuleTensors
from .unconverted import check_patterns, tell_of_unused

_NARROW = (torch.bfloat16, torch.float16)


class UnconvertedModules:
    """A source in units, of layers and the last one of what is outside of them, and their formats.

    config: of the model. weights: how many it has. group_size: see `StoredLayout`. Raises as
    `convert` does.
    """

    def __init__(
        self,
        source: ModulesSource,
        config: Mapping[str, Any],
        quant: QuantConfig,
        trust_remote_code: bool,
        group_size: int | None = None,
    ) -> None:
        self._source, self.quant = source, quant
        self._group = group_size
        self.config = dict(config)
        self._trust = trust_remote_code
        self._open()
        if self._layout.structure.head is None and self._tensors.has_other_head():
            self.config["tie_word_embeddings"] = False  # as transformers decides, too
            self._open()
        self.units = self._layout.units
        if not isinstance(source, GGUFModulesSource):
            tell_of_unused(source, self.units - 1, self._tensors.layers())
        names = [matrix.name for unit in range(self.units) for matrix in self.matrices(unit)]
        check_patterns(source.path, names, quant.weights)
        self.weights = sum(x.numel() for x in self._layout.structure.model.parameters())

    def read(
        self, unit: int
    ) -> tuple[dict[str, Tensor], list[tuple[Matrix, Tensor | ExpertTensors]]]:
        """What stays as it is, and matrices with the weights that they are in."""
        places = self._layout.places(unit)
        experts: dict[str, ExpertTensors] = {}
        for place in places:
            matrix = next(iter(self._layout.matrices(place)), None)
            if matrix is not None and matrix.expert is not None:
                one_by_one = self._tensors.experts(place)
                experts |= {} if one_by_one is None else {place.name: one_by_one}
        together = [place for place in places if place.name not in experts]
        of = None if unit + 1 == self.units else unit
        loaded: dict[str, Tensor | ExpertTensors]
        loaded = {**self._tensors.load(of, together, [*experts]), **experts}
        floats, matrices = {}, []
        for place in places:
            found = self._layout.matrices(place)
            matrices += [(matrix, loaded[place.name]) for matrix in found]
            if not found:
                name = self._layout.structure.stored_as(place)
                floats[name] = _as_narrow_as_exact(cast(Tensor, loaded[place.name]))
        return floats, matrices

    def floats(self, unit: int) -> dict[str, Tensor]:
        """A unit as the source has it, by the names of the checkpoint, matrices in float32."""
        floats, matrices = self.read(unit)
        return {**floats, **{matrix.name: matrix.of(weight) for matrix, weight in matrices}}

    def matrices(self, unit: int) -> list[Matrix]:
        """What is quantized of a unit."""
        return [
            matrix for place in self._layout.places(unit) for matrix in self._layout.matrices(place)
        ]

    def quantized(self, matrix: Matrix, values: Tensor) -> QTensor:
        """Values of a matrix, or of some rows of it, [N, K], as they are stored."""
        return quantize_as(self.form(matrix), values, self.quant, matrix.name)

    def run(
        self, batches: Sequence[Tensor], seen: Seen | None = None, written: bool = False
    ) -> ModuleRun:
        """What takes texts, int64 [texts, tokens] each, through the layers; see `ModuleRun`.

        written: embeddings are as they are stored. Raises ArgumentError for what are no tokens.
        """
        structure = self._layout.structure
        quantized = [{m.name for m in self.matrices(unit)} for unit in range(self.units - 1)]
        tables = [table for table in structure.tables if table is not structure.head]
        outer = self._tensors.load(None, [*structure.outer(), *tables])
        for ids in batches:
            check_ids(ids, len(outer[structure.embedding.name]))
        used = torch.cat([ids.flatten() for ids in batches]).unique()
        rows = []
        for table in tables:
            found = outer.pop(table.name)[used]
            for matrix in self._layout.matrices(table) if written else ():
                found = self.quantized(matrix, found).dequantize()
            rows.append(found)
        of_ids = [lambda x, of=of: of[torch.searchsorted(used, x)] for of in rows]
        return ModuleRun(self._described(), outer, of_ids, quantized, batches, seen)

    @property
    def head(self) -> str:
        """What the matrix of the head is called in the last unit."""
        return EMBEDDING if self._layout.structure.head is None else LM_HEAD

    @property
    def vocabulary(self) -> int:
        return int(self._layout.structure.outputs.weight.shape[0])

    @property
    def positions(self) -> int | None:
        """Tokens that a text may have."""
        return position_limit(self._layout.structure.model.config.get_text_config(decoder=True))

    def weights_of(self, unit: int) -> int:
        """Numbers in a unit."""
        return sum(place.tensor.numel() for place in self._layout.places(unit))

    def _open(self) -> None:
        structure = self._described()
        self._layout = StoredLayout(structure, self.quant, self._group)
        self._tensors = ModuleTensors(self._source, structure)

    def _described(self) -> Structure:
        """The model without weights."""
        source, tensors = self._source, len(self._source.names())
        full = read_config(self.config, source.path, self._trust, tensors=tensors)
        model = build(full, self._trust)
        if sees(full.model_type):
            check_text(model)
        return Structure.of(model)

    def form(self, matrix: Matrix) -> Format:
        return self._layout.form(matrix)


def _as_narrow_as_exact(value: Tensor) -> Tensor:
    """A float32 tensor in the 16-bit type that holds it exactly, if one does."""
    if value.dtype == torch.bool:
        raise ConversionError("buffers of bools cannot be stored in a checkpoint")
    for dtype in _NARROW if value.is_floating_point() else ():
        narrow = value.to(dtype)
        if torch.equal(narrow.to(value.dtype), value):
            return narrow.contiguous()
    return value.contiguous()
