"""The weights of a layer file and of the outer file, and the Hugging Face tensors they come from.

    self_attn.qkv_proj   the rows of q_proj, k_proj and v_proj, one below the other
    mlp.gate_up_proj     the rows of gate_proj and up_proj, "rows16": blocks of 16 rows in
                         turn, gate 0..15, up 0..15, gate 16..31, up 16..31, ..., so that
                         silu(gate) * up of 16 outputs needs two neighbouring blocks of rows
    mlp.experts.<e>.*    the same two matrices of an expert; each expert's are neighbours
    everything else      one tensor each

Whatever a family calls its tensors, weights are stored under Llama's names, with

    input_layernorm, post_attention_layernorm      the norms before attention and MLP
    self_attn.post_norm, mlp.post_norm             those after them

Fused biases have the rows of their matrix in the same order. Queries and keys of families that
rotate neighbouring channels have their rows in the order of halves. Norms that families store less
one are stored whole. Matrices are called without the ".weight" of Hugging Face; vectors keep it.
Inside a file every name has the prefix of its layer, "model.layers.0.".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import UnsupportedModelError
from qoff.memory.plan import EMBEDDING, LM_HEAD

from .families import tensor_names
from .spec import DecoderSpec
from .spec_parts import ExpertsSpec
from .tensor_names import TensorNames

ROW_BLOCK = 16
NORM, QKV = "model.norm.weight", "self_attn.qkv_proj"
POSITIONS = "embed_positions"  # of layer 0
ROUTER, SHARED_GATE = "mlp.router", "mlp.shared_expert_gate"

Order = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, or one expert's in it, and where its rows go.

    order: from its rows, int64, to those of the weight. unit: so many rows, from a multiple of it
    on, fill whole blocks of 16 rows of the weight. expert: number in a tensor [experts, ...].
    transposed: it is stored as [columns, rows]. flat: a vector stored as [rows / flat, flat].
    plus: what is added to each value. times: the name of a matrix that it is multiplied by from the
    right, and whether that is stored transposed.
    """

    source: str
    rows: int
    order: Order
    unit: int = ROW_BLOCK
    expert: int | None = None
    transposed: bool = False
    flat: int | None = None
    plus: float = 0.0
    times: tuple[str, bool] | None = None


