"""Rounds of an `LLM` in virtual time: its own admission, adapting and changes of the plan."""

from __future__ import annotations

from collections.abc import Sequence as Passes
from functools import partial

import torch

from qoff.engine.adapting import adapter_of
from qoff.engine.answers import completion
from qoff.engine.opened import Opened
from qoff.engine.request import SamplingParams, Sequence
from qoff.engine.round_stats import RoundStats
from qoff.engine.rounds import Rounds
from qoff.engine.schedule import Schedule
from qoff.engine.simulated.executor import open_simulated
from qoff.engine.simulated.machine import OnMachine, VirtualMachine
from qoff.memory.io.virtual import VirtualClock
from qoff.models.forward_pass import ForwardPass
from qoff.plan import Plan
from qoff.plan.calls import as_used
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import MachineProfile


class SimulatedRounds(OnMachine):
    """A plan on a machine whose links may become slower meanwhile: set `machine.read.rate`.

    profile: what the planner knows of the machine at first. All tokens are 0. Raises as `Executor`
    does.
    """

    def __init__(self, sizes: NativeSizes, plan: Plan, profile: MachineProfile) -> None:
        used = as_used(profile, sizes, plan.activations)
        super().__init__(VirtualMachine(used, VirtualClock()))
        self.machine.loading = False  # opening takes its time
        self._sizes = sizes
        opened = self.open(plan)
        self.adapter = adapter_of(opened, profile)
        self.rounds = Rounds(opened, self.open, partial(completion, tokenizer=None), self.adapter)

    def open(self, plan: Plan) -> Opened:
        """Open a plan; no other may be open."""
        clock = self.machine.clock
        start = clock.now()
        try:
            executor = open_simulated(self._sizes.checkpoint, plan, self.machine, self._own)
        except BaseException:
            self.close()
            raise
        decoder, store = executor.runtime.decoder, executor.runtime.store
        schedule = _Zeros(decoder, store, plan.schedule, executor.instrumentation)
        return Opened(executor, schedule, self.close, seconds=clock.now() - start)

    def answer(self, count: int, prompt: int, tokens: int) -> list[RoundStats]:
        """The rounds in which so many prompts of `prompt` tokens get answers of `tokens` each."""
        first = len(self.rounds.history)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ask = tuple(range(prompt))
        groups = [[Sequence(i, 0, None, ask, params, tokens, frozenset())] for i in range(count)]
        list(self.rounds.answers(groups))
        return self.rounds.history[first:]


class _Zeros(Schedule):
    """Logits that are there."""

    def round(self, passes: Passes[ForwardPass]) -> list[torch.Tensor]:
        return [torch.zeros_like(logits) for logits in super().round(passes)]
