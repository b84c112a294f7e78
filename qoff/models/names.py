"""The weights of a layer file and of the outer file, and the Hugging Face tensors they come from.

    self_attn.qkv_proj   the rows of q_proj, k_proj and v_proj, one below the other; below them
                         those of gates, one for each channel of the heads (which families keep in
                         q_proj, head by head, or in a tensor of their own), or one for each head
    mlp.gate_up_proj     the rows of gate_proj and up_proj, "rows16": blocks of 16 rows in
                         turn, gate 0..15, up 0..15, gate 16..31, up 16..31, ..., so that
                         silu(gate) * up of 16 outputs needs two neighbouring blocks of rows
    mlp.up_proj          in place of these, where an MLP has no gate
    mlp.act_fn           of an MLP whose activation is xIELU: alpha_p, alpha_n, beta and eps
    mlp.experts.<e>.*    the same two matrices of an expert; each expert's are neighbours
    mlp.latent_in, mlp.latent_out   the matrices around experts of a narrower space
    everything else      one tensor each

Latent attention (`kernels.layout.latent`) has

    self_attn.qkv_proj   the rows of q_a_proj, or of q_proj, of kv_a_proj_with_mqa, and of gates
    self_attn.q_b_proj, self_attn.kv_b_proj     as they are

Layers with an index (`kernels.layout.index`) have, channels that rotate as that has them,

    self_attn.indexer.keys      the rows of wk, and of weights_proj
    self_attn.indexer.wq_b, self_attn.indexer.k_norm

Layers with linear attention (`kernels.layout.delta`) have in place of attention

    linear_attn.qkvz_proj   the rows of queries, keys, values and z, each head after head
    linear_attn.ba_proj     those of b, one for each value head, and of a
    linear_attn.conv1d      the convolution, tap by tap
    linear_attn.out_proj, linear_attn.norm, linear_attn.A_log, linear_attn.dt_bias

or, in place of the second one,

    linear_attn.b_proj, linear_attn.a_proj      as they are

or, where it is KDA,

    linear_attn.fb_proj     the rows of f_proj, which a comes of, and of b

or, where a and z are of few channels, in place of the first two

    linear_attn.qkv_proj    the rows of queries, of keys and of values
    linear_attn.fgb_proj    those of f_a_proj, of g_a_proj and of b
    linear_attn.f_b_proj, linear_attn.g_b_proj      what a and z come of, as they are

and those with short convolutions (`kernels.layout.short_conv`)

    short_conv.in_proj, short_conv.out_proj     as they are: b, c and x, one below the other
    short_conv.conv                             the convolution, tap by tap

and those with Mamba 2 (`kernels.layout.mamba`)

    mamba.in_proj, mamba.out_proj     as they are: z, x, B, C and dt, one below the other
    mamba.conv1d                      the convolution, tap by tap
    mamba.A_log, mamba.dt_bias, mamba.D, mamba.norm

Layers with both attention and Mamba 2 have the matrices of both: those of their inputs, then those
of their outputs.

Whatever a family calls its tensors, weights are stored under Llama's names, with

    input_layernorm, post_attention_layernorm      the norms before attention and MLP
    self_attn.post_norm, mlp.post_norm             those after them
    mlp.dense_norm, mlp.mixture_norm               those after MLP and experts side by side
    mlp.routed_norm, mlp.routing_norm              those before experts, and before their router

Models with embeddings of their layers (`native.per_layer`) have in the outer file

    model.embed_tokens_per_layer    a row for each token and layer, all of a token's together

and in layers

    per_layer.context, per_layer.context_norm       of layer 0: what is added to these
    per_layer.gate, per_layer.projection, per_layer.post_norm

Those whose hidden states are several streams (`native.streams`) have in layers

    streams.router, streams.router_norm     what streams are mixed by
    streams.prediction, streams.correction  the matrices of its factors, row after row
    streams.scale                           of the first stream before `per_layer.gate`
    streams.split.1, ...                    of layer 0: what other streams come of
    streams.joined.1, ...                   of the last layer: what they become
    laurel.left, laurel.right, laurel.post_norm

A layer for multi-token prediction (`families.mtp`) has, in a file of its own,

    mtp.embed_norm, mtp.hidden_norm     of the two that it is given
    mtp.proj                            of both, side by side
    mtp.norm                            what its output goes through before the head

Fused biases have the rows of their matrix in the same order. Queries and keys of families that
rotate neighbouring channels have their rows in the order of halves. Norms that families store less
one are stored whole. Matrices are called without the ".weight" of Hugging Face; vectors keep it.
Inside a file every name has the prefix of its layer, "model.layers.0.".
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER
from qoff.quant import Format, QuantConfig
from qoff.quant.matrix import ROUTER_BITS

from .row_order import ROW_BLOCK, Order, in_order

BEFORE = MappingProxyType(  # norms of what goes into a part of a layer
    {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
)
NORM, QKV = "model.norm.weight", "self_attn.qkv_proj"
HEAD_BIAS = f"{LM_HEAD}.bias"
Q_B, KV_B = "self_attn.q_b_proj", "self_attn.kv_b_proj"  # of latent attention
Q_NORM, KV_NORM = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
INDEX_KEYS, INDEX_Q = "self_attn.indexer.keys", "self_attn.indexer.wq_b"
INDEX_NORM = "self_attn.indexer.k_norm"
POSITIONS = "embed_positions"  # of layer 0
QKVZ, BA, OUT = (f"linear_attn.{x}_proj" for x in ("qkvz", "ba", "out"))
DELTA_B, DELTA_A = "linear_attn.b_proj", "linear_attn.a_proj"
KDA_FB = "linear_attn.fb_proj"
KDA_QKV, KDA_FGB = "linear_attn.qkv_proj", "linear_attn.fgb_proj"
KDA_FORGET, KDA_GATE = "linear_attn.f_b_proj", "linear_attn.g_b_proj"
CONV, DELTA_NORM = "linear_attn.conv1d.weight", "linear_attn.norm.weight"
DECAY, DT_BIAS = "linear_attn.A_log", "linear_attn.dt_bias"
SHORT_IN, SHORT_OUT = "short_conv.in_proj", "short_conv.out_proj"
SHORT_CONV = "short_conv.conv.weight"
MAMBA_IN, MAMBA_OUT = "mamba.in_proj", "mamba.out_proj"
MAMBA_CONV, MAMBA_CONV_BIAS = "mamba.conv1d.weight", "mamba.conv1d.bias"
MAMBA_DECAY, MAMBA_DT_BIAS, MAMBA_SKIP = "mamba.A_log", "mamba.dt_bias", "mamba.D"
MAMBA_NORM = "mamba.norm.weight"
ROUTER, SHARED_GATE = "mlp.router", "mlp.shared_expert_gate"
CORRECTION = "mlp.router.correction"  # of what experts are chosen by
GAINS = "mlp.router.gains"  # of their weights
ROUTED_NORM, ROUTING_NORM = "mlp.routed_norm", "mlp.routing_norm"  # of experts beside an MLP
DENSE_NORM, MIXTURE_NORM = "mlp.dense_norm", "mlp.mixture_norm"
LATENT_IN, LATENT_OUT = "mlp.latent_in", "mlp.latent_out"  # before and behind experts
LAYER_SCALE = "layer_scale"
XIELU = "mlp.act_fn"
CONTEXT, CONTEXT_NORM = "per_layer.context", "per_layer.context_norm"  # of layer 0
LAYER_GATE, LAYER_PROJECTION = "per_layer.gate", "per_layer.projection"
LAYER_NORM = "per_layer.post_norm"
STREAM_ROUTER, STREAM_NORM = "streams.router", "streams.router_norm"
PREDICTION, CORRECTION_OF_STREAMS = "streams.prediction", "streams.correction"
STREAM_SCALE = "streams.scale"
SPLIT, JOINED = "streams.split.{}", "streams.joined.{}"  # of the first and of the last layer
LAUREL_LEFT, LAUREL_RIGHT, LAUREL_NORM = "laurel.left", "laurel.right", "laurel.post_norm"
MTP_EMBED_NORM, MTP_HIDDEN_NORM = "mtp.embed_norm", "mtp.hidden_norm"
MTP_PROJ, MTP_NORM = "mtp.proj", "mtp.norm"


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, or one expert's in it, and where its rows go.

    order: from its rows, int64, to those of the weight. unit: so many rows, from a multiple of it
    on, fill whole blocks of 16 rows of the weight. expert: number in a tensor [experts, ...].
    transposed: it is stored as [columns, rows]. stored: the shape of a vector that has another.
    rows_each: one of its rows is so many of the weight, one after the other.
    plus: what is added to each value. of_exponential: minus their exponential is stored. times: the
    name of a matrix that it is multiplied by from the right, and whether that is stored transposed.
    """

    source: str
    rows: int
    order: Order = in_order
    unit: int = ROW_BLOCK
    expert: int | None = None
    transposed: bool = False
    stored: tuple[int, ...] | None = None
    rows_each: int = 1
    plus: float = 0.0
    of_exponential: bool = False
    times: tuple[str, bool] | None = None


