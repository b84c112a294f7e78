"""What 4-bit weights cost a model, by solver, group size and library.

    python -m bench.weights --text FILE --calibration FILE [--model PATH] [--spread]

Predictions of the model with layers' matrices quantized and dequantized, against those of the model
as it is, all in float32: mean KL divergence in nats a token and its 99th percentile, how often the
likeliest token is the same, and the ratio of perplexities; standard errors are over pieces of text.
Embedding and head stay as they are. Without --model it is the demo model, whose own weights lie on
a grid of 4 bits in groups of 32; --spread moves each of them by a random part of a step of that
grid, up to half of one, so that no format has the grid for itself. bitsandbytes and hqq are
measured where they are installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from bench.demo import fetch_gguf
from bench.harness import Report, arguments
from qoff.cli.convert import calibration_ids
from qoff.eval import peers
from qoff.memory.plan import EMBEDDING
from qoff.models.convert.builder import Builder
from qoff.models.convert.layerwise import Layerwise
from qoff.models.convert.unconverted import Unconverted
from qoff.models.sources.safetensors import open_source
from qoff.quant import Format, QuantConfig, quantize
from qoff.quant.compensated import compensated
from qoff.quant.solvers import SOLVERS

GROUPS = (64, 32, 128)
TEXTS, CALIBRATION = 8, 8  # pieces of 512 tokens
QUICK_TOKENS = 32
Solve = Callable[[Tensor, Tensor | None], Tensor]  # a matrix, moments of its inputs: what is left


class Model:
    """A model in float32, and what it predicts on texts, int64 [texts, tokens]."""

    def __init__(self, path: Path, ids: Tensor, spread: bool = False) -> None:
        self._model = Unconverted.of(open_source(path))
        self._floats = Builder(self._model.source, QuantConfig(), True)
        self._spread = spread
        self._outer = {w.name: self._floats.floats(w) for w in self._model.units[-1][1]}
        self._ids, self._run = ids, Layerwise(self._model.spec, ids)
        self._final = self._through(lambda _, weights: weights)

    def loss(self, solve: Solve, calibration: Tensor | None = None) -> dict[str, float]:
        """Quantize all matrices of layers, each calibrated behind layers that are, and compare."""
        other = None
        if calibration is not None:
            run = Layerwise(self._model.spec, calibration)
            other = run, run.embedded(self._outer[EMBEDDING])

        def solved(layer: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
            nonlocal other
            moments: Mapping[str, Tensor] = {}
            if other is not None:
                moments = _moments(other[0], layer, weights, other[1])
            found = {
                name: solve(w, moments.get(name)) if w.dim() == 2 else w
                for name, w in weights.items()
            }
            if other is not None:
                other = other[0], other[0].run(layer, found, other[1])
            return found

        return self._compared(self._through(solved))

    def _through(self, change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]]) -> Tensor:
        """Final hidden states, with each layer's weights changed."""
        hidden = self._run.embedded(self._outer[EMBEDDING])
        random = torch.Generator().manual_seed(0)
        for layer in range(self._model.spec.num_layers):
            weights = {w.name: self._floats.floats(w) for w in self._model.units[layer][1]}
            if self._spread:
                weights = {n: _spread(w, random) for n, w in weights.items()}
            hidden = self._run.run(layer, change(layer, weights), hidden)
        return hidden

    def _compared(self, found: Tensor) -> dict[str, float]:
        columns = [torch.cat(x) for x in zip(*self._pieces(found), strict=True)]
        divergence, same, surprise = (x.view(self._ids.shape) for x in columns)
        by_text = surprise[:, :-1].mean(1)
        error = len(self._ids) ** 0.5
        return {
            "kl": float(divergence.mean()),
            "kl_error": float(divergence.mean(1).std()) / error,
            "kl_99": float(divergence.flatten().quantile(0.99)),
            "same_top": float(same.mean()),
            "perplexity_ratio": math.exp(float(by_text.mean())),
            "perplexity_error": float(by_text.std()) / error,
        }

    def _pieces(self, found: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Divergence, agreement, and more surprise at the next token, of some rows at a time."""
        following = self._ids.roll(-1, 1).flatten()
        step = self._run.logit_rows
        for a, b, token in zip(
            self._final.split(step), found.split(step), following.split(step), strict=True
        ):
            p, q = (self._run.logits(self._outer, x).log_softmax(-1) for x in (a, b))
            surprise = (p - q).gather(1, token[:, None])[:, 0]
            yield (p.exp() * (p - q)).sum(1), (p.argmax(1) == q.argmax(1)).float(), surprise


def _moments(
    run: Layerwise, layer: int, weights: Mapping[str, Tensor], hidden: Tensor
) -> dict[str, Tensor]:
    called = {id(w): name for name, w in weights.items()}
    found: dict[str, Tensor] = {}

    def seen(matrix: object, x: Tensor, _: Tensor) -> None:
        name = called[id(matrix)]
        into = found.setdefault(name, x.new_zeros(x.shape[1], x.shape[1]))
        into.addmm_(x.T, x)

    run.run(layer, weights, hidden, seen)
    return found


def _spread(w: Tensor, random: torch.Generator) -> Tensor:
    """A matrix that lay on a grid of 4 bits in groups of 32, anywhere between its points."""
    if w.dim() != 2:
        return w
    step = quantize(w, 4, 32, "rtn").scale_min[..., 0].T.float().repeat_interleave(32, 1)
    return w + (torch.rand(w.shape, generator=random) - 0.5) * step


def _form(w: Tensor, group: int) -> Format:
    """4 bits, in the largest groups up to `group` that divide the columns of a matrix."""
    return Format(4, max(g for g in (32, 64, 128) if g <= group and w.shape[1] % g == 0))


def _qoff(solver: str, group: int) -> Solve:
    return lambda w, _: quantize(w, 4, _form(w, group).group_size, solver).dequantize()


def _gptq(group: int) -> Solve:
    def solve(w: Tensor, moments: Tensor | None) -> Tensor:
        assert moments is not None
        return compensated(w, moments, _form(w, group)).dequantize()

    return solve


def _nf4(group: int) -> Solve:
    return lambda w, _: peers.nf4(w, group)


def _hqq(group: int) -> Solve:
    return lambda w, _: peers.hqq(w, _form(w, group).group_size)


PEERS = {"bitsandbytes": _nf4, "hqq": _hqq}


def ways(groups: Sequence[int]) -> dict[str, tuple[Solve, bool]]:
    """What is compared: how a matrix is quantized, and whether that wants calibration."""
    found: dict[str, tuple[Solve, bool]] = {}
    for group in groups:
        found |= {f"{name}, {group}": (_qoff(name, group), False) for name in SOLVERS}
        found[f"gptq, {group}"] = (_gptq(group), True)
        for name, peer in PEERS.items():
            if find_spec(name) is not None:
                found[f"{name} package, {group}"] = (peer(group), False)
    return found


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__,
        argv,
        model=(Path, None, "a GGUF file or a directory with safetensors; default: the demo model"),
        text=(Path, None, "what losses are measured on"),
        calibration=(Path, None, "another text, for gptq"),
        spread=(bool, False, "weights anywhere between the points of the grid they came from"),
    )
    path = args.model or fetch_gguf()
    if args.text is None or args.calibration is None:
        raise SystemExit("say --text FILE and --calibration FILE, two texts of the same kind")
    ids, calibration = (calibration_ids(path, file) for file in (args.text, args.calibration))
    ids, calibration = ids[:: max(1, len(ids) // TEXTS)][:TEXTS], calibration[:CALIBRATION]
    if args.quick:
        ids, calibration = ids[:2, :QUICK_TOKENS], calibration[:2, :QUICK_TOKENS]
    model = Model(path, ids, args.spread)
    report = Report(
        "weights",
        {"tokens": ids.numel(), "calibration": calibration.numel(), "spread": args.spread},
        "4-bit weights against the model as it is; solver and group size",
        ("", "KL, nats", "+-", "99 %", "same token", "perplexity", "+-"),
    )
    for name, (solve, wants) in ways(GROUPS[:1] if args.quick else GROUPS).items():
        found = model.loss(solve, calibration if wants else None)
        report.measured[name] = found
        report.rows.append((name, *(f"{value:.4f}" for value in found.values())))
    report.publish(args.out)


if __name__ == "__main__":
    main()
