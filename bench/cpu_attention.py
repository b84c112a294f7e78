"""Decode attention over the packed KV cache on the CPU: time, and the part of the read bandwidth.

Each case reads a pool far larger than the caches, beside torch's attention over the same tokens
uncompressed, beside reading the same records alone, and beside itself on a block that stays in the
cache: where that is no faster, what limits is arithmetic. `--bits 4,2` is for other codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.bandwidth import BUFFER_BYTES, ReadBandwidth, read_pieces
from bench.block_instructions import block_instructions
from bench.harness import Bar, Report, arguments
from bench.sampling import interleaved, timed
from qoff.errors import QoffError
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from qoff.kvcache import KVQuant
from qoff.memory.arena import map_pages

KV_HEADS = 8
POOL_BYTES = 128 << 20  # at least, so that it is read from memory each time
_PEER_BYTES = 3 << 30  # of the uncompressed cache; beyond, torch is left out
_TOLERANCE = 2e-2
QOFF, CACHED, RECORDS = "qoff", "qoff, one block", "the records, read alone"
FP32, BF16 = "torch fp32", "torch bf16"


@dataclass(frozen=True)
class Shape:
    """Sequences of `context` tokens; `group` query heads to each of 8 KV heads."""

    batch: int
    context: int
    head_dim: int
    group: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.context}, D {self.head_dim}, GQA {self.group}"


SHAPES = (
    *(Shape(1, 16384, dim, group) for dim in (64, 128) for group in (1, 4, 8)),
    *(Shape(1, context, 128, 4) for context in (1024, 4096, 131072)),
    Shape(16, 4096, 128, 1),
    Shape(64, 1024, 128, 4),
)
QUICK_SHAPES = (Shape(1, 256, 64, 3), Shape(2, 128, 128, 1))


class Operands:
    """A pool of random blocks, and the same tokens uncompressed."""

    def __init__(self, shape: Shape, form: KVFormat, least_bytes: int) -> None:
        self.shape = shape
        blocks = shape.context // BLOCK_TOKENS
        used = shape.batch * blocks
        self.nbytes = used * KV_HEADS * form.nbytes
        copies = 1 + least_bytes // self.nbytes
        pool = map_pages(copies * self.nbytes).view(copies * used, KV_HEADS, form.nbytes)
        pool.random_(256)
        _, k_scale, k_minimum, _, v_scale, v_minimum = form.views(pool)
        for bits, scale, minimum in (
            (form.k_bits, k_scale, k_minimum),
            (form.v_bits, v_scale, v_minimum),
        ):
            top = 2**bits - 1
            scale.copy_((0.1 + 0.2 * torch.rand(scale.shape)) * 15 / top)
            minimum.copy_(-top / 2 * scale.float())
        ragged = Ragged.of([1] * shape.batch, [shape.context] * shape.batch)
        order = torch.randperm(copies * used).int().view(copies, shape.batch, blocks)
        counts = [shape.context] * shape.batch
        self._packed = [
            PackedTokens(form, pool, BlockTable(table.contiguous(), counts, ragged))
            for table in (*order, torch.zeros_like(order[0]))
        ]
        self._q = torch.randn(shape.batch, KV_HEADS * shape.group * shape.head_dim)
        self.pool, self.form = pool, form

    def _addresses(self, packed: PackedTokens) -> Tensor:
        """Addresses of the records, in the order in which they are attended."""
        blocks = packed.table.blocks.long()[:, None, :]  # [batch, 1, blocks]
        kv_heads = torch.arange(KV_HEADS)[:, None]  # [kv_heads, 1]
        records = (blocks * KV_HEADS + kv_heads) * self.form.nbytes
        return (self.pool.data_ptr() + records).flatten()

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return each alternative as a call; qoff's takes the next blocks of the pool."""
        shape, q = self.shape, self._q
        heads = KV_HEADS * shape.group
        scale = shape.head_dim**-0.5
        *different, same = self._packed
        turns = cycle(different)
        places = cycle([self._addresses(packed) for packed in different])
        out: dict[str, Callable[[], Any]] = {
            QOFF: lambda: packed_attention(q, heads, next(turns), scale=scale)[0],
            CACHED: lambda: packed_attention(q, heads, same, scale=scale)[0],
            RECORDS: lambda: read_pieces(next(places), self.form.nbytes),
        }
        if 16 * shape.batch * shape.context * KV_HEADS * shape.head_dim > _PEER_BYTES:
            return out
        table = self._packed[0].table.blocks.long()
        # [batch, blocks, kv_heads, 64, D] -> [batch, kv_heads, tokens, D]
        keys, values = (
            x[table].transpose(1, 2).flatten(2, 3)
            for x in dequantize_blocks(self.pool[: int(table.max()) + 1], self.form)
        )
        for name, dtype in ((FP32, torch.float32), (BF16, torch.bfloat16)):
            operands = (x.to(dtype) for x in (q.view(shape.batch, heads, 1, -1), keys, values))
            query, key, value = operands
            out[name] = partial(scaled_dot_product_attention, query, key, value, enable_gqa=True)
        return out


