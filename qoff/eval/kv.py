"""A KV cache in the tables of an evaluation."""

from __future__ import annotations

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UNPACKED
from qoff.models.native.caches import head_shapes
from qoff.models.spec import DecoderSpec


def kv_name(quant: KVQuant | None) -> str:
    """Like "4,4, window 64"; None is float32."""
    if quant is None:
        return "float32"
    parts = [f"{quant.k_bits},{quant.v_bits}"]
    parts += [f"{len(quant.layers)} layers otherwise"] if quant.layers else []
    parts += [f"window {quant.window}"]
    parts += [f"{quant.sinks} sinks"] if quant.sinks else []
    parts += [f"top {quant.attention_top:g}"] if quant.attention_top < 1 else []
    return ", ".join(parts)


def why_unmeasured(quant: KVQuant | None, longest: int, piece: int) -> str | None:
    """Why windows read `piece` tokens at a time do not measure a packed cache; None: they do.

    longest: tokens of the longest window, of which the last is only predicted.
    """
    if quant is None or (quant.k_bits == UNPACKED and not quant.layers):
        return None
    packed = -(-(quant.window + quant.sinks + BLOCK_TOKENS) // piece) * piece
    if longest - 1 > packed:
        return None
    return (
        f"the KV cache ({kv_name(quant)}) is not measured: windows of {longest} tokens end before "
        f"any token is packed; use --window {packed + 2} or more"
    )


def kv_bytes_per_token(quant: KVQuant | None, spec: DecoderSpec) -> float:
    """Of an old token, in all layers; those in the window take what float32 takes."""
    shapes = head_shapes(spec)
    forms = [None] * len(shapes) if quant is None else quant.forms(shapes)
    return sum(
        shape.kv_heads * (form.nbytes / BLOCK_TOKENS if form else 4 * shape.cached_width)
        for shape, form in zip(shapes, forms, strict=True)
    )
