"""A model of transformers' modules, with the interface of the native decoder."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint, QuantEntry, read_weight
from qoff.errors import (
    ArgumentError,
    FormatError,
    OpError,
    UnsupportedModelError,
)
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.ops import Ops, exact
from qoff.kvcache import DeviceCache, KVCache, KVQuant
from qoff.kvcache.host.mixed import host_cache
from qoff.kvcache.quant import UnpackableError
from qoff.memory.plan.experts import are_uniform
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.caches import check_top_on_gpu
from qoff.models.native.following import check_ids
from qoff.models.native.linear import Steps
from qoff.models.spec import check_length

from . import probe
from .attention import NAME, PackedAttention, register
from .binding import WeightBinder, bind_embedding
from .cache import ModuleCache, StatesPass, new_columns
from .configs import DTYPE, LAYOUT, build, layer_configs, position_limit, read_config
from .current import current
from .linear import Head, Multiply
from .own_caches import OwnCaches, OwnCachesPass
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


def is_modules(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is for transformers' modules. Raises FormatError for another layout."""
    layout = checkpoint.config.get("quantization_config", {}).get("layout")
    if layout not in (None, "layers", LAYOUT):
        raise FormatError(
            f"{checkpoint.path}: this version does not read layout {layout!r}; use a newer qoff"
        )
    return bool(layout == LAYOUT)


@dataclass(frozen=True)
class ModuleLayer:
    """A layer as caches know it: those of equal models are interchangeable."""

    model_type: str
    config: str  # as JSON

    def __str__(self) -> str:
        return f"transformers' {self.model_type}"


