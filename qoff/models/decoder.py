"""The native decoder: five ops a layer, and a forward pass that pauses before every layer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.device_cache import DeviceLayerCache
from qoff.kernels.heads import HeadShape
from qoff.kernels.ops import Ops
from qoff.kernels.qtensor import QTensor
from qoff.kernels.ragged import Ragged
from qoff.kvcache import DeviceCache, KVCache, KVQuant, MixedCache, PackedCache, PlainCache
from qoff.memory import HEAD, Tile, TiledMatrix, Unit, Weights

from . import names
from .graphs import Replays
from .rope import CPU, RotaryTable
from .spec import DecoderSpec

Steps = Generator[Unit, Weights, Tensor]

_ALL = slice(None)
_MLP_TOKENS = 512  # tokens that go through the MLP together: bounds working space at prefill
UNPACKED_ON_GPU = (
    "on a GPU the KV cache is packed: say how, with kv=KVQuant(8, 8), the closest to none, or "
    "kv=KVQuant(4, 4), the smallest"
)


class Activations(Protocol):
    """Where the hidden states of a batch are between two units."""

    def load(self) -> Tensor:
        """Return the hidden states, [M, hidden_size] in the decoder's dtype, on its device."""

    def store(self, hidden: Tensor) -> None:
        """Take the hidden states; what `load` returned is not used any more."""


