"""The MLP of a mixture of experts on the CPU, beside reading the chosen experts' bytes and a loop.

The loop is over the chosen experts, in torch, on weights dequantized beforehand to float32, as a
model's own code has it. kt-kernel's backends on 4-bit weights of their own, with a thread for each
core and with one fewer (its caller waits without sleeping), take turns with it where `bench.peers
kt-kernel` has installed them. Every call takes other experts, so that weights come from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import weight_bound
from bench.bandwidth import BUFFER_BYTES, ReadBandwidth
from bench.harness import Bar, Report, arguments
from bench.peers import kt_experts
from bench.weight_bound import HEADER, QOFF, Case, measure
from qoff.kernels.cpu.moe.experts import experts
from qoff.kernels.layout.packing import packed_shapes
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor

GROUP = 64
TOKENS = (1, 16, 512)
QUICK_TOKENS = (1, 16)
DRAWS = 16  # different choices of experts that calls take in turn
KT_TOKENS = (1, 16)  # at which qoff has to be as fast as kt-kernel
BAR = 0.70  # of the read bandwidth, at one token
_TOLERANCE = 1e-3  # of the result's RMS

NARROW, LOOP = "qoff, 8-bit activations", "torch loop, ready fp32"


@dataclass(frozen=True)
class Shape:
    """A layer's experts: how many, how many of them a token takes, and the sizes of one."""

    name: str
    experts: int
    per_token: int
    hidden: int
    inner: int


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880),
)
QUICK_SHAPES = (Shape("small", 16, 2, 256, 128),)


