"""Building the weights of a checkpoint from those of a source, in pieces of rows.

Quantization goes row by row, so pieces and fusing change no value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError, QuantizationError
from qoff.kernels.layout.packing import BITS, GROUP_SIZES, packed_shapes
from qoff.kernels.layout.scales import COMPACT, common
from qoff.memory.plan.units import expert_matrix
from qoff.models.names import Part, Weight
from qoff.models.row_order import ROW_BLOCK
from qoff.models.sources import Source
from qoff.quant import Format, QTensor, QuantConfig, TensorInfo, quantize_as, widened
from qoff.quant.matrix import CALIBRATED
from qoff.quant.rows import reordered, split_rows

PIECE = 1 << 21  # weights read at a time


@dataclass
class Builder:
    """Builds weights as they are written, and counts the formats it has seen."""

    source: Source
    quant: QuantConfig
    requantize: bool
    formats: Counter[tuple[Format, bool]] = field(default_factory=Counter)

    def check(self, prefix: str, weights: Iterable[Weight]) -> int:
        """Check from headers alone that weights can be built; return the bytes they will take."""
        return sum(self._check(prefix, weight) for weight in weights)

    def build(self, prefix: str, weight: Weight) -> QTensor | Tensor:
        """Return a weight as it is written: a QTensor in the wanted packing, or float32 [rows]."""
        if weight.columns is None:
            return self._vector(weight)
        form, scales = self.note(prefix, weight), self._scales(prefix, weight)
        out = _empty((weight.rows, weight.columns), form, self.quant.packing, scales)
        for rows, data, name in self._pieces(weight):
            order = rows.argsort()
            piece = self.quantized(data, form, name, scales)
            if not bool((rows.diff() > 0).all()):
                piece = reordered(piece, order)
            out = out.with_scales(common((piece.scale_min.dtype, out.scale_min.dtype)))
            _place(piece, out, rows[order])
        return out

    def _scales(self, prefix: str, weight: Weight) -> torch.dtype:
        """How scales of a matrix are stored: where parts keep their own, others' are like those."""
        chosen = self.quant.scale_dtype
        imported = chosen == COMPACT and self.format(prefix, weight)[1]
        return torch.float16 if imported else chosen

    def note(self, prefix: str, weight: Weight) -> Format:
        """Count the format of a matrix that is built now, and return it."""
        form, imported = self.format(prefix, weight)
        self.formats[form, imported] += not weight.sensitive
        return form

    def keeps(self, prefix: str, weight: Weight) -> bool:
        """Whether all values of a matrix are those of the source."""
        stored = [self._info(part.source) for part in weight.parts]
        own = all(info.quantized and not info.anew for info in stored)
        return own and self.format(prefix, weight)[1]

    def calibrates(self, prefix: str, weight: Weight) -> bool:
        """Whether a weight is a matrix that the solver wants the inputs of."""
        if weight.columns is None or weight.sensitive or self.quant.solver not in CALIBRATED:
            return False
        return not self.format(prefix, weight)[1]

    def gains(self, prefix: str, weight: Weight) -> bool:
        """Whether what `calibrates` can lose less: not where 8 bits hold values of few levels."""
        stored = any(self._info(part.source).quantized for part in weight.parts)
        return not stored or self.format(prefix, weight)[0].bits < max(BITS)

    def floats(self, weight: Weight) -> Tensor:
        """Return the values of a weight as the source has them, float32 [rows, columns] or [rows].

        Raises QuantizationError for NaN and infinity.
        """
        if weight.columns is None:
            return self._vector(weight)
        out = torch.empty(weight.rows, weight.columns)
        for rows, values in self.pieces(weight):
            out[rows] = values
        return out

    def pieces(self, weight: Weight) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of a matrix, int64 [n], and their values as `floats` has them, some at a time.

        Raises QuantizationError for NaN and infinity.
        """
        for rows, piece, name in self._pieces(weight):
            values = piece.dequantize() if isinstance(piece, QTensor) else _floats(piece, name)
            yield rows, _finite(values, name)

    def rows(self, table: Weight, ids: Tensor) -> Tensor:
        """Some rows of a matrix as the source has them, float32 [len(ids), columns]."""
        found = torch.empty(len(ids), table.columns or 0)
        for rows, piece in self.pieces(table):
            ordered, order = rows.sort()
            at = torch.searchsorted(ordered, ids).clamp_(max=len(rows) - 1)
            here = (ordered[at] == ids).nonzero()[:, 0]
            found[here] = piece[order[at[here]]]
        return found

    def description(self) -> dict[str, Any]:
        """Return the `quantization_config` of what was built."""
        (form, imported), _ = self.formats.most_common(1)[0]
        chosen = {name: asdict(x) for name, x in self.quant.weights.items()}
        return {
            "quant_method": "qoff",
            "version": 1,
            "bits": form.bits,
            "group_size": form.group_size,
            "solver": "imported" if imported else self.quant.solver,
            "packing": self.quant.packing,
            **({"weights": chosen} if chosen else {}),
        }

    def _check(self, prefix: str, weight: Weight) -> int:
        for number, part in enumerate(weight.parts):
            found, wanted = self._info(part.source).shape, weight.stored_shape(number)
            if part.expert is not None:
                wanted = (found[0] if found[0] > part.expert else part.expert + 1, *wanted)
            if part.times is not None:
                wanted = (wanted[0], *found[1:])
            if found != wanted:
                raise FormatError(
                    f"{self.source.path}: tensor {part.source} has shape {found}, "
                    f"but config.json wants {wanted}; they are not of one model"
                )
        if weight.columns is None:
            return weight.rows * 4
        form, _ = self.format(prefix, weight)
        group = form.group_size
        if weight.columns % group:
            fits = [str(g) for g in GROUP_SIZES if weight.columns % g == 0]
            raise QuantizationError(
                f"{prefix}{weight.name}: group size {group} does not divide its {weight.columns} "
                + (
                    f"columns; group sizes that do: {', '.join(fits)}"
                    if fits
                    else "columns, and no other does; this model cannot be converted"
                )
            )
        shapes = packed_shapes((weight.rows, weight.columns), form.bits, group, self.quant.packing)
        codes, scale_min = (torch.Size(shape).numel() for shape in shapes)
        return codes + scale_min * self._scales(prefix, weight).itemsize

    def _info(self, name: str) -> TensorInfo:
        info = self.source.info(name)
        if info is None:
            raise FormatError(
                f"{self.source.path}: no tensor {name}, which its config.json asks for; "
                "the model is incomplete, get it again"
            )
        return info

    def format(self, prefix: str, weight: Weight) -> tuple[Format, bool]:
        """Return the format of a matrix, and whether its codes are those of the source.

        Codes that are taken over have the widest codes and smallest groups of the parts, as these
        hold the others exactly, or a format chosen for this matrix that holds them, too.
        """
        stored = {part.source: self._info(part.source) for part in weight.parts}
        for name, info in stored.items():
            if info.obstacle and not self.requantize:
                raise QuantizationError(
                    f"{self.source.path}: {name} {info.obstacle}; pass requantize=True "
                    "(--requantize) to quantize its values again, at some loss"
                )
        chosen = self.quant.chosen(prefix + weight.name)
        if found := [x.quantized for x in stored.values() if x.quantized]:
            imported = any(x.quantized and not x.anew for x in stored.values())
            own = Format(max(bits for bits, _ in found), min(group for _, group in found))
            if chosen and imported and not chosen.holds(own):
                if self.requantize:
                    return chosen, False
                raise QuantizationError(
                    f"{prefix}{weight.name}: keeps its codes ({own}), which {chosen} does not "
                    "hold; leave its format out, convert the model that it was quantized from, or "
                    "pass requantize=True (--requantize) to quantize its values again"
                )
            return chosen or own, imported
        return weight.form(prefix, self.quant), False

    def _pieces(self, weight: Weight) -> Iterator[tuple[Tensor, Tensor | QTensor, str]]:
        """Yield pieces of a matrix, the rows that each goes to, and the tensor it comes from."""
        assert weight.columns is not None
        for i, part in enumerate(weight.parts):
            rows = max(1, PIECE // weight.columns // part.unit) * part.unit
            start = 0
            for data in self._read(part, rows):
                to = weight.destination(i, start, start + data.shape[0])
                start += data.shape[0]
                yield to, data, part.source

    def _read(self, part: Part, rows: int) -> Iterator[Tensor | QTensor]:
        """A part in pieces of `rows` rows."""
        if part.expert is not None:
            whole = self.source.item(part.source, part.expert)
            if isinstance(whole, QTensor):
                yield from (reordered(whole, at) for at in torch.arange(part.rows).split(rows))
            else:
                yield from (whole.T.contiguous() if part.transposed else whole).split(rows)
            return
        factor = None
        if part.times is not None:
            name, transposed = part.times
            factor = torch.cat([_floats(x, name) for x in self.source.chunks(name, ROW_BLOCK)])
            factor = factor.T if transposed else factor
        for data in self.source.chunks(part.source, rows // part.rows_each):
            data = data if part.rows_each == 1 else split_rows(data, part.rows_each)
            yield data if factor is None else _floats(data, part.source) @ factor

    def quantized(
        self, data: Tensor | QTensor, form: Format, name: str, scales: torch.dtype | None = None
    ) -> QTensor:
        """Return rows of a matrix in a format, without calibration; name: what errors call it.

        scales: how they are stored, by default as configured.
        """
        if isinstance(data, QTensor):
            if form.holds(Format(data.bits, data.group_size)):
                return widened(data, form.bits, form.group_size).to_packing(self.quant.packing)
            data = data.dequantize()
        return quantize_as(form, data, self.quant, name, scales)

    def _vector(self, weight: Weight) -> Tensor:
        out = torch.empty(weight.rows)
        for i, part in enumerate(weight.parts):
            name = part.source
            pieces = self.source.chunks(name, part.rows)
            values = torch.cat([_floats(x, name).flatten() for x in pieces]) + part.plus
            values = values.neg().log() if part.of_exponential else values
            out[weight.destination(i, 0, part.rows)] = _finite(values, name)
        return out


def with_uniform_experts(
    weights: Mapping[str, QTensor | Tensor],
) -> dict[str, QTensor | Tensor]:
    """The weights of a layer, its experts' matrices of a kind in one form that holds all of them.

    The widest codes, the smallest groups, and float32 scales where they differ: no value changes.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        kind = expert_matrix(name)
        if kind is not None and isinstance(weight, QTensor):
            alike[kind[1]].append(name)
    found = dict(weights)
    for names in alike.values():
        matrices = [weight for name in names if isinstance(weight := weights[name], QTensor)]
        bits, group = max(m.bits for m in matrices), min(m.group_size for m in matrices)
        dtype = common(m.scale_min.dtype for m in matrices)
        for name, matrix in zip(names, matrices, strict=True):
            found[name] = widened(matrix.with_scales(dtype), bits, group)
    return found


def _floats(data: Tensor | QTensor, name: str) -> Tensor:
    if isinstance(data, QTensor) or not data.is_floating_point():
        raise FormatError(f"{name}: expected floats; the model is damaged")
    return data.float()


def _finite(values: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise QuantizationError(f"{name}: holds NaN or infinity; get the model again")
    return values


def _empty(shape: tuple[int, int], form: Format, packing: str, scales: torch.dtype) -> QTensor:
    codes, scale_min = packed_shapes(shape, form.bits, form.group_size, packing)
    return QTensor(
        torch.zeros(codes, dtype=torch.uint8),
        torch.zeros(scale_min, dtype=scales),
        shape,
        form.bits,
        form.group_size,
        packing,
    )


def _place(piece: QTensor, out: QTensor, rows: Tensor) -> None:
    """Write a piece into the rows of `out`, which are whole blocks of 16 but for the last."""
    scale_min = piece.with_scales(out.scale_min.dtype).scale_min
    if out.packing == "split32":
        out.codes[rows] = piece.codes
        out.scale_min[:, rows] = scale_min
    else:
        blocks = rows[::ROW_BLOCK] // ROW_BLOCK
        out.codes[blocks] = piece.codes
        out.scale_min[blocks] = scale_min