class Kept:
    """Hidden states that stay on the device."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None

    def load(self) -> Tensor:
        assert self._hidden is not None
        return self._hidden

    def store(self, hidden: Tensor) -> None:
        self._hidden = hidden


@dataclass(frozen=True)
class Scratch:
    """What a layer leaves between its ops, for up to `qkv.shape[0]` tokens.

    Nothing, for ops that allocate their results. Without `tiled` no value in it is needed between
    two units, and batches that take turns may share it. Layers in tiles leave values of all tokens
    in it from tile to tile, of one batch alone.
    """

    qkv: Tensor | None = None  # [M, (heads + 2 kv_heads) * head_dim]
    attended: Tensor | None = None  # [M, heads * head_dim]
    gated: Tensor | None = None  # [at most _MLP_TOKENS, or M where tiled, intermediate_size]
    tiled: bool = False

    @classmethod
    def of(cls, spec: DecoderSpec, tokens: int, tiled: bool = False) -> Scratch:
        """Float32, on the CPU."""
        return cls(
            torch.empty(tokens, spec.q_rows + 2 * spec.kv_rows),
            torch.empty(tokens, spec.q_rows),
            torch.empty(_mlp_tokens(tokens, tiled), spec.intermediate_size),
            tiled,
        )

    @staticmethod
    def nbytes(spec: DecoderSpec, tokens: int, tiled: bool = False) -> int:
        """Bytes of `of(spec, tokens, tiled)`."""
        attention = tokens * (2 * spec.q_rows + 2 * spec.kv_rows)
        return 4 * (attention + _mlp_tokens(tokens, tiled) * spec.intermediate_size)

    def upto(self, tokens: int) -> Scratch:
        """The part for this many tokens."""
        qkv, attended = _first(self.qkv, tokens), _first(self.attended, tokens)
        return Scratch(qkv, attended, self.gated, self.tiled)


@dataclass(frozen=True)
class Batch:
    """One forward pass: new tokens of some sequences, and the cache that remembers the old."""

    tokens: Tensor  # int64 [M]
    ragged: Ragged
    cache: KVCache
    logit_rows: Tensor  # int64 [R], rows whose logits are wanted
    activations: Activations = field(default_factory=Kept)
    scratch: Scratch | None = None  # for at least M tokens; None, or not fit for tiles: its own


@dataclass
class _Pass:
    """A forward pass under way."""

    batch: Batch
    scratch: Scratch
    rotary: tuple[Tensor, Tensor]
    hidden: Tensor | None = None  # [M, hidden_size] of the layer at work
    opened: DeviceLayerCache | None = None  # the cache of that layer, where it is open already

    @property
    def input(self) -> Tensor:
        assert self.hidden is not None
        return self.hidden


def head_shapes(spec: DecoderSpec) -> tuple[HeadShape, ...]:
    """The attention of each layer."""
    return tuple(
        HeadShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.head_dim**-0.5,
            window,
            spec.norm_eps,
        )
        for window in spec.sliding_window
    )


class Decoder:
    """A decoder of the Llama family, computed by `ops` on weights that it is handed step by step.

    `embed` turns token ids, int64 [M], into [M, hidden_size] of any float dtype. activation_bits:
    of the inputs of each layer's matmuls, 16 or 8; the head's are always 16. device, dtype: of
    hidden states; dense weights are on that device too. replays: layers at decode are recorded
    there and replayed; None: never.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        embed: Callable[[Tensor], Tensor],
        activation_bits: int = 16,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        replays: Replays | None = None,
    ) -> None:
        self.spec = spec
        self.device, self.dtype = device, dtype
        self._ops = ops
        self._replays = replays
        self._activation_bits = activation_bits
        self._embed = embed
        self._rotary = RotaryTable(spec, device)
        self.head_shapes = head_shapes(spec)

    def new_cache(self, sequences: int, capacity: int = 0, kv: KVQuant | None = None) -> KVCache:
        """An empty cache for this many sequences: float32, or packed as `kv` says.

        A cache in float32, or on a GPU, has room for `capacity` tokens each at once. Raises OpError
        for a head size that cannot be packed, ArgumentError for bits of a layer there is not, and
        on a GPU without `kv`.
        """
        shapes = self.head_shapes
        if kv is None:
            if self._ops.CACHE == "device":
                raise ArgumentError(UNPACKED_ON_GPU)
            return PlainCache(shapes, sequences, capacity)
        dims = [shape.head_dim for shape in shapes]
        if self._ops.CACHE == "device":
            if kv.attention_top < 1 or kv.sinks:
                raise ArgumentError("on a GPU attention is to all blocks, and no token is a sink")
            return DeviceCache(
                shapes,
                kv.packed_forms(dims),
                sequences,
                window=kv.window,
                capacity=capacity,
                steady=self._replays is not None,
                device=self.device,
                dtype=self.dtype,
            )
        forms = kv.forms(dims)
        packed = [form for form in forms if form is not None]
        if not packed:
            return PlainCache(shapes, sequences, capacity)
        if len(packed) < len(forms):
            return MixedCache(
                shapes,
                forms,
                sequences,
                window=kv.window,
                sinks=kv.sinks,
                attention_top=kv.attention_top,
            )
        return PackedCache(
            shapes,
            packed,
            sequences,
            window=kv.window,
            sinks=kv.sinks,
            attention_top=kv.attention_top,
        )

    def new_scratch(self, tokens: int, tiled: bool = False) -> Scratch:
        """Working space for passes of up to this many tokens."""
        return Scratch.of(self.spec, tokens, tiled) if self._ops.USES_OUT else Scratch(tiled=tiled)

    def steps(self, batch: Batch) -> Steps:
        """One forward pass, as a generator over its units.

        It yields the unit it needs next (0, 1, ..., HEAD) and is sent that unit's weights, by
        their names inside the layer, which it uses until it yields again. Where a matrix is a
        `TiledMatrix`, it yields the tiles one by one, while the unit's other weights stay valid.
        Which units it yields does not depend on the batch. A tied embedding comes as "lm_head". It
        returns the logits, float32 [R, vocab_size]; the new tokens are then in the cache.
        """
        cache, ragged, activations = batch.cache, batch.ragged, batch.activations
        cache.begin(ragged)
        rotary = self._rotary.upto(ragged.longest + 1)
        activations.store(self._embed(batch.tokens).to(self.device, self.dtype))
        scratch = (batch.scratch or self.new_scratch(ragged.tokens)).upto(ragged.tokens)
        run = _Pass(batch, scratch, rotary)
        for layer in range(self.spec.num_layers):
            weights = yield layer
            if _tiled(weights) and not run.scratch.tiled:
                run.scratch = self.new_scratch(ragged.tokens, tiled=True)
            run.hidden = activations.load()
            if not self._replayed(layer, weights, run):
                yield from self._attention(layer, weights, run)
                yield from self._mlp(weights, run)
            activations.store(run.input)
        weights = yield HEAD
        rows = activations.load()[batch.logit_rows]
        run.hidden = None
        norm = _vector(weights, names.NORM)
        logits = yield from self._linear(run, weights, names.HEAD, rows, norm=norm, bits=16)
        cache.end(ragged)
        return logits.float()

    def _replayed(self, layer: int, weights: Weights, run: _Pass) -> bool:
        """Compute a layer as its recording, or record it; whether that could be."""
        if self._replays is None or not run.batch.ragged.is_decode or _tiled(weights):
            return False
        opened = run.batch.cache.open(layer)
        key = opened.replay_key() if isinstance(opened, DeviceLayerCache) else None
        if key is None:
            return False

        def work(hidden: Tensor) -> None:
            run.hidden, run.opened = hidden, cast(DeviceLayerCache, opened)
            for part in (self._attention(layer, weights, run), self._mlp(weights, run)):
                assert next(part, None) is None  # only tiles are waited for
            run.opened = None

        hidden, tables = run.input, tuple(table.data_ptr() for table in run.rotary)
        whole = (layer, id(weights), tables, key)
        self._replays.run(whole, weights, hidden, work)
        run.hidden = hidden
        return True

    def _attention(self, layer: int, weights: Weights, run: _Pass) -> Steps:
        """hidden += attention(norm(hidden))."""
        batch, scratch = run.batch, run.scratch
        norm = _vector(weights, "input_layernorm.weight")
        qkv = yield from self._linear(
            run, weights, "self_attn.qkv_proj", out=scratch.qkv, norm=norm
        )
        attended = self._ops.attention(
            qkv,
            self.head_shapes[layer],
            run.opened or batch.cache.open(layer),
            batch.ragged,
            rotary=run.rotary if self.spec.rope_layers[layer] else None,
            q_norm=_vector(weights, "self_attn.q_norm.weight"),
            k_norm=_vector(weights, "self_attn.k_norm.weight"),
            out=scratch.attended,
        )
        batch.cache.close(layer)
        return (yield from self._linear(run, weights, "self_attn.o_proj", attended, adds=True))

    def _mlp(self, weights: Weights, run: _Pass) -> Steps:
        """hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))."""
        norm = _vector(weights, "post_attention_layernorm.weight")
        count = len(run.input)
        step = max(count, 1) if _tiled(weights) else _MLP_TOKENS
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            gated = yield from self._linear(
                run,
                weights,
                "mlp.gate_up_proj",
                out=_first(run.scratch.gated, part.stop - first),
                part=part,
                norm=norm,
                silu_mul=True,
            )
            yield from self._linear(run, weights, "mlp.down_proj", gated, part=part, adds=True)
        return run.input

    def _linear(
        self,
        run: _Pass,
        weights: Weights,
        name: str,
        x: Tensor | None = None,
        *,
        out: Tensor | None = None,
        part: slice = _ALL,
        adds: bool = False,
        norm: Tensor | None = None,
        silu_mul: bool = False,
        bits: int | None = None,
    ) -> Steps:
        """Return f(norm(x) @ W.T + bias), in `out` if there is one.

        Without x, the input is the hidden states of the tokens `part`; with `adds` the result is
        added to them. A matrix in tiles is multiplied tile by tile; meanwhile the hidden states are
        where the batch keeps them.
        """
        matrix, bias = weights[name], _vector(weights, f"{name}.bias")
        call = partial(
            self._ops.w4_linear,
            norm=norm,
            eps=self.spec.norm_eps,
            silu_mul=silu_mul,
            activation_bits=bits or self._activation_bits,
        )
        if isinstance(matrix, TiledMatrix):
            share = 2 if silu_mul else 1  # rows for a column of the result
            result = yield from self._by_tiles(run, matrix, call, x, bias, out, part, adds, share)
            return result
        here = run.input[part] if x is None or adds else None
        return call(
            cast(Tensor, here) if x is None else x,
            cast(QTensor, matrix),
            bias=bias,
            residual=here if adds else None,
            out=here if adds else out,
        )

    def _by_tiles(
        self,
        run: _Pass,
        matrix: TiledMatrix,
        call: Callable[..., Tensor],
        x: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        part: slice,
        adds: bool,
        share: int,
    ) -> Steps:
        """`_linear` with a matrix of which each tile gives some columns of the result."""
        for tile in matrix.tiles:
            rows = yield from self._fetch(run, tile)
            source = run.input[part] if x is None else x
            if out is None and not adds:
                out = source.new_empty(len(source), matrix.shape[0] // share)
            whole = run.input[part] if adds else cast(Tensor, out)
            target = whole[:, tile.first_row // share : tile.stop // share]
            direct = self._ops.USES_OUT  # such ops take columns of a larger matrix
            added = (target if direct else target.contiguous()) if adds else None
            some = call(
                source,
                rows,
                bias=None if bias is None else bias[tile.first_row : tile.stop],
                residual=added,
                out=target if direct else None,
            )
            if not direct:
                target.copy_(some)
        return run.input[part] if adds else cast(Tensor, out)

    @staticmethod
    def _fetch(run: _Pass, tile: Tile) -> Generator[Unit, Weights, QTensor]:
        """Wait for a tile, with the hidden states put away meanwhile."""
        if run.hidden is not None:
            run.batch.activations.store(run.hidden)
        weights = yield tile
        if run.hidden is not None:
            run.hidden = run.batch.activations.load()
        return cast(QTensor, weights[tile.name])


def _tiled(weights: Weights) -> bool:
    return any(isinstance(weight, TiledMatrix) for weight in weights.values())


def _mlp_tokens(tokens: int, tiled: bool) -> int:
    """Tokens of which the MLP's intermediate values are kept at a time."""
    return tokens if tiled else min(tokens, _MLP_TOKENS)


def _first(memory: Tensor | None, rows: int) -> Tensor | None:
    return None if memory is None else memory[:rows]


def _vector(weights: Weights, name: str) -> Tensor | None:
    """A dense weight, None where this model has none of that name."""
    return cast("Tensor | None", weights.get(name))
