"""Which weights a model has, in and outside of its layers, and the tensors that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER

from .families import tensor_names
from .families.family import TensorNames
from .names import (
    BA,
    CONTEXT,
    CONTEXT_NORM,
    CONV,
    CORRECTION,
    CORRECTION_OF_STREAMS,
    DECAY,
    DELTA_NORM,
    DENSE_NORM,
    DT_BIAS,
    GAINS,
    INDEX_KEYS,
    INDEX_NORM,
    INDEX_Q,
    JOINED,
    KV_B,
    KV_NORM,
    LAUREL_LEFT,
    LAUREL_NORM,
    LAUREL_RIGHT,
    LAYER_GATE,
    LAYER_NORM,
    LAYER_PROJECTION,
    LAYER_SCALE,
    MIXTURE_NORM,
    NORM,
    OUT,
    POSITIONS,
    PREDICTION,
    Q_B,
    Q_NORM,
    QKV,
    QKVZ,
    ROUTED_NORM,
    ROUTER,
    ROUTING_NORM,
    SHARED_GATE,
    SHORT_CONV,
    SHORT_IN,
    SHORT_OUT,
    SPLIT,
    STREAM_NORM,
    STREAM_ROUTER,
    STREAM_SCALE,
    Part,
    Weight,
)
from .row_order import (
    ROW_BLOCK,
    Order,
    after,
    from_groups,
    from_halves,
    from_heads,
    from_pairs,
    in_order,
    in_turn,
    indexed,
    unpaired,
    with_gates,
)
from .spec import DecoderSpec
from .spec_parts import ExpertsSpec, IndexSpec, LatentSpec, PerLayerSpec, StreamsSpec


def layer_weights(
    spec: DecoderSpec, layer: int, names: TensorNames | None = None
) -> tuple[Weight, ...]:
    """Return the weights of one layer, vectors first, in the order of its file.

    names: what the source calls them (default: what the family does). Raises UnsupportedModelError
    where a row block of 16 would hold rows of two parts.
    """
    return _Layer(spec, layer, names or tensor_names(spec.model_type)).weights()


def outer_weights(spec: DecoderSpec, names: TensorNames | None = None) -> tuple[Weight, ...]:
    """Return the weights outside of the layers; `lm_head` only if it is not the embedding."""
    names = names or tensor_names(spec.model_type)
    width, found = spec.hidden_size, []
    if spec.final_norm:
        norm = Part(f"{names.norm}.weight", width, plus=names.norm_offset)
        found.append(Weight(NORM, (norm,)))
        if spec.norm == "layer" and spec.norm_bias:
            found.append(Weight("model.norm.bias", (Part(f"{names.norm}.bias", width),)))
    sources = {EMBEDDING: names.embedding, LM_HEAD: names.head}
    if spec.tie_word_embeddings:
        del sources[LM_HEAD]
    for name, source in sources.items():
        part = Part(source, spec.vocab_size, times=names.times.get(name))
        found.append(Weight(name, (part,), width))
    if spec.per_layer is not None:
        each, rows = spec.num_layers, spec.num_layers * spec.per_layer.vocab_size
        part = Part(names.per_layer[0], rows, unit=each * ROW_BLOCK, rows_each=each)
        found.append(Weight(PER_LAYER, (part,), spec.per_layer.width))
    return tuple(found)


def output_of(spec: DecoderSpec, layer: int) -> str:
    """The last matrix of attention, or of what a layer has in its place."""
    if not spec.is_recurrent(layer):
        return "self_attn.o_proj"
    return OUT if isinstance(spec.state_shape, DeltaShape) else SHORT_OUT


class _Layer:
    """The weights of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, names: TensorNames) -> None:
        self._spec, self._layer, self._names = spec, layer, names
        kv_heads, self._dim = spec.heads(layer)
        self._q, self._kv = spec.num_heads * self._dim, kv_heads * self._dim
        self._inner, self._lent = spec.intermediate(layer), spec.kv_layers[layer] != layer
        sizes = {"head_dim": self._dim, "intermediate_size": self._inner}
        if spec.latent is not None:
            sizes["q_lora_rank"] = spec.latent.query_latent
        if spec.experts is not None:
            sizes["moe_intermediate_size"] = spec.experts.intermediate_size
            sizes["shared_expert_intermediate_size"] = spec.experts.shared_size
        for key, size in sizes.items():
            if size % ROW_BLOCK:
                raise UnsupportedModelError(
                    f"config.json: {key} is {size}; supported: multiples of {ROW_BLOCK}"
                )

    def weights(self) -> tuple[Weight, ...]:
        spec, experts = self._spec, self._spec.experts
        attends = self._recurrent() if spec.is_recurrent(self._layer) else self._attention()
        attention = [*self._norms(), *attends]
        if spec.streams is not None:
            attention = [*self._before(spec.streams), *attention]
        if experts is not None and spec.has_experts(self._layer):
            rest = list(self._mixture(experts))
            if experts.beside:
                rest += self._mlp("mlp", self._inner, spec.mlp_bias)
            # What lies at the end stays in memory first: experts come before the other matrices.
            matrices = rest + attention
        else:
            rest = list(self._mlp("mlp", self._inner, spec.mlp_bias))
            if spec.per_layer is not None:
                rest += self._per_layer(spec.per_layer)
            if spec.streams is not None and self._layer == spec.num_layers - 1:
                rest += self._of_streams(JOINED, self._names.streams[1], spec.streams)
            matrices = attention + rest
        vectors = (w for w in attention + rest if w.columns is None)
        return (*vectors, *(w for w in matrices if w.columns is not None))

    def _source(self, module: str, tensor: str = "weight") -> str:
        return self._names.in_layer(self._layer, module, tensor)

    def _part(self, module: str, rows: int, order: Order = in_order, unit: int = ROW_BLOCK) -> Part:
        return Part(self._source(module), rows, order, unit)

    def _vector(self, module: str, rows: int, tensor: str = "weight") -> Weight:
        plus = self._names.norm_offset if tensor == "weight" else 0.0
        return Weight(f"{module}.{tensor}", (Part(self._source(module, tensor), rows, plus=plus),))

    def _norms(self) -> Iterator[Weight]:
        spec = self._spec
        before = spec.pre_norm or spec.norm_after_add
        modules = ["input_layernorm", "post_attention_layernorm"] if before else []
        modules += ["self_attn.post_norm", "mlp.post_norm"] if spec.post_norm else []
        biased = spec.norm == "layer" and spec.norm_bias
        for tensor in ("weight", "bias") if biased else ("weight",):
            yield from (self._vector(module, spec.hidden_size, tensor) for module in modules)
        if spec.qk_norm in ("head", "rotated", "all") and not spec.is_recurrent(self._layer):
            for x, rows in (("q", self._q), ("k", self._kv))[: 1 if self._lent else 2]:
                each = rows if spec.qk_norm == "all" else self._dim
                yield self._vector(f"self_attn.{x}_norm", each)
        if spec.latent is not None:
            yield self._vector(KV_NORM, spec.latent.latent)
            if spec.latent.query_latent:
                yield self._vector(Q_NORM, spec.latent.query_latent)
        if spec.layer_scale:
            yield self._bare(LAYER_SCALE, 1)

    def _bare(self, name: str, rows: int) -> Weight:
        """A vector whose name in the source has no last part of its own."""
        return Weight(name, (Part(self._source(name, ""), rows),))

    def _attention(self) -> Iterator[Weight]:
        spec, o = self._spec, "self_attn.o_proj"
        parts = self._qkv() if spec.latent is None else self._compressed(spec.latent)
        yield from _linear(QKV, parts, spec.hidden_size, spec.qkv_bias)
        if spec.latent is not None:
            yield from self._expanding(spec.latent)
        if spec.index is not None and spec.index.layers[self._layer]:
            yield from self._index(spec.index)
        columns = self._q if spec.latent is None else spec.o_columns
        yield from _linear(o, (self._part(o, spec.hidden_size),), columns, spec.o_bias)
        if spec.sinks:
            yield self._vector("self_attn", spec.num_heads, "sinks")
        if spec.learned_positions and self._layer == 0:
            part = Part(self._names.positions, spec.learned_positions)
            yield Weight(POSITIONS, (part,), spec.hidden_size)

    def _qkv(self) -> tuple[Part, ...]:
        spec, names = self._spec, self._names
        q, kv, dim = self._q, 0 if self._lent else self._kv, self._dim
        if names.fused_qkv == "heads":
            return (self._part(QKV, 3 * q, from_heads(spec.num_heads, dim)),)
        rope = spec.rope_of(self._layer) or spec.rope  # layers that do not rotate are stored alike
        pairs = rope.dim if names.rope_pairs and rope is not None else 0
        if names.fused_qkv == "rows":
            order = unpaired(0, dim, pairs, q + kv) if pairs else in_order
            return (self._part(QKV, q + 2 * kv, order, dim if pairs else ROW_BLOCK),)
        full = spec.full_heads if spec.sliding_window[self._layer] is None else None
        values = "k" if full is not None and full.values_are_keys else "v"
        parts, first = [], 0
        if spec.gated_attention and not names.split_gates:
            order = with_gates(dim, q + 2 * kv)
            parts.append(self._part("self_attn.q_proj", 2 * q, order, 2 * dim))
            first = q
        matrices = (("q", q, pairs), ("k", kv, pairs), (values, kv, 0))
        for x, rows, turned in matrices[len(parts) : 1 if self._lent else 3]:
            order = unpaired(first, dim, turned, rows) if turned else after(first)
            unit = dim if turned else ROW_BLOCK
            parts.append(self._part(f"self_attn.{x}_proj", rows, order, unit))
            first += rows
        if spec.gated_attention and names.split_gates:
            parts.append(self._part("self_attn.gate_proj", q, after(first)))
        return tuple(parts)

    def _recurrent(self) -> Iterator[Weight]:
        shape = self._spec.state_shape
        if isinstance(shape, DeltaShape):
            return self._linear_attention(shape)
        assert isinstance(shape, ShortConvShape)
        return self._short_conv(shape)

    def _short_conv(self, shape: ShortConvShape) -> Iterator[Weight]:
        hidden = self._spec.hidden_size
        yield Weight(SHORT_CONV, (self._convolution(SHORT_CONV, shape),))
        yield Weight(SHORT_IN, (self._part(SHORT_IN, shape.width),), hidden)
        yield Weight(SHORT_OUT, (self._part(SHORT_OUT, hidden),), shape.channels)

    def _linear_attention(self, shape: DeltaShape) -> Iterator[Weight]:
        """Gated DeltaNet."""
        hidden, heads = self._spec.hidden_size, shape.value_heads
        yield Weight(CONV, (self._convolution(CONV, shape),))
        logs = self._names.linear_of_ggml
        yield Weight(DECAY, (Part(self._source(DECAY, ""), heads, of_exponential=logs),))
        yield Weight(DT_BIAS, (Part(self._source(DT_BIAS, ""), heads),))
        norm = Part(self._source(DELTA_NORM.removesuffix(".weight")), shape.value_dim)
        yield Weight(DELTA_NORM, (norm,))
        yield Weight(QKVZ, self._qkvz(shape), hidden)
        yield Weight(BA, self._ba(shape), hidden)
        yield Weight(OUT, (self._part(OUT, hidden),), shape.values)

    def _convolution(self, name: str, shape: DeltaShape | ShortConvShape) -> Part:
        taps, channels = shape.taps, shape.channels
        return Part(
            self._source(name.removesuffix(".weight")),
            taps * channels,
            lambda at: at % taps * channels + at // taps,
            stored=(channels, taps) if self._names.linear_of_ggml else (channels, 1, taps),
        )

    def _qkvz(self, shape: DeltaShape) -> tuple[Part, ...]:
        if self._names.split_linear:
            mixed = self._part("linear_attn.in_proj_qkv", shape.channels)
            z = self._part("linear_attn.in_proj_z", shape.values, after(shape.channels))
            return mixed, z
        group = shape.values // shape.key_heads
        sizes = (shape.key_dim, shape.key_dim, group, group)
        order = from_groups(sizes, shape.key_heads)
        return (self._part("linear_attn.in_proj_qkvz", shape.width, order, sum(sizes)),)

    def _ba(self, shape: DeltaShape) -> tuple[Part, ...]:
        heads = shape.value_heads
        if self._names.split_linear == "all":
            if heads % ROW_BLOCK:
                raise UnsupportedModelError(
                    f"config.json: linear_num_value_heads is {heads}; supported: multiples of "
                    f"{ROW_BLOCK}"
                )
            b = self._part("linear_attn.in_proj_b", heads)
            return b, self._part("linear_attn.in_proj_a", heads, after(heads))
        group = heads // shape.key_heads
        order = from_groups((group, group), shape.key_heads)
        return (self._part("linear_attn.in_proj_ba", 2 * heads, order, 2 * heads),)

    def _compressed(self, latent: LatentSpec) -> tuple[Part, ...]:
        """What queries, keys and values come of; channels that RoPE rotates are in halves."""
        q, kv = self._spec.q_rows, latent.latent + latent.rope_dim
        queries = self._part(
            "self_attn.q_proj", q, *self._rotated(0, latent.nope_dim, latent.rope_dim)
        )
        if latent.query_latent:
            q = latent.query_latent
            queries = self._part("self_attn.q_a_proj", q)
        order = self._rotated(q, latent.latent, latent.rope_dim)
        return (queries, self._part("self_attn.kv_a_proj_with_mqa", kv, *order))

    def _expanding(self, latent: LatentSpec) -> Iterator[Weight]:
        """The matrices of what is compressed."""
        spec = self._spec
        if latent.query_latent:
            order = self._rotated(0, latent.nope_dim, latent.rope_dim)
            yield Weight(Q_B, (self._part(Q_B, spec.q_rows, *order),), latent.query_latent)
        rows = latent.shape(spec.num_heads).rows
        yield Weight(KV_B, (self._part(KV_B, rows),), latent.latent)

    def _index(self, index: IndexSpec) -> Iterator[Weight]:
        """What chooses tokens."""
        assert self._spec.latent is not None
        order = indexed(index.dim, index.rope_dim, self._names.index_pairs)
        for tensor in ("weight", "bias"):
            part = Part(self._source(INDEX_NORM, tensor), index.dim, order)
            yield Weight(f"{INDEX_NORM}.{tensor}", (part,))
        queries = self._part(INDEX_Q, index.heads * index.dim, order, index.dim)
        yield Weight(INDEX_Q, (queries,), self._spec.latent.query_latent)
        keys = self._part("self_attn.indexer.wk", index.dim, order, index.dim)
        heads = self._part("self_attn.indexer.weights_proj", index.heads, after(index.dim))
        yield Weight(INDEX_KEYS, (keys, heads), self._spec.hidden_size)

    def _rotated(self, first: int, start: int, turned: int) -> tuple[Order, int]:
        """Where rows go of heads that rotate from channel `start` on, and how many a head has."""
        if not self._names.rope_pairs:
            return after(first), ROW_BLOCK
        return unpaired(first, start + turned, turned, 1 << 62, start), start + turned

    def _mlp(self, module: str, inner: int, bias: bool = False) -> Iterator[Weight]:
        """An MLP, or an expert."""
        hidden, up, down = self._spec.hidden_size, f"{module}.up_proj", f"{module}.down_proj"
        fused = f"{module}.gate_up_proj"
        if not self._spec.gated:
            yield from _linear(up, (self._part(up, inner),), hidden, bias)
        elif self._names.fused_gate_up:
            part = self._part(fused, 2 * inner, from_halves(inner))
            yield from _linear(fused, (part,), hidden, bias)
        else:
            parts = (
                self._part(name, inner, partial(in_turn, part=i))
                for i, name in enumerate((f"{module}.gate_proj", up))
            )
            yield from _linear(fused, tuple(parts), hidden, bias)
        yield from _linear(down, (self._part(down, hidden),), inner, bias)

    def _per_layer(self, by: PerLayerSpec) -> Iterator[Weight]:
        """What is done with embeddings of layers; the first one has what all of them need."""
        hidden, width = self._spec.hidden_size, by.width
        if self._layer == 0:
            _, context, norm = self._names.per_layer
            yield Weight(f"{CONTEXT_NORM}.weight", (Part(norm, width),))
            yield Weight(CONTEXT, (Part(context, self._spec.num_layers * width),), hidden)
        yield self._vector(LAYER_NORM, hidden)
        yield Weight(LAYER_GATE, (self._part(LAYER_GATE, width),), hidden)
        yield Weight(LAYER_PROJECTION, (self._part(LAYER_PROJECTION, hidden),), width)

    def _before(self, streams: StreamsSpec) -> Iterator[Weight]:
        """What streams are mixed by, and LAuReL; the first layer has what they come of."""
        hidden, count = self._spec.hidden_size, streams.count
        for name, rows, columns in (
            (STREAM_ROUTER, count, hidden),
            (PREDICTION, count * count, count),
            (CORRECTION_OF_STREAMS, count, count),
        ):
            part = Part(self._source(name), rows * columns, stored=(rows, columns))
            yield Weight(f"{name}.weight", (part,))
        for name in (STREAM_NORM, LAUREL_NORM):
            yield self._vector(name, hidden)
        yield self._bare(f"{STREAM_SCALE}.weight", hidden)
        if self._layer == 0:
            yield from self._of_streams(SPLIT, self._names.streams[0], streams)
        yield Weight(LAUREL_LEFT, (self._part(LAUREL_LEFT, streams.rank),), hidden)
        yield Weight(LAUREL_RIGHT, (self._part(LAUREL_RIGHT, hidden),), streams.rank)

    def _of_streams(self, name: str, source: str, streams: StreamsSpec) -> Iterator[Weight]:
        """A matrix of each stream but the first, which may lie in one tensor."""
        hidden, apart = self._spec.hidden_size, "{}" in source
        for i in range(streams.count - 1):
            part = Part(source.format(i), hidden, expert=None if apart else i)
            yield Weight(name.format(i + 1), (part,), hidden)

    def _mixture(self, experts: ExpertsSpec) -> Iterator[Weight]:
        hidden, parts = self._spec.hidden_size, (self._part(ROUTER, experts.count),)
        router, *bias = _linear(ROUTER, parts, hidden, experts.router_bias)
        yield from bias
        if experts.correction:
            source, count = self._source(CORRECTION, ""), experts.count
            stored = (1, count) if self._names.correction_in_row else None
            yield Weight(CORRECTION, (Part(source, count, stored=stored),))
        if experts.gains:
            yield self._bare(GAINS, experts.count)
        if experts.beside:
            yield self._bare(f"{ROUTING_NORM}.weight", hidden)
            for module in (ROUTED_NORM, DENSE_NORM, MIXTURE_NORM):
                yield self._vector(module, hidden)
        if self._names.stacked_experts:
            yield from self._stacked(experts)
        else:
            for e in range(experts.count):
                yield from self._mlp(f"mlp.experts.{e}", experts.intermediate_size)
        yield router
        if experts.shared_size:
            yield from self._mlp("mlp.shared_expert", experts.shared_size)
            if experts.shared_gate:
                yield Weight(SHARED_GATE, (self._part(SHARED_GATE, 1),), hidden)

    def _stacked(self, experts: ExpertsSpec) -> Iterator[Weight]:
        """Experts of tensors that hold all of them: their biases one after the other, matrices."""
        inner, hidden = experts.intermediate_size, self._spec.hidden_size
        columns = {"gate_up_proj": hidden, "down_proj": inner}
        parts = {"gate_up_proj": self._stacked_gate_up(inner)}
        parts["down_proj"] = (self._stacked_part("down_proj", hidden),)
        for name, found in parts.items() if experts.bias else ():
            rows = sum(part.rows for part in found)
            biases = (_biases(part, experts.count, rows) for part in found)
            yield Weight(f"mlp.experts.{name}.bias", tuple(biases))
        for e in range(experts.count):
            for name, found in parts.items():
                matrices = tuple(replace(part, expert=e) for part in found)
                yield Weight(f"mlp.experts.{e}.{name}", matrices, columns[name])

    def _stacked_gate_up(self, inner: int) -> tuple[Part, ...]:
        fused = "gate_up_proj"
        if self._names.stacked_experts == "columns":
            return (self._stacked_part(fused, 2 * inner, from_pairs, 2 * ROW_BLOCK),)
        if "halves" in self._names.stacked_experts:
            return (self._stacked_part(fused, 2 * inner, from_halves(inner)),)
        orders = {"gate_proj": partial(in_turn, part=0), "up_proj": partial(in_turn, part=1)}
        return tuple(self._stacked_part(name, inner, order) for name, order in orders.items())

    def _stacked_part(
        self, name: str, rows: int, order: Order = in_order, unit: int = ROW_BLOCK
    ) -> Part:
        transposed = self._names.stacked_experts in ("columns", "column-halves")
        bare = transposed or self._names.stacked_experts == "bare-halves"
        source = self._source(f"mlp.experts.{name}", "" if bare else "weight")
        return Part(source, rows, order, unit, transposed=transposed)


def _linear(name: str, parts: tuple[Part, ...], columns: int, bias: bool) -> Iterator[Weight]:
    """A matrix, and a bias of the same parts."""
    yield Weight(name, parts, columns)
    if bias:
        sources = (part.source.removesuffix("weight") + "bias" for part in parts)
        biases = (replace(p, source=s) for p, s in zip(parts, sources, strict=True))
        yield Weight(f"{name}.bias", tuple(biases))


def _biases(part: Part, experts: int, each: int) -> Part:
    """The biases of all experts, where `part` is one expert's rows; each: rows of its weight."""
    rows, order = part.rows, part.order
    stem = part.source.removesuffix(".weight")
    return replace(
        part,
        source=f"{stem}_bias" if part.transposed else f"{stem}.bias",
        rows=experts * rows,
        order=lambda at: at // rows * each + order(at % rows),
        transposed=False,
        stored=(experts, rows),
    )
