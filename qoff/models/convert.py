"""Converting a model to a qoff checkpoint, a layer at a time.

A layer is held in memory as it will be written; its sources are read, quantized and dropped in
pieces of rows. Quantization goes row by row, so pieces and fusing change no value.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.checkpoint import CheckpointWriter
from qoff.errors import FormatError, QuantizationError
from qoff.kernels.packing import GROUP_SIZES, packed_shapes
from qoff.quant import QTensor, QuantConfig, TensorInfo, quantize, widened
from qoff.quant.rows import reordered

from .families import converted
from .modules.configs import is_native
from .modules.conversion import convert_modules
from .names import ROW_BLOCK, Part, Weight, layer_prefix, layer_weights, outer_weights
from .sources import SafetensorsSource, Source, open_source, own_code
from .spec import DecoderSpec
from .tensor_names import TensorNames
from .uniform import with_uniform_experts

Progress = Callable[[int, int], None]  # units done, units in all: the layers and the outer file
_PIECE = 1 << 21  # weights read at a time


def convert(
    source_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant: QuantConfig | None = None,
    for_cpu: bool = False,
    requantize: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Convert a model directory with safetensors, or a GGUF file, to a checkpoint directory `out`.

    `for_cpu` stores the packing that CPU kernels read. Codes of quantized weights are taken over,
    those of a fused weight in the widest format of its parts; where no format of ours can hold them
    this needs `requantize`, which quantizes their values anew. Besides a constant, memory holds one
    layer, or the outer weights, as written.

    A directory of an architecture without a spec is converted for transformers' own modules
    (`modules.conversion`); memory then holds one layer, or the outer weights, in float32. Code that
    comes with a model or its tokenizer is run, and kept with the checkpoint, only with
    `trust_remote_code`.

    Raises UnsupportedModelError, FormatError or QuantizationError naming file and tensor, and
    ConversionError when writing fails; then nothing is left at `out`.
    """
    source = open_source(source_path)
    resolved = _resolved(quant or QuantConfig(), for_cpu)
    config = source.config()
    if isinstance(source, SafetensorsSource) and not is_native(config):
        return convert_modules(
            source,
            config,
            out,
            resolved,
            overwrite=overwrite,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )
    job = _Job(source, resolved, requantize)
    config, names = converted(config, lambda name: source.info(name) is not None)
    spec = DecoderSpec.from_config(config)
    if spec.tie_word_embeddings and _has_other_head(source, spec, names):
        spec = replace(spec, tie_word_embeddings=False)
    units = [*((layer_prefix(i), layer_weights(spec, i, names)) for i in range(spec.num_layers))]
    units.append(("", outer_weights(spec, names)))
    expected = sum(job.check(prefix, weights) for prefix, weights in units)
    files = source.files()
    with CheckpointWriter(out, overwrite=overwrite, expected_bytes=expected) as writer:
        for i, (prefix, weights) in enumerate(units):
            built = with_uniform_experts({f"{prefix}{w.name}": job.build(w) for w in weights})
            if prefix:
                writer.write_layer(i, built)
            else:
                writer.write_outer(built)
            del built
            if progress is not None:
                progress(i + 1, len(units))
        for name, data in files.items():
            writer.copy_file(name, data)
        if trust_remote_code:
            for name, code in own_code(source_path).items():
                writer.copy_file(name, code)
        tie = {"tie_word_embeddings": spec.tie_word_embeddings}
        writer.finish({**config, **tie, "quantization_config": job.description()})
    return Path(out)


