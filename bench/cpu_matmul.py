"""The int4 matmul on the CPU beside torch's int4 op, dequantize + GEMM, and ready fp32 weights.

Weights rotate over enough copies that one token's product reads them from memory, not from cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from bench import weight_bound
from bench.bandwidth import BUFFER_BYTES, ReadBandwidth
from bench.harness import Bar, Report, arguments
from bench.peers.int4 import DequantizeGemm, TorchInt4
from bench.random_model import GROUP, random_matrix
from bench.weight_bound import HEADER, QOFF, Case, measure
from qoff.kernels.cpu.linear.linear import w4_linear

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (576, 1536))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_SHAPES, QUICK_TOKENS = ((576, 1536),), (1, 16)
COPIES_BYTES = 64 << 20  # all copies of the packed weight together take more
_TILE_ROWS = 256  # of the tiled dequantize + GEMM
_TOLERANCE = 0.03  # of the result's RMS: the torch op rounds activations and scales to bfloat16

TORCH, WHOLE, TILED, READY = (
    "torch int4",
    "dequantize + GEMM",
    "dequantize tiles + GEMM",
    "fp32 GEMM, ready weights",
)


class Operands:
    """The copies of one weight in every alternative's form."""

    def __init__(self, n: int, k: int) -> None:
        numbers = torch.Generator().manual_seed(0)
        nbytes = random_matrix((16, k), 4, numbers).nbytes * n // 16
        count = COPIES_BYTES // nbytes + 2
        self.weights = [random_matrix((n, k), 4, numbers) for _ in range(count)]
        self.name, self.shape, self.nbytes = f"{n}x{k}", (n, k), self.weights[0].nbytes
        self.int4 = [TorchInt4(w) for w in self.weights]
        whole: dict[str, Tensor] = {}
        tiled: dict[str, Tensor] = {}
        self.whole = [DequantizeGemm(w, n, whole) for w in self.weights]
        self.tiled = [DequantizeGemm(w, _TILE_ROWS, tiled) for w in self.weights]
        self.ready = [w.dequantize().T for w in self.weights[: COPIES_BYTES // (4 * n * k) + 2]]

    def calls(self, tokens: int) -> dict[str, Callable[[], Tensor]]:
        """Return each alternative as a call that takes the next copy."""
        n, k = self.shape
        x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens))
        half, out = x.bfloat16(), torch.empty(tokens, n)
        weights, int4, ready = cycle(self.weights), cycle(self.int4), cycle(self.ready)
        whole, tiled = cycle(self.whole), cycle(self.tiled)
        return {
            QOFF: lambda: w4_linear(x, next(weights), out=out),
            TORCH: lambda: next(int4)(half),
            WHOLE: lambda: next(whole)(x, out),
            TILED: lambda: next(tiled)(x, out),
            READY: lambda: torch.mm(x, next(ready), out=out),
        }

    def size(self, tokens: int) -> tuple[float, int]:
        """Bytes of the packed weight, and operations of a product."""
        n, k = self.shape
        return self.nbytes, 2 * n * k * tokens


def check(operands: Operands) -> None:
    """Raise QoffError unless all alternatives compute the same product."""
    weight_bound.check(operands, READY, (QOFF, TORCH, WHOLE, TILED), _TOLERANCE)


def checked(shapes: Sequence[tuple[int, int]]) -> Iterator[Operands]:
    """The operands of one shape after the other; only one is in memory at a time."""
    for n, k in shapes:
        operands = Operands(n, k)
        check(operands)
        yield operands


def report(cases: Sequence[Case], settings: dict) -> Report:
    """Return the table, ratios and bars."""
    result = Report(
        "cpu_matmul",
        settings,
        f"int4 matmul, group {GROUP}; eta: of the read bandwidth of the same minute; "
        "/ peer: times as fast as it",
        ("N x K", *HEADER, "/ torch int4", "/ dequant + GEMM", "/ in tiles", "/ ready fp32",
         "/ best int4"),
    )  # fmt: skip
    for case in cases:
        ratios = {peer: case.ratio(peer) for peer in (TORCH, WHOLE, TILED, READY)}
        ratios["best int4"] = min(ratios[peer] for peer in (TORCH, WHOLE, TILED))
        name = case.name.replace("x", " x ")
        result.rows.append((name, *case.row(), *(f"{ratio:.2f}" for ratio in ratios.values())))
        case.add_to(result, ratios)
    single = [case for case in cases if case.tokens == 1]
    result.bars = [
        Bar("x torch int4 at M=1, worst shape", 1.0, min(c.ratio(TORCH) for c in single)),
        Bar(
            "x dequantize + GEMM (whole or tiles), worst shape and M",
            1.0,
            min(min(c.ratio(WHOLE), c.ratio(TILED)) for c in cases),
        ),
        *(Bar(f"eta at M=1, {c.name}", 0.85, c.eta) for c in single if c.name == "4096x4096"),
    ]
    return result


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv)
    rounds, least_s, buffer = (3, 0.002, 64 << 20) if args.quick else (7, 0.03, BUFFER_BYTES)
    shapes, tokens = (QUICK_SHAPES, QUICK_TOKENS) if args.quick else (SHAPES, TOKENS)
    cases = measure(checked(shapes), tokens, ReadBandwidth(buffer), rounds, least_s)
    settings = {"rounds": rounds, "group": GROUP, "least_s": least_s, "quick": args.quick}
    report(cases, settings).publish(args.out)


if __name__ == "__main__":
    main()
