"""Launching every variant's kernel by its launcher, on meta tensors, with a runner that launches
nothing but binds arguments and options as Triton would on a GPU of compute capability 9.0.

`python -m tests.kernels.launches`, without TRITON_INTERPRET, prints what differs from the variants
as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

from bench.gpu_limits import WARP
from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.attention.append import kv_append
from qoff.kernels.triton.attention.decode import decode_attention
from qoff.kernels.triton.attention.merge import merge
from qoff.kernels.triton.attention.prefill import prefill_attention
from qoff.kernels.triton.elementwise.interleaved_silu_mul import gated_silu
from qoff.kernels.triton.elementwise.rms_norm import rms_norm
from qoff.kernels.triton.elementwise.rope import rope
from qoff.kernels.triton.elementwise.silu_mul import silu_mul
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.variant import Variant, shipped
from qoff.kernels.triton.linear.dequantize import dequantize
from qoff.kernels.triton.linear.linear import w4_linear
from qoff.kernels.triton.linear.quantize import quantize
from qoff.kernels.triton.linear.split_k import add_splits
from qoff.kernels.triton.moe.experts import add_up
from qoff.kernels.triton.moe.pairs import gemv_pairs
from qoff.kernels.triton.moe.product import Product
from qoff.kernels.triton.moe.tiles import config_for, tile_product, tiles

CAPABILITY = 90
GPU = Gpu(CAPABILITY, 128)  # as variants assume
GRID_MAX = (2**31 - 1, 65535, 65535)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SEQUENCES, KV_HEADS, BLOCKS = 3, 8, 128

Launch = dict[str, Any]


def record(launches: list[Launch]) -> None:
    """From now on launches are appended to `launches`, and nothing is compiled."""
    backend = CUDABackend(GPUTarget("cuda", CAPABILITY, WARP))

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        bind = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        self._pack_args(backend, kwargs, bound, specialization, options)  # refuses unknown options
        assert all(0 < n <= most for n, most in zip(grid, GRID_MAX, strict=False)), grid
        kinds = dict(zip(self.arg_names, specialization, strict=True))
        launches.append(
            {
                "kernel": self,
                "types": {name: kind for name, (kind, _) in kinds.items() if kind != "constexpr"},
                "constants": {n: bound[n] for n, (kind, _) in kinds.items() if kind == "constexpr"},
                "aligned": {name for name, (kind, of) in kinds.items() if "D" in str(of)},
                "options": options,
            }
        )

    jit.JITFunction.run = run
    Gpu.of = staticmethod(lambda device: GPU)


def differences(variant: Variant, launch: Launch) -> list[str]:
    """How a launch differs from the variant that stands for it."""
    found = []
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    if launch["options"] != options:
        found.append(f"options {launch['options']}, not {options}")
    ones = {n for n, t in variant.types.items() if t[0] == "i" and launch["constants"].get(n) == 1}
    constants = {n: value for n, value in launch["constants"].items() if n not in ones}
    for what, have, want in (
        ("constants", constants, dict(variant.constants)),
        ("types", launch["types"], {n: t for n, t in variant.types.items() if n not in ones}),
    ):
        found += [
            f"{what}: {name} is {have.get(name)}, not {want.get(name)}"
            for name in sorted(have.keys() | want.keys())
            if have.get(name, "absent") != want.get(name, "absent")
        ]
    numbers = {name for name, kind in variant.types.items() if kind[0] in "*iu"}
    missing = numbers - variant.unaligned - launch["aligned"] - ones
    found += [f"{name} is no multiple of 16" for name in sorted(missing)]
    return found


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(torch.int32, *shape)


def dtype_of(variant: Variant, name: str) -> torch.dtype:
    return DTYPES[variant.types[name][1:]]


def linear(variant: Variant) -> None:
    c, dtype = variant.constants, dtype_of(variant, "x")
    m, bits = c.get("TOKENS") or c["BLOCK_M"], c["BITS"]
    group_bytes = c["GROUP_BYTES"]
    group = group_bytes * 8 // bits
    n = 1 << 10 if c["PARTIAL"] else 1 << 16
    row_bytes = (1 << 16) + (0 if c["EVEN"] else max(16, group_bytes))
    k = row_bytes * 8 // bits
    scale_min = empty(dtype_of(variant, "scale_min"), k // group, n, 2)
    bias = empty(dtype, n) if "bias" in variant.types else None
    if c["PARTIAL"]:  # the launch has no bias, the sum of the parts has
        bias = empty(dtype, n)
    codes = empty(torch.uint8, n, row_bytes)
    w4_linear(empty(dtype, m, k), QTensor(codes, scale_min, (n, k), bits, group, "split32"), bias)


def splits(variant: Variant) -> None:
    partial = empty(torch.float32, variant.constants["SPLITS"], 8, 1024)
    dtype = dtype_of(variant, "out")
    add_splits(partial, empty(dtype, 1024), empty(dtype, 8, 1024))


def of_experts(variant: Variant) -> None:
    c, dtype = variant.constants, dtype_of(variant, "x")
    bits, group = c["BITS"], c["GROUP_BYTES"] * 8 // c["BITS"]
    row_bytes = (1 << 12) + (0 if c["EVEN"] else max(16, c["GROUP_BYTES"]))
    experts, n, k = 8, 1 << 10, row_bytes * 8 // bits
    scale_min = empty(dtype_of(variant, "scale_min"), experts, k // group, n, 2)
    codes = empty(torch.uint8, experts, n, row_bytes)
    weight = QExperts(codes, scale_min, (n, k), bits, group, "split32")
    bias = empty(dtype, experts, n) if c["BIAS"] else None
    topk_ids, topk_weights = empty(torch.int64, 3, 2), empty(torch.float32, 3, 2)
    if c["ACTIVATION"]:
        x = empty(dtype, 3, k)
        product = Product.gate_up(x, topk_ids, topk_weights, weight, bias, c["ACTIVATION"])
    else:
        product = Product.down(empty(dtype, 6, k), topk_ids, topk_weights, weight, bias)
    if variant.kernel.fn.__name__ == "experts_gemv_kernel":
        gemv_pairs(product)
        return
    config = config_for(c["BLOCK_M"], c["GROUP_BYTES"])
    tile_product(product, tiles(topk_ids, experts, config.block_m), config)


def added_up(variant: Variant) -> None:
    per_token, out = variant.constants["PER_TOKEN"], empty(dtype_of(variant, "out"), 3, 4096)
    residual = out if variant.constants["RESIDUAL"] else None
    add_up(empty(torch.float32, 3 * per_token, 4096), residual, out)


def dequantized(variant: Variant) -> None:
    bits, run = variant.constants["BITS"], variant.constants["RUN"]
    group = run * 8 // bits
    scale_min = empty(dtype_of(variant, "scale_min"), 4096 // group, 4096, 2)
    codes = empty(torch.uint8, 4096, 4096 * bits // 8)
    weight = QTensor(codes, scale_min, (4096, 4096), bits, group, "split32")
    dequantize(weight, dtype_of(variant, "out"))


def quantized(variant: Variant) -> None:
    c = variant.constants
    w = empty(dtype_of(variant, "w"), 4096, 4096)
    quantize(w, c["BITS"], c["GROUP"], dtype_of(variant, "scale_min"))


def normed(variant: Variant) -> None:
    dtype, columns = dtype_of(variant, "x"), variant.constants["COLUMNS"]
    x = empty(dtype, 7, columns)
    rms_norm(x, empty(dtype, columns), 1e-5, x if variant.constants["ADD"] else None)


def gated(variant: Variant) -> None:
    silu_mul(empty(dtype_of(variant, "out"), 3, 2 * 14336))


def gated_in_turn(variant: Variant) -> None:
    gated_silu(empty(dtype_of(variant, "out"), 3, 2 * 14336))


def turned(variant: Variant) -> None:
    c = variant.constants
    x = empty(dtype_of(variant, "x"), 3, 32, 2 * c["PAIRS"] + c["REST"])
    table = empty(torch.float32, 9, c["PAIRS"])
    rope(x, empty(torch.int64, 3), table, table, c["INTERLEAVED"])


def merged(variant: Variant) -> None:
    c = variant.constants
    outs = empty(dtype_of(variant, "outs"), c["PARTS"], 16, 32, c["D"])
    merge(outs, empty(torch.float32, c["PARTS"], 16, 32), dtype_of(variant, "out"))


def cache(form: KVFormat, dtype: torch.dtype, rows: int, new: int, older: bool) -> DeviceLayerCache:
    """A pass of `rows` tokens of each sequence that completes `new` blocks."""
    recent = empty(dtype, SEQUENCES, 64, KV_HEADS, form.head_dim)
    step = PassTables(
        **{name: ints(SEQUENCES) for name in ("start", "length", "packed", "after")},
        row_start=ints(SEQUENCES + 1),
        table=ints(SEQUENCES, BLOCKS),
        positions=ints(rows),
        max_rows=rows,
        max_packed=64 * BLOCKS,
        max_new_blocks=new,
        resident_from=ints(SEQUENCES) if older else None,
    )
    pool = empty(torch.uint8, 9, KV_HEADS, form.nbytes)
    return DeviceLayerCache(form, pool, recent, recent, step)


def appended(variant: Variant) -> None:
    c, dtype = variant.constants, dtype_of(variant, "k")
    form = KVFormat(2 * c["HALF"], c.get("K_BITS", 4), c.get("V_BITS", 4))
    k = empty(dtype, 7, KV_HEADS, form.head_dim)
    table = empty(torch.float32, 9, c["PAIRS"])
    tables = (table, table) if c["PAIRS"] else None
    kv_append(k, k, cache(form, dtype, 5, 2, False), tables, c["ROPE"] == "interleaved")


def attended(variant: Variant) -> None:
    c = variant.constants
    writes = "scratch_k" in variant.types and "q" not in variant.types
    dtype = torch.float16 if writes else dtype_of(variant, "q")
    form = KVFormat(c["HEAD_DIM"], c["K_BITS"], c["V_BITS"])
    shape = HeadShape(
        heads=KV_HEADS * c.get("GROUP", 4),
        kv_heads=KV_HEADS,
        head_dim=form.head_dim,
        scale=0.125,
        window=100 if c["WINDOW"] else None,
        soft_cap=30.0 if c.get("SOFT_CAP") else 0.0,
    )
    sinks = empty(torch.float32, shape.heads) if c.get("SINKS") else None
    decode = variant.op == "decode_attention"
    rows = SEQUENCES if decode else 4096 if writes or c["SCRATCH"] else 16
    q = empty(dtype, rows, shape.heads, form.head_dim)
    kept = cache(form, dtype, rows, 0, c["RESIDENT_FROM"])
    if decode:
        decode_attention(q, kept, shape, sinks)
        return
    k = empty(dtype, rows, KV_HEADS, form.head_dim)
    prefill_attention(q, k, k, kept, shape, sinks)


LAUNCHERS: dict[str, Callable[[Variant], None]] = {
    "gemv_kernel": linear,
    "skinny_kernel": linear,
    "add_splits_kernel": splits,
    "experts_gemv_kernel": of_experts,
    "experts_tile_kernel": of_experts,
    "experts_sum_kernel": added_up,
    "dequantize_kernel": dequantized,
    "quantize_kernel": quantized,
    "rms_norm_kernel": normed,
    "silu_mul_kernel": gated,
    "gated_silu_kernel": gated_in_turn,
    "rope_kernel": turned,
    "merge_kernel": merged,
    "pack_kernel": appended,
    "write_kernel": appended,
    "decode_attention_kernel": attended,
    "prefill_attention_kernel": attended,
    "scratch_kernel": attended,
}


def main() -> None:
    launches: list[Launch] = []
    record(launches)
    found, count = [], 0
    for variant in shipped(CAPABILITY):
        launches.clear()
        LAUNCHERS[variant.kernel.fn.__name__](variant)
        mine = [launch for launch in launches if launch["kernel"] is variant.kernel]
        lines = [differences(variant, launch) for launch in mine] or [["is not launched"]]
        found += [f"{variant.op} {variant.name}: {line}" for line in lines[0]]
        count += 1
    print(json.dumps({"triton": triton.__version__, "variants": count, "differences": found}))


if __name__ == "__main__":
    main()
