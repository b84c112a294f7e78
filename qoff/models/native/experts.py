"""A mixture of experts: which of them compute for a token, and where their weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.kernels.upload import on_device
from qoff.memory import EXPERTS, ChosenExperts, Expert, Weights
from qoff.memory.experts import ExpertWave
from qoff.memory.experts.on_cpu import CpuExperts
from qoff.models.forward_pass import WAVE_PAIRS, ForwardPass
from qoff.models.names import CORRECTION, GAINS
from qoff.models.spec_parts import ExpertsSpec

from .choices import Choice, Pairs
from .cpu_pairs import CpuPairs
from .linear import Steps, vector, wait_for


class Experts:
    """Computes the experts of a layer."""

    def __init__(self, spec: ExpertsSpec, ops: Ops) -> None:
        self.spec, self._ops, self._routing = spec, ops, spec.routing
        self._views: dict[tuple[int, ...], list[QExperts]] = {}  # by where they lie

    def forget_weights(self) -> None:
        """Hold no weights any more."""
        self._views.clear()

    def compute(
        self,
        layer: int,
        x: Tensor,
        scores: Tensor,
        weights: Weights,
        hidden: Tensor,
        into: Tensor | None = None,
    ) -> None:
        """hidden += the weighted sum of the outputs of each token's experts, [M, W].

        x: their inputs, [M, W]. scores: the router's, [M, experts]. into: is the sum instead.
        """
        gate_up, down = self._matrices(weights)
        mlp = self.spec.mlp(layer, gate_up, down, *self._biases(weights))
        residual, out = (hidden, hidden) if into is None else (None, into)
        self._ops.experts(x, *self.route(scores, weights), mlp, residual=residual, out=out)

    def route(self, scores: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Experts of each token, [M, T], and their weights."""
        vectors = (vector(weights, name) for name in (CORRECTION, GAINS))
        return self._ops.route(scores, self._routing, *vectors)

    def choice(
        self, routed: Tensor, x: Tensor, scores: Tensor, weights: Weights, part: slice
    ) -> Choice:
        """What the router chose for tokens whose experts come one by one.

        routed: what it was given. x: what experts are.
        """
        ids, shares = self.route(scores, weights)
        return Choice(part, x, ids.cpu(), shares, before=None if routed is x else routed)

    def in_waves(
        self,
        layer: int,
        weights: Weights,
        run: ForwardPass,
        choices: list[Choice],
        guesses: tuple[Expert, ...],
        into: Tensor | None = None,
        on_cpu: CpuExperts | None = None,
    ) -> Steps:
        """hidden += the outputs of experts that come in waves, as `compute` would have it.

        into: in place of the hidden states, [M, W]. on_cpu: experts that do not come for
        passes of few tokens; the CPU computes them meanwhile.

        What a pair of a token and an expert gives is kept until all have come and summed in the
        router's order, so that it does not matter in which waves they came. The first pass of a
        round that has a wave computes what all passes want of it.
        """
        if into is not None:
            into.zero_()
        mixture = run.mixture
        mixture.choices += choices
        if on_cpu is None or layer not in on_cpu.layers or not on_cpu.computes(len(run.input)):
            yield from self._waves(layer, weights, run, choices, guesses, into)
        else:
            if mixture.on_cpu is None:
                mixture.on_cpu = CpuPairs(layer, self.spec, on_cpu)
            pairs: CpuPairs = mixture.on_cpu
            try:
                pairs.add(choices)
                yield from self._waves(layer, weights, run, choices, guesses, into, pairs)
                pairs.finish(choices)
            except BaseException:
                pairs.abandon()
                raise
        mixture.done(choices)
        for choice in choices:
            if choice.weighted is not None:
                hidden = (run.input if into is None else into)[choice.part]
                self._ops.add_experts(choice.weighted, residual=hidden, out=hidden)
        return run.input

    def _waves(
        self,
        layer: int,
        weights: Weights,
        run: ForwardPass,
        choices: list[Choice],
        guesses: tuple[Expert, ...],
        into: Tensor | None,
        pairs: CpuPairs | None = None,
    ) -> Steps:
        """Wait for the experts that come, and compute them."""
        mixture = run.mixture
        wanted_ones = set[int]().union(*(choice.ids.flatten().tolist() for choice in choices))
        left = sorted(n for n in wanted_ones if pairs is None or not pairs.has(n))
        others = pairs is not None and mixture.passes > 1  # may begin what the CPU is to compute
        while left or others:
            others = False
            wanted = ChosenExperts(layer, tuple(left), guesses)
            found = yield from wait_for(run, wanted)
            wave = cast(ExpertWave, found[EXPERTS])
            if mixture.wave is not wave and wave.numbers:
                mixture.wave = wave
                biases = self._biases_of(wave, weights)
                mlp = self.spec.mlp(layer, wave.gate_up, wave.down, *biases)
                self._compute_wave(mixture.choices, wave, mlp, run.input if into is None else into)
            left = [number for number in left if number not in wave.numbers]
            if pairs is not None:
                pairs.take()
                others = any(one.on_cpu is None for one in mixture.choices)  # wait for more waves
        return run.input

    def by_jobs(
        self,
        layer: int,
        weights: Weights,
        run: ForwardPass,
        choices: list[Choice],
        following: int | None,
        guesses: Tensor | None,
        into: Tensor | None = None,
    ) -> None:
        """hidden += the outputs of experts that come by jobs of `run.expert_jobs`; see `in_waves`.

        guesses: of the layer `following`.
        """
        hidden = run.input if into is None else into
        biases = tuple(self._biases(weights))
        for choice in choices:
            jobs, rows = run.expert_jobs, hidden[choice.part]
            asked = jobs.ask(layer, choice.ids, following, guesses, biases)
            places = [
                None if bias is None else place
                for bias, place in zip(biases, asked.biases, strict=True)
            ]
            mlp = self.spec.mlp(layer, asked.gate_up, asked.down, *places)
            residual = rows if into is None else None
            self._ops.experts(
                choice.x, asked.slots, choice.weights, mlp, residual=residual, out=rows
            )
            jobs.release()

    def _compute_wave(
        self, choices: list[Choice], wave: ExpertWave, mlp: ExpertsMlp, hidden: Tensor
    ) -> None:
        """Compute the pairs whose experts are there: into `hidden` if these are all there are."""
        alike: dict[int, list[Pairs]] = {}  # passes of other sizes may have other kernels
        for choice in choices:
            slots = choice.slots(wave.table)
            if len(choices) == 1 and choice.weighted is None and slots.min() >= 0:
                rows, chosen = hidden[choice.part], on_device(slots, choice.x.device)
                self._ops.experts(choice.x, chosen, choice.weights, mlp, residual=rows, out=rows)
                return
            places = (slots.flatten() >= 0).nonzero()[:, 0]
            if len(places):
                some = Pairs(choice, places, slots.flatten()[places])
                alike.setdefault(slots.numel(), []).append(some)
        for count, all_of_it in alike.items():
            for some_of_it in _batches(all_of_it, min(count, WAVE_PAIRS)):
                self._compute_pairs(some_of_it, count, mlp)

    def _compute_pairs(self, some: list[Pairs], count: int, mlp: ExpertsMlp) -> None:
        """Compute pairs of choices of `count` pairs each."""
        like, (sizes, top_k) = some[0].choice.x, ([len(p.places) for p in some], self.spec.top_k)
        exact = torch.promote_types(like.dtype, torch.float32)
        device, shape = like.device, (sum(sizes), like.shape[1])
        x, out = like.new_empty(shape), like.new_empty(shape, dtype=exact)
        places = [on_device(pairs.places, device) for pairs in some]
        shares = []
        for pairs, which, rows in zip(some, places, x.split(sizes), strict=True):
            torch.index_select(pairs.choice.x, 0, which // top_k, out=rows)
            shares.append(pairs.choice.weights.flatten()[which])
        slots = on_device(torch.cat([pairs.slots for pairs in some])[:, None], device)
        weights = torch.cat(shares)[:, None]
        self._ops.experts(x, slots, weights, mlp, out=out, of=(count, self.spec.count))
        for (choice, *_), which, rows in zip(some, places, out.split(sizes), strict=True):
            if choice.weighted is None:
                choice.weighted = out.new_empty(*choice.ids.shape, shape[1])
            choice.weighted.flatten(0, 1).index_copy_(0, which, rows)

    def _biases(self, weights: Weights) -> list[Tensor | None]:
        """Those of gate and up and those of down, of all experts, [E, rows]; None for none."""
        found = (vector(weights, f"mlp.experts.{name}.bias") for name in self.spec.matrices)
        return [None if bias is None else bias.view(self.spec.count, -1) for bias in found]

    def _biases_of(self, wave: ExpertWave, weights: Weights) -> list[Tensor | None]:
        """The same of a wave's experts, at the numbers of their slots."""
        biases = self._biases(weights)
        if biases[0] is None:
            return biases
        device, numbers = biases[0].device, torch.tensor(wave.numbers)
        places, these = (on_device(x, device) for x in (wave.table[numbers], numbers))
        for bias, memory in zip(biases, wave.biases, strict=True):
            assert bias is not None
            memory[places] = bias[these].to(memory.dtype)
        return list(wave.biases)

    def _matrices(self, weights: Weights) -> list[QExperts]:
        """Those of gate and up and those down, of all experts of a layer."""
        last = self.spec.count - 1
        names = self.spec.matrices
        ends = (weights[f"mlp.experts.0.{names[0]}"], weights[f"mlp.experts.{last}.{names[1]}"])
        # Layers that stream come to the same places again and again.
        key = tuple(cast(QTensor, end).codes.data_ptr() for end in ends)
        if key not in self._views:
            self._views[key] = [
                QExperts.of(
                    [cast(QTensor, weights[f"mlp.experts.{e}.{name}"]) for e in range(last + 1)]
                )
                for name in names
            ]
        return self._views[key]


def likeliest(layer: int | None, ids: Tensor | None) -> tuple[Expert, ...]:
    """The experts of a layer that tokens chose, [M, T], those of most tokens first."""
    if layer is None or ids is None:
        return ()
    votes = Counter(ids.flatten().tolist())
    return tuple(Expert(layer, number) for number, _ in votes.most_common())


def _batches(some: Sequence[Pairs], most: int) -> Iterator[list[Pairs]]:
    """The pairs in parts of `most`, but for the last one."""
    batch, left = list[Pairs](), most
    for choice, places, slots in some:
        first = 0
        while first < len(places):
            part = slice(first, first + left)
            batch.append(Pairs(choice, places[part], slots[part]))
            first += left
            left -= len(batch[-1].places)
            if left == 0:
                yield batch
                batch, left = [], most
    if batch:
        yield batch
