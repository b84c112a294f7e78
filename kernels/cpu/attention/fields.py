"""The arguments of the attention jobs, and where each lies."""

import ctypes

from qoff.kernels.cpu.operands import int64s, offsets


class AttentionArguments(ctypes.Structure):
    """Addresses and strides in bytes, sizes, flags. below: rows from this position on only append.

    0: there are none.
    """

    _fields_ = (
        *int64s(
            "qkv", "qkv_stride", "tokens", "heads", "kv_heads", "head_dim", "q_norm", "k_norm",
            "whole_norms", "sinks", "cos", "sin", "pairs", "positions", "places", "slots", "keys",
            "values", "capacity", "window", "out", "out_stride", "lse", "runs", "scratch",
            "width", "value_dim", "latent", "query_every", "query_ahead", "norm_last", "value_norm",
            "appends", "below",
        ),
        ("query_beta", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )  # fmt: skip
    OF_LAYER = ("q_norm", "k_norm", "sinks", "keys", "values")


(QKV, QKV_STRIDE, M, HEADS, KV_HEADS, DIM, Q_NORM, K_NORM, WHOLE_NORMS, SINKS, COS, SIN, PAIRS,
 POSITIONS, PLACES, SLOTS, KEYS, VALUES, CAPACITY, WINDOW, OUT, OUT_STRIDE, LSE, RUNS, PARTIALS,
 WIDTH, VALUE_DIM, LATENT, QUERY_EVERY, QUERY_AHEAD, NORM_LAST, VALUE_NORM, APPENDS, BELOW,
 QUERY_BETA, NORM_EPS, SCALE, SOFT_CAP) = (
    offsets(AttentionArguments)
)  # fmt: skip
