"""What parts of a pass take: its layers on a GPU, embedded tokens, recordings, logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.states import StateShape
from qoff.kernels.reference.streams import TOGETHER
from qoff.memory.rows import ROWS
from qoff.models.forward_pass import WAVE_PAIRS, mlp_tokens, per_layer_floats, stream_floats
from qoff.models.spec import DecoderSpec


def embedded_bytes(spec: DecoderSpec, tokens: int, dtype: torch.dtype) -> int:
    """The most bytes that embedding this many tokens allocates: in float32, scaled, in `dtype`."""
    found = tokens * spec.hidden_size * (8 + dtype.itemsize)
    found += tokens * spec.hidden_width * dtype.itemsize * (spec.streams is not None)
    if spec.per_layer is not None:  # whose rows have numbers, and are scaled some at a time
        found += tokens * spec.per_layer_width * (4 + dtype.itemsize)
        found += 8 * tokens * spec.num_layers
        found += 12 * min(tokens * spec.num_layers, ROWS) * spec.per_layer.width
    return found


def held_bytes(spec: DecoderSpec, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a pass on a GPU has of its own until its end, beside hidden states.

    Its tokens' embeddings of layers, K and V that more than one layer attends to, what an index
    chooses, and what a layer for multi-token prediction makes of its two inputs and its output.
    """
    values = sum(2 * heads * dim for heads, dim in map(spec.heads, spec.lent_layers))
    own = (spec.per_layer_width + values + 3 * spec.hidden_size * spec.mtp) * dtype.itemsize
    return tokens * (own + 4 * spec.chosen_width)


def recorded_bytes(spec: DecoderSpec, rows: int, passes: int = 1) -> int:
    """The most bytes that recordings of decode steps keep on a CPU, of up to `rows` sequences.

    Hidden states and logits, of which a smaller step has a part, and what each is given; beside a
    workspace. passes: of as many sequences each, which are recorded together.
    """
    each = 3 * spec.hidden_width + spec.per_layer_width + per_layer_floats(spec) + spec.vocab_size
    each += stream_floats(spec) + 2 * spec.intermediate_size * any(spec.sparsity or ())
    if spec.experts is not None:  # what is chosen, and guessed, of those that come one by one
        each += 3 * (spec.hidden_size + spec.latent_width)
        each += 2 * spec.experts.count + 16 * spec.experts.top_k
    return 4 * rows * passes * each


def logits_bytes(spec: DecoderSpec, rows: int, dtype: torch.dtype) -> int:
    """The most bytes that `rows` logits take, from the head's product to what a pass returns.

    In float32; or in `dtype`, in float32, and twice more where they are scaled.
    """
    if dtype == torch.float32:
        return rows * spec.vocab_size * 4
    scaled = spec.logit_scale != 1 or spec.logit_soft_cap != 0
    return rows * spec.vocab_size * (dtype.itemsize + 4 + 8 * scaled)


