"""Every byte of a model from its `config.json` alone: no weights are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import OUTER_FILE
from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.states import StateShape
from qoff.models.families import converted
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.names import Weight, layer_prefix
from qoff.models.native.caches import head_shapes
from qoff.models.spec import DecoderSpec
from qoff.models.spec_parts import ExpertsSpec
from qoff.quant import QuantConfig

from .calls import call_s
from .manual import Memory, Plan
from .planned_files import PlannedWeight, check_floats, planned_file, planned_layers
from .profile import MachineProfile
from .sizes import Sizes

_MIXER_OPS, _MLP_OPS = 3, 2  # of a layer


@dataclass(frozen=True)
class NativeSizes(Sizes):
    """Of a model that qoff computes itself."""

    checkpoint: Checkpoint
    spec: DecoderSpec
    stored: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], quant: QuantConfig | None = None) -> Self:
        """The checkpoint that a model of floats is converted to; config: that of Hugging Face.

        Raises UnsupportedModelError for weights whose codes are taken over, whose formats only
        their files tell, and for a config that is refused.
        """
        check_floats(config)
        quant = quant or QuantConfig()
        own, names = converted(config, lambda name: False)
        spec = DecoderSpec.from_config(own)
        folder = Path("model")
        outer = planned_file(
            folder / OUTER_FILE, planned("", outer_weights(spec, names), quant), quant
        )
        layers = (
            (layer_prefix(i), planned(layer_prefix(i), layer_weights(spec, i, names), quant))
            for i in range(spec.num_layers)
        )
        checkpoint = Checkpoint(folder, dict(own), planned_layers(folder, layers, quant), outer)
        return cls(checkpoint, spec)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """The same of a checkpoint that is there."""
        return cls(checkpoint, DecoderSpec.from_config(checkpoint.config), stored=True)

    @cached_property
    def shapes(self) -> tuple[HeadShape, ...]:
        return head_shapes(self.spec)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        counts = Counter(place for places in self.spec.cache_places for place in places)
        return tuple(counts[place] for place in self.spec.cached_layers)

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def heads(self) -> int:
        return self.spec.num_heads

    @property
    def hidden_width(self) -> int:
        return self.spec.hidden_width

    @property
    def experts(self) -> ExpertsSpec | None:
        return self.spec.experts

    @property
    def expert_width(self) -> int:
        return self.spec.expert_width

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return self.spec.state_shapes

    @property
    def position_limit(self) -> int | None:
        return self.spec.position_limit

    @property
    def index_top(self) -> int | None:
        return None if self.spec.index is None else self.spec.index.top

    def check_positions(self, tokens: int) -> None:
        self.spec.check_positions(tokens)

    def calls_s(self, machine: MachineProfile) -> float:
        spec, layers = self.spec, range(self.spec.num_layers)
        mixers = sum(spec.attends(i) + spec.is_recurrent(i) for i in layers)
        ops = _MIXER_OPS * mixers + _MLP_OPS * sum(map(spec.has_mlp, layers))
        return (ops + 1) * call_s(machine)

    def unpacked_bytes(self, tokens: int, on_gpu: bool) -> int:
        return 0  # states have kernels of their own, and recent tokens are forgotten

    def memory_of(
        self,
        plan: Plan,
        on_gpu: bool,
        device: torch.device,
        dtype: torch.dtype,
        tiled: bool = False,
        cores: int | None = None,
    ) -> Memory:
        if not on_gpu:
            return Memory.of(plan, self.spec, self.shapes, tiled, cores)
        from .gpu import memory_on_gpu  # needs Triton

        return memory_on_gpu(plan, self.spec, self.shapes, device, dtype, tiled, plan.batch_size)

    @property
    def layer_columns(self) -> int:
        layers = range(self.spec.num_layers)
        kinds = self._attention_columns, self._mlp_columns, self._per_layer_columns
        return sum(columns(each) for each in layers for columns in (*kinds, self._stream_columns))

    @property
    def last_columns(self) -> int:
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
        experts = self.spec.experts
        if experts is None:
            return 0
        each = 3 if experts.gated else 2
        return sum(experts.layers) * each * self.spec.expert_width * experts.intermediate_size

    @property
    def head_columns(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size


def planned(prefix: str, weights: Iterable[Weight], quant: QuantConfig) -> list[PlannedWeight]:
    """Weights of a unit as `convert` stores them."""
    return [
        PlannedWeight(prefix + w.name, (w.rows,))
        if w.columns is None
        else PlannedWeight(prefix + w.name, (w.rows, w.columns), w.form(prefix, quant))
        for w in weights
    ]
