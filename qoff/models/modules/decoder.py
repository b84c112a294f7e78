"""A model of transformers' modules, with the interface of the native decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from qoff.checkpoint import Checkpoint, read_weight
from qoff.errors import ArgumentError, FormatError, OpError
from qoff.kernels.ops import Ops, exact
from qoff.kvcache import DeviceCache, KVCache, KVQuant
from qoff.kvcache.host.mixed import host_cache
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.following import check_ids
from qoff.models.native.linear import Steps

from .attention import PackedAttention
from .binding import WeightBinder, bind_embedding
from .cache import ModuleCache, StatesPass, new_columns
from .configs import LAYOUT
from .current import current
from .linear import Head, Multiply
from .outline import Outline
from .own_caches import OwnCaches, OwnCachesPass
from .structure import Structure


def is_modules(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is for transformers' modules. Raises FormatError for another layout."""
    layout = checkpoint.config.get("quantization_config", {}).get("layout")
    if layout not in (None, "layers", LAYOUT):
        raise FormatError(
            f"{checkpoint.path}: this version does not read layout {layout!r}; use a newer qoff"
        )
    return bool(layout == LAYOUT)


class ModuleDecoder(Outline):
    """Runs a checkpoint of layout "modules" on weights that it is handed step by step.

    embed: looks up rows of the embedding, from ids int64 [U] to float [U, K]; embed_layers: those
    of embeddings of layers, where a model has them. options, and what is raised: of `Outline`.
    Layers hold weights only while they are computed; what lies outside of layers, embedding and
    head is read at once, and stays.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        embed: Callable[[Tensor], Tensor],
        embed_layers: Callable[[Tensor], Tensor],
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, caches_on_device=ops.CACHE == "device", **options)
        self._ops, structure = ops, self.structure
        _read_outer(checkpoint, structure, self.device)
        self._install(checkpoint, structure)
        bind_embedding(self.model.get_input_embeddings(), embed)
        if structure.layer_table is not None:
            bind_embedding(cast(nn.Embedding, structure.layer_table.module), embed_layers)

    def own_caches(self, *arguments: Any, **options: Any) -> OwnCaches:
        """Slots with a cache of transformers for each sequence; arguments of `OwnCaches`."""
        return OwnCaches(*arguments, new=self._empty_states, **options)

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

    def _install(self, checkpoint: Checkpoint, structure: Structure) -> None:
        """Replace what computes with quantized weights, and let layers wait for theirs."""
        multiply = Multiply(self._ops, self.dtype)
        for i, file in enumerate(checkpoint.layers):
            binder = WeightBinder(structure, i, file.quantized, multiply)
            wait_for_weights(structure.layers[i], binder)
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


def _read_outer(checkpoint: Checkpoint, structure: Structure, device: torch.device) -> None:
    """Read norms, positions and the like into their modules."""
    for place in structure.outer():
        value = read_weight(checkpoint.outer, checkpoint.outer.weights[place.name])
        assert isinstance(value, Tensor)
        place.put(value.to(device, place.tensor.dtype if value.is_floating_point() else None))
