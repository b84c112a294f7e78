"""Decode attention over the packed KV cache on the CPU: time, and the part of the read bandwidth.

Each case reads a pool far larger than the caches, beside torch's attention over the same tokens
uncompressed. With `--model`, also the demo model 4096 tokens deep, beside llama.cpp with its 4-bit
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench import native
from bench.bandwidth import BUFFER_BYTES, ReadBandwidth
from bench.cpu_decode import Work, prompts, sample_llama
from bench.demo import fetch_checkpoint, fetch_gguf
from bench.harness import Bar, Report, Samples, arguments, interleaved, timed, torch_threads
from bench.peers import llama_cpp
from qoff.errors import QoffError
from qoff.kernels.cpu.packed_attention import packed_attention
from qoff.kernels.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layer_cache import BlockTable, PackedTokens
from qoff.kernels.ragged import Ragged
from qoff.kernels.reference_kv import dequantize_blocks
from qoff.kvcache import KVQuant
from qoff.models.runtime import Runtime

KV_HEADS = 8
POOL_BYTES = 128 << 20  # at least, so that it is read from memory each time
_PEER_BYTES = 3 << 30  # of the uncompressed cache; beyond, torch is left out
_TOLERANCE = 2e-2
QOFF, FP32, BF16 = "qoff", "torch fp32", "torch bf16"


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

    def __init__(self, shape: Shape, least_bytes: int) -> None:
        self.shape, form = shape, KVFormat(shape.head_dim)
        blocks = shape.context // BLOCK_TOKENS
        used = shape.batch * blocks
        self.nbytes = used * KV_HEADS * form.nbytes
        copies = 1 + least_bytes // self.nbytes
        pool = torch.randint(256, (copies * used, KV_HEADS, form.nbytes), dtype=torch.uint8)
        _, k_scale, k_minimum, _, v_scale, v_minimum = form.views(pool)
        for scale, minimum in ((k_scale, k_minimum), (v_scale, v_minimum)):
            scale.copy_(0.1 + 0.2 * torch.rand(scale.shape))
            minimum.copy_(-7.5 * scale.float())
        ragged = Ragged.of([1] * shape.batch, [shape.context] * shape.batch)
        order = torch.randperm(copies * used).int().view(copies, shape.batch, blocks)
        counts = [shape.context] * shape.batch
        self._packed = [
            PackedTokens(form, pool, BlockTable(table.contiguous(), counts, ragged))
            for table in order
        ]
        self._q = torch.randn(shape.batch, KV_HEADS * shape.group * shape.head_dim)
        self._pool, self._form = pool, form

    def calls(self) -> dict[str, Callable[[], Tensor]]:
        """Return each alternative as a call; qoff's takes the next blocks of the pool."""
        shape, q = self.shape, self._q
        heads = KV_HEADS * shape.group
        scale = shape.head_dim**-0.5
        turns = cycle(self._packed)
        out: dict[str, Callable[[], Tensor]] = {
            QOFF: lambda: packed_attention(q, heads, next(turns), scale=scale)[0]
        }
        if 16 * shape.batch * shape.context * KV_HEADS * shape.head_dim > _PEER_BYTES:
            return out
        table = self._packed[0].table.blocks.long()
        # [batch, blocks, kv_heads, 64, D] -> [batch, kv_heads, tokens, D]
        keys, values = (
            x[table].transpose(1, 2).flatten(2, 3)
            for x in dequantize_blocks(self._pool[: int(table.max()) + 1], self._form)
        )
        for name, dtype in ((FP32, torch.float32), (BF16, torch.bfloat16)):
            operands = (x.to(dtype) for x in (q.view(shape.batch, heads, 1, -1), keys, values))
            query, key, value = operands
            out[name] = partial(scaled_dot_product_attention, query, key, value, enable_gqa=True)
        return out

    def check(self) -> None:
        """Raise QoffError unless qoff computes what torch does."""
        calls = self.calls()
        if FP32 not in calls:
            return
        truth = calls[FP32]().flatten()
        error = float((calls[QOFF]().flatten() - truth).norm() / truth.norm())
        if not error < _TOLERANCE:
            raise QoffError(f"{self.shape.name}: off by {error:.1%}, nothing measured")


