"""A mixture in virtual time: which experts texts take, and layers that wait for them alone."""

from __future__ import annotations

from collections.abc import Set
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qoff.memory import EXPERTS, ChosenExperts, Expert, Weights, WeightStore
from qoff.memory.experts import ExpertCache, ExpertWave, StreamedExperts
from qoff.memory.experts.on_cpu import CpuExperts, CpuLayer
from qoff.memory.experts.routes import MadeUpRoutes, RecordedRoutes, Routes
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.choices import Chosen
from qoff.models.native.decoder import Decoder
from qoff.models.native.experts import Experts, likeliest
from qoff.models.native.layer import Layer
from qoff.models.native.linear import Steps, wait_for
from qoff.models.spec_parts import ExpertsSpec

from .ops import SimulatedOps

_TIMES, _MOST = 3, 64  # what passes before ask for, in slots; rounds of them, at most


class Router:
    """What tokens choose: those that decode as texts do, those of prompts each alike likely.

    routes: that a run recorded; None: made up. Of a prompt, the first tokens are the recorded ones.
    """

    def __init__(self, experts: ExpertsSpec, routes: RecordedRoutes | None = None) -> None:
        self._experts, self._recorded = experts, routes
        self._place = np.cumsum(experts.layers) - 1  # among the layers with experts
        self._random = np.random.default_rng(0)
        self.begin(1)

    def begin(self, texts: int) -> None:
        """Have so many sequences decode from now on."""
        experts, layers = self._experts, sum(self._experts.layers)
        routes: Routes = self._recorded or MadeUpRoutes(layers, experts.count, experts.top_k)
        self._texts, self._steps = texts, routes.steps(texts)
        self._taken: list[NDArray[np.int64]] = []  # by step, until all layers have had it
        self._dropped, self._tokens = 0, np.zeros(layers, dtype=int)

    def choose(self, layer: int, run: ForwardPass) -> NDArray[np.int64]:
        """The experts that the rows of a pass that go on ask for of a layer, in their order."""
        if not run.ragged.is_decode:
            return self._of_prompts(layer, len(run.input))
        return self.of_next(layer, len(run.input))

    def of_next(self, layer: int, count: int) -> NDArray[np.int64]:
        """The experts that the next tokens of so many sequences choose, which follow in turn."""
        place = self._place[layer]
        first = self._tokens[place]
        self._tokens[place] += count
        found = [self._token(place, token) for token in range(first, first + count)]
        done = int(self._tokens.min()) // self._texts - self._dropped
        del self._taken[:done]
        self._dropped += done
        return np.unique(np.concatenate(found))

    def _token(self, place: int, token: int) -> NDArray[np.int64]:
        step, text = divmod(token, self._texts)
        while len(self._taken) <= step - self._dropped:
            self._taken.append(next(self._steps))
        return self._taken[step - self._dropped][text, place]

    def guess(self, layer: int | None, count: int) -> tuple[Expert, ...]:
        """Experts of a layer that so many tokens might choose, for all that is known."""
        if layer is None:
            return ()
        chosen = self._by_chance(count)
        return tuple(Expert(layer, int(number)) for number in np.flatnonzero(chosen))

    def _by_chance(self, tokens: int) -> NDArray[np.bool_]:
        experts = self._experts
        share = 1 - (1 - experts.top_k / experts.count) ** tokens
        return self._random.random(experts.count) < share

    def _of_prompts(self, layer: int, tokens: int) -> NDArray[np.int64]:
        experts = self._experts
        chosen = np.zeros(experts.count, dtype=bool)
        if self._recorded is not None:
            recorded = self._recorded.numbers[:tokens, self._place[layer]]
            chosen[recorded] = True
            tokens -= len(recorded)
        chosen |= self._by_chance(tokens)
        chosen[: experts.top_k] |= not chosen.any()
        return np.flatnonzero(chosen)