def layer_bytes(
    spec: DecoderSpec,
    tokens: int,
    dtype: torch.dtype,
    *,
    linear_bytes: Callable[[int, int, int], int],
    experts_bytes: Callable[[int, int, int, int, int], int],
    attention_bytes: int,
    states_bytes: Callable[[int, StateShape], int],
    tiled: bool = False,
) -> int:
    """The most bytes that a layer of `tokens` tokens allocates, on ops that allocate their results.

    As if attention, and then the MLP or the experts, freed nothing before their end. linear_bytes:
    of a matmul, by tokens, rows and columns of its matrix. experts_bytes: of the experts' op, by
    tokens, top_k, number and inner size of experts, and hidden size. attention_bytes: of its op.
    states_bytes: of the op of recurrent layers, by tokens.
    tiled: where matrices may come in tiles, and experts one by one.
    """
    hidden, item = spec.hidden_size, dtype.itemsize
    part = mlp_tokens(tokens, tiled, on_gpu=True)
    normed = tokens * hidden * (2 * item + 8)  # in float32 and back
    aside = tokens * hidden * item  # added later: scaled, or what a parallel attention returns

    def linear(count: int, rows: int, columns: int) -> int:
        # The whole result beside that of a tile, and what a tile is added to.
        return linear_bytes(count, rows, columns) + 2 * count * rows * item * tiled

    attention = linear(tokens, spec.qkv_rows, hidden) + attention_bytes
    attention += linear(tokens, hidden, spec.o_columns) + normed + aside
    if spec.value_dim:  # V, and all that attention is given, with zeros; and what is left of it
        attention += tokens * (spec.attention_width + spec.kv_rows + spec.o_columns) * item
    if spec.latent is not None:  # queries and keys, and values of heads
        attention += tokens * (spec.attention_width + spec.o_columns) * item
        attention += tokens * spec.latent.query_latent * item
        if spec.latent.query_latent:
            attention += linear(tokens, spec.q_rows, spec.latent.query_latent)
    if spec.index is not None and spec.latent is not None:
        index = spec.index.shape  # its queries and keys come together
        attention += linear(tokens, index.width - index.dim, spec.latent.query_latent)
        attention += linear(tokens, index.dim + index.heads, hidden) + 2 * normed
        attention += tokens * (index.width + index.dim) * (item + 4)
    if spec.qk_norm == "all":
        attention += tokens * (spec.q_rows * (2 * item + 8) + 2 * spec.kv_rows * item)
    attention += tokens * hidden * (4 + item) * (spec.learned_positions > 0)
    attention += 2 * tokens * spec.heads_width * item * spec.gated_attention
    if spec.state_shape is not None:
        shape = spec.state_shape
        states = sum(linear(tokens, rows, hidden) for rows in shape.projections)
        states += states_bytes(tokens, shape)
        if isinstance(shape, DeltaShape):  # what KDA's a and z come of, each by itself
            states += 2 * tokens * shape.rank * item
        states += linear(tokens, hidden, shape.values) + normed + aside
        attention = attention + states if spec.has_both else max(attention, states)

    def mlp(inner: int) -> int:
        first = linear(part, 2 * inner if spec.gated else inner, hidden)
        activated = 3 * part * inner * item
        if any(spec.sparsity or ()):  # some rows at a time: both halves, what is left, squares
            activated += part * inner * 3 * item + min(part, TOGETHER) * inner * 24
        return first + activated + linear(part, hidden, inner)

    rest = mlp(spec.widest_mlp)
    if spec.experts is not None:
        experts = spec.experts
        some = mlp_tokens(tokens, tiled, on_gpu=True)
        routed = some * (experts.count * (item + 12 + 16 * experts.judged) + experts.top_k * 24)
        routed += linear(some, experts.count, hidden)
        width, latent = spec.expert_width, spec.latent_width
        sizes = (experts.top_k, experts.count, experts.intermediate_size, width)
        shared = mlp(experts.shared_size) + 3 * aside if experts.shared_size else 0
        pairs = tokens * experts.top_k
        waves = pairs * (4 * width + 32) + min(pairs, WAVE_PAIRS) * width * (item + 4)
        waves *= tiled
        weighed = some * experts.top_k * width * (4 + item) * experts.weighs_input
        summed = aside * spec.sums_experts
        if latent:  # what experts are given, and the sums of what they give
            routed += linear(some, latent, hidden) + linear(some, hidden, latent)
            routed += 2 * tokens * latent * item
        if experts.beside:
            summed = rest + 4 * aside + 2 * normed
        rest = max(rest, routed + experts_bytes(some, *sizes) + weighed + shared + waves + summed)
    own = 0  # of embeddings of layers: before the first one, and at the end of each
    if spec.per_layer is not None:
        width, all_layers = spec.per_layer.width, spec.per_layer_width
        begin = linear(part, all_layers, hidden) + part * all_layers * (5 * item + 8)
        end = linear(tokens, width, hidden) + 3 * tokens * width * item
        own = max(begin, end + linear(tokens, hidden, width) + normed + 3 * aside)
    return max(attention, rest + normed + 2 * aside, own) + _stream_bytes(spec, tokens, item)


def _stream_bytes(spec: DecoderSpec, tokens: int, item: int) -> int:
    """What streams take beside them in a layer: see `stream_floats`, and some rows in float32."""
    if spec.streams is None:
        return 0
    some = min(tokens, TOGETHER) * (3 * spec.hidden_width + 4 * spec.hidden_size) * 4
    return tokens * (stream_floats(spec) + 3 * spec.hidden_size) * item + some