class Operands:
    """One layer's experts, as in its file and as float32."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.name = shape, f"{shape.name}, {shape.per_token} of {shape.experts}"
        self.gate_up, self.down = random_experts(shape)
        self.nbytes = self.gate_up.expert(0).nbytes + self.down.expert(0).nbytes
        self.ready = [
            (self.gate_up.expert(e).dequantize().T, self.down.expert(e).dequantize().T)
            for e in range(shape.experts)
        ]
        split = [(*_gate_and_up(gate_up.T), down.T) for gate_up, down in self.ready]
        counts = {max(1, torch.get_num_threads() - 1), torch.get_num_threads()}
        self.peers = {
            _with_threads(name, n): kt_experts.KtExperts(
                split, shape.per_token, max(TOKENS), name, GROUP, n
            )
            for name in kt_experts.methods(shape.inner)
            for n in counts
        }

    def draws(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Return top-k ids and weights of the tokens, DRAWS times; in turn all experts occur."""
        shape, found = self.shape, []
        generator = torch.Generator().manual_seed(tokens)
        numbers = torch.empty(0, dtype=torch.int64)
        for _ in range(DRAWS):
            picked = []
            for _ in range(tokens):
                if len(numbers) < shape.per_token:
                    numbers = torch.randperm(shape.experts, generator=generator)
                picked.append(numbers[: shape.per_token])
                numbers = numbers[shape.per_token :]
            topk_weights = torch.rand(tokens, shape.per_token, generator=generator)
            found.append((torch.stack(picked), topk_weights.softmax(1)))
        return found

    def calls(self, tokens: int) -> dict[str, Callable[[], Tensor]]:
        """Return each alternative as a call that takes the next draw."""
        x = torch.randn(tokens, self.shape.hidden, generator=torch.Generator().manual_seed(tokens))
        draws = self.draws(tokens)
        wide, narrow, loop = cycle(draws), cycle(draws), cycle(draws)
        theirs = {name: cycle(draws) for name in self.peers}

        def qoff(draw: tuple[Tensor, Tensor], bits: int) -> Tensor:
            mlp = ExpertsMlp(self.gate_up, self.down, "silu")
            return experts(x, *draw, mlp, activation_bits=bits)

        return {
            QOFF: lambda: qoff(next(wide), 16),
            NARROW: lambda: qoff(next(narrow), 8),
            LOOP: lambda: self.loop(x, *next(loop)),
            **{name: partial(_on_next, peer, x, theirs[name]) for name, peer in self.peers.items()},
        }

    def size(self, tokens: int) -> tuple[float, int]:
        """Bytes of the chosen experts, a mean over the draws, and operations of a call."""
        shape, draws = self.shape, self.draws(tokens)
        chosen = sum(len(topk_ids.unique()) for topk_ids, _ in draws) / len(draws)
        return self.nbytes * chosen, 6 * tokens * shape.per_token * shape.hidden * shape.inner

    def loop(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Expert by expert, over those that are chosen."""
        out = torch.zeros_like(x)
        for e in topk_ids.unique().tolist():
            token, place = torch.where(topk_ids == e)
            gate_up, down = self.ready[e]
            gate, up = (x[token] @ gate_up).view(len(token), -1, 2, 16).unbind(2)
            y = (F.silu(gate) * up).reshape(len(token), -1) @ down
            out.index_add_(0, token, y * topk_weights[token, place, None])
        return out


def _with_threads(method: str, n: int) -> str:
    return f"{method}, {n} thread{'s' * (n > 1)}"


def _fastest(case: Case, method: str) -> float | None:
    """How many times faster than kt-kernel with its best number of threads qoff is."""
    found = [case.ratio(name) for name in case.seconds if name.startswith(method)]
    return min(found, default=None)


def _on_next(
    peer: kt_experts.KtExperts, x: Tensor, draws: Iterator[tuple[Tensor, Tensor]]
) -> Tensor:
    return peer(x, *next(draws))


def _gate_and_up(w: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up [inner, hidden] of their rows in turns of 16 [2 * inner, hidden]."""
    gate, up = w.reshape(-1, 2, 16, w.shape[1]).unbind(1)
    return gate.reshape(-1, w.shape[1]), up.reshape(-1, w.shape[1])


def random_experts(shape: Shape) -> tuple[QExperts, QExperts]:
    """gate_up and down in one buffer, expert by expert; elements are about 1 / sqrt(K)."""
    sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    forms = [packed_shapes(size, 4, GROUP, "rows16") for size in sizes]
    generator = torch.Generator().manual_seed(0)
    matrices: tuple[list[QTensor], list[QTensor]] = ([], [])
    counts = [(torch.Size(c).numel(), 2 * torch.Size(s).numel()) for c, s in forms]
    nbytes = sum(sum(pair) for pair in counts)
    buffer = torch.randint(
        256, (shape.experts, nbytes), dtype=torch.uint8, generator=generator
    ).view(-1)
    start = 0
    for _ in range(shape.experts):
        for size, form, count, found in zip(sizes, forms, counts, matrices, strict=True):
            middle, stop = start + count[0], start + sum(count)
            codes = buffer[start:middle].view(form[0])
            scale_min = buffer[middle:stop].view(torch.float16).view(form[1])
            scale = (0.5 + torch.rand(form[1], generator=generator)) / (4.6 * size[1] ** 0.5)
            scale[:, :, 1] *= -7.5
            scale_min.copy_(scale)
            found.append(QTensor(codes, scale_min, size, 4, GROUP, "rows16"))
            start = stop
    return QExperts.of(matrices[0]), QExperts.of(matrices[1])


def check(operands: Operands) -> None:
    """Raise QoffError unless qoff and the loop compute the same."""
    weight_bound.check(operands, LOOP, (QOFF,), _TOLERANCE)


def checked(shapes: Sequence[Shape]) -> Iterator[Operands]:
    """The experts of one shape after the other; only one is in memory at a time."""
    for shape in shapes:
        operands = Operands(shape)
        check(operands)
        yield operands


def report(cases: Sequence[Case], settings: dict) -> Report:
    """Return the table, ratios and bars."""
    result = Report(
        "experts",
        settings,
        f"MLP of a mixture of experts, 4 bits, group {GROUP}; eta: bytes of the chosen experts, of "
        "the read bandwidth of the same minute; / peer: times as fast as it",
        ("experts", *HEADER, "/ torch loop", "8-bit ms", *(f"/ {x}" for x in kt_experts.METHODS)),
    )
    for case in cases:
        theirs = {x: _fastest(case, x) for x in kt_experts.METHODS}
        ratios = {LOOP: case.ratio(LOOP)} | {x: r for x, r in theirs.items() if r is not None}
        shown = [f"{ratios[x]:.2f}" if x in ratios else "" for x in kt_experts.METHODS]
        narrow = f"{case.seconds[NARROW].median * 1e3:.3f}"
        result.rows.append((case.name, *case.row(), f"{ratios[LOOP]:.2f}", narrow, *shown))
        case.add_to(result, ratios)
    result.bars = [
        Bar(f"eta at M=1, {case.name}", BAR, case.eta) for case in cases if case.tokens == 1
    ]
    result.bars += [
        Bar(f"x {name} at M={case.tokens}, {case.name}", 1.0, ratio)
        for case in cases
        if case.tokens in KT_TOKENS
        for name in kt_experts.METHODS
        if (ratio := _fastest(case, name)) is not None
    ]
    worst = min(case.ratio(LOOP) for case in cases)
    result.bars.append(Bar("x torch loop on ready float32 weights, worst case", 1.0, worst))
    return result


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv)
    rounds, least_s, buffer = (3, 0.002, 64 << 20) if args.quick else (5, 0.03, BUFFER_BYTES)
    shapes, tokens = (QUICK_SHAPES, QUICK_TOKENS) if args.quick else (SHAPES, TOKENS)
    cases = measure(checked(shapes), tokens, ReadBandwidth(buffer), rounds, least_s)
    settings = {"rounds": rounds, "group": GROUP, "least_s": least_s, "quick": args.quick}
    report(cases, settings).publish(args.out)


if __name__ == "__main__":
    main()