class SimulatedLayer(Layer):
    """A layer whose experts come as a router says.

    Those of the next layer are guessed, and right by chance alone: of prompts, that want nearly
    all, always; of single tokens so seldom that the engine soon reads none.
    """

    def __init__(self, decoder: Decoder, ops: SimulatedOps, router: Router, bits: int) -> None:
        """bits: of activations."""
        ops_of = decoder.layer._ops
        super().__init__(decoder.spec, ops_of, decoder.head_shapes, decoder.device)
        self._simulated, self._router, self._bits = ops, router, bits

    def _streamed_experts(
        self,
        layer: int,
        experts: Experts,
        weights: Weights,
        run: ForwardPass,
        chosen: Chosen,
        into: Tensor | None,
    ) -> Steps:
        """As a layer's, whose pairs of tokens and experts are as many for each expert."""
        streamed = cast(StreamedExperts, weights[EXPERTS])
        guesses = likeliest(streamed.following, chosen.guesses)
        numbers = set(self._router.choose(layer, run).tolist())
        each = len(run.input) * experts.spec.top_k / len(numbers)
        left, mixture, on_cpu = set(numbers), run.mixture, streamed.on_cpu
        future, others = None, False
        inputs = run.input[:, : self._spec.expert_width]  # as many as all parts of the pass have
        if on_cpu is not None and layer in on_cpu.layers and on_cpu.computes(len(run.input)):
            if mixture.on_cpu is None:
                mixture.on_cpu = _CpuPairs(self._simulated, on_cpu, layer)
            future = mixture.on_cpu.add(_Wanted(numbers, each), inputs)
            left -= mixture.on_cpu.numbers
            others = mixture.passes > 1
        mine = _Wanted(frozenset(left), each, future is None)
        mixture.choices.append(mine)
        while left or others:
            wanted = ChosenExperts(layer, tuple(sorted(left)), guesses)
            found = yield from wait_for(run, wanted)
            wave = found[EXPERTS]
            assert isinstance(wave, ExpertWave)
            if mixture.wave is not wave:
                mixture.wave = wave
                self._compute_wave(mixture.choices, wave)
            left -= set(wave.numbers)
            others = future is not None and any(one.passing for one in mixture.choices)
        if future is not None:
            mixture.on_cpu.finish(future, _Wanted(numbers, each), inputs)
        mixture.done([mine])
        if len(numbers) > 1:
            x = chosen.choices[0].x
            self._ops.add_experts(x, out=x)
        return run.input

    def _compute_wave(self, choices: list[_Wanted], wave: ExpertWave) -> None:
        """What all passes of a round want of it."""
        wanted = [(one.numbers & set(wave.numbers), one.pairs) for one in choices]
        there = set().union(*(numbers for numbers, _ in wanted))
        if there:
            pairs = sum(len(numbers) * each for numbers, each in wanted) / len(there)
            matrices = (wave.gate_up, wave.down)
            self._simulated.compute_experts(pairs, len(there), matrices, self._bits)


class _Wanted(NamedTuple):
    """Experts that a pass wants of a layer, and the pairs of each; passing: the CPU's, too."""

    numbers: Set[int]
    pairs: float
    passing: bool = False


class _CpuPairs:
    """Experts of a layer that the CPU computes, for all passes of a round that wait together."""

    def __init__(self, ops: SimulatedOps, on_cpu: CpuExperts, layer: int) -> None:
        self._ops, self._on_cpu = ops, on_cpu
        self._machine, self._layer = ops.machine, on_cpu.layers[layer]
        self.numbers = _numbers(self._layer)
        self._waiting: list[_Wanted] = []

    def add(self, choice: _Wanted, x: Tensor) -> Future[None]:
        """Have the thread compute what a pass wants of them; x: its inputs."""
        self._waiting.append(choice._replace(numbers=choice.numbers & self.numbers))
        return self._on_cpu.submit(partial(self._compute, x.nbytes))

    def finish(self, future: Future[None], choice: _Wanted, x: Tensor) -> None:
        """Wait until it is done, and for the outputs to come."""
        self._on_cpu.join(future)
        pairs = choice.pairs * len(choice.numbers & self.numbers)
        self._on_cpu.pairs += round(pairs)
        self._machine.to_device.move(int(4 * pairs) * x.shape[1])

    def _compute(self, nbytes: int) -> None:
        """In the thread: inputs come, and all that waits is computed, if that has not been done."""
        self._machine.from_device.move(nbytes)
        some, self._waiting = self._waiting, []
        there = set[int]().union(*(one.numbers for one in some))
        if there:
            rows = sum(len(one.numbers) * one.pairs for one in some) / len(there)
            matrices = (self._layer.gate_up, self._layer.down)
            self._ops.compute_experts(rows, len(there), matrices, 16, on_host=True)


def warm(store: WeightStore, router: Router, sequences: int) -> None:
    """Have the experts where they are after rounds in which so many sequences decoded."""
    cache = store.experts
    if cache is None:
        return
    router.begin(sequences)
    asked, rounds, slots = 0, 0, store.residency.expert_slots
    layers = np.flatnonzero(cache.counts).tolist()
    on_cpu = {layer: set[int]() for layer in layers}
    if cache.on_cpu is not None:
        on_cpu |= {layer: _numbers(one) for layer, one in cache.on_cpu.layers.items()}
    for layer in layers:  # slots that are empty long would miss what is seldom wanted
        _bring(cache, layer, set(range(cache.counts[layer])) - on_cpu[layer], ())
    while rounds < 2 or (asked < _TIMES * slots and rounds < _MOST):
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            wanted = set(router.of_next(layer, sequences).tolist()) - on_cpu[layer]
            asked += len(wanted)
            _bring(cache, layer, wanted, router.guess(following, sequences))
        rounds += 1


def _bring(cache: ExpertCache, layer: int, numbers: set[int], guesses: tuple[Expert, ...]) -> None:
    """Have these experts come, wave by wave."""
    left = set(numbers)
    while left:
        wave = cache.acquire(ChosenExperts(layer, tuple(sorted(left)), guesses))
        left -= set(wave.numbers)
        cache.release(wave)


def _numbers(layer: CpuLayer) -> set[int]:
    """The experts of a layer that the CPU computes."""
    return set((layer.table >= 0).nonzero()[:, 0].tolist())
