"""The weights of attention, and of what a layer has in its place or beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.mamba import MambaShape
from qoff.kernels.layout.short_conv import ShortConvShape

from .families.family import TensorNames
from .names import (
    BA,
    CONV,
    DECAY,
    DELTA_A,
    DELTA_B,
    DELTA_NORM,
    DT_BIAS,
    INDEX_KEYS,
    INDEX_NORM,
    INDEX_Q,
    KDA_FB,
    KDA_FGB,
    KDA_FORGET,
    KDA_GATE,
    KDA_QKV,
    KV_B,
    MAMBA_CONV,
    MAMBA_CONV_BIAS,
    MAMBA_DECAY,
    MAMBA_DT_BIAS,
    MAMBA_IN,
    MAMBA_NORM,
    MAMBA_OUT,
    MAMBA_SKIP,
    OUT,
    POSITIONS,
    Q_B,
    QKV,
    QKVZ,
    ROUTER,
    SHORT_CONV,
    SHORT_IN,
    SHORT_OUT,
    Part,
    Weight,
)
from .recurrent_spec import MambaSpec
from .row_order import (
    ROW_BLOCK,
    Order,
    after,
    from_groups,
    from_heads,
    in_order,
    indexed,
    unpaired,
    with_gates,
)
from .spec import DecoderSpec
from .spec_parts import IndexSpec, LatentSpec


def output_of(spec: DecoderSpec, layer: int) -> str:
    """The last matrix of attention, or of what a layer has in its place; or one of its MLP."""
    if not spec.has_mixer(layer):
        return ROUTER if spec.has_experts(layer) else "mlp.down_proj"
    return ATTENTION_OUT if spec.attends(layer) else recurrent_output(spec)


def recurrent_output(spec: DecoderSpec) -> str:
    """The last matrix of what layers with states have."""
    return _OUTPUTS[type(spec.state_shape)]


ATTENTION_OUT = "self_attn.o_proj"
_OUTPUTS: Mapping[type, str] = MappingProxyType(
    {DeltaShape: OUT, ShortConvShape: SHORT_OUT, MambaShape: MAMBA_OUT}
)


class AttentionWeights:
    """Those of one layer, and how any weight of it comes of the tensors of a source.

    Raises UnsupportedModelError where a row block of 16 would hold rows of two parts.
    """

    def __init__(self, spec: DecoderSpec, layer: int, names: TensorNames) -> None:
        self._spec, self._layer, self._names = spec, layer, names
        kv_heads, self._dim = spec.heads(layer)
        self._q, self._kv = spec.query_heads(layer) * self._dim, kv_heads * self._dim
        self._values = kv_heads * spec.values(layer)
        self._inner, self._lent = spec.intermediate(layer), spec.kv_layers[layer] != layer
        sizes = {"head_dim": self._dim, "intermediate_size": self._inner}
        sizes["v_head_dim"] = spec.value_dim
        if spec.latent is not None:
            sizes["q_lora_rank"] = spec.latent.query_latent
        if spec.experts is not None:
            sizes["moe_intermediate_size"] = spec.experts.intermediate_size
            sizes["moe_latent_size"] = spec.experts.latent_size
            sizes["shared_expert_intermediate_size"] = spec.experts.shared_size
        for key, size in sizes.items():
            if size % ROW_BLOCK:
                raise UnsupportedModelError(
                    f"config.json: {key} is {size}; supported: multiples of {ROW_BLOCK}"
                )

    def _source(self, module: str, tensor: str = "weight") -> str:
        return self._names.in_layer(self._layer, module, tensor)

    def _part(self, module: str, rows: int, order: Order = in_order, unit: int = ROW_BLOCK) -> Part:
        return Part(self._source(module), rows, order, unit)

    def _vector(self, module: str, rows: int, tensor: str = "weight") -> Weight:
        plus = self._names.norm_offset if tensor == "weight" else 0.0
        return Weight(f"{module}.{tensor}", (Part(self._source(module, tensor), rows, plus=plus),))

    def _bare(self, name: str, rows: int) -> Weight:
        """A vector whose name in the source has no last part of its own."""
        return Weight(name, (Part(self._source(name, ""), rows),))

    def _attention(self) -> Iterator[Weight]:
        spec, o = self._spec, ATTENTION_OUT
        parts = self._qkv() if spec.latent is None else self._compressed(spec.latent)
        yield from with_bias(QKV, parts, spec.hidden_size, spec.qkv_bias)
        if spec.latent is not None:
            yield from self._expanding(spec.latent)
        if spec.index is not None and spec.index.layers[self._layer]:
            yield from self._index(spec.index)
        own = spec.query_heads(self._layer) * spec.values(self._layer)
        columns = own if spec.latent is None else spec.o_columns
        yield from with_bias(o, (self._part(o, spec.hidden_size),), columns, spec.o_bias)
        if spec.has_sinks(self._layer):
            yield self._bare("self_attn.sinks", spec.query_heads(self._layer))
        if spec.learned_positions and self._layer == 0:
            part = Part(self._names.positions, spec.learned_positions)
            yield Weight(POSITIONS, (part,), spec.hidden_size)

    def _qkv(self) -> tuple[Part, ...]:
        spec, names = self._spec, self._names
        q, dim = self._q, self._dim
        kv, own = (0, 0) if self._lent else (self._kv, self._values)
        if names.fused_qkv == "heads":
            return (self._part(QKV, 3 * q, from_heads(spec.num_heads, dim)),)
        rope = spec.rope_of(self._layer) or spec.rope  # layers that do not rotate are stored alike
        pairs = rope.dim if names.rope_pairs and rope is not None else 0
        if names.fused_qkv == "rows":
            order = unpaired(0, dim, pairs, q + kv) if pairs else in_order
            return (self._part(QKV, q + kv + own, order, dim if pairs else ROW_BLOCK),)
        full = spec.full_heads if spec.sliding_window[self._layer] is None else None
        values = "k" if full is not None and full.values_are_keys else "v"
        parts, first = [], 0
        if spec.gated_attention and not names.split_gates:
            order = with_gates(dim, q + kv + own)
            parts.append(self._part("self_attn.q_proj", 2 * q, order, 2 * dim))
            first = q
        matrices = (("q", q, pairs), ("k", kv, pairs), (values, own, 0))
        for x, rows, turned in matrices[len(parts) : 1 if self._lent else 3]:
            order = unpaired(first, dim, turned, rows) if turned else after(first)
            unit = dim if turned else ROW_BLOCK
            parts.append(self._part(f"self_attn.{x}_proj", rows, order, unit))
            first += rows
        if spec.gated_attention and names.split_gates:
            gates = spec.gates(self._layer)
            parts.append(self._part("self_attn.gate_proj", gates, after(first)))
        return tuple(parts)

    def _both(self) -> list[Weight]:
        """Those of states and of attention: matrices of outputs, used last, come last."""
        last = (recurrent_output(self._spec), ATTENTION_OUT)
        return sorted((*self._recurrent(), *self._attention()), key=lambda x: x.name in last)

    def _recurrent(self) -> Iterator[Weight]:
        shape = self._spec.state_shape
        if isinstance(shape, DeltaShape):
            return self._linear_attention(shape)
        if isinstance(shape, MambaShape):
            return self._mamba(shape)
        assert isinstance(shape, ShortConvShape)
        return self._short_conv(shape)

    def _short_conv(self, shape: ShortConvShape) -> Iterator[Weight]:
        hidden = self._spec.hidden_size
        yield Weight(SHORT_CONV, (self._convolution(SHORT_CONV, shape),))
        yield Weight(SHORT_IN, (self._part(SHORT_IN, shape.width),), hidden)
        yield Weight(SHORT_OUT, (self._part(SHORT_OUT, hidden),), shape.channels)

    def _mamba(self, shape: MambaShape) -> Iterator[Weight]:
        """Mamba 2."""
        hidden, spec = self._spec.hidden_size, self._spec.recurrent
        assert isinstance(spec, MambaSpec)
        yield Weight(MAMBA_CONV, (self._convolution(MAMBA_CONV, shape),))
        if spec.conv_bias:
            yield self._bare(MAMBA_CONV_BIAS, shape.channels)
        logs = self._names.linear_of_ggml
        yield Weight(MAMBA_DECAY, (self._by_head(MAMBA_DECAY, shape, of_exponential=logs),))
        yield Weight(MAMBA_DT_BIAS, (Part(self._source(MAMBA_DT_BIAS, ""), shape.heads),))
        yield Weight(MAMBA_SKIP, (self._by_head(MAMBA_SKIP, shape),))
        if spec.normed:
            stored = (shape.groups, shape.values // shape.groups) if logs else None
            norm = self._source(MAMBA_NORM.removesuffix(".weight"))
            yield Weight(MAMBA_NORM, (Part(norm, shape.values, stored=stored),))
        yield Weight(MAMBA_IN, (self._part(MAMBA_IN, shape.width),), hidden)
        yield Weight(MAMBA_OUT, (self._part(MAMBA_OUT, hidden),), shape.values)

    def _by_head(self, name: str, shape: MambaShape, of_exponential: bool = False) -> Part:
        """A vector of numbers of heads, which GGUF files have as [heads, 1]."""
        stored = (shape.heads, 1) if self._names.linear_of_ggml else None
        source = self._source(name, "")
        return Part(source, shape.heads, stored=stored, of_exponential=of_exponential)

    def _linear_attention(self, shape: DeltaShape) -> Iterator[Weight]:
        """Gated DeltaNet, or KDA."""
        hidden, heads = self._spec.hidden_size, shape.value_heads
        convolutions = self._convolutions(shape)
        yield Weight(CONV, convolutions)
        logs = self._names.linear_of_ggml
        low = ((heads, 1) if logs else (1, 1, heads, 1)) if shape.rank else None
        decay = Part(self._source(DECAY, ""), heads, stored=low, of_exponential=logs)
        yield Weight(DECAY, (decay,))
        yield Weight(DT_BIAS, (Part(self._source(DT_BIAS, ""), shape.decays),))
        norm = Part(self._source(DELTA_NORM.removesuffix(".weight")), shape.value_dim)
        yield Weight(DELTA_NORM, (norm,))
        if shape.rank:
            yield from self._kda_of_rank(shape)
        elif shape.by_channel:
            yield self._joined(QKVZ, {**_projected(shape), "g_proj": shape.values})
            yield self._joined(KDA_FB, {"f_proj": shape.decays, "b_proj": heads})
        elif shape.apart:
            yield self._joined(QKVZ, {**_projected(shape), "g_proj": shape.values})
            for name in (DELTA_B, DELTA_A):
                yield Weight(name, (self._part(name, heads),), hidden)
        else:
            yield Weight(QKVZ, self._qkvz(shape), hidden)
            yield Weight(BA, self._ba(shape), hidden)
        yield Weight(OUT, (self._part(OUT, hidden),), shape.values)

    def _kda_of_rank(self, shape: DeltaShape) -> Iterator[Weight]:
        rank = shape.rank
        if rank % ROW_BLOCK:
            raise UnsupportedModelError(
                f"config.json: linear_head_dim is {rank}; supported: multiples of {ROW_BLOCK}"
            )
        small = {"f_a_proj": rank, "g_a_proj": rank, "b_proj": shape.value_heads}
        yield self._joined(KDA_QKV, _projected(shape))
        yield self._joined(KDA_FGB, small)
        yield Weight(KDA_FORGET, (self._part(KDA_FORGET, shape.decays),), rank)
        yield Weight(KDA_GATE, (self._part(KDA_GATE, shape.values),), rank)

    def _joined(self, name: str, rows: Mapping[str, int]) -> Weight:
        """Matrices of linear attention, of so many rows each, one below the other."""
        firsts = accumulate(rows.values(), initial=0)
        parts = (
            self._part(f"linear_attn.{part}", count, after(first))
            for (part, count), first in zip(rows.items(), firsts, strict=False)
        )
        return Weight(name, tuple(parts), self._spec.hidden_size)

    def _convolutions(self, shape: DeltaShape) -> tuple[Part, ...]:
        """Those of queries, of keys and of values, or one of all."""
        if not self._names.split_conv:
            return (self._convolution(CONV, shape),)
        taps, found, first = shape.taps, list[Part](), 0
        for x, channels in (("q", shape.keys), ("k", shape.keys), ("v", shape.values)):
            order = _tap_by_tap(taps, shape.channels, first)
            source = self._source(f"linear_attn.{x}_conv1d")
            found.append(Part(source, taps * channels, order, stored=(channels, 1, taps)))
            first += channels
        return tuple(found)

    def _convolution(self, name: str, shape: DeltaShape | ShortConvShape | MambaShape) -> Part:
        taps, channels = shape.taps, shape.channels
        return Part(
            self._source(name.removesuffix(".weight")),
            taps * channels,
            _tap_by_tap(taps, channels),
            stored=(channels, taps) if self._names.linear_of_ggml else (channels, 1, taps),
        )

    def _qkvz(self, shape: DeltaShape) -> tuple[Part, ...]:
        if self._names.split_linear:
            mixed = self._part("linear_attn.in_proj_qkv", shape.channels)
            z = self._part("linear_attn.in_proj_z", shape.values, after(shape.channels))
            return mixed, z
        group = shape.values // shape.key_heads
        sizes = (shape.key_dim, shape.key_dim, group, group)
        order, unit = from_groups(sizes, shape.key_heads), sum(sizes)
        return (self._part("linear_attn.in_proj_qkvz", shape.key_heads * unit, order, unit),)

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
        """What queries, keys, values and gates come of; channels that rotate are in halves."""
        q, kv = self._spec.q_rows, latent.latent + latent.rope_dim
        queries = self._part(
            "self_attn.q_proj", q, *self._rotated(0, latent.nope_dim, latent.rope_dim)
        )
        if latent.query_latent:
            q = latent.query_latent
            queries = self._part("self_attn.q_a_proj", q)
        order = self._rotated(q, latent.latent, latent.rope_dim)
        parts = (queries, self._part("self_attn.kv_a_proj_with_mqa", kv, *order))
        gates = self._spec.gates(self._layer)
        if not gates:
            return parts
        return (*parts, self._part("self_attn.gate_proj", gates, after(q + kv)))

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


def _projected(shape: DeltaShape) -> dict[str, int]:
    """Rows of the matrices of queries, keys and values."""
    return {"q_proj": shape.keys, "k_proj": shape.keys, "v_proj": shape.values}


def _tap_by_tap(taps: int, channels: int, first: int = 0) -> Order:
    """From the taps of a channel after those of another; first: the channel that they begin at."""
    return lambda at: at % taps * channels + at // taps + first


def with_bias(name: str, parts: tuple[Part, ...], columns: int, bias: bool) -> Iterator[Weight]:
    """A matrix, and a bias of the same parts."""
    yield Weight(name, parts, columns)
    if bias:
        sources = (part.source.removesuffix("weight") + "bias" for part in parts)
        biases = (replace(p, source=s) for p, s in zip(parts, sources, strict=True))
        yield Weight(f"{name}.bias", tuple(biases))