@dataclass
class _Job:
    """What a conversion has to know, and what it has seen of formats."""

    source: Source
    quant: QuantConfig
    requantize: bool
    formats: Counter[tuple[int, int, bool]] = field(default_factory=Counter)

    def check(self, prefix: str, weights: Iterable[Weight]) -> int:
        """Check from headers alone that weights can be built; return the bytes they will take."""
        return sum(self._check(prefix, weight) for weight in weights)

    def build(self, weight: Weight) -> QTensor | Tensor:
        """Return a weight as it is written: a QTensor in the wanted packing, or float32 [rows]."""
        if weight.columns is None:
            return self._vector(weight)
        bits, group, imported = self._format(weight)
        self.formats[bits, group, imported] += not weight.sensitive
        out = _empty((weight.rows, weight.columns), bits, group, self.quant)
        for rows, piece in self._pieces(weight, bits, group):
            if piece.scale_min.dtype.itemsize > out.scale_min.dtype.itemsize:
                out = replace(out, scale_min=out.scale_min.to(piece.scale_min.dtype))
            _place(piece, out, rows)
        return out

    def description(self) -> dict[str, Any]:
        """Return the `quantization_config` of what was built."""
        (bits, group, imported), _ = self.formats.most_common(1)[0]
        return {
            "quant_method": "qoff",
            "version": 1,
            "bits": bits,
            "group_size": group,
            "solver": "imported" if imported else self.quant.solver,
            "packing": self.quant.packing,
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
        bits, group, _ = self._format(weight)
        if weight.columns % group:
            fits = [str(g) for g in GROUP_SIZES if weight.columns % g == 0]
            raise QuantizationError(
                f"{prefix}{weight.name}: group size {group} does not divide its {weight.columns} "
                f"columns; group sizes that do: {', '.join(fits) or 'none'}"
            )
        shapes = packed_shapes((weight.rows, weight.columns), bits, group, self.quant.packing)
        codes, scale_min = (torch.Size(shape).numel() for shape in shapes)
        return codes + scale_min * self.quant.scale_dtype.itemsize

    def _info(self, name: str) -> TensorInfo:
        info = self.source.info(name)
        if info is None:
            raise FormatError(
                f"{self.source.path}: no tensor {name}, which its config.json asks for; "
                "the model is incomplete, get it again"
            )
        return info

    def _format(self, weight: Weight) -> tuple[int, int, bool]:
        """Return bits and group of a matrix, and whether they are those of the source.

        The widest codes and smallest groups of the parts, as these hold the others exactly.
        """
        stored = {part.source: self._info(part.source) for part in weight.parts}
        for name, info in stored.items():
            if info.obstacle and not self.requantize:
                raise QuantizationError(
                    f"{self.source.path}: {name} {info.obstacle}; pass requantize=True "
                    "(--requantize) to quantize its values anew, at some loss"
                )
        if found := [x.quantized for x in stored.values() if x.quantized]:
            imported = any(x.quantized and not x.anew for x in stored.values())
            return max(bits for bits, _ in found), min(group for _, group in found), imported
        bits = self.quant.head_bits if weight.sensitive else self.quant.bits
        return bits, self.quant.group_size, False

    def _pieces(self, weight: Weight, bits: int, group: int) -> Iterator[tuple[Tensor, QTensor]]:
        """Yield pieces of a matrix in the wanted packing, each with the rows it goes to."""
        assert weight.columns is not None
        for i, part in enumerate(weight.parts):
            rows = max(1, _PIECE // weight.columns // part.unit) * part.unit
            start = 0
            for data in self._read(part, rows):
                to = weight.destination(i, start, start + data.shape[0])
                start += data.shape[0]
                order = to.argsort()
                piece = self._quantized(data, bits, group, part.source)
                yield to[order], piece if _ascending(order) else reordered(piece, order)

    def _read(self, part: Part, rows: int) -> Iterator[Tensor | QTensor]:
        """A part in pieces of `rows` rows."""
        if part.expert is not None:
            whole = self.source.item(part.source, part.expert)
            whole = whole.T.contiguous() if part.transposed else whole
            yield from whole.split(rows)
            return
        factor = None
        if part.times is not None:
            name, transposed = part.times
            factor = torch.cat([_floats(x, name) for x in self.source.chunks(name, ROW_BLOCK)])
            factor = factor.T if transposed else factor
        for data in self.source.chunks(part.source, rows):
            yield data if factor is None else _floats(data, part.source) @ factor

    def _quantized(self, data: Tensor | QTensor, bits: int, group: int, name: str) -> QTensor:
        quant = self.quant
        if isinstance(data, QTensor):
            return widened(data, bits, group).to_packing(quant.packing)
        return quantize(
            data, bits, group, quant.solver, quant.packing, quant.scale_dtype, name=name
        )

    def _vector(self, weight: Weight) -> Tensor:
        out = torch.empty(weight.rows)
        for i, part in enumerate(weight.parts):
            name = part.source
            pieces = self.source.chunks(name, part.rows)
            values = torch.cat([_floats(x, name).flatten() for x in pieces]) + part.plus
            if not bool(torch.isfinite(values).all()):
                raise QuantizationError(f"{name}: holds NaN or infinity; get the model again")
            out[weight.destination(i, 0, part.rows)] = values
        return out


def _resolved(quant: QuantConfig, for_cpu: bool) -> QuantConfig:
    return replace(quant, packing="cpu16") if for_cpu else quant


def _ascending(order: Tensor) -> bool:
    return bool((order == torch.arange(len(order))).all())


def _floats(data: Tensor | QTensor, name: str) -> Tensor:
    if isinstance(data, QTensor) or not data.is_floating_point():
        raise FormatError(f"{name}: expected a vector of floats; the model is damaged")
    return data.float()


def _has_other_head(source: Source, spec: DecoderSpec, names: TensorNames) -> bool:
    """Whether a head is there that differs from the embedding it is declared to be tied to.

    transformers does not tie the two then.
    """
    embedding, head = names.embedding, names.head
    if source.info(head) is None or source.info(embedding) is None:
        return False
    if source.info(head) != source.info(embedding):
        return True
    rows = max(ROW_BLOCK, _PIECE // spec.hidden_size // ROW_BLOCK * ROW_BLOCK)
    pairs = zip(source.chunks(embedding, rows), source.chunks(head, rows), strict=True)
    return not all(_equal(a, b) for a, b in pairs)


def _equal(a: Tensor | QTensor, b: Tensor | QTensor) -> bool:
    first, second = (x.dequantize() if isinstance(x, QTensor) else x for x in (a, b))
    return torch.equal(first, second)


def _empty(shape: tuple[int, int], bits: int, group: int, quant: QuantConfig) -> QTensor:
    codes, scale_min = packed_shapes(shape, bits, group, quant.packing)
    return QTensor(
        torch.zeros(codes, dtype=torch.uint8),
        torch.zeros(scale_min, dtype=quant.scale_dtype),
        shape,
        bits,
        group,
        quant.packing,
    )


def _place(piece: QTensor, out: QTensor, rows: Tensor) -> None:
    """Write a piece into the rows of `out`, which are whole blocks of 16 but for the last."""
    scale_min = piece.scale_min.to(out.scale_min.dtype)
    if out.packing == "half32":
        out.codes[rows] = piece.codes
        out.scale_min[:, rows] = scale_min
    else:
        blocks = rows[::ROW_BLOCK] // ROW_BLOCK
        out.codes[blocks] = piece.codes
        out.scale_min[blocks] = scale_min
