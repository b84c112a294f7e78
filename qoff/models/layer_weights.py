"""Which weights a model has, in and outside of its layers, and the tensors that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from qoff.kernels.layout import ending
from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER

from .attention_weights import AttentionWeights, with_bias
from .families import tensor_names
from .families.family import TensorNames
from .names import (
    BEFORE,
    CONTEXT,
    CONTEXT_NORM,
    CORRECTION,
    CORRECTION_OF_STREAMS,
    DENSE_NORM,
    GAINS,
    HEAD_BIAS,
    JOINED,
    KV_NORM,
    LATENT_IN,
    LATENT_OUT,
    LAUREL_LEFT,
    LAUREL_NORM,
    LAUREL_RIGHT,
    LAYER_GATE,
    LAYER_NORM,
    LAYER_PROJECTION,
    LAYER_SCALE,
    MIXTURE_NORM,
    MTP_EMBED_NORM,
    MTP_HIDDEN_NORM,
    MTP_NORM,
    MTP_PROJ,
    NORM,
    PREDICTION,
    Q_NORM,
    ROUTED_NORM,
    ROUTER,
    ROUTING_NORM,
    SHARED_GATE,
    SPLIT,
    STREAM_NORM,
    STREAM_ROUTER,
    STREAM_SCALE,
    XIELU,
    Part,
    Weight,
)
from .row_order import ROW_BLOCK, Order, after, from_halves, from_pairs, in_order, in_turn
from .spec import DecoderSpec
from .spec_parts import ExpertsSpec, PerLayerSpec, StreamsSpec


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
    if spec.head_bias:
        bias = Part(names.head.removesuffix("weight") + "bias", spec.vocab_size)
        found.append(Weight(HEAD_BIAS, (bias,)))
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


class _Layer(AttentionWeights):
    """The weights of one layer: norms, streams, MLP and experts beside attention's."""

    def weights(self) -> tuple[Weight, ...]:
        spec, experts = self._spec, self._spec.experts
        attention = list(self._norms())
        if spec.attends(self._layer):
            attention += self._both() if spec.is_recurrent(self._layer) else self._attention()
        elif spec.has_mixer(self._layer):
            attention += self._recurrent()
        if spec.streams is not None:
            attention = [*self._before(spec.streams), *attention]
        if spec.mtp:
            attention = [*self._mtp(), *attention]
        if experts is not None and spec.has_experts(self._layer):
            rest = list(self._mixture(experts))
            if experts.beside:
                rest += self._mlp("mlp", self._inner, spec.mlp_bias)
            # What lies at the end stays in memory first: experts come before the other matrices.
            matrices = rest + attention
        else:
            has_mlp = spec.has_mlp(self._layer)
            rest = list(self._mlp("mlp", self._inner, spec.mlp_bias)) if has_mlp else []
            if has_mlp and spec.activation == ending.XIELU:
                rest.append(self._xielu())
            if spec.per_layer is not None:
                rest += self._per_layer(spec.per_layer)
            if spec.streams is not None and self._layer == spec.num_layers - 1:
                rest += self._of_streams(JOINED, self._names.streams[1], spec.streams)
            matrices = attention + rest
        vectors = (w for w in attention + rest if w.columns is None)
        return (*vectors, *(w for w in matrices if w.columns is not None))

    def _norms(self) -> Iterator[Weight]:
        spec = self._spec
        before = spec.norms_before(self._layer) or spec.norm_after_add
        parts = {"self_attn": spec.has_mixer(self._layer), "mlp": spec.has_mlp(self._layer)}
        there = [part for part, is_there in parts.items() if is_there]
        modules = [BEFORE[part] for part in there] if before else []
        modules += [f"{part}.post_norm" for part in there] if spec.norms_after(self._layer) else []
        biased = spec.norm == "layer" and spec.norm_bias
        for tensor in ("weight", "bias") if biased else ("weight",):
            yield from (self._vector(module, spec.hidden_size, tensor) for module in modules)
        if spec.qk_norm in ("head", "rotated", "all") and spec.attends(self._layer):
            for x, rows in (("q", self._q), ("k", self._kv))[: 1 if self._lent else 2]:
                each = rows if spec.qk_norm == "all" else self._dim
                yield self._vector(f"self_attn.{x}_norm", each)
        if spec.latent is not None and spec.attends(self._layer):
            yield self._vector(KV_NORM, spec.latent.latent)
            if spec.latent.query_latent:
                yield self._vector(Q_NORM, spec.latent.query_latent)
        if spec.layer_scale:
            yield self._bare(LAYER_SCALE, 1)

    def _mtp(self) -> Iterator[Weight]:
        """What a layer for multi-token prediction has around its decoder layer."""
        hidden, names = self._spec.hidden_size, self._names
        for name in (MTP_EMBED_NORM, MTP_HIDDEN_NORM, MTP_NORM):
            part = Part(f"{names.mtp.get(name, name)}.weight", hidden, plus=names.norm_offset)
            yield Weight(f"{name}.weight", (part,))
        proj = Part(f"{names.mtp.get(MTP_PROJ, MTP_PROJ)}.weight", hidden)
        yield Weight(MTP_PROJ, (proj,), 2 * hidden)

    def _mlp(self, module: str, inner: int, bias: bool = False) -> Iterator[Weight]:
        """An MLP."""
        yield from self._around(module, self._spec.hidden_size, inner, self._spec.gated, bias)

    def _xielu(self) -> Weight:
        """What the activation has learned, and its two constants, which are stored as such."""
        stored = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        return Weight(
            XIELU,
            tuple(
                Part(self._source(XIELU, name), 1, after(i), stored=shape)
                for i, (name, shape) in enumerate(stored.items())
            ),
        )

    def _around(
        self, module: str, hidden: int, inner: int, gated: bool, bias: bool = False
    ) -> Iterator[Weight]:
        """The matrices from `hidden` numbers to `inner` ones, and back."""
        fused, up, down = (f"{module}.{name}_proj" for name in ("gate_up", "up", "down"))
        if not gated:
            yield from with_bias(up, (self._part(up, inner),), hidden, bias)
        elif self._names.fused_gate_up:
            part = self._part(fused, 2 * inner, from_halves(inner))
            yield from with_bias(fused, (part,), hidden, bias)
        else:
            parts = (
                self._part(name, inner, partial(in_turn, part=i))
                for i, name in enumerate((f"{module}.gate_proj", up))
            )
            yield from with_bias(fused, tuple(parts), hidden, bias)
        yield from with_bias(down, (self._part(down, hidden),), inner, bias)

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
        router, *bias = with_bias(ROUTER, parts, hidden, experts.router_bias)
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
                sizes = self._spec.expert_width, experts.intermediate_size
                yield from self._around(f"mlp.experts.{e}", *sizes, experts.gated)
        yield router
        if experts.latent_size:
            latent = experts.latent_size
            yield Weight(LATENT_IN, (self._part(LATENT_IN, latent),), hidden)
            yield Weight(LATENT_OUT, (self._part(LATENT_OUT, hidden),), latent)
        if experts.shared_size:
            yield from self._mlp("mlp.shared_expert", experts.shared_size)
            if experts.shared_gate:
                yield Weight(SHARED_GATE, (self._part(SHARED_GATE, 1),), hidden)

    def _stacked(self, experts: ExpertsSpec) -> Iterator[Weight]:
        """Experts of tensors that hold all of them: their biases one after the other, matrices."""
        inner, hidden = experts.intermediate_size, self._spec.expert_width
        first, second = experts.matrices
        columns = {first: hidden, second: inner}
        parts: dict[str, tuple[Part, ...]] = {first: (self._stacked_part(first, inner),)}
        if experts.gated:
            parts = {first: self._stacked_gate_up(inner)}
        parts[second] = (self._stacked_part(second, hidden),)
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
