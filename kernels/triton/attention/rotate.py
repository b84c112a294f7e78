"""Hadamard rotations of V inside Triton kernels: see `layout.rotation`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(v, RUN: tl.constexpr, BACK: tl.constexpr):
    """`rotate_values` of rows of v, float32 [ROWS, CHANNELS], RUN channels together; or back again.

    CHANNELS is a power of two, and RUN one up to it. Each step adds and subtracts neighbours, and
    puts the differences behind the sums; as many steps as the index has bits bring all back to
    their places (fast Walsh-Hadamard transform of constant geometry).
    """
    ROWS: tl.constexpr = v.shape[0]
    CHANNELS: tl.constexpr = v.shape[1]
    RUNS: tl.constexpr = ROWS * CHANNELS // RUN
    STEPS: tl.constexpr = (
        (RUN > 1)
        + (RUN > 2)
        + (RUN > 4)
        + (RUN > 8)
        + (RUN > 16)
        + (RUN > 32)
        + (RUN > 64)
        + (RUN > 128)
    )
    HALVINGS: tl.constexpr = STEPS - STEPS // 2 if BACK else STEPS // 2
    v = tl.reshape(v, (RUNS, RUN))
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(v, (RUNS, RUN // 2, 2)))
        v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (RUNS, RUN))
    return tl.reshape(v * (0.5**HALVINGS), (ROWS, CHANNELS))