def check(shape: Shape, calls: dict[str, Callable[[], Any]]) -> None:
    """Raise QoffError unless qoff, at its first call, computes what torch does."""
    if FP32 not in calls:
        return
    truth = calls[FP32]().flatten()
    error = float((calls[QOFF]().flatten() - truth).norm() / truth.norm())
    if not error < _TOLERANCE:
        raise QoffError(f"{shape.name}: off by {error:.1%}, nothing measured")


def add_case(
    result: Report, shape: Shape, form: KVFormat, reading: ReadBandwidth, quick: bool
) -> float:
    """Measure one shape into the report; returns the fraction of the read bandwidth."""
    operands = Operands(shape, form, (1 << 20) if quick else POOL_BYTES)
    calls = operands.calls()
    check(shape, calls)
    least_s = 0.001 if quick else 0.05
    ways = {name: timed(call, least_s) for name, call in calls.items()}
    seconds = interleaved({**ways, **reading.ways()}, 2 if quick else 7)
    found, limit = seconds[QOFF], reading.best(seconds)
    rate = operands.nbytes / found.median
    ratios = {
        name: seconds[name].median / found.median
        for name in (CACHED, RECORDS, FP32, BF16)
        if name in seconds
    }
    eta = rate / limit.median
    result.rows.append(
        (shape.name, f"{found.median * 1e3:.3f}", f"{found.spread:.0%}", f"{rate / 1e9:.1f}",
         f"{limit.median / 1e9:.1f}", f"{eta:.2f}", f"{ratios[RECORDS]:.2f}",
         f"{ratios[CACHED]:.2f}",
         *(f"{ratios[name]:.1f}" if name in ratios else "-" for name in (FP32, BF16)))
    )  # fmt: skip
    result.measured[shape.name] = {
        "cache_bytes": operands.nbytes,
        "read_bytes_per_s": limit.summary(),
        "seconds": {name: samples.summary() for name, samples in seconds.items()},
        "us_per_cached_block": 1e6
        * default_pool().threads
        * seconds[CACHED].median
        * operands.form.nbytes
        / operands.nbytes,  # and KV head, of each thread
    }
    result.ratios[shape.name] = {"eta": eta, **ratios}
    return eta


def add_instructions(result: Report, shapes: Sequence[Shape]) -> None:
    """Count what a block takes, for every head size and group measured."""
    counted = {}
    for head_dim, rows in sorted({(shape.head_dim, shape.group) for shape in shapes}):
        found = block_instructions(head_dim, rows)
        if found is None:
            result.notes.append("no VNNI: the instructions of a block are not counted")
            return
        counted[f"D {head_dim}, GQA {rows}"] = asdict(found) | {
            "bytes_per_cycle": found.bytes_per_cycle
        }
        result.notes.append(found.note(head_dim))
    result.measured["instructions of a block"] = counted


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv, bits=(str, "4", "bits of K and V, as --kv has them"))
    shapes, kv = QUICK_SHAPES if args.quick else SHAPES, KVQuant.of(args.bits)
    reading = ReadBandwidth((64 << 20) if args.quick else BUFFER_BYTES)
    result = Report(
        "cpu_attention",
        {
            "kv_heads": KV_HEADS,
            "quick": args.quick,
            "form": f"{kv.k_bits}-bit K per channel, {kv.v_bits}-bit V",
        },
        "decode attention over packed blocks, 8 KV heads; eta: of the read bandwidth of the same "
        "minute; records: of the rate at which the same records are read alone; one block: the "
        "time for as many tokens that are one block in the processor's cache, over this time; "
        "/ torch: times as fast as it uncompressed",
        ("batch x context", "ms", "spread", "GB/s", "of", "eta", "records", "one block",
         "/ torch fp32", "/ torch bf16"),
    )  # fmt: skip
    for shape in shapes:
        form = KVFormat(shape.head_dim, kv.k_bits, kv.v_bits)
        eta = add_case(result, shape, form, reading, args.quick)
        if shape.group <= 4 and shape.context >= 16384:
            result.bars.append(Bar(f"eta, {shape.name}", 0.7, eta))
    if (kv.k_bits, kv.v_bits) == (4, 4):
        add_instructions(result, shapes)
    result.publish(args.out)


if __name__ == "__main__":
    main()
