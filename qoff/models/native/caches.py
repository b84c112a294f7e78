"""What a model's KV caches keep of each layer, and which of them can be made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qoff.budgets import CPU
from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import WIDEST, HeadShape
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UnpackableError
from qoff.kvcache.states import StateCache
from qoff.models.spec import DecoderSpec


def head_shapes(spec: DecoderSpec) -> tuple[HeadShape, ...]:
    """The attention of each of `spec.cached_layers`."""
    latent, found = spec.latent, list[HeadShape]()
    for layer in spec.attention_layers:
        if spec.index is not None and spec.index.layers[layer]:
            found.append(spec.index.shape.keys)
        kv_heads, dim = spec.heads(layer)
        shape = HeadShape(
            spec.query_heads(layer),
            kv_heads,
            dim if latent is None else latent.shape(spec.num_heads).head_dim,
            dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            spec.sliding_window[layer],
            spec.norm_eps,
            spec.attention_soft_cap,
            0 if latent is None else latent.latent,
            spec.query_scale_of(layer),
            spec.chunked,
            spec.qk_norm == "rotated",
            spec.value_norm,
        )
        found.append(shape)
    return tuple(found)


def check_top_on_gpu(shapes: Sequence[HeadShape], kv: KVQuant) -> None:
    """Raise ArgumentError for attention to a part of the blocks where no kernel for a GPU does it.

    That is with latents and with heads of more than `WIDEST` channels.
    """
    wide = any(shape.latent or shape.head_dim > WIDEST for shape in shapes)
    if kv.attention_top < 1 and wide:
        raise ArgumentError(
            f"on a GPU attention to latents, or with heads of over {WIDEST} channels, is to all "
            "blocks: use attention_top=1 (leave out --attention-top), or device='cpu' "
            "(--device cpu)"
        )


def new_states(
    spec: DecoderSpec, sequences: int, device: torch.device = CPU, drafted: int = 0
) -> tuple[StateCache | None, Sequence[bool]]:
    """Empty states of a model with recurrent layers, and which layers of a KV cache have them.

    drafted: see `StateCache`.
    """
    if spec.recurrent is None:
        return None, ()
    return StateCache(spec.state_shapes, sequences, device, drafted), spec.state_places


def check_kv(spec: DecoderSpec, kv: KVQuant | None, on_device: bool) -> None:
    """Refuse caches that cannot be made.

    on_device: in the memory of a GPU. Raises OpError for a head size that cannot be packed,
    ArgumentError for bits of a layer there is not, and on a GPU what `check_top_on_gpu` does, and
    for no `kv` and sink tokens.
    """
    if kv is not None:
        if spec.index is not None and kv.attention_top < 1:
            raise ArgumentError(
                "an index of this model chooses the tokens that are attended to: use "
                "attention_top=1 (leave out --attention-top)"
            )
        try:
            kv.forms(head_shapes(spec))
        except UnpackableError as error:
            if not on_device:
                raise
            raise UnpackableError(
                f"{error}, but on a GPU all are; use device='cpu' (--device cpu)"
            ) from error
    if not on_device:
        return
    if kv is None:
        raise ArgumentError(
            "on a GPU the KV cache is packed: say how, with kv=KVQuant(8, 8) (--kv 8), the closest "
            "to none, or kv=KVQuant(4, 4) (--kv 4), the smallest; a float32 one is on the CPU, "
            "with device='cpu' (--device cpu)"
        )
    if kv.sinks:
        raise ArgumentError("on a GPU no token is a sink; use sinks=0")
    check_top_on_gpu(head_shapes(spec), kv)
