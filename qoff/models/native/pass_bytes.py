"""What the ends of a pass take, beside a layer's workspace: embedded tokens, recordings, logits."""

from __future__ import annotations

import torch

from qoff.models.forward_pass import per_layer_floats
from qoff.models.spec import DecoderSpec


def embedded_bytes(spec: DecoderSpec, tokens: int, dtype: torch.dtype) -> int:
    """The most bytes that embedding this many tokens allocates: in float32, scaled, in `dtype`."""
    return tokens * (spec.hidden_size * (8 + dtype.itemsize) + 4 * spec.per_layer_width)


def recorded_bytes(spec: DecoderSpec, rows: int, passes: int = 1) -> int:
    """The most bytes that recordings of decode steps keep on a CPU, of up to `rows` sequences.

    Hidden states and logits, of which a smaller step has a part, and what each is given; beside a
    workspace. passes: of as many sequences each, whose layers are recorded together.
    """
    each = 3 * spec.hidden_size + spec.per_layer_width + per_layer_floats(spec)
    return 4 * rows * (passes * each + spec.vocab_size)


def logits_bytes(spec: DecoderSpec, rows: int, dtype: torch.dtype) -> int:
    """The most bytes that `rows` logits take, from the head's product to what a pass returns.

    In float32; or in `dtype`, in float32, and twice more where they are scaled.
    """
    if dtype == torch.float32:
        return rows * spec.vocab_size * 4
    scaled = spec.logit_scale != 1 or spec.logit_soft_cap != 0
    return rows * spec.vocab_size * (dtype.itemsize + 4 + 8 * scaled)
