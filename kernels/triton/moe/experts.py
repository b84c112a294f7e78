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
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.widening import read_bits
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.overlap import (
    let_next_begin,
    overlap_options,
    overlaps,
    wait_for_earlier,
)
from qoff.kernels.triton.launch.sizes import cdiv

from .pairs import fma_pairs, gemv_pairs
from .product import UNIT, Product
from .tiles import Tiles, block_for, config_for, tile_product, tiles, tiles_bytes

PAIRS_MAX = 1 << 15  # in one launch; more tokens go one part after the other
_BLOCK = 512
_WARPS = 4


@triton.jit
def experts_sum_kernel(
    weighted, out, H, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """out [M, H] = the sum of each token's PER_TOKEN rows of float32 [M * T, H], in their order."""
    wait_for_earlier(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(PER_TOKEN):
        total += tl.load(weighted + (token * PER_TOKEN + t) * H + column, mask=mask, other=0.0)
    let_next_begin(OVERLAP)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=mask)


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    mlp: ExpertsMlp,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    of: tuple[int, int] | None = None,
    block: int | None = None,
) -> Tensor:
    """Return residual + sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias), [M, H].

    Where `mlp.weighs_input`, topk_weights multiply x in place of the outputs, in its dtype. x:
    float16 or bfloat16 [M, H]; topk_ids: int64 [M, T], not checked, as that would wait for the
    GPU; topk_weights: float32 [M, T]; all contiguous. mlp: packing split32, every expert's codes
    and scales at multiples of 16 bytes; biases of any float dtype. Activations are rounded to the
    dtype of x, nothing else is but the result, which is in it, or in that of `out`. of: pairs and
    experts that the rule goes by, of a choice that these are a part of. block: pairs of a tile, 0
    for each by itself; None leaves it to the rule. Raises OpError.
    """
    _check_weights(gate_up=mlp.gate_up, down=mlp.down)
    device, (rows, hidden) = mlp.gate_up.device, mlp.gate_up.shape
    require("x", x, FLOATS, ("M", hidden), device)
    require("topk_ids", topk_ids, (torch.int64,), (len(x), "T"), device)
    if topk_ids.shape[1] < 1:
        raise OpError("a token chooses at least one expert; topk_ids is [M, 0]")
    require("topk_weights", topk_weights, (torch.float32,), topk_ids.shape, device)
    gate_up_bias = _bias("gate_up_bias", mlp.gate_up_bias, x, (mlp.gate_up.count, rows))
    down_bias = _bias("down_bias", mlp.down_bias, x, (mlp.down.count, hidden))
    into, out = out, torch.empty_like(x) if out is None or residual is not None else out
    if of is not None and block is None:
        block = rule(*of, Gpu.of(x.device).capability)
    together = max(1, PAIRS_MAX // topk_ids.shape[1])
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        for first in range(0, len(x), together):
            part = slice(first, first + together)
            inputs, chosen = x[part], (topk_ids[part], topk_weights[part])
            if mlp.weighs_input:
                inputs = (inputs[:, None] * chosen[1][..., None]).flatten(0, 1).to(x.dtype)
                chosen = chosen[0], torch.ones_like(chosen[1])
            found: dict[int, Tiles] = {}
            product = Product(
                inputs, *chosen, mlp.gate_up, gate_up_bias, mlp.activation, mlp.gated, mlp.limit
            )
            inner = _compute(product, block, found)
            product = Product(inner, *chosen, mlp.down, down_bias)
            add_up(_compute(product, block, found), out[part])
        return out if residual is None else torch.add(out, residual, out=into)


def _check_weights(**weights: QExperts) -> None:
    for name, weight in weights.items():
        if weight.packing != "split32":
            raise OpError(f"{name} is of packing {weight.packing}; the op takes split32")
        if read_bits(weight.bits, weight.packing) != weight.bits:
            raise OpError(f"{name} has {weight.bits} bits, which are none for a GPU")
        starts = (
            weight.codes.storage_offset(),
            weight.scale_min.storage_offset() * weight.scale_min.element_size(),
        )
        if any(number % UNIT for number in (*starts, *weight.strides)):
            raise OpError(
                f"{name}: codes and scales of every expert start at multiples of {UNIT} bytes of "
                f"their storage, not at {starts} and every {weight.strides} bytes"
            )


def _bias(name: str, bias: Tensor | None, x: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """In the dtype of x."""
    if bias is None:
        return None
    bias = bias.to(x.dtype)
    require(name, bias, (x.dtype,), shape, x.device)
    return bias


def _compute(p: Product, block: int | None, found: dict[int, Tiles]) -> Tensor:
    """A product, in the way that the rule says. found: tiles of the same pairs by their size."""
    capability, experts = Gpu.of(p.x.device).capability, p.weight.count
    block = rule(p.pairs, experts, capability) if block is None else block
    if not block:
        return fma_pairs(p) if capability < 80 else gemv_pairs(p)
    config = config_for(block, p.group_bytes, capability)
    size = config.block_m  # small groups want smaller ones on some GPUs
    if size not in found:
        found[size] = tiles(p.topk_ids, experts, size)
    return tile_product(p, found[size], config)


def experts_bytes(
    tokens: int, top_k: int, count: int, inner: int, hidden: int, dtype: torch.dtype
) -> int:
    """The most bytes `experts` allocates for M tokens of T experts each, out of `count`.

    Biases, the result, both products of the tokens that go together, and their pairs sorted by
    expert. inner: values between the products, of an expert; hidden: of a token.
    """
    pairs = min(tokens, max(1, PAIRS_MAX // top_k)) * top_k
    values = count * (2 * inner + hidden) + tokens * hidden + pairs * inner
    return values * dtype.itemsize + 4 * pairs * hidden + 2 * tiles_bytes(pairs, count)


def rule(pairs: int, experts: int, capability: int) -> int:
    """Pairs of a tile, or 0 for pairs each by itself: where few experts have several."""
    if capability < 80 or pairs <= max(16, experts):
        return 0
    return block_for(pairs, experts)


def add_experts(
    weighted: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return residual + the sum of each token's float32 weighted [M, T, H] in their order.

    In the dtype of the residual or of `out`, of which one is there, like `experts`.
    """
    like = residual if out is None else out
    assert like is not None
    total = torch.empty_like(like, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(weighted):
        add_up(weighted.flatten(0, 1), total)
        if residual is not None:
            return torch.add(total, residual, out=out)
        return total if out is None else out.copy_(total)


def add_up(weighted: Tensor, out: Tensor) -> None:
    """out [M, H] = the sum of each token's rows of float32 weighted [M * T, H]."""
    tokens, hidden = out.shape
    experts_sum_kernel[(tokens, cdiv(hidden, _BLOCK))](
        weighted,
        out,
        hidden,
        PER_TOKEN=len(weighted) // tokens,
        BLOCK=_BLOCK,
        OVERLAP=overlaps(out.device),
        num_warps=_WARPS,
        num_stages=1,
        **overlap_options(out.device),
        **LAUNCH,
    )
