"""How a model of transformers' modules is stored: what of each unit is quantized, and how."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import QuantizationError
from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER
from qoff.quant import Format, QuantConfig
from qoff.quant.matrix import ROUTER_BITS

from .structure import Matrix, Structure, UnitWeight, matrices_of


@dataclass(frozen=True)
class StoredLayout:
    """Units are the layers, and the last one what is outside of them.

    Linear layers and experts of decoder layers, embedding and head are matrices, where the group
    divides their columns; all else stays as it is. group_size: of matrices of layers without a
    chosen format; None: that of quant.
    """

    structure: Structure
    quant: QuantConfig
    group_size: int | None = None

    @property
    def units(self) -> int:
        return len(self.structure.layers) + 1

    def places(self, unit: int) -> list[UnitWeight]:
        """What there is in a unit."""
        structure = self.structure
        if unit + 1 < self.units:
            return structure.layer(unit)
        return [*structure.outer(), *structure.tables]

    def matrices(self, place: UnitWeight) -> list[Matrix]:
        """The matrices that a weight is stored as; none: it stays as it is.

        Raises QuantizationError for a chosen format whose groups do not divide one.
        """
        structure = self.structure
        if place in structure.tables:
            rows, columns = place.tensor.shape
            found = [Matrix(structure.stored_as(place), (rows, columns))]
        elif structure.unit_of(place.name) is None:
            return []
        else:
            found = matrices_of(place)
        unfit = [x for x in found if x.shape[1] % self.form(x).group_size]
        if not unfit:
            return found
        for matrix in found:
            if self.quant.chosen(matrix.name):
                raise QuantizationError(
                    f"{matrix.name}: {self.form(unfit[0])} do not divide the {matrix.shape[1]} "
                    "columns of this matrix, or of one that is stored with it"
                )
        return []

    def form(self, matrix: Matrix) -> Format:
        """Of a matrix."""
        quant = self.quant
        if chosen := quant.chosen(matrix.name):
            return chosen
        if matrix.name in (EMBEDDING, LM_HEAD, PER_LAYER):
            return Format(quant.head_bits, quant.group_size)
        bits = ROUTER_BITS if matrix.routes else quant.bits
        return Format(bits, self.group_size or quant.group_size)
