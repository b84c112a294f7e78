"""The native decoder: a forward pass that pauses before every layer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from qoff.budgets import CPU
from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.ops import Ops
from qoff.kernels.reference.linear import ended
from qoff.kvcache import KVCache, KVQuant
from qoff.kvcache.device.cache import DeviceCachePass
from qoff.kvcache.host.mixed import host_cache
from qoff.kvcache.stateful import device_cache
from qoff.memory import EXPERTS, HEAD, Unit, Weights
from qoff.memory.plan import LM_HEAD
from qoff.models import names
from qoff.models.forward_pass import (
    Begun,
    ForwardPass,
    HiddenStates,
    LayerWorkspace,
    ResidentActivations,
    mlp_tokens,
)
from qoff.models.spec import DecoderSpec

from .caches import check_kv, head_shapes, new_states
from .choices import Chosen
from .following import check_ids
from .graphs import Replays
from .joining import join
from .layer import Layer
from .linear import Linear, Rows, Steps, norm_of, tiled
from .per_layer import table_scale
from .rope import RotaryTable
from .rows import kept, taken
from .whole import WholePasses


class Decoder:
    """A decoder of the Llama family, computed by `ops` on weights that it is handed step by step.

    `embed` turns token ids, int64 [M], into [M, hidden_size] of any float dtype, times a factor;
    `embed_layers` into [M, spec.per_layer_width], for models with embeddings of layers.
    The head's inputs are never rounded to fewer than 16 bits. device, dtype: of hidden states;
    dense weights are on that device too. replays: what is computed at decode is recorded there and
    replayed, a layer at a time, or a whole pass where `resident` says that no weight ever moves.
    """

    resident = False

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        embed: Callable[[Tensor, float], Tensor],
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        replays: Replays | None = None,
        embed_layers: Callable[[Tensor, float], Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.device, self.dtype = device, dtype
        self._ops = ops
        self.replays = replays
        self._embed, self._embed_layers = embed, embed_layers
        self._steady = (0, LayerWorkspace())  # working space for so many tokens
        self._chosen_of = WeakKeyDictionary[object, Tensor]()  # by cache
        self._final_of = WeakKeyDictionary[object, Tensor]()  # the same
        ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        kinds = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self._rotary = [RotaryTable(spec, rope, device) for rope in kinds]
        self._kinds = [None if rope is None else kinds.index(rope) for rope in ropes]
        self.head_shapes = head_shapes(spec)
        self.layer = Layer(spec, ops, self.head_shapes, device)
        self._head = Linear(ops)
        # Logits are scaled in float32: by the head's op, or behind it.
        self._scaled = dtype == torch.float32
        ending = PLAIN if self._scaled else logits_ending(spec)
        self._whole = None
        if replays is not None:
            self._whole = WholePasses(spec, replays, self._from_ids, ending)

    @property
    def caches_on_device(self) -> bool:
        """Whether its KV caches are packed ones in the memory of a GPU."""
        return self._ops.CACHE == "device"

    @property
    def cache_shapes(self) -> tuple[object, ...]:
        """What its caches keep: those of models alike are interchangeable."""
        return (*self.head_shapes, *self.spec.state_shapes)

    @property
    def max_positions(self) -> int:
        """Tokens of a sequence that the model was made for."""
        return self.spec.max_position_embeddings

    def new_cache(self, sequences: int, capacity: int = 0, kv: KVQuant | None = None) -> KVCache:
        """An empty cache for this many sequences: float32, or packed as `kv` says.

        A cache in float32, or on a GPU, has room for `capacity` tokens each at once. Raises what
        `check_kv` does.
        """
        check_kv(self.spec, kv, self.caches_on_device)
        if kv is None or not self.caches_on_device:
            states = new_states(self.spec, sequences)
            lent = self.spec.lent_layers
            return host_cache(self.head_shapes, sequences, kv, capacity, *states, lent)
        return device_cache(
            self.head_shapes,
            kv.packed_forms(self.head_shapes),
            sequences,
            window=kv.window,
            capacity=capacity,
            steady=self.replays is not None,
            values_rotated=kv.values_rotated,
            attention_top=kv.attention_top,
            frees=kv.frees(on_gpu=True),
            device=self.device,
            dtype=self.dtype,
            lent=self.spec.lent_layers,
            states=new_states(self.spec, sequences, self.device),
        )

    def new_workspace(self, tokens: int, tiled: bool = False) -> LayerWorkspace:
        """Working space for passes of up to this many tokens: float32, on the CPU."""
        if not self._ops.USES_OUT:
            return LayerWorkspace(tiled=tiled)
        spec = self.spec
        return LayerWorkspace(
            torch.empty(tokens, spec.attention_width),
            torch.empty(tokens, spec.attended_width),
            torch.empty(mlp_tokens(tokens, tiled), spec.widest_mlp),
            tiled,
            None if spec.latent is None else torch.empty(tokens, spec.projected_rows),
        )

    def steps(self, run: ForwardPass) -> Steps:
        """One forward pass, as a generator over its units.

        It yields the unit it needs next (0, 1, ..., HEAD) and is sent that unit's weights, by
        their names inside the layer, which it uses until it yields again. Where a matrix is a
        `TiledMatrix`, it yields the tiles one by one, while the unit's other weights stay valid.
        Which units it yields does not depend on the pass. A tied embedding comes as "lm_head". It
        returns the logits, float32 [R, vocab_size]; the new tokens are then in the cache.
        """
        ids, key, stays, rows = run.begun or self.begin(run)
        run.begun = None
        whole = self._whole if self.resident and stays and self.replays is not None else None
        if whole is not None and key is not None:
            run.tokens = ids
            logits = yield from whole.recorded(run, key)
        elif whole is not None and whole.can_defer(run):
            logits = yield from whole.deferred(run, ids)
        else:
            rows = self.embedded(ids, run) if rows is None else rows
            logits = yield from self.units(run, rows, run.logit_rows, key)
        for part in run.parts:
            assert part.cached is not None
            part.cached.end()
        run.hidden = None
        if isinstance(run.activations, ResidentActivations):
            run.activations.forget()
        return self._finished(logits)

    def _finished(self, products: Tensor) -> Tensor:
        """Logits, float32 [R, vocab_size], of what the head leaves."""
        return products if self._scaled else ended(products.float(), logits_ending(self.spec))

    def begin(self, run: ForwardPass) -> Begun:
        """Have the cache ready for a pass, and what its layers are told beside."""
        ragged = run.ragged
        self.spec.check_positions(ragged.longest + 1)
        ids = run.tokens
        check_ids(ids, self.spec.vocab_size)
        run.cached = cached = run.cache.begin(ragged)
        run.cache_places = self.spec.cache_places
        tables = [table.upto(ragged.longest + 1) for table in self._rotary]
        key: Hashable | None = None
        on_gpu = cached if isinstance(cached, DeviceCachePass) else None
        if on_gpu is None:
            run.ragged = ragged = cached.ragged
        if self.spec.learned_positions:
            run.positions = ragged.positions if on_gpu is None else on_gpu.positions
        if self.replays is not None:
            if on_gpu is not None and on_gpu.rows > len(ids):
                ids = pad(ids, (0, on_gpu.rows - len(ids)))
                if run.adapters is not None:
                    run.adapters = run.adapters.padded(len(ids))
            # What adapters add on a GPU comes to a slot, launched layer by layer.
            alone = run.states is not None or run.previous is not None
            alone = alone or (on_gpu is not None and run.adapters is not None)
            key = None if alone else cached.replay_key()
        if key is not None:
            tables = [table.whole for table in self._rotary]
            run.workspace = run.workspace or self.steady_workspace(len(ids))
            memory = [part for both in tables for part in both] + run.workspace.memory
            if on_gpu is None:
                memory += [ragged.positions, ragged.slots]
            adapted = None if run.adapters is None else run.adapters.key
            key = (key, adapted, *(part.data_ptr() for part in memory))
        if self.spec.index is not None:
            run.chosen = self._chosen(run.cache, len(ids), key is not None)
            key = key and (key, run.chosen.data_ptr())
        if run.wants_final and not self.spec.mtp:
            run.final = self._final(run.cache, len(ids), key is not None)
            key = key and (key, run.final.data_ptr())
        run.rotary = [None if kind is None else tables[kind] for kind in self._kinds]
        stays = isinstance(run.activations, ResidentActivations) and not cached.moves
        return Begun(ids, key, stays)

    def _chosen(self, cache: object, tokens: int, steady: bool) -> Tensor:
        """Memory for what an index chooses."""
        size = tokens, self.spec.chosen_width
        return self._of_cache(self._chosen_of, cache, size, torch.int32, steady)

    def _final(self, cache: object, tokens: int, steady: bool) -> Tensor:
        """Memory for hidden states behind the final norm."""
        size = tokens, self.spec.hidden_size
        return self._of_cache(self._final_of, cache, size, self.dtype, steady)

    def _of_cache(
        self,
        known: WeakKeyDictionary[object, Tensor],
        cache: object,
        size: tuple[int, int],
        dtype: torch.dtype,
        steady: bool,
    ) -> Tensor:
        """Memory for rows of a pass; steady: the same for all passes of a cache."""
        there = known.get(cache) if steady else None
        if there is None or len(there) < size[0]:
            there = torch.empty(size, dtype=dtype, device=self.device)
            if steady:
                known[cache] = there
        return there[: size[0]]

    def join(self, runs: Sequence[ForwardPass]) -> ForwardPass | None:
        """Passes of a round, which have begun, as one whose rows go through matrices together.

        Each attends by itself, so that a row has the bits that it would have alone. None where that
        is no gain, as something moves, or where the workspace has no room.
        """
        first, whole = runs[0], self._whole
        room = 0 if first.workspace is None else first.workspace.tokens
        rows = sum(len(run.tokens) for run in runs)
        if len(runs) < 2 or rows > room or whole is None or not self.resident:
            return None
        if not all(run.begun and run.begun.stays and whole.can_defer(run) for run in runs):
            return None
        if any(run.logit_rows is None for run in runs):
            return None
        joined = join(runs)
        longest = max(run.ragged.longest for run in runs)
        tables = [table.upto(longest + 1) for table in self._rotary]
        joined.rotary = [None if kind is None else tables[kind] for kind in self._kinds]
        joined.begun = Begun(joined.tokens, None, stays=True)
        for run in runs:
            run.begun = None
        return joined

    def follow(self, run: ForwardPass) -> Tensor | None:
        """What `steps` returns, without a unit, of a step like the cache's last one.

        None, and nothing is done, unless that is a recorded pass over all weights whose recording
        computes this one, too.
        """
        if self._whole is None or run.states is not None or run.wants_final:
            return None
        products = self._whole.following.logits(run)
        return None if products is None else self._finished(taken(products, run.logit_rows))

    def follow_with_tokens(self, run: ForwardPass, *choosing: Any) -> list[list[int]]:
        """Several steps as in `follow`: the tokens chosen in each; see `Following.tokens`."""
        if self._whole is None or run.wants_final:
            return []
        return self._whole.following.tokens(run, *choosing)

    def forget_weights(self) -> None:
        """Hold no weights any more: what was recorded has them, and no pass is replayed after."""
        self.layer.forget_weights()
        if self.replays is not None:
            self.replays.forget()
        self.replays = self._whole = None

    def embedded(self, ids: Tensor, run: ForwardPass) -> Tensor:
        """What the first layer is given, [M, spec.hidden_width] on the device.

        Of several streams only the first is there; the pass has what else a layer is given.
        """
        if self.spec.per_layer is not None:
            assert self._embed_layers is not None
            of_layers = self._embed_layers(ids, table_scale(self.spec.per_layer))
            run.per_layer = of_layers.to(self.device, self.dtype)
        rows = self._embed(ids, self.spec.embedding_scale).to(self.device, self.dtype)
        if self.spec.streams is None:
            return rows
        hidden = rows.new_empty(len(rows), self.spec.hidden_width)
        self._ops.matched(rows, out=hidden[:, : self.spec.hidden_size])
        return hidden

    def steady_workspace(self, tokens: int) -> LayerWorkspace:
        """Working space that stays where it is, for passes that are recorded."""
        if tokens > self._steady[0]:
            self._steady = (tokens, self.new_workspace(tokens))
        return self._steady[1]

    def _from_ids(self, run: ForwardPass, ids: Tensor, logit_rows: Tensor | None) -> Steps:
        """A pass over tokens, unit by unit; logit_rows None: the logits of all."""
        return self.units(run, self.embedded(ids, run), logit_rows)

    def units(
        self,
        run: ForwardPass,
        rows: Tensor,
        logit_rows: Tensor | None = None,
        key: Hashable | None = None,
    ) -> Steps:
        """A pass that has begun over embedded tokens, unit by unit; logit_rows None: of all.

        key: of layers that can be recorded. The cache's part of the pass is left to be ended.
        """
        alone = key is None and run.states is None and not run.wants_final
        keep = kept(logit_rows, len(rows)) if alone else None
        yield from self._layers(run, rows, key, keep)
        if keep is not None and logit_rows is not None:
            logit_rows = torch.arange(len(logit_rows))
        weights = yield HEAD
        norm = None  # of a layer for multi-token prediction, which has one of its own
        if not self.spec.mtp:
            norm = norm_of(self.spec, weights, names.NORM.removesuffix(".weight"))
        hidden = found = run.activations.load()
        if self.layer.streams is not None:
            hidden = self.layer.streams.joined(hidden)
        if run.states is not None:
            self._hand_over(run.states, hidden[: run.ragged.tokens], norm)
        if run.wants_final and norm is None:
            run.final = hidden
        elif run.wants_final and norm is not None:
            for part, rows in zip(run.parts, run.of_parts(hidden), strict=True):
                self._ops.norm(rows, norm, out=part.final)
        # Others use the memory of those that move, while a head streams in tiles.
        moves = logit_rows is None and not isinstance(run.activations, ResidentActivations)
        moves = moves and hidden is found
        x: Rows = "hidden" if moves else taken(hidden, logit_rows)
        run.hidden = hidden if moves else None
        end = logits_ending(self.spec) if self._scaled else PLAIN
        return (yield from self._head(run, weights, LM_HEAD, x, norm=norm, end=end))

    def _layers(
        self, run: ForwardPass, rows: Tensor, key: Hashable | None, keep: Sequence[int] | None
    ) -> Generator[Unit, Weights, None]:
        """The layers of a pass, which leave hidden states in its activations.

        keep: see `Layer.steps`, of the last one.
        """
        activations, count = run.activations, len(rows)
        activations.store(rows)
        workspace = (run.workspace or self.new_workspace(count)).upto(count)
        of_tiles = workspace if workspace.tiled else None
        last = self.spec.num_layers - 1
        for layer in range(self.spec.num_layers):
            weights = yield layer
            if run.layers is not None and layer < run.layers.until:
                continue
            in_tiles = tiled(weights)
            if in_tiles and of_tiles is None:
                of_tiles = self.new_workspace(count, tiled=True)
            run.workspace = of_tiles if in_tiles else workspace
            run.hidden = activations.load()
            if key is None or in_tiles or run.per_layer is not None:  # which lies anywhere
                going_on = keep if layer == last else None
                with nullcontext() if run.layers is None else run.layers.telling(layer):
                    yield from self.layer.steps(layer, weights, run, going_on)
            elif EXPERTS in weights:
                chosen = self._until_experts(layer, weights, run, key)
                yield from self.layer.from_experts(layer, weights, run, chosen)
            else:
                self._replayed(layer, weights, run, key)
            activations.store(run.input)

    def _hand_over(self, states: HiddenStates, hidden: Tensor, norm: Norm | None) -> None:
        """Give hidden states after the final norm to who wants them, some rows at a time."""
        for start in range(0, len(hidden), states.ROWS):
            rows = hidden[start : start + states.ROWS]
            states.take(start, rows if norm is None else self._ops.norm(rows, norm))

    def _replayed(self, layer: int, weights: Weights, run: ForwardPass, key: Hashable) -> None:
        """Compute a layer as its recording, or record it."""

        def work(hidden: Tensor) -> Tensor:
            run.hidden = hidden
            _at_once(self.layer.steps(layer, weights, run))
            return hidden

        hidden = run.input
        found = self._recorded(layer, weights, run, key, work)
        run.hidden = hidden if found is hidden else hidden.copy_(found)

    def _until_experts(
        self, layer: int, weights: Weights, run: ForwardPass, key: Hashable
    ) -> Chosen:
        """The same of a layer up to where it waits for experts; what it waits for."""

        def work(hidden: Tensor) -> tuple[Tensor, Chosen]:
            run.hidden = hidden
            return hidden, _at_once(self.layer.until_experts(layer, weights, run))

        hidden = run.input
        found, chosen = self._recorded(layer, weights, run, key, work)
        run.hidden = hidden if found is hidden else hidden.copy_(found)
        self.layer.adapt(layer, run)  # what follows is no part of the recording
        return chosen.copy()  # other passes are computed before this goes on

    def _recorded(
        self,
        layer: int,
        weights: Weights,
        run: ForwardPass,
        key: Hashable,
        work: Callable[[Tensor], Any],
    ) -> Any:
        """What `work` gives for the hidden states, by itself or as it was recorded."""
        cached = run.cached
        assert cached is not None
        assert self.replays is not None
        places = self.spec.cache_places[layer]
        there = [cached.arrive(place) for place in places]
        whole = (layer, id(weights), key, *there)
        found = self.replays.run(whole, weights, run.input, work, self.spec.num_layers)
        for place, moved in zip(places, there, strict=True):
            if moved is not None:
                cached.close(place)
        return found


def _at_once(steps: Generator[Unit, Weights, Any]) -> Any:
    """What a part of a layer returns that waits for nothing: no tiles."""
    try:
        unit = next(steps)
    except StopIteration as found:
        return found.value
    raise RuntimeError(f"what is recorded waits for {unit!r}")


def logits_ending(spec: DecoderSpec) -> Ending:
    """What makes logits, as the model predicts by them, of the products of its head."""
    return Ending(scale=spec.logit_scale, soft_cap=spec.logit_soft_cap)
