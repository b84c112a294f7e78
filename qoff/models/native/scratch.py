"""What passes on a CPU take of the working memory that its ops share.

Ops take turns in one workspace, which grows to the most that one of them asks for: see
`kernels.cpu.*.scratch`, whose functions the ops ask by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from qoff.kernels.cpu.attention import scratch as attention
from qoff.kernels.cpu.indexed import scratch as indexed
from qoff.kernels.cpu.linear.scratch import linear_bytes
from qoff.kernels.cpu.moe.scratch import ExpertSizes, route_bytes
from qoff.kernels.cpu.packed_attention import scratch as packed
from qoff.kernels.cpu.recurrent.scratch import states_bytes
from qoff.kernels.cpu.sampling.scratch import sampling_bytes
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import RUN_TOKENS
from qoff.kernels.layout.packing import GROUP_SIZES
from qoff.kernels.processor import pool_threads
from qoff.models import names
from qoff.models.forward_pass import MLP_TOKENS, WAVE_PAIRS, mlp_tokens
from qoff.models.layer_weights import layer_weights
from qoff.models.spec import DecoderSpec

_GROUP = min(GROUP_SIZES)  # has the most scales


@dataclass(frozen=True)
class Passes:
    """The largest passes of a run.

    tokens: of any. sequences: of one that decodes, a token each; `place` is the last one of those
    that are not packed, `blocks` are the packed ones of a sequence. rows: of logits. drawn: rows
    that tokens are chosen from together; of_torch: by torch's generator. tiled: layers stream in
    tiles. selects: decode attends to some of the blocks. pairs: a prompt may be attended to as
    pairs of bfloat16, which take more.
    """

    tokens: int
    sequences: int
    place: int
    rows: int
    drawn: int
    blocks: int = 0
    of_torch: bool = False
    tiled: bool = False
    selects: bool = False
    pairs: bool = True


def scratch_bytes(
    spec: DecoderSpec,
    shapes: Sequence[HeadShape],
    forms: Sequence[KVFormat | None],
    passes: Passes,
    threads: int | None = None,
) -> int:
    """The most bytes that an op of these passes asks for.

    forms: how the layers' K and V are packed; None: they are not. threads: that compute; None:
    those of this machine.
    """
    threads = threads or pool_threads()
    kinds = set(zip(shapes, forms, strict=True))
    return max(
        *_layer(spec, passes, threads),
        linear_bytes(threads, passes.rows, spec.hidden_size, _GROUP, normed=True),
        sampling_bytes(spec.vocab_size, passes.drawn, of_torch=passes.of_torch),
        *(max(attention_bytes(*kind, passes, threads)) for kind in kinds),
    )


def attention_bytes(
    shape: HeadShape, form: KVFormat | None, passes: Passes, threads: int
) -> Iterator[int]:
    """What attention of one kind of layer asks for."""
    sequences, heads = passes.sequences, shape.heads
    if shape.indexes:
        if form is not None:
            yield packed.pack_bytes(threads, form)
        rows = max(passes.tokens, sequences)
        unpacked = passes.place + passes.tokens  # as the op counts them, in whole runs
        longest = passes.blocks * BLOCK_TOKENS + (unpacked // RUN_TOKENS + 1) * RUN_TOKENS
        yield indexed.choose_bytes(threads, heads, shape.head_dim, rows, longest)
        return
    yield attention.prefill_bytes(threads, shape, 2 if passes.pairs else 4)
    each = attention.token_bytes(shape, attention.decode_runs(passes.place))
    yield attention.decode_bytes(threads, attention.most_partials(threads, sequences, each))
    if form is not None:
        yield packed.pack_bytes(threads, form)
        yield packed_bytes(form, heads, passes, threads)
        if passes.selects:
            yield packed.select_bytes(threads, sequences, shape.kv_heads, passes.blocks)


def packed_bytes(form: KVFormat, heads: int, passes: Passes, threads: int) -> int:
    """What attention to packed blocks asks for; a prefill pass has one run of them."""
    each = packed.token_bytes(form, heads, packed.decode_runs(passes.blocks))
    partials = attention.most_partials(threads, passes.sequences, each)
    return packed.attend_bytes(threads, form, partials)


def _layer(spec: DecoderSpec, passes: Passes, threads: int) -> Iterator[int]:
    """What the products of a layer ask for."""
    together = mlp_tokens(passes.tokens, passes.tiled)
    for of_mlp, columns in _matrices(spec):
        tokens = together if of_mlp else passes.tokens
        yield linear_bytes(threads, tokens, columns, _GROUP, normed=True)
    if spec.state_shape is not None:
        yield states_bytes(threads, spec.state_shape)
    if spec.latent is not None:
        shape = spec.latent.shape(spec.num_heads)
        yield attention.latent_bytes(threads, shape)
        if spec.index is not None:
            heads = indexed.padded(shape.heads)
            yield indexed.attend_bytes(threads, shape.head_dim, shape.latent, heads)
    if spec.experts is not None:
        experts, inner = spec.experts, spec.experts.intermediate_size
        width, count = spec.expert_width, experts.count
        sizes = ExpertSizes(width, inner, width, (_GROUP, _GROUP))
        yield sizes.nbytes(threads, min(passes.tokens, MLP_TOKENS), experts.top_k, count)
        if passes.tiled:  # in waves, pair by pair
            yield sizes.nbytes(threads, together, experts.top_k, count)
            yield sizes.nbytes(threads, min(together * experts.top_k, WAVE_PAIRS), 1, count)
        yield route_bytes(threads, count, experts.judged)


@cache
def _matrices(spec: DecoderSpec) -> frozenset[tuple[bool, int]]:
    """Of the matrices that `w4_linear` multiplies by: whether they are an MLP's, and columns."""
    layers = range(spec.num_layers)
    kinds = {
        (
            spec.has_experts(layer),
            spec.has_mlp(layer),
            spec.attends(layer),
            spec.has_mixer(layer),
            spec.intermediate(layer),
        ): layer
        for layer in layers
    }
    return frozenset(
        (weight.name.startswith("mlp."), weight.columns)
        for layer in kinds.values()
        for weight in layer_weights(spec, layer)
        if weight.columns is not None
        and weight.name not in (names.KV_B, names.POSITIONS)
        and not weight.name.startswith("mlp.experts.")
    )
