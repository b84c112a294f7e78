"""What decode and prefill attention share inside their Triton kernels.

Packed K and V are multiplied in float16 whatever the type of the model: scales and minima are
float16, and 11 bits of a query or probability are better than the 8 of bfloat16.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.triton.linear.planes import halves

TOKENS = tl.constexpr(BLOCK_TOKENS)
OFFSET = tl.constexpr(1024.0)  # float16 of the bits 0x6400
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@cache
def form_constants(form: KVFormat) -> dict[str, int | bool]:
    """The constants that describe `form` to the kernels of this module's users."""
    return {
        "HEAD_DIM": form.head_dim,
        "K_BITS": form.k_bits,
        "V_BITS": form.v_bits,
        "PARTS": form.parts,
        "K_SCALE": form.k_scale,
        "V_CODES": form.v_codes,
        "V_SCALE": form.v_scale,
        "NBYTES": form.nbytes,
    }


@triton.jit
def load_where(at, inside, ALL: tl.constexpr):
    """What lies at `at`, 0 where not inside. ALL: everything is inside, and no mask is needed."""
    return tl.load(at) if ALL else tl.load(at, mask=inside, other=0)


@triton.jit
def load_code_rows(
    codes, token, column, inside, WIDTH: tl.constexpr, BITS: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    """Rows of 64 tokens of codes of 2, 3, 4 or 8 bits, 0 where not `inside`.

    codes: pointer to elements of one or two bytes. token: [64, 1], column: [1, columns], those of a
    row of WIDTH that are loaded; or both turned. Codes of 2 and 3 bits become codes of 4.
    """
    if BITS >= 4:
        rows = load_where(codes + (token * WIDTH + column), inside, ALL)
    else:
        # The same mask for both bytes of an element: a shift takes nothing across that is kept.
        EACH: tl.constexpr = 1 if codes.dtype.element_ty == tl.uint8 else 257
        lower = load_where(codes + (token % 32 * WIDTH + column), inside, ALL)
        rows = (lower >> (token // 32 * 2).to(lower.dtype)) & (0x33 * EACH)
        if BITS == 3:
            upper = load_where(codes + ((32 + token % 16) * WIDTH + column), inside, ALL)
            rows |= ((upper >> (token // 16).to(upper.dtype)) & (0x11 * EACH)) << 2
        rows = rows.to(codes.dtype.element_ty)
    return rows


@triton.jit
def load_float16(at, first, inside, COUNT: tl.constexpr, ALL: tl.constexpr):
    """COUNT float16 from `first` on, both even, at a pointer to float16; 0 from `inside` on.

    Two at a time: four bytes are the least that can be copied ahead to shared memory.
    """
    pair = tl.arange(0, COUNT // 2)
    pairs = load_where(
        at.to(tl.pointer_type(tl.uint32)) + first // 2 + pair, first + 2 * pair < inside, ALL
    )
    even, odd = halves(pairs, tl.float16)
    return tl.reshape(tl.join(even, odd), (COUNT,))


@triton.jit
def load_token_params(params, PARTS: tl.constexpr, PAIRS: tl.constexpr):
    """Scales of both planes and minima of both planes, float16 [64] each.

    PAIRS: by `load_float16`, of use where Triton copies ahead and registers are left.
    """
    SECOND: tl.constexpr = (PARTS - 1) * TOKENS
    at = params.to(tl.pointer_type(tl.float16))
    if PAIRS:
        a = load_float16(at, 0, TOKENS, TOKENS, True)
        b = load_float16(at + SECOND, 0, TOKENS, TOKENS, True)
        c = load_float16(at + PARTS * TOKENS, 0, TOKENS, TOKENS, True)
        d = load_float16(at + PARTS * TOKENS + SECOND, 0, TOKENS, TOKENS, True)
    else:
        at += tl.arange(0, TOKENS)
        a = tl.load(at)
        b = tl.load(at + SECOND)
        c = tl.load(at + PARTS * TOKENS)
        d = tl.load(at + PARTS * TOKENS + SECOND)
    return a, b, c, d


@triton.jit
def add_sink(sinks, head, inside, top, total):
    """Maximum and sum of a softmax with a key without a value, and the factor for its values."""
    sink = tl.load(sinks + head, mask=inside, other=0.0) * LOG2E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return new_top, total * fade + tl.exp2(sink - new_top), fade


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """The oldest position that a query sees; below 0 for one before the first.

    window: tokens; of a chunk, at whose multiples windows begin, where WINDOW is below 0.
    """
    return position - position % window if WINDOW < 0 else position - window + 1


def window_constants(shape: HeadShape) -> tuple[int, int]:
    """Of a window its tokens, and what kernels are compiled for: 1, -1 for chunks, 0 for none."""
    size = abs(shape.reach)
    return size, shape.reach // max(1, size)


@triton.jit
def cap_scores(s, soft_cap):
    """soft_cap * tanh(s / soft_cap) in float32, without overflow for any s."""
    e = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / soft_cap))
    t = soft_cap * (1.0 - e) / (1.0 + e)
    return tl.where(s < 0, 0.0 - t, t)
