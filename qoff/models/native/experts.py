"""A mixture of experts: which of them compute for a token, and where their weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.kernels.upload import on_device
from qoff.memory import EXPERTS, ChosenExperts, Expert, Weights
from qoff.memory.experts import ExpertWave
from qoff.models.forward_pass import WAVE_PAIRS, ForwardPass
from qoff.models.names import CORRECTION, GAINS
from qoff.models.spec_parts import ExpertsSpec

from .linear import Steps, vector, wait_for

MATRICES = ("gate_up_proj", "down_proj")


@dataclass
class Choice:
    """What the router chose for some tokens, and what their experts gave so far."""

    part: slice  # of the pass's tokens
    x: Tensor  # inputs of the experts, [M, H]
    ids: Tensor  # int64 [M, T], in host memory
    weights: Tensor  # [M, T]
    left: Tensor  # bool [M, T], in host memory: pairs that were not computed
    weighted: Tensor | None = None  # [M, T, H], if not all came at once


class Experts:
    """Computes the experts of a layer."""

    def __init__(self, spec: ExpertsSpec, ops: Ops) -> None:
        self.spec, self._ops, self._routing = spec, ops, spec.routing
        self._views: dict[tuple[int, ...], list[QExperts]] = {}  # by where they lie

    def compute(
        self,
        x: Tensor,
        scores: Tensor,
        weights: Weights,
        hidden: Tensor,
        into: Tensor | None = None,
    ) -> None:
        """hidden += the weighted sum of the outputs of each token's experts, [M, hidden_size].

        x: their inputs. scores: the router's, [M, experts]. into: is the sum instead.
        """
        gate_up, down = self._matrices(weights)
        mlp = self._mlp(gate_up, down, *self._biases(weights))
        residual, out = (hidden, hidden) if into is None else (None, into)
        self._ops.experts(x, *self.route(scores, weights), mlp, residual=residual, out=out)

    def route(self, scores: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Experts of each token, [M, T], and their weights."""
        vectors = (vector(weights, name) for name in (CORRECTION, GAINS))
        return self._ops.route(scores, self._routing, *vectors)

    def choice(self, x: Tensor, scores: Tensor, weights: Weights, part: slice) -> Choice:
        """What the router chose for tokens whose experts come one by one."""
        ids, shares = self.route(scores, weights)
        ids = ids.cpu()
        return Choice(part, x, ids, shares, torch.ones_like(ids, dtype=torch.bool))

    def in_waves(
        self,
        layer: int,
        weights: Weights,
        run: ForwardPass,
        choices: list[Choice],
        guesses: tuple[Expert, ...],
        into: Tensor | None = None,
    ) -> Steps:
        """hidden += the outputs of experts that come in waves, as `compute` would have it.

        into: in place of the hidden states, [M, hidden_size].

        What a pair of a token and an expert gives is kept until all have come and summed in the
        router's order, so that it does not matter in which waves they came.
        """
        left = sorted(set().union(*(choice.ids.unique().tolist() for choice in choices)))
        if into is not None:
            into.zero_()
        while left:
            wanted = ChosenExperts(layer, tuple(left), guesses)
            found = yield from wait_for(run, wanted)
            wave = cast(ExpertWave, found[EXPERTS])
            biases = self._biases_of(wave, weights)
            mlp = self._mlp(wave.gate_up, wave.down, *biases)
            for choice in choices:
                sums = run.input if into is None else into
                self._compute_wave(choice, wave, mlp, sums[choice.part])
            left = [number for number in left if number not in wave.numbers]
        for choice in choices:
            if choice.weighted is not None:
                hidden = (run.input if into is None else into)[choice.part]
                self._ops.add_experts(choice.weighted, residual=hidden, out=hidden)
        return run.input

    def _compute_wave(
        self, choice: Choice, wave: ExpertWave, mlp: ExpertsMlp, hidden: Tensor
    ) -> None:
        """Compute the pairs whose experts are there: into `hidden` where these are all."""
        x, (count, top_k), device = choice.x, choice.ids.shape, choice.x.device
        slots = wave.table[choice.ids]
        there = choice.left & (slots >= 0)
        if there.all():
            chosen = on_device(slots, device), choice.weights
            self._ops.experts(x, *chosen, mlp, residual=hidden, out=hidden)
            choice.left.fill_(False)
            return
        pairs = there.flatten().nonzero()[:, 0]
        if not len(pairs):
            return
        exact = torch.promote_types(x.dtype, torch.float32)
        if choice.weighted is None:
            choice.weighted = x.new_empty(count, top_k, x.shape[1], dtype=exact)
        for some in pairs.split(WAVE_PAIRS):
            which, places = on_device(some, device), on_device(slots.flatten()[some], device)
            choice.weighted.flatten(0, 1)[which] = self._ops.experts(
                x[which // top_k],
                places[:, None],
                choice.weights.flatten()[which, None],
                mlp,
                out=x.new_empty(len(some), x.shape[1], dtype=exact),
                of=(slots.numel(), self.spec.count),
            )
        choice.left &= ~there

    def _mlp(self, gate_up: QExperts, down: QExperts, *biases: Tensor | None) -> ExpertsMlp:
        """How these compute."""
        spec = self.spec
        return ExpertsMlp(gate_up, down, spec.activation, *biases, weighs_input=spec.weighs_input)

    def _biases(self, weights: Weights) -> list[Tensor | None]:
        """Those of gate and up and those of down, of all experts, [E, rows]; None for none."""
        found = (vector(weights, f"mlp.experts.{name}.bias") for name in MATRICES)
        return [None if bias is None else bias.view(self.spec.count, -1) for bias in found]

    def _biases_of(self, wave: ExpertWave, weights: Weights) -> list[Tensor | None]:
        """The same of a wave's experts, at the numbers of their slots."""
        found: list[Tensor | None] = []
        numbers = torch.tensor(wave.numbers)
        for bias, memory in zip(self._biases(weights), wave.biases, strict=True):
            if bias is not None:
                memory[wave.table[numbers]] = bias[numbers].to(memory.dtype)
            found.append(None if bias is None else memory)
        return found

    def _matrices(self, weights: Weights) -> list[QExperts]:
        """Those of gate and up and those down, of all experts of a layer."""
        last = self.spec.count - 1
        ends = (weights["mlp.experts.0.gate_up_proj"], weights[f"mlp.experts.{last}.down_proj"])
        # Layers that stream come to the same places again and again.
        key = tuple(cast(QTensor, end).codes.data_ptr() for end in ends)
        if key not in self._views:
            self._views[key] = [
                QExperts.of(
                    [cast(QTensor, weights[f"mlp.experts.{e}.{name}"]) for e in range(last + 1)]
                )
                for name in MATRICES
            ]
        return self._views[key]
