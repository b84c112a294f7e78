"""Every byte of a model from its `config.json` alone: no weights are needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from qoff.checkpoint import (
    Checkpoint,
    QuantEntry,
    TensorEntry,
    WeightEntry,
    WeightFile,
    unwritten,
)
from qoff.checkpoint.layout import OUTER_FILE, layer_file
from qoff.errors import OpError, UnsupportedModelError
from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.packing import BITS, packed_shapes
from qoff.memory.plan import HEAD, Layouts, is_expert, unit_weights
from qoff.models.families import converted
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.modules.configs import check_config, is_native
from qoff.models.names import Weight, layer_prefix
from qoff.models.native.caches import head_shapes
from qoff.models.spec import DecoderSpec
from qoff.quant import QTensor, QuantConfig, comes_as_floats, stated


@dataclass(frozen=True)
class ModelSizes:
    """A model as a checkpoint would have it: where each weight lies in its file, and its bytes.

    checkpoint: without files where only the config is known; what plans placements reads headers
    alone, so it takes this as it takes a real one. stored: whether there are files.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    stored: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], quant: QuantConfig | None = None) -> Self:
        """The checkpoint that a model of floats is converted to; config: that of Hugging Face.

        Raises UnsupportedModelError for an architecture that `qoff.LLM` does not run, and for
        weights whose codes are taken over, whose formats only their files tell.
        """
        if not is_native(config):
            check_config(config, trust_remote_code=True)  # raises for what nothing runs
            raise UnsupportedModelError(
                f"config.json: model_type {config.get('model_type')!r} runs through transformers' "
                "modules, which are not planned for; use qoff.load with device_memory"
            )
        stored = stated(config)
        if stored and not comes_as_floats(stored[1], f"config.json: {stored[0]}"):
            raise UnsupportedModelError(
                "config.json: the weights are quantized already, and only their files tell how "
                "many bytes they become; convert the model first (qoff convert), and plan that"
            )
        quant = quant or QuantConfig()
        own, names = converted(config, lambda name: False)
        spec = DecoderSpec.from_config(own)
        folder = Path("model")
        outer = planned_file(folder / OUTER_FILE, "", outer_weights(spec, names), quant)
        made = dict[Hashable, tuple[str, WeightFile]]()
        layers = list[WeightFile]()
        for i in range(spec.num_layers):
            weights, prefix = layer_weights(spec, i, names), layer_prefix(i)
            forms = ((w.name, w.rows, w.columns, w.form(prefix, quant)) for w in weights)
            like = len(prefix), *forms  # names are as long, so headers are, too
            if like not in made:
                made[like] = prefix, planned_file(folder / layer_file(i), prefix, weights, quant)
            layers.append(_renamed(made[like][1], folder / layer_file(i), made[like][0], prefix))
        return cls(Checkpoint(folder, dict(own), tuple(layers), outer), spec)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """The same of a checkpoint that is there. Raises UnsupportedModelError as `of` does."""
        if not is_native(checkpoint.config):
            return cls.of(checkpoint.config)  # refuses it
        return cls(checkpoint, DecoderSpec.from_config(checkpoint.config), stored=True)

    @cached_property
    def shapes(self) -> tuple[HeadShape, ...]:
        """The attention of each layer that attends."""
        return head_shapes(self.spec)

    @property
    def attention(self) -> HeadShape:
        """That of the first layer which attends."""
        return next(shape for shape in self.shapes if not shape.indexes)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """How many layers read what each of `shapes` keeps."""
        counts = Counter(place for places in self.spec.cache_places for place in places)
        return tuple(counts[place] for place in self.spec.cached_layers)

    @cached_property
    def layouts(self) -> Callable[[str], Layouts]:
        """What its units take, by the packing on the device; kept for all plans."""
        return cache(partial(Layouts, self.checkpoint))

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer's weights as they are stored."""
        return tuple(_bytes(file) for file in self.checkpoint.layers)

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of the weights that the logits are computed with."""
        outer = self.checkpoint.outer
        return sum(outer.weights[name].nbytes for name in unit_weights(HEAD, outer))

    @cached_property
    def layer_bits(self) -> int:
        """Bits of the layers' matrices, on average: of the widths that there are, the nearest."""
        layers = self.checkpoint.layers
        entries = (entry for file in layers for entry in file.weights.values())
        columns = sum(e.shape[0] * e.shape[1] for e in entries if len(e.shape) > 1)
        return _nearest_bits(8 * sum(self.layer_bytes) / max(1, columns))

    @cached_property
    def head_bits(self) -> int:
        """The same of the matrix of the logits."""
        return _nearest_bits(8 * self.head_bytes / self.head_columns)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weights as they are stored."""
        return sum(map(_bytes, self.checkpoint.files))

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert; 0 where there is none."""
        experts = self.spec.experts
        if experts is None:
            return 0
        weights = (item for file in self.checkpoint.layers for item in file.weights.items())
        found = sum(entry.nbytes for name, entry in weights if is_expert(name))
        return found // (experts.count * sum(experts.layers))

    @property
    def layer_columns(self) -> int:
        """Multiplications of one token by the matrices of all layers, without chosen experts'."""
        layers = range(self.spec.num_layers)
        kinds = self._attention_columns, self._mlp_columns, self._per_layer_columns
        return sum(columns(each) for each in layers for columns in (*kinds, self._stream_columns))

    @property
    def last_columns(self) -> int:
        """The part of `layer_columns` in the last layer behind attention: for rows of logits."""
        spec, last = self.spec, self.spec.num_layers - 1
        attended = 0
        if spec.state_shape is not None and spec.is_recurrent(last):
            attended += spec.state_shape.values
        if spec.attends(last):
            own = spec.query_heads(last) * spec.values(last)
            attended += spec.o_columns if spec.latent else own
        rest = self._mlp_columns(last) + self._per_layer_columns(last)
        joined = 0 if spec.streams is None else (spec.stream_count - 1) * spec.hidden_size
        return spec.hidden_size * (attended + joined) + rest

    def _attention_columns(self, layer: int) -> int:
        """Of attention, and of what is in its place or beside it."""
        spec, states = self.spec, 0
        if spec.state_shape is not None and spec.is_recurrent(layer):
            shape = spec.state_shape
            states = spec.hidden_size * (sum(shape.projections) + shape.values)
            if isinstance(shape, DeltaShape) and shape.rank:  # a and z are of a few channels
                states -= (spec.hidden_size - shape.rank) * (shape.decays + shape.values)
        if not spec.attends(layer):
            return states
        if spec.latent is not None:
            columns = spec.hidden_size * (spec.qkv_rows + spec.o_columns)
            columns += spec.latent.query_latent * spec.q_rows
            if spec.index is not None and spec.index.layers[layer]:
                columns += spec.latent.query_latent * spec.index.heads * spec.index.dim
                columns += spec.hidden_size * (spec.index.heads + spec.index.dim)
            return columns + spec.latent.shape(spec.num_heads).rows * spec.latent.latent
        kv_heads, dim = spec.heads(layer)
        own = kv_heads if spec.kv_layers[layer] == layer else 0
        rows = (spec.query_heads(layer) + own) * (dim + spec.values(layer)) + spec.gates(layer)
        return states + spec.hidden_size * rows

    def _mlp_columns(self, layer: int) -> int:
        spec, each = self.spec, 3 if self.spec.gated else 2
        inner = spec.intermediate(layer) if spec.has_mlp(layer) else 0
        if spec.experts is not None and spec.has_experts(layer):
            inner = spec.intermediate_size * spec.experts.beside + spec.experts.shared_size
            return spec.hidden_size * (each * inner + 2 * spec.latent_width)
        return each * spec.hidden_size * inner

    def _per_layer_columns(self, layer: int) -> int:
        spec = self.spec
        if spec.per_layer is None:
            return 0
        first = spec.per_layer_width if layer == 0 else 0
        return spec.hidden_size * (2 * spec.per_layer.width + first)

    def _stream_columns(self, layer: int) -> int:
        spec = self.spec
        if spec.streams is None:
            return 0
        ends = (layer == 0) + (layer == spec.num_layers - 1)
        others = (spec.stream_count - 1) * spec.hidden_size
        return spec.hidden_size * (2 * spec.streams.rank + ends * others)

    @property
    def expert_columns(self) -> int:
        """Multiplications of one row by the matrices of an expert in each layer that has any."""
        experts = self.spec.experts
        if experts is None:
            return 0
        each = 3 if experts.gated else 2
        return sum(experts.layers) * each * self.spec.expert_width * experts.intermediate_size

    @property
    def head_columns(self) -> int:
        """Multiplications of one row of logits."""
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def parameters(self) -> int:
        """Elements of all matrices and vectors."""
        files = self.checkpoint.files
        return sum(math.prod(entry.shape) for file in files for entry in file.weights.values())


