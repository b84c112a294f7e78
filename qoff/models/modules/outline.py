"""A model of transformers' modules without its weights: what it computes, keeps and takes."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, FormatError, UnsupportedModelError
from qoff.kernels.layout.heads import HeadShape
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UnpackableError
from qoff.memory.plan.experts import are_uniform
from qoff.models.native.caches import check_top_on_gpu
from qoff.models.spec import check_length

from . import probe
from .attention import NAME, register
from .cache import ModuleCache
from .configs import DTYPE, build, layer_configs, position_limit, read_config
from .sequence_memory import SequenceMemory, extrapolated
from .structure import (
    Structure,
    buffers_from_config,
    cache_argument,
    has_position_table,
    layer_width,
    matrices_of,
)
from .text_part import sees


@dataclass(frozen=True)
class ModuleLayer:
    """A layer as caches know it: those of equal models are interchangeable."""

    model_type: str
    config: str  # as JSON

    def __str__(self) -> str:
        return f"transformers' {self.model_type}"


class Outline:
    """What a checkpoint of layout "modules" tells of a model before any weight is read.

    trust_remote_code: run code that came with the model. kv: how its cache is packed; None: as
    transformers keeps it. caches_on_device: packed for a GPU's attention. device: where what lies
    outside of layers, embedding and head is, `outer_bytes` of it. dtype: of hidden states, float32
    on a CPU. device_memory: bytes of a GPU that may be used; None: all. float_bytes: of a layer's
    weights that are not quantized, as its modules want them, the most. Raises UnsupportedModelError
    for a config that transformers has no model for, UnpackableError where the cache cannot be
    packed, ArgumentError for a form of it that the device does not have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        trust_remote_code: bool,
        kv: KVQuant | None = None,
        caches_on_device: bool = False,
        device: torch.device = CPU,
        dtype: torch.dtype = DTYPE,
        device_memory: int | None = None,
    ) -> None:
        self.device, self.dtype, self.device_memory = device, dtype, device_memory
        self.caches_on_device = caches_on_device
        if caches_on_device and kv is not None and kv.sinks:
            raise ArgumentError("on a GPU no token is a sink; use sinks=0")
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        tensors = len(checkpoint.weight_map)
        self.config = read_config(config, checkpoint.path, trust_remote_code, tensors=tensors)
        self.kv, self._trusted = kv, trust_remote_code
        self.model = self._built(packed=kv is not None)
        if sees(self.config.model_type):
            probe.check_text(self.model)
        self.structure = structure = Structure.of(self.model)
        _check_layers(checkpoint, structure)
        self._parameters = set(signature(self.model.forward).parameters)
        self.text_config = self.model.config.get_text_config(decoder=True)
        # Of attention that is qoff's, by transformers' numbers of layers with keys of their own.
        self.packed_shapes: dict[int, HeadShape] = {}
        lenders: dict[int, int] = {}
        states = self._empty_states()
        self._may_attend = probe.may_attend(states)
        if kv is not None:
            call = partial(self._call, self.model)
            self.packed_shapes, lenders = probe.head_shapes(self.model, call, states)
            shapes = list(self.packed_shapes.values())
            kv.forms(shapes)
            if caches_on_device:
                check_top_on_gpu(shapes, kv)
        self._attends = {n: (i, shape) for i, (n, shape) in enumerate(self.packed_shapes.items())}
        self.lent = frozenset(self._attends[lender][0] for lender in lenders.values())
        for layer, lender in lenders.items():
            place, shape = self._attends[lender]
            self._attends[layer] = place, replace(shape, appends=False)
        tables = [table.module for table in structure.tables]
        self._ends = has_position_table(self.model, self.position_limit, tables)
        self.layers_path = structure.path
        self.vocab_size: int = structure.outputs.weight.shape[0]
        self.embedded_tokens: int = self.model.get_input_embeddings().num_embeddings
        self.width = max(layer_width(layer, self.text_config) for layer in structure.layers)
        matrices = (x for x in structure.layers.parameters() if x.dim() > 1)
        self.columns = max(max(x.shape[-2:]) for x in matrices)  # a matrix may be transposed
        self.outer_bytes = buffers_from_config(self.model, device)
        self.outer_bytes += sum(place.tensor.nbytes for place in structure.outer())
        self.float_bytes = max(
            sum(place.tensor.nbytes for place in structure.floats(i, file.quantized))
            for i, file in enumerate(checkpoint.layers)
        )
        described = ModuleLayer(str(config["model_type"]), self.text_config.to_json_string())
        self.cache_shapes = (described,) * len(structure.layers)
        self.one_by_one = are_uniform(checkpoint)  # whether experts may come so

    def _built(self, packed: bool) -> Any:
        """The model on the meta device, its attention qoff's where the cache is to be packed.

        Raises UnpackableError for a class that has attentions of its own only.
        """
        if not packed:
            return build(deepcopy(self.config), self._trusted, dtype=self.dtype)
        register()
        try:
            return build(deepcopy(self.config), self._trusted, NAME, self.dtype)
        except UnsupportedModelError as error:
            build(deepcopy(self.config), self._trusted)  # raises where it cannot be at all
            raise UnpackableError(
                f"the KV cache of {self.config.model_type} cannot be packed: its attention does "
                "not go through transformers' interface; use kv=None"
            ) from error

    @property
    def readers(self) -> tuple[int, ...]:
        """How many layers attend to what each of `packed_shapes` keeps."""
        counts = Counter(place for place, _ in self._attends.values())
        return tuple(counts[place] for place in range(len(self.packed_shapes)))

    @property
    def max_positions(self) -> int:
        """Tokens of a sequence that the model was made for."""
        return self.position_limit or 2048

    @property
    def heads(self) -> int:
        """Query heads of a layer, the most."""
        layers = layer_configs(self.text_config)
        return max(getattr(one, "num_attention_heads", None) or 1 for one in layers)

    @property
    def position_limit(self) -> int | None:
        """Tokens that a sequence may have; None: as many as there is memory for."""
        return position_limit(self.text_config)

    def check_positions(self, tokens: int) -> None:
        """Raise ContextLengthError for a sequence of more tokens than `position_limit`."""
        check_length(tokens, self.position_limit, self.config.model_type)

    def sequence_memory(self) -> SequenceMemory:
        """What a sequence in a slot of a cache takes beside packed K and V.

        Raises UnpackableError where sequences have to be computed alone, and K and V would be
        packed.
        """
        model = self._for_trials()
        call, states, packed = partial(self._call, model), self._empty_states(), self.packed_shapes
        try:
            if self._ends and "position_ids" not in self._parameters:
                raise probe.UnknownCacheError("it counts padding among positions")
            layers = probe.layer_memory(model, call, states, packed, self.position_limit)
            return SequenceMemory(layers)
        except probe.UnknownCacheError as error:
            reason = str(error)
        if packed:
            name = type(model).__name__
            raise UnpackableError(
                f"the sequences of {name} cannot be computed together: {reason}; use kv=None"
            )
        trial = cache(partial(probe.bytes_of_cache, model, call, self._empty_states))
        return SequenceMemory(own=partial(extrapolated, trial), reason=reason)

    def pass_ops(self) -> int:
        """How many of torch's ops a pass takes beside what experts compute."""
        model = self._for_trials()
        return probe.count_ops(model, partial(self._call, model), self._empty_states)

    def _for_trials(self) -> Any:
        """Another one of the model, whose attention is nobody's where that can be."""
        try:
            return self._built(packed=True)
        except UnpackableError:
            return self._built(packed=False)

    def _empty_states(self) -> Any:
        """transformers' cache of one sequence."""
        return ModuleCache(self.text_config, 1).states

    def _call(self, model: Any, ids: Tensor, states: Any, **more: Tensor | None) -> Any:
        """transformers' forward pass, with what it takes of `more`."""
        offered: dict[str, Any] = {**more, str(cache_argument(model)): states}
        known = {name: value for name, value in offered.items() if name in self._parameters}
        return model(input_ids=ids, use_cache=True, return_dict=True, **known)


def _check_layers(checkpoint: Checkpoint, structure: Structure) -> None:
    """Raise FormatError unless the files hold what the model's layers have."""
    if len(checkpoint.layers) != len(structure.layers):
        raise FormatError(
            f"{checkpoint.path}: has files of {len(checkpoint.layers)} layers, but its config.json "
            f"asks for {len(structure.layers)}; convert the model again"
        )
    wanted = [
        (file, {place.name, *(matrix.name for matrix in matrices_of(place))})  # one of them
        for i, file in enumerate(checkpoint.layers)
        for place in structure.layer(i)
    ]
    outer = {structure.stored_as(place) for place in (*structure.outer(), *structure.tables)}
    wanted += [(checkpoint.outer, {name}) for name in sorted(outer)]
    for file, names in wanted:
        if not names & file.weights.keys():
            raise FormatError(
                f"{file.path}: has no {min(names)}, which config.json asks for; convert the model "
                "again"
            )