@dataclass(frozen=True)
class Weight:
    """A weight as it is stored: a matrix [rows, columns], or a vector [rows] without columns."""

    name: str
    parts: tuple[Part, ...]
    columns: int | None = None

    @property
    def sensitive(self) -> bool:
        """Whether its codes have as many bits as those of embedding and head."""
        return self.name in (EMBEDDING, LM_HEAD, ROUTER, SHARED_GATE, POSITIONS)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def stored_shape(self, part: int) -> tuple[int, ...]:
        """Shape that the Hugging Face tensor of a part has; of an expert's, all but the first.

        What is multiplied by another matrix may have any number of columns.
        """
        one = self.parts[part]
        if self.columns is None:
            return (one.rows,) if one.flat is None else (one.rows // one.flat, one.flat)
        return (self.columns, one.rows) if one.transposed else (one.rows, self.columns)

    def destination(self, part: int, start: int, stop: int) -> Tensor:
        """Return the stored rows, int64, in which rows start..stop-1 of a part lie."""
        return self.parts[part].order(torch.arange(start, stop))


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's weights start with."""
    return f"model.layers.{layer}."


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
    rows, width = spec.vocab_size, spec.hidden_size
    sources = {EMBEDDING: names.embedding, LM_HEAD: names.head}
    if spec.tie_word_embeddings:
        del sources[LM_HEAD]
    matrices = [
        Weight(name, (Part(source, rows, _after(0), times=names.times.get(name)),), width)
        for name, source in sources.items()
    ]
    norms: list[Weight] = []
    if spec.final_norm:
        source = names.norm
        norms = [_vector(NORM, f"{source}.weight", width, names.norm_offset)]
        if spec.norm == "layer":
            norms.append(_vector(_bias_of(NORM), f"{source}.bias", width))
    return (*norms, *matrices)


def interleave16(gate: Tensor, up: Tensor) -> Tensor:
    """Join two tensors [rows, ...] in blocks of 16 rows in turn, as `mlp.gate_up_proj` is."""
    blocks = [torch.unflatten(x, 0, (-1, ROW_BLOCK)) for x in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def _vector(name: str, source: str, rows: int, plus: float = 0.0) -> Weight:
    return Weight(name, (Part(source, rows, _after(0), plus=plus),))


def _bias_of(norm: str) -> str:
    return norm.removesuffix("weight") + "bias"


class _Layer:
    """The weights of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, names: TensorNames) -> None:
        self._spec, self._layer, self._names = spec, layer, names
        sizes = {"head_dim": spec.head_dim, "intermediate_size": spec.intermediate_size}
        if spec.experts is not None:
            sizes["moe_intermediate_size"] = spec.experts.intermediate_size
            sizes["shared_expert_intermediate_size"] = spec.experts.shared_size
        for key, size in sizes.items():
            if size % ROW_BLOCK:
                raise UnsupportedModelError(
                    f"config.json: {key} is {size}; supported: multiples of {ROW_BLOCK}"
                )

    def weights(self) -> tuple[Weight, ...]:
        vectors, matrices = self._attention()
        vectors = [*self._norms(), *vectors]
        spec, experts = self._spec, self._spec.experts
        if spec.learned_positions and self._layer == 0:
            part = Part(self._names.positions, spec.learned_positions, _after(0))
            matrices.append(Weight(POSITIONS, (part,), spec.hidden_size))
        if experts is None or not experts.layers[self._layer]:
            more = self._mlp("mlp", spec.intermediate_size, spec.mlp_bias)
        else:
            more = self._mixture(experts)
        # What lies at the end stays in memory first: experts come before the other matrices.
        mixed = self._spec.has_experts(self._layer)
        both = (*more[1], *matrices) if mixed else (*matrices, *more[1])
        return (*vectors, *more[0], *both)

    def _source(self, module: str, tensor: str = "weight") -> str:
        return self._names.in_layer(self._layer, module, tensor)

    def _norms(self) -> list[Weight]:
        spec = self._spec
        before = spec.pre_norm or spec.norm_after_add
        modules = ["input_layernorm", "post_attention_layernorm"] if before else []
        modules += ["self_attn.post_norm", "mlp.post_norm"] if spec.post_norm else []
        found = [self._norm(module, spec.hidden_size) for module in modules]
        if spec.norm == "layer":
            found += [self._norm(module, spec.hidden_size, "bias") for module in modules]
        if spec.qk_norm == "head":
            found += [self._norm(f"self_attn.{x}_norm", spec.head_dim) for x in "qk"]
        elif spec.qk_norm == "all":
            found.append(self._norm("self_attn.q_norm", spec.q_rows))
            found.append(self._norm("self_attn.k_norm", spec.kv_rows))
        return found

    def _norm(self, module: str, rows: int, tensor: str = "weight") -> Weight:
        plus = self._names.norm_offset if tensor == "weight" else 0.0
        return _vector(f"{module}.{tensor}", self._source(module, tensor), rows, plus)

    def _attention(self) -> tuple[list[Weight], list[Weight]]:
        spec = self._spec
        qkv = Weight(QKV, self._qkv_parts("weight"), spec.hidden_size)
        vectors = [Weight(f"{QKV}.bias", self._qkv_parts("bias"))] if spec.qkv_bias else []
        o = "self_attn.o_proj"
        if spec.o_bias:
            vectors.append(_vector(f"{o}.bias", self._source(o, "bias"), spec.hidden_size))
        if spec.sinks:
            source = self._source("self_attn", "sinks")
            vectors.append(_vector("self_attn.sinks", source, spec.num_heads))
        out = Weight(o, (Part(self._source(o), spec.hidden_size, _after(0)),), spec.q_rows)
        return vectors, [qkv, out]

    def _qkv_parts(self, tensor: str) -> tuple[Part, ...]:
        spec, names = self._spec, self._names
        q, kv = spec.q_rows, spec.kv_rows
        if names.fused_qkv == "rows":
            return (Part(self._source(QKV, tensor), q + 2 * kv, _after(0)),)
        if names.fused_qkv == "heads":
            order = _from_heads(spec.num_heads, spec.head_dim)
            return (Part(self._source(QKV, tensor), 3 * q, order),)
        rope = spec.rope_of(self._layer)
        pairs = rope.dim if names.rope_pairs and rope is not None else 0
        parts, first = [], 0
        for x, rows in (("q", q), ("k", kv), ("v", kv)):
            turned = pairs if x != "v" else 0
            order = _unpaired(first, spec.head_dim, turned) if turned else _after(first)
            unit = spec.head_dim if turned else ROW_BLOCK
            source = self._source(f"self_attn.{x}_proj", tensor)
            parts.append(Part(source, rows, order, unit))
            first += rows
        return tuple(parts)

    def _mlp(self, module: str, inner: int, bias: bool) -> tuple[list[Weight], list[Weight]]:
        """Vectors and matrices of an MLP, or of an expert."""
        spec = self._spec
        if spec.gated:
            first, parts = f"{module}.gate_up_proj", self._gate_up(module, inner)
        else:
            source = self._source(f"{module}.up_proj")
            first, parts = f"{module}.up_proj", (Part(source, inner, _after(0)),)
        down = Part(self._source(f"{module}.down_proj"), spec.hidden_size, _after(0))
        matrices = [
            Weight(first, parts, spec.hidden_size),
            Weight(f"{module}.down_proj", (down,), inner),
        ]
        vectors = [_bias(matrix) for matrix in matrices] if bias else []
        return vectors, matrices

    def _gate_up(self, module: str, inner: int) -> tuple[Part, ...]:
        if self._names.fused_gate_up:
            source = self._source(f"{module}.gate_up_proj")
            return (Part(source, 2 * inner, from_halves(inner)),)
        return tuple(
            Part(self._source(f"{module}.{name}_proj"), inner, _interleaved(i))
            for i, name in enumerate(("gate", "up"))
        )

    def _mixture(self, experts: ExpertsSpec) -> tuple[list[Weight], list[Weight]]:
        spec = self._spec
        router = Part(self._source(ROUTER), experts.count, _after(0))
        vectors, matrices = [], []
        if experts.router_bias:
            source = self._source(ROUTER, "bias")
            vectors.append(_vector(f"{ROUTER}.bias", source, experts.count))
        if experts.bias:
            vectors += self._expert_biases(experts)
        for e in range(experts.count):
            matrices += self._expert(e, experts)
        matrices.append(Weight(ROUTER, (router,), spec.hidden_size))
        if experts.shared_size:
            matrices += self._mlp("mlp.shared_expert", experts.shared_size, False)[1]
            if experts.shared_gate:
                part = Part(self._source(SHARED_GATE), 1, _after(0))
                matrices.append(Weight(SHARED_GATE, (part,), spec.hidden_size))
        return vectors, matrices

    def _expert(self, e: int, experts: ExpertsSpec) -> list[Weight]:
        inner = experts.intermediate_size
        if not self._names.stacked_experts:
            return self._mlp(f"mlp.experts.{e}", inner, bias=False)[1]
        stored, hidden = f"mlp.experts.{e}", self._spec.hidden_size
        gate_up, down = (f"mlp.experts.{name}_proj" for name in ("gate_up", "down"))
        order, unit = from_pairs, 2 * ROW_BLOCK
        return [
            Weight(
                f"{stored}.gate_up_proj",
                (Part(self._source(gate_up, ""), 2 * inner, order, unit, e, True),),
                hidden,
            ),
            Weight(
                f"{stored}.down_proj",
                (Part(self._source(down, ""), hidden, _after(0), expert=e, transposed=True),),
                inner,
            ),
        ]

    def _expert_biases(self, experts: ExpertsSpec) -> list[Weight]:
        """The biases of all experts, those of one after those of the other."""
        inner, hidden = 2 * experts.intermediate_size, self._spec.hidden_size
        found = []
        for name, rows, order in (
            ("mlp.experts.gate_up_proj", inner, from_pairs),
            ("mlp.experts.down_proj", hidden, _after(0)),
        ):
            source = f"{self._source(name, '')}_bias"
            part = Part(source, experts.count * rows, order, flat=rows)
            found.append(Weight(f"{name}.bias", (part,)))
        return found


def _bias(matrix: Weight) -> Weight:
    parts = (
        Part(p.source.removesuffix("weight") + "bias", p.rows, p.order, p.unit)
        for p in matrix.parts
    )
    return Weight(f"{matrix.name}.bias", tuple(parts))


def _after(first: int) -> Order:
    """Rows in their order, from a row on."""
    return lambda rows: rows + first


def _interleaved(part: int) -> Order:
    """Rows of the gate (0) or of the up matrix (1), in blocks of 16 in turn."""
    return lambda rows: (rows // ROW_BLOCK * 2 + part) * ROW_BLOCK + rows % ROW_BLOCK


def from_halves(inner: int) -> Order:
    """From gate above up."""
    return lambda rows: (
        (rows % inner // ROW_BLOCK * 2 + rows // inner) * ROW_BLOCK + rows % ROW_BLOCK
    )


def from_pairs(rows: Tensor) -> Tensor:
    """From rows of gate and up in turn."""
    block, inside = rows // (2 * ROW_BLOCK), rows % (2 * ROW_BLOCK)
    return (2 * block + inside % 2) * ROW_BLOCK + inside // 2


def _from_heads(heads: int, dim: int) -> Order:
    """From query, key and value of one head after the other."""

    def order(rows: Tensor) -> Tensor:
        head, inside = rows // (3 * dim), rows % (3 * dim)
        return (inside // dim * heads + head) * dim + inside % dim

    return order


def _unpaired(first: int, dim: int, turned: int) -> Order:
    """From heads whose first `turned` channels turn in neighbouring pairs to halves that turn."""

    def order(rows: Tensor) -> Tensor:
        channel = rows % dim
        half = channel % 2 * (turned // 2) + channel // 2
        return first + rows - channel + torch.where(channel < turned, half, channel)

    return order