def _nearest_bits(bits: float) -> int:
    return min(BITS, key=lambda b: abs(b + 0.5 - bits))


def _bytes(file: WeightFile) -> int:
    return sum(entry.nbytes for entry in file.weights.values())


def _renamed(file: WeightFile, path: Path, old: str, new: str) -> WeightFile:
    """The file at another path, of weights whose names begin otherwise."""

    def tensor(t: TensorEntry) -> TensorEntry:
        return TensorEntry(new + t.name.removeprefix(old), t.dtype, t.shape, t.offset, t.nbytes)

    weights = dict[str, WeightEntry]()
    for entry in file.weights.values():
        found: WeightEntry
        if isinstance(entry, QuantEntry):
            codes, scales = tensor(entry.codes), tensor(entry.scale_min)
            found = replace(
                entry, name=new + entry.name.removeprefix(old), codes=codes, scale_min=scales
            )
        else:
            found = tensor(entry)
        weights[found.name] = found
    return replace(file, path=path, weights=weights)


def planned_file(
    path: Path, prefix: str, weights: Iterable[Weight], quant: QuantConfig
) -> WeightFile:
    """A file of weights as `convert` lays it out."""
    built: dict[str, QTensor | Tensor] = {}
    for weight in weights:
        name = prefix + weight.name
        if weight.columns is None:
            built[name] = torch.empty(weight.rows, device="meta")
            continue
        form, shape = weight.form(prefix, quant), (weight.rows, weight.columns)
        try:
            codes, scale_min = packed_shapes(shape, form.bits, form.group_size, quant.packing)
        except OpError as error:
            raise UnsupportedModelError(f"{name}: {error}") from error
        built[name] = QTensor(
            torch.empty(codes, dtype=torch.uint8, device="meta"),
            torch.empty(scale_min, dtype=quant.scale_dtype, device="meta"),
            shape,
            form.bits,
            form.group_size,
            quant.packing,
        )
    return unwritten(path, built)
