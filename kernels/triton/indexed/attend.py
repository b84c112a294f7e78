"""Attention to the tokens that an index chose, on a GPU: latents, gathered through block tables.

A tile of queries is heads of one row. It goes through the row's list, whose positions ascend: those
in blocks come first, whose keys are dequantized as they are gathered, then those in the ring, then
new ones. Where rows are few, lists are cut in parts, one program each, which `merge` joins.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.operands import require
from qoff.kernels.triton.attention.kv_tiles import LOG2E, TOKENS, form_constants, load_code_rows
from qoff.kernels.triton.attention.merge import join, merge_bytes
from qoff.kernels.triton.attention.prefill_tiles import exact_planes, load_where, weights
from qoff.kernels.triton.latent.tiles import attend_dense, load_part, store_found
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2
from qoff.kernels.triton.linear.nibbles import dot16


@dataclass(frozen=True)
class ChosenConfig:
    """`rows` heads of a tile, and how lists are cut."""

    rows: int
    num_warps: int
    chunk: int = 32  # channels of either half whose products are summed at a time
    keys: int = 16  # that are gathered at a time: more take too many registers
    least: int = 128  # tokens of a part


@triton.jit
def _load_gathered(
    record, token, first, COUNT: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, K_SCALE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """SIZE channels from `first` on of both halves of keys in blocks, float16; 0 from COUNT on.

    record, token: of each key, pointer to its block and number there.
    """
    ALL: tl.constexpr = COUNT % SIZE == 0
    WIDTH: tl.constexpr = 2 * HALF if BITS == 8 else HALF
    channel = (first + tl.arange(0, SIZE))[None, :]
    inside = channel < COUNT
    codes, at = record[:, None], token[:, None]
    a = load_code_rows(codes, at, channel, inside, WIDTH, BITS, ALL)
    b = a
    if BITS == 8:
        b = load_code_rows(codes + HALF, at, channel, inside, WIDTH, BITS, ALL)
    low, high = exact_planes(a, b, BITS, ASM)
    params = (record + K_SCALE).to(tl.pointer_type(tl.float16))[:, None] + channel
    low = low * load_where(params, inside, ALL) + load_where(params + 2 * HALF, inside, ALL)
    high = high * load_where(params + HALF, inside, ALL) + load_where(
        params + 3 * HALF, inside, ALL
    )
    return low, high


@triton.jit(do_not_specialize=["run", "max_blocks", "tokens"])
def chosen_attention_kernel(
    q,  # [tokens, HEADS, D], turned by RoPE
    k,  # [tokens, 1, D]
    row_start, start, pool, block_table, compressed, recent,
    chosen,  # int32 [tokens, TOP]
    order,
    outs,  # [parts, tokens, HEADS, VALUES]
    lses,
    scale,  # softmax scale * log2(e)
    ring,  # W
    q_stride, k_stride,
    run,  # places of a list in a part
    max_blocks,
    tokens,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUES: tl.constexpr,
    PAD: tl.constexpr, CHUNK: tl.constexpr, K_BITS: tl.constexpr, K_SCALE: tl.constexpr,
    NBYTES: tl.constexpr, TOP: tl.constexpr, KEYS: tl.constexpr, RING_HAS_NEW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Heads of one row against a part of its list.

    RING_HAS_NEW: `start` is the length of a sequence with its one new token, which is in the ring.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    EACH: tl.constexpr = VALUES // 2
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    row = tl.program_id(0) // TILES
    part = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    begin = tl.load(start + s)
    count = tl.minimum(begin, 1) if RING_HAS_NEW else tl.load(row_start + s + 1) - first_row
    if row >= count:
        return
    position = begin - 1 if RING_HAS_NEW else begin + row
    in_blocks = tl.load(compressed + s)
    head = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    inside = head < HEADS
    place = (first_row + row).to(tl.int64)
    queries = q + place * q_stride + head * HEAD_DIM
    listed = chosen + place * TOP
    if order is not None:
        listed = chosen + tl.load(order + place) * TOP
    first = part * run
    last = tl.minimum(tl.minimum(first + run, TOP), position + 1)
    packed = tl.zeros([64], tl.int32)
    old = tl.zeros([64], tl.int32)
    for at in range(first, last, 64):
        lane = at + tl.arange(0, 64)
        key = tl.load(listed + lane, mask=lane < last, other=2**31 - 1)
        packed += (key < in_blocks).to(tl.int32)
        old += (key < begin).to(tl.int32)
    packed_end = first + tl.sum(packed)
    old_end = first + tl.sum(old)
    low = tl.zeros([ROWS, PAD], tl.float32)
    high = tl.zeros([ROWS, PAD], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    table = block_table + s.to(tl.int64) * max_blocks
    for at in tl.range(first, packed_end, KEYS, num_stages=1):
        lane = at + tl.arange(0, KEYS)
        key = tl.load(listed + tl.minimum(lane, packed_end - 1))
        record = pool + tl.load(table + key // TOKENS).to(tl.int64) * NBYTES
        token = key % TOKENS
        score = tl.zeros([ROWS, KEYS], tl.float32)
        for channel in tl.range(0, HALF, CHUNK, num_stages=1):
            q_low, q_high = load_part(queries, inside, channel, HALF, CHUNK, HALF)
            k_low, k_high = _load_gathered(
                record, token, channel, HALF, CHUNK, HALF, K_BITS, K_SCALE, ASM
            )
            score = dot16(q_low.to(tl.float16), tl.trans(k_low), score, ASM)
            score = dot16(q_high.to(tl.float16), tl.trans(k_high), score, ASM)
        v_low, v_high = _load_gathered(record, token, 0, EACH, PAD, HALF, K_BITS, K_SCALE, ASM)
        seen = inside[:, None] & (lane < packed_end)[None, :]
        p, fade, top, total = weights(score, seen, scale, top, total, True)
        p = p.to(tl.float16)
        low = dot16(p, v_low, low * fade[:, None], ASM)
        high = dot16(p, v_high, high * fade[:, None], ASM)

    at_rows = position + tl.zeros([ROWS], tl.int32)
    base = recent + s.to(tl.int64) * ring * HEAD_DIM
    low, high, top, total = attend_dense(
        queries, inside, base, HEAD_DIM, base, HEAD_DIM, packed_end, old_end, ring, 0, at_rows,
        scale, low, high, top, total, EACH, PAD, HALF, CHUNK, KEYS, True, 1, ASM, listed,
    )  # fmt: skip
    if not RING_HAS_NEW:
        new = k + first_row.to(tl.int64) * k_stride
        low, high, top, total = attend_dense(
            queries, inside, new, k_stride, new, k_stride, old_end, last, 1, begin, at_rows,
            scale, low, high, top, total, EACH, PAD, HALF, CHUNK, KEYS, False, 1, ASM, listed,
        )  # fmt: skip
    target = (part * tokens + place) * HEADS + head
    store_found(outs, lses, target, inside, low, high, top, total, EACH, PAD)


def chosen_attention(
    q: Tensor,
    k: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    chosen: Tensor,
    config: ChosenConfig | None = None,
) -> Tensor:
    """What new tokens find at the positions that they chose, [T, Hq, latent] in q's type.

    q: [T, Hq, D], k: [T, 1, D], as for `latent.attention.latent_attention`. chosen: contiguous
    int32 [T, top], ascending; of a row at a position below `top` all positions up to its own. Its
    rows are in the places that the pass's `order` says. Raises OpError.
    """
    cache.check_queries(q, shape, None)
    cache.check_keys(k)
    step, form = cache.step, cache.form
    tokens, heads = len(step.positions), shape.heads
    if form.latent != shape.latent or not shape.latent or shape.kv_heads != 1:
        raise OpError(f"chosen tokens have latents of one KV head, not {shape}, {form}")
    if shape.reach or shape.soft_cap:
        raise OpError(f"attention to chosen tokens has neither window nor soft cap: {shape}")
    if len(q) != tokens or len(k) != tokens:
        raise OpError(f"{len(q)} queries and {len(k)} keys of a pass of {tokens} rows")
    require("chosen", chosen, (torch.int32,), (tokens, "top"), q.device)
    decodes, sequences = step.max_rows <= 1, len(step.start)
    kernel, config, processors = _bound(
        q.device, q.dtype, form, heads, chosen.shape[1], decodes, config
    )
    tiles = max(1, step.max_rows) * cdiv(heads, config.rows)
    parts, run = cut(tiles * sequences, chosen.shape[1], processors, config)
    outs = q.new_empty(parts, tokens, heads, form.value_dim)
    lses = q.new_empty(parts, tokens, heads, dtype=torch.float32)
    if tokens:
        kernel(
            (tiles, parts, sequences),
            q, k, step.row_start, step.length if decodes else step.start, cache.pool, step.table,
            step.packed, cache.recent_k, chosen, step.order, outs, lses,
            shape.scale * LOG2E.value, cache.recent_k.shape[1], q.stride(0), k.stride(0), run,
            step.table.stride(0), tokens,
        )  # fmt: skip
    return outs[0] if parts == 1 else join(outs, lses, parts)[0]


def cut(programs: int, top: int, processors: int, config: ChosenConfig) -> tuple[int, int]:
    """Into how many parts lists of `top` tokens are cut, and tokens of a part.

    programs: without cutting.
    """
    each = max(1, processors // max(1, programs))
    run = cdiv(max(config.least, cdiv(top, each)), config.keys) * config.keys
    return cdiv(top, run), run


@cache
def _bound(
    device: torch.device,
    dtype: torch.dtype,
    form: KVFormat,
    heads: int,
    top: int,
    decodes: bool,
    config: ChosenConfig | None,
) -> tuple[BoundKernel, ChosenConfig, int]:
    """The kernel for all that does not change from step to step, its tiles, and processors."""
    gpu = Gpu.of(device)
    config = config or heuristic(gpu.capability, heads)
    constants = form_constants(form)
    kernel = BoundKernel(
        chosen_attention_kernel,
        **{name: constants[name] for name in ("HEAD_DIM", "K_BITS", "K_SCALE", "NBYTES")},
        HEADS=heads,
        ROWS=config.rows,
        VALUES=form.value_dim,
        PAD=max(16, next_power_of_2(form.value_dim // 2)),
        CHUNK=config.chunk,
        TOP=top,
        KEYS=config.keys,
        RING_HAS_NEW=decodes,
        ASM=use_asm(),
        num_warps=config.num_warps,
        num_stages=1,
    )
    return kernel, config, gpu.processors


def heuristic(capability: int, heads: int) -> ChosenConfig:
    """As large a tile as registers and shared memory of the architecture hold."""
    if capability < 80:  # no tensor cores in Triton there: products take many registers
        return ChosenConfig(16, num_warps=8)
    # On 10.0 sums of 64 rows go to tensor memory, which is too small for them.
    most = 64 if capability < 100 else 32
    return ChosenConfig(max(16, min(most, next_power_of_2(heads))), num_warps=8)


def chosen_attention_bytes(
    tokens: int, heads: int, top: int, form: KVFormat, dtype: torch.dtype, device: torch.device
) -> int:
    """The most bytes that `chosen_attention` allocates: its results, and those of parts."""
    gpu = Gpu.of(device)
    config = heuristic(gpu.capability, heads)
    rows = tokens * heads
    # Cut in n parts, n times the tiles is `processors` at most.
    partial = min(cdiv(top, config.least) * rows, gpu.processors * config.rows)
    return (rows + partial) * merge_bytes(1, 1, form.value_dim, dtype.itemsize)