class ModuleDecoder:
    """Runs a checkpoint of layout "modules" on weights that it is handed step by step.

    embed: looks up rows of the embedding, from ids int64 [U] to float [U, K]; embed_layers: those
    of embeddings of layers, where a model has them. Layers hold weights only while they are
    computed; what lies outside of layers, embedding and head is read at once, `outer_bytes` of it,
    and stays. device: where all that is, but the rows of the embedding before they are looked up.
    dtype: of hidden states, float32 on a CPU. device_memory: bytes of a GPU that may be used; None:
    all. Raises UnsupportedModelError for a config that
    transformers has no model for, FormatError where the checkpoint is another model's,
    ArgumentError for a form of the KV cache that the device does not have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        embed: Callable[[Tensor], Tensor],
        trust_remote_code: bool,
        kv: KVQuant | None = None,
        embed_layers: Callable[[Tensor], Tensor] | None = None,
        device: torch.device = CPU,
        dtype: torch.dtype = DTYPE,
        device_memory: int | None = None,
    ) -> None:
        self.device, self.dtype, self.device_memory = device, dtype, device_memory
        self.caches_on_device = ops.CACHE == "device"
        if self.caches_on_device and kv is not None and kv.sinks:
            raise ArgumentError("on a GPU no token is a sink; use sinks=0")
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        tensors = len(checkpoint.weight_map)
        self.config = read_config(config, checkpoint.path, trust_remote_code, tensors=tensors)
        self.model = self._built(trust_remote_code, packed=kv is not None)
        if sees(self.config.model_type):
            probe.check_text(self.model)
        structure = Structure.of(self.model)
        _check_layers(checkpoint, structure)
        self.kv, self._ops, self._trusted = kv, ops, trust_remote_code
        self._parameters = set(signature(self.model.forward).parameters)
        self.text_config = self.model.config.get_text_config(decoder=True)
        # Of attention that is qoff's, by transformers' numbers of layers with keys of their own.
        self.packed_shapes: dict[int, HeadShape] = {}
        lenders: dict[int, int] = {}
        states = ModuleCache(self.text_config, 1).states
        self._may_attend = probe.may_attend(states)
        if kv is not None:
            call = partial(self._call, self.model)
            self.packed_shapes, lenders = probe.head_shapes(self.model, call, states)
            shapes = list(self.packed_shapes.values())
            kv.forms(shapes)
            if self.caches_on_device:
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
        self.outer_bytes += _read_outer(checkpoint, structure, device)
        described = ModuleLayer(str(config["model_type"]), self.text_config.to_json_string())
        self.cache_shapes = (described,) * len(structure.layers)
        self.one_by_one = are_uniform(checkpoint)  # whether experts may come so
        self._install(checkpoint, structure)
        bind_embedding(self.model.get_input_embeddings(), embed)
        if structure.layer_table is not None:
            assert embed_layers is not None
            bind_embedding(cast(nn.Embedding, structure.layer_table.module), embed_layers)

    def _built(self, trust_remote_code: bool, packed: bool) -> Any:
        """The model on the meta device, its attention qoff's where the cache is to be packed.

        Raises UnpackableError for a class that has attentions of its own only.
        """
        if not packed:
            return build(deepcopy(self.config), trust_remote_code, dtype=self.dtype)
        register()
        try:
            return build(deepcopy(self.config), trust_remote_code, NAME, self.dtype)
        except UnsupportedModelError as error:
            build(deepcopy(self.config), trust_remote_code)  # raises where it cannot be at all
            raise UnpackableError(
                f"the KV cache of {self.config.model_type} cannot be packed: its attention does "
                "not go through transformers' interface; use kv=None"
            ) from error

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
        try:
            model = self._built(self._trusted, packed=True)
        except UnpackableError:
            model = self._built(self._trusted, packed=False)
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

    def own_caches(self, *arguments: Any, **options: Any) -> OwnCaches:
        """Slots with a cache of transformers for each sequence; arguments of `OwnCaches`."""
        return OwnCaches(*arguments, new=self._empty_states, **options)

    def _empty_states(self) -> Any:
        """transformers' cache of one sequence."""
        return ModuleCache(self.text_config, 1).states

    def new_cache(
        self, sequences: int, capacity: int = 0, kv: KVQuant | None = None
    ) -> ModuleCache:
        """An empty cache of transformers' own; it grows. For packed attention one of qoff's.

        Raises ArgumentError for `kv` where the model was opened without, OpError for a head size
        that cannot be packed.
        """
        if self.packed_shapes:
            shapes = [*self.packed_shapes.values()]
            tokens: KVCache
            if self.caches_on_device:
                assert kv is not None
                tokens = DeviceCache(
                    shapes,
                    kv.packed_forms(shapes),
                    sequences,
                    window=kv.window,
                    capacity=capacity,
                    values_rotated=kv.values_rotated,
                    attention_top=kv.attention_top,
                    frees=kv.frees(on_gpu=True),
                    device=self.device,
                    dtype=self.dtype,
                    lent=self.lent,
                )
            else:
                tokens = host_cache(shapes, sequences, kv, capacity, lent=self.lent)
            return ModuleCache(self.text_config, sequences, tokens, [*self.packed_shapes])
        if kv is not None:
            raise ArgumentError(
                f"{self.cache_shapes[0]} was loaded without a packed KV cache; load it with kv=8 "
                "or kv=4"
            )
        return ModuleCache(self.text_config, sequences, itemsize=self.dtype.itemsize)

    def steps(self, run: ForwardPass) -> Steps:
        """One forward pass, as a generator over its units, like `Decoder.steps`.

        Hidden states stay where they are between its steps. Raises OpError for another cache than
        `new_cache` makes, and as `ModuleCache.begin` does; ArgumentError beyond the end of a table
        of positions.
        """
        from .passes import ModulePass

        check_ids(run.tokens, self.embedded_tokens)
        if self._ends:
            self.check_positions(run.ragged.longest + 1)
        run.cached = cached = run.cache.begin(run.ragged)
        if isinstance(cached, OwnCachesPass):
            return (yield from self._alone(run, cached))
        packs = bool(self.packed_shapes)
        if not isinstance(cached, StatesPass) or (cached.tokens is None) == packs:
            cached.abandon()
            raise OpError(f"this model needs a cache of its own, not a {type(run.cache).__name__}")
        new = new_columns(run.ragged)
        places = new.nonzero().T
        if run.logit_rows is not None:
            places = places[:, run.logit_rows]
        real, states = cached.real, cached.states
        work = ModulePass(lambda: self._forward(run.tokens, new, real, states), places)
        if cached.tokens is not None:
            work.attention = PackedAttention(
                self._ops,
                self._attends,
                cached.tokens,
                run.ragged,
                None if new.all() else tuple(one.to(self.device) for one in new.nonzero().T),
                self.dtype,
            )
        logits = yield from work.steps()
        cached.end()
        return logits

    def _alone(self, run: ForwardPass, cached: OwnCachesPass) -> Steps:
        """The sequences of a pass take turns at each unit."""
        from .passes import ModulePass, by_turns

        rows = torch.arange(len(run.tokens)) if run.logit_rows is None else run.logit_rows
        passes = list[ModulePass]()
        for span, states in zip(run.ragged.spans, cached.states, strict=True):
            tokens = run.tokens[span.start : span.start + span.count]
            columns = rows[(rows >= span.start) & (rows < span.start + span.count)] - span.start
            new, real = (
                torch.ones(1, n, dtype=torch.bool) for n in (span.count, span.past + span.count)
            )
            work = partial(self._forward, tokens, new, real, states)
            passes.append(ModulePass(work, torch.stack([torch.zeros_like(columns), columns])))
        logits = yield from by_turns(passes, cached.compact_prompts)
        cached.end()
        return torch.cat(logits)

    def _forward(self, tokens: Tensor, new: Tensor, known: Tensor, states: Any) -> Tensor:
        """Logits float32 [R, vocab_size] of a batch padded as `new`, bool [B, T], says.

        known: bool [B, columns], which are tokens, the new ones included. states: transformers'
        cache.
        """
        ids = torch.zeros(new.shape, dtype=torch.int64)
        ids[new] = tokens
        real = known.long()
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        if not self._may_attend:  # Mamba multiplies new tokens by the mask
            real = real[:, -new.shape[1] :]
        there = {"attention_mask": real, "position_ids": positions}
        options = {name: one.to(self.device) for name, one in there.items()}
        output = self._call(self.model, ids.to(self.device), states, **options)
        logits: Tensor = output.logits[0]
        return logits.float()

    def _call(self, model: Any, ids: Tensor, states: Any, **more: Tensor | None) -> Any:
        """transformers' forward pass, with what it takes of `more`."""
        offered: dict[str, Any] = {**more, str(cache_argument(model)): states}
        known = {name: value for name, value in offered.items() if name in self._parameters}
        return model(input_ids=ids, use_cache=True, return_dict=True, **known)

    def _install(self, checkpoint: Checkpoint, structure: Structure) -> None:
        """Replace what computes with quantized weights, and let layers wait for theirs."""
        multiply, self.float_bytes = Multiply(self._ops, self.dtype), 0
        for i, file in enumerate(checkpoint.layers):
            quantized = {n for n, entry in file.weights.items() if isinstance(entry, QuantEntry)}
            binder = WeightBinder(structure, i, quantized, multiply)
            wait_for_weights(structure.layers[i], binder)
            self.float_bytes = max(self.float_bytes, binder.float_bytes)
        head = Head(structure.outputs, Multiply(exact(self._ops), self.dtype))
        self.model.set_output_embeddings(head)


def wait_for_weights(layer: nn.Module, binder: WeightBinder) -> None:
    """Let a layer ask for its weights before it runs, and give them back after it."""
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = current()
        weights = run.fetch(binder.index)
        values = binder.values(weights)
        binder.bind(values)
        run.resumed = lambda: binder.bind(values)  # another pass may have given them back
        try:
            return own(*args, **kwargs)
        finally:
            run.resumed = None
            binder.unbind()

    layer.forward = forward


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


def _read_outer(checkpoint: Checkpoint, structure: Structure, device: torch.device) -> int:
    """Read norms, positions and the like into their modules; returns their bytes."""
    total = 0
    for place in structure.outer():
        value = read_weight(checkpoint.outer, checkpoint.outer.weights[place.name])
        assert isinstance(value, Tensor)
        value = value.to(device, place.tensor.dtype if value.is_floating_point() else None)
        total += value.nbytes
        place.put(value)
    return total