def add_case(result: Report, shape: Shape, reading: ReadBandwidth, quick: bool) -> float:
    """Measure one shape into the report; returns the fraction of the read bandwidth."""
    operands = Operands(shape, (1 << 20) if quick else POOL_BYTES)
    operands.check()
    least_s = 0.001 if quick else 0.05
    calls = {name: timed(call, least_s) for name, call in operands.calls().items()}
    seconds = interleaved({**calls, **reading.ways()}, 2 if quick else 7)
    found, limit = seconds[QOFF], reading.best(seconds)
    rate = operands.nbytes / found.median
    ratios = {name: seconds[name].median / found.median for name in (FP32, BF16) if name in seconds}
    result.rows.append(
        (shape.name, f"{found.median * 1e3:.3f}", f"{found.spread:.0%}", f"{rate / 1e9:.1f}",
         f"{limit.median / 1e9:.1f}", f"{rate / limit.median:.2f}",
         *(f"{ratios[name]:.1f}" if name in ratios else "-" for name in (FP32, BF16)))
    )  # fmt: skip
    result.measured[shape.name] = {
        "cache_bytes": operands.nbytes,
        "read_bytes_per_s": limit.summary(),
        "seconds": {name: samples.summary() for name, samples in seconds.items()},
    }
    result.ratios[shape.name] = {"eta": rate / limit.median, **ratios}
    return rate / limit.median


def deep_decode(depth: int, rounds: int) -> dict[str, Samples]:
    """Tokens per second `depth` tokens deep: qoff by its cache's bits, llama.cpp by its types."""
    work = Work("deep", 1, depth, 33, "decode")
    names = {"qoff, 4-bit KV": KVQuant(), "qoff, float32 KV": None}
    checkpoint = fetch_checkpoint()
    runtimes = {name: Runtime(checkpoint, kv=kv) for name, kv in names.items()}
    vocab = next(iter(runtimes.values())).spec.vocab_size

    def sample(runtime: Runtime) -> Callable[[], float]:
        def measure() -> float:
            with torch_threads(1):
                return native.generate(runtime, prompts(work, vocab), work.new)[1].decode_rate

        return measure

    calls = {name: sample(runtime) for name, runtime in runtimes.items()}
    peers = []
    if llama_cpp.installed():
        for kind in ("q4_0", "f16"):
            peer = llama_cpp.LlamaCpp(
                fetch_gguf(), torch.get_num_threads(), context=depth + 64, kv_type=kind
            )
            peers.append(peer)
            calls[f"llama.cpp, {kind} KV"] = sample_llama(peer, work)
    try:
        return interleaved(calls, rounds)
    finally:
        for runtime in runtimes.values():
            runtime.close()
        for peer in peers:
            peer.close()


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv, model=(bool, False, "the demo model 4096 tokens deep, too"))
    shapes = QUICK_SHAPES if args.quick else SHAPES
    reading = ReadBandwidth((64 << 20) if args.quick else BUFFER_BYTES)
    result = Report(
        "cpu_attention",
        {"kv_heads": KV_HEADS, "quick": args.quick, "form": "4-bit K per channel, 4-bit V"},
        "decode attention over 4-bit blocks, 8 KV heads; eta: of the read bandwidth of the same "
        "minute; / torch: times as fast as it uncompressed",
        ("batch x context", "ms", "spread", "GB/s", "of", "eta", "/ torch fp32", "/ torch bf16"),
    )
    for shape in shapes:
        eta = add_case(result, shape, reading, args.quick)
        if shape.group <= 4 and shape.context >= 16384:
            result.bars.append(Bar(f"eta, {shape.name}", 0.7, eta))
    if args.model:
        found = deep_decode(256 if args.quick else 4096, 2 if args.quick else 5)
        result.measured["deep decode"] = {name: s.summary() for name, s in found.items()}
        for name, samples in found.items():
            result.notes.append(f"{name}: {samples.median:.1f} tok/s ({samples.spread:.0%})")
        if "llama.cpp, q4_0 KV" in found:
            ratio = found["qoff, 4-bit KV"].median / found["llama.cpp, q4_0 KV"].median
            result.bars.append(Bar("decode 4096 deep / llama.cpp with q4_0 KV", 4.0, ratio))
    result.publish(args.out)


if __name__ == "__main__":
    main()
