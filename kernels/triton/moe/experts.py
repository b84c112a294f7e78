"""The MLP of a mixture of experts on a GPU, on 4- or 8-bit codes: two products and a sum.

Few pairs of a token and an expert are computed each by itself (`pairs`), many are sorted by expert
and computed in tiles (`tiles`). Weighted outputs are kept in float32 and
summed for each token in the order of its experts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.qexperts import QExperts, check_mlp
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import LAUNCH

from .pairs import fma_pairs, gemv_pairs
from .product import UNIT, Product
from .tiles import Tiles, block_for, config_for, tile_product, tiles, tiles_bytes

PAIRS_MAX = 1 << 15  # in one launch; more tokens go one part after the other
_BLOCK = 512
_WARPS = 4


@triton.jit
def experts_sum_kernel(
    weighted,  # float32 [M * T, H]
    residual,
    out,
    H,
    PER_TOKEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [M, H] = residual + the sum of each token's PER_TOKEN rows, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(PER_TOKEN):
        total += tl.load(weighted + (token * PER_TOKEN + t) * H + column, mask=mask, other=0.0)
    if RESIDUAL:
        total += tl.load(residual + token * H + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=mask)


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: QExperts,
    down: QExperts,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Return residual + sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias) [M, H].

    x: float16 or bfloat16 [M, H]; topk_ids: int64 [M, T], not checked, as that would wait for the
    GPU; topk_weights: float32 [M, T]. gate_up: E x [2I, H], rows in blocks of 16 of gate and of up
    in turn; down: E x [H, I]; packing split32, every expert's codes and scales at multiples of 16
    bytes. Biases: [E, 2I] and [E, H], residual and out: [M, H], in the dtype of x; out may be x or
    the residual. All contiguous. Activations are rounded to the dtype of x, nothing else is but the
    result. activation: see `reference.experts.activate`. block: pairs of a tile, 0 for each by
    itself; None leaves it to the rule. Raises OpError.
    """
    check_mlp(gate_up, down, activation)
    _check_weights(gate_up=gate_up, down=down)
    _check(x, topk_ids, topk_weights, gate_up, gate_up_bias, down_bias, residual, out)
    out = torch.empty_like(x) if out is None else out
    together = max(1, PAIRS_MAX // topk_ids.shape[1])
    for first in range(0, len(x), together):
        rows = slice(first, first + together)
        picked, weights = topk_ids[rows], topk_weights[rows]
        one = Product.gate_up(x[rows], picked, weights, gate_up, gate_up_bias, activation)
        two = Product.down(one.out, picked, weights, down, down_bias)
        _compute(one, two, block)
        add_up(two.out, None if residual is None else residual[rows], out[rows])
    return out


def _check_weights(**weights: QExperts) -> None:
    for name, weight in weights.items():
        if weight.packing != "split32":
            raise OpError(f"{name} is of packing {weight.packing}; the op takes split32")
        starts = (
            weight.codes.storage_offset(),
            weight.scale_min.storage_offset() * weight.scale_min.element_size(),
        )
        if any(number % UNIT for number in (*starts, *weight.strides)):
            raise OpError(
                f"{name}: codes and scales of every expert start at multiples of {UNIT} bytes of "
                f"their storage, not at {starts} and every {weight.strides} bytes"
            )


def _check(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: QExperts,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> None:
    device, (rows, hidden) = gate_up.device, gate_up.shape
    require("x", x, FLOATS, ("M", hidden), device)
    require("topk_ids", topk_ids, (torch.int64,), (len(x), "T"), device)
    if topk_ids.shape[1] < 1:
        raise OpError("a token chooses at least one expert; topk_ids is [M, 0]")
    require("topk_weights", topk_weights, (torch.float32,), topk_ids.shape, device)
    for name, tensor, shape in (
        ("gate_up_bias", gate_up_bias, (gate_up.count, rows)),
        ("down_bias", down_bias, (gate_up.count, hidden)),
        ("residual", residual, x.shape),
        ("out", out, x.shape),
    ):
        if tensor is not None:
            require(name, tensor, (x.dtype,), shape, device)


def _compute(one: Product, two: Product, block: int | None) -> None:
    """Both products, in the way that the rule says."""
    gpu = Gpu.of(one.x.device)
    if block is None:
        block = rule(one.pairs, one.weight.count, gpu.capability)
    if not block:
        for product in (one, two):
            (fma_pairs if gpu.capability < 80 else gemv_pairs)(product)
        return
    found: dict[int, Tiles] = {}  # by size; small groups want smaller ones on some GPUs
    for product in (one, two):
        config = config_for(block, product.group_bytes)
        size = config.block_m
        if size not in found:
            found[size] = tiles(one.topk_ids, one.weight.count, size)
        tile_product(product, found[size], config)


def experts_bytes(
    tokens: int, top_k: int, count: int, inner: int, hidden: int, itemsize: int
) -> int:
    """The most bytes `experts` allocates for M tokens of T experts each, out of `count`.

    The result, both products of the tokens that go together, and their pairs sorted by expert.
    inner: values between the products, of an expert; hidden: of a token.
    """
    pairs = min(tokens, max(1, PAIRS_MAX // top_k)) * top_k
    products = pairs * (inner * itemsize + 4 * hidden)
    return tokens * hidden * itemsize + products + 2 * tiles_bytes(pairs, count)


def rule(pairs: int, experts: int, capability: int) -> int:
    """Pairs of a tile, or 0 for pairs each by itself: where few experts have several."""
    if capability < 80 or pairs <= max(16, experts):
        return 0
    return block_for(pairs, experts)


def add_up(weighted: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """out [M, H] = residual + the sum of each token's rows of float32 weighted [M * T, H]."""
    tokens, hidden = out.shape
    experts_sum_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
        weighted,
        residual,
        out,
        hidden,
        PER_TOKEN=len(weighted) // tokens,
        RESIDUAL=residual is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        num_stages=1,
        **LAUNCH,
    )
