"""Random plans and budgets on tiny models: each runs, or is refused, and none changes a token.

    python -m bench.random_plans --seconds 600 --seed 1

A plan is opened or refused with a BudgetError or ArgumentError. The answers of one that opens are
compared, token for token, with those of the same KV cache with all in memory, one sequence at a
time; then no thread, no open file and no byte beyond a budget is left, and no plan takes 2 s. Those
answers are long, and computed once for a model and KV cache; a plan is asked for beginnings of
some.

Where KV blocks are changes rounding. With 16-bit activations no token has changed by it in tens of
thousands of plans; 8-bit activations make steps of 1/255 of the last bits, so there the two best
tokens may change places if their log-probabilities are within 0.02. This is counted as a near tie,
and the rest of that answer, which follows another token, is not compared.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import Bar, Report, arguments
from bench.random_model import write_random_checkpoint
from bench.stress import TINY
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, Completion, SamplingParams
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import DEVICE, HOST, KVPlacement
from qoff.models.native.caches import head_shapes
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory, Plan

# Few and many layers, one and four queries of a KV head, a head of its own and a tied one.
SHAPES: tuple[dict[str, Any], ...] = (
    TINY,
    TINY | {"num_hidden_layers": 9, "tie_word_embeddings": True},
    TINY | {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4},
)
CONTEXT = 240
LONGEST = 160
# Of prompts: the most, the fewest, and those with which an answer comes to the end of a block.
_LENGTHS = (LONGEST, 1, 63, 64, 79, 103, 125, 128)
_DRAWN = 4  # further prompts, of any length
_SHORT, _LONG = 8, 70  # tokens of an answer at most, and of those to every fourth prompt
_SLOW_S, _STUCK_S = 2.0, 300.0  # a plan that is noted; one after which all threads are shown
_NEAR_TIE = 0.02  # nats between the two best tokens that 8-bit activations may swap
_TIMES = 3  # that a plan is run if it is slow: the machine may be busy
_TICK_S = 0.05
_CACHES = (
    KVQuant(window=16),
    KVQuant(8, 4, window=0),
    KVQuant(8, 8, window=100, sinks=16),
    KVQuant(window=40, attention_top=0.5),
    KVQuant(window=16, layers={1: (8, 8)}, values_rotated=False),
    KVQuant(3, 2, window=0, layers={1: (4, 3)}),
)


class Draws:
    """Plans, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def plan(self, spill: Path) -> Plan:
        """A plan whose answers are those of its KV cache, whatever else it says."""
        draw = self.random
        device = draw.choice((0.0, 0.3, draw.random(), 1.0))
        host = draw.choice((0.0, draw.random(), 1.0)) * (1 - device)
        return Plan(
            device_memory=None,
            batch_size=draw.randint(1, 9),
            batches=draw.randint(1, 4),
            context=CONTEXT + draw.randrange(3) * draw.randrange(500),
            # Whole prompts: pieces would see what is packed before them.
            prefill_tokens=LONGEST + draw.randrange(2) * draw.randrange(1000),
            kv=draw.choice(_CACHES),
            kv_placement=KVPlacement(device, host),
            cpu_attention=draw.choice(("auto", "always", "never")),
            activations=draw.choice(("device", "host", "disk")),
            schedule=draw.choice(("block", "sequential")),
            slots=draw.randint(2, 5),
            activation_bits=draw.choice((16, 16, 8)),
            spill_folder=spill,
        )

    def requests(self, prompts: int) -> tuple[list[int], list[int]]:
        """Which of the prompts, and how many tokens of each answer: mostly few."""
        draw = self.random
        numbers = [draw.randrange(prompts) for _ in range(draw.choice((1, 2, 3, 6)))]
        return numbers, [
            draw.randint(1, _most(i) if draw.random() < 0.05 else _SHORT) for i in numbers
        ]

    def bounds(self, weights: int, device: int, host: int) -> dict[str, int]:
        """Bounds of memory about what a plan takes unbounded, weights and the rest of each tier;
        none of a tier at times. Most of them have room for the rest, without which none opens."""
        draw = self.random
        found = {}
        for name, chance, rest in (("device_memory", 0.8, device), ("host_memory", 0.4, host)):
            if draw.random() < chance:
                part = draw.choice((1.0, 1.0, draw.uniform(0.05, 1.1)))
                found[name] = int(rest * part + weights * draw.uniform(0, 1.1))
        return found