@dataclass(frozen=True)
class Weight:
    """A weight as it is stored: a matrix [rows, columns], or a vector [rows] without columns."""

    name: str
    parts: tuple[Part, ...]
    columns: int | None = None

    @property
    def sensitive(self) -> bool:
        """Whether its codes have bits of their own: embeddings, head, routers, what forgets."""
        outer = self.name in (EMBEDDING, LM_HEAD, POSITIONS, PER_LAYER)
        return self.exact or outer or self.name.startswith("streams.")

    @property
    def exact(self) -> bool:
        """Whether it is small and decides: routers, keys of an index, what forgets, LAuReL."""
        forgets = (BA, DELTA_B, DELTA_A, KDA_FB, KDA_FGB, KDA_FORGET)
        small = (*forgets, INDEX_KEYS, LAUREL_LEFT, LAUREL_RIGHT)
        return self.routes or self.name in small

    @property
    def routes(self) -> bool:
        """Whether it chooses experts."""
        return self.name in (ROUTER, SHARED_GATE)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def form(self, prefix: str, quant: QuantConfig) -> Format:
        """The format that floats are quantized to; prefix: of its name in the checkpoint."""
        bits = quant.head_bits if self.sensitive else quant.bits
        bits = ROUTER_BITS if self.exact else bits
        return quant.chosen(prefix + self.name) or Format(bits, quant.group_size)

    def stored_shape(self, part: int) -> tuple[int, ...]:
        """Shape that the Hugging Face tensor of a part has; of an expert's, all but the first.

        What is multiplied by another matrix may have any number of columns.
        """
        one = self.parts[part]
        if self.columns is None:
            return (one.rows,) if one.stored is None else one.stored
        rows, columns = one.rows // one.rows_each, self.columns * one.rows_each
        return (columns, rows) if one.transposed else (rows, columns)

    def destination(self, part: int, start: int, stop: int) -> Tensor:
        """Return the stored rows, int64, in which rows start..stop-1 of a part lie."""
        return self.parts[part].order(torch.arange(start, stop))


MTP_PREFIX = "model.mtp."  # of the names of a layer for multi-token prediction


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's weights start with."""
    return f"model.layers.{layer}."