@dataclass(frozen=True)
class Answer:
    """Tokens, and by how many nats each is ahead of the next best: 0 where it is not the best."""

    tokens: tuple[int, ...]
    ahead: tuple[float, ...]

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        """The answer in a completion with the log-probabilities of the two best tokens."""
        assert completion.logprobs is not None
        best = [sorted(x.logprob for x in step.values())[-2:] for step in completion.logprobs]
        return cls(completion.token_ids, tuple(high - low for low, high in best))

    def first_other(self, tokens: Sequence[int]) -> int | None:
        """Where tokens are first other ones; None if all are the beginning of these."""
        pairs = enumerate(zip(tokens, self.tokens, strict=False))
        return next((i for i, (found, expected) in pairs if found != expected), None)


class Clock(threading.Thread):
    """Seconds in which this process ran: it may be stopped for minutes."""

    def __init__(self) -> None:
        super().__init__(name="clock", daemon=True)
        self.seconds = 0.0

    def run(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self.seconds += _TICK_S


class Trial:
    """One model under many plans. counts: of what came of them."""

    def __init__(self, checkpoint: Path, spill: Path, seed: int) -> None:
        self._checkpoint, self._spill = checkpoint, spill
        self._draws = Draws(seed)
        draw = self._draws.random
        lengths = [*_LENGTHS, *(draw.randint(2, LONGEST) for _ in range(_DRAWN))]
        self._prompts = [[draw.randrange(512) for _ in range(length)] for length in lengths]
        self._alone: dict[str, list[Answer]] = {}
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0  # seconds of a plan

    def warm_up(self) -> None:
        """Import and compile what the first plan would wait for."""
        self._expected(self._draws.plan(self._spill))

    def run(self, clock: Clock) -> None:
        """Draw a plan and see. What goes wrong is noted with the plan."""
        plan = self._draws.plan(self._spill)
        numbers, lengths = self._draws.requests(len(self._prompts))
        alone = self._expected(plan)
        expected = [alone[i] for i in numbers]
        bounded = replace(plan, **self._draws.bounds(*self._taken(plan)))  # type: ignore[arg-type]
        for _ in range(_TIMES):
            start = clock.seconds
            outcome, wrong = self._outcome(bounded, numbers, lengths, expected)
            seconds = clock.seconds - start
            if wrong or seconds < _SLOW_S:
                break
            self.counts["run again: slow"] += 1
        self.counts[outcome] += 1
        self.slowest = max(self.slowest, seconds)
        if seconds >= _SLOW_S:
            wrong = wrong or f"took {seconds:.1f} s"
        if wrong:
            self.counts["wrong"] += 1
            self.failures.append(f"{bounded}: {wrong}")

    def _outcome(
        self,
        plan: Plan,
        numbers: Sequence[int],
        lengths: Sequence[int],
        expected: list[Answer],
    ) -> tuple[str, str]:
        """What comes of a plan, and what is wrong with that."""
        threads = set(threading.enumerate())
        files = _open_files()
        outcome, wrong = "opened", ""
        try:
            with LLM(self._checkpoint, plan) as llm:
                found = llm.generate(*self._asked(plan, numbers, lengths))
                used = llm.memory_by_tier()
            wrong = self._other_tokens(plan, [x.token_ids for x in found], lengths, expected)
            for tier, budget in (("device", plan.device_memory), ("host", plan.host_memory)):
                if budget is not None and sum(used[tier].values()) > budget:
                    wrong = f"{used[tier]} on {tier}"
        except (ArgumentError, BudgetError) as error:
            outcome = f"refused: {type(error).__name__}"
        except Exception as error:
            outcome, wrong = "failed", repr(error)
        gc.collect()
        left = [x.name for x in set(threading.enumerate()) - threads if "qoff-cpu" not in x.name]
        if left or _open_files() != files:
            wrong = wrong or f"left open: threads {left}, files {_open_files() - files}"
        return outcome, wrong

    def _other_tokens(
        self,
        plan: Plan,
        found: list[tuple[int, ...]],
        lengths: Sequence[int],
        expected: list[Answer],
    ) -> str:
        """What is wrong with the tokens of a plan's answers; near ties are counted only."""
        for tokens, length, answer in zip(found, lengths, expected, strict=True):
            at = answer.first_other(tokens)
            if len(tokens) != length or (
                at is not None and (plan.activation_bits != 8 or answer.ahead[at] > _NEAR_TIE)
            ):
                return f"tokens {tokens}, expected {answer.tokens[:length]}"
            if at is not None:
                self.counts["near ties"] += 1
        return ""

    def _taken(self, plan: Plan) -> tuple[int, int, int]:
        """Bytes without bounds: weights, and what else is on the device and in host memory."""
        checkpoint = Checkpoint.open(self._checkpoint)
        spec = DecoderSpec.from_config(checkpoint.config)
        memory = Memory.of(plan, spec, head_shapes(spec))
        weights = sum(file.nbytes for file in checkpoint.files)
        return weights, memory.total(DEVICE), memory.total(HOST)

    def _expected(self, plan: Plan) -> list[Answer]:
        """The answers to each prompt alone, with everything in memory."""
        key = f"{plan.kv!r} {plan.activation_bits}"
        if key not in self._alone:
            alone = Plan(
                batch_size=1, context=CONTEXT, kv=plan.kv, activation_bits=plan.activation_bits
            )
            with LLM(self._checkpoint, alone) as llm:
                numbers = range(len(self._prompts))
                asked, params = self._asked(alone, numbers, [_most(i) for i in numbers])
                found = llm.generate(asked, [replace(x, logprobs=2) for x in params])
            self._alone[key] = [Answer.of(completion) for completion in found]
        return self._alone[key]

    def _asked(
        self, plan: Plan, numbers: Sequence[int], lengths: Sequence[int]
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Some prompts and how they are continued. Every third one draws its tokens, but for 8-bit
        activations: how near a draw was to another token is not known."""
        drawn = plan.activation_bits == 16
        params = [
            SamplingParams(
                temperature=float(drawn and i % 3 == 2), seed=i, max_tokens=n, ignore_eos=True
            )
            for i, n in zip(numbers, lengths, strict=True)
        ]
        return [self._prompts[i] for i in numbers], params


def _most(number: int) -> int:
    """The most tokens of an answer to the prompt of a number."""
    return _SHORT if number % 4 else _LONG


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments(
        __doc__,
        argv,
        seconds=(float, 60.0, "of plans"),
        plans=(int, 10_000, "at most"),
        seed=(int, 0, "of plans, budgets and prompts"),
    )
    with tempfile.TemporaryDirectory() as folder:
        trials = []
        for i, shape in enumerate(SHAPES):
            path = Path(folder, f"model-{i}")
            write_random_checkpoint(path, shape, seed=i)
            trials.append(Trial(path, Path(folder, "spill"), given.seed + i))
        clock, done = Clock(), 0
        clock.start()
        trials[0].warm_up()
        gc.collect()
        gc.freeze()  # what was imported: each plan's collection is for what it has left
        end = time.perf_counter() + given.seconds
        while time.perf_counter() < end and done < given.plans:
            faulthandler.dump_traceback_later(_STUCK_S, exit=True)
            trials[done % len(trials)].run(clock)
            done += 1
        faulthandler.cancel_dump_traceback_later()
    counts = sum((trial.counts for trial in trials), Counter[str](plans=done))
    failures = [line for trial in trials for line in trial.failures]
    slowest = max(trial.slowest for trial in trials)
    report = Report(
        "random_plans",
        {"seconds": given.seconds, "seed": given.seed},
        f"{done} random plans on {len(SHAPES)} tiny models",
        ("what", "plans"),
        [(name, f"{count:,}") for name, count in counts.items()],
        {name: float(count) for name, count in counts.items()} | {"slowest_s": slowest},
        notes=[f"the slowest took {slowest:.2f} s", *failures],
        bars=[Bar("plans that run or are refused, with the same tokens", 1, float(not failures))],
    )
    report.publish(given.out)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
