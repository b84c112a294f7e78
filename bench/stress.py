"""Threads that share one LLM: thousands of requests, and every token compared.

    python -m bench.stress --seconds 600 --seed 1

Each request draws a prompt and how it is answered; some callers give up, some ask for what cannot
be. The answers to each prompt alone, computed first, are what every answer has to be. Prompts share
their packed beginnings, which rounds: those of a block or more are compared by their lengths; with
--unshared all are compared by their tokens.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Bar, Report, arguments
from bench.random_model import SMALL, write_random_checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import TIERS, KVPlacement
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.plan import Plan

TINY = SMALL | {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_PROMPTS = 48
_GIVES_UP, _IMPOSSIBLE = 0.1, 0.05  # parts of the requests

Answers = list[tuple[int, ...]]


class Requests:
    """Prompts, how each is answered, and its answers alone. seed: of all that is drawn."""

    def __init__(self, llm: LLM, seed: int) -> None:
        draw = random.Random(seed)
        vocab = llm.runtime.spec.vocab_size
        self.prompts = [
            [draw.randrange(vocab) for _ in range(draw.randrange(1, 150))] for _ in range(_PROMPTS)
        ]
        self.params = [
            SamplingParams(
                temperature=float(i % 2),
                seed=i,
                max_tokens=1 + i % 9,
                n=1 + i % 2,
                ignore_eos=True,
            )
            for i in range(_PROMPTS)
        ]
        self.alone = [self.answers(llm, [i])[0] for i in range(_PROMPTS)]

    def answers(self, llm: LLM, numbers: Sequence[int]) -> list[Answers]:
        """The tokens of the answers to some prompts, asked for together."""
        found = llm.generate([self.prompts[i] for i in numbers], [self.params[i] for i in numbers])
        return [[x.token_ids for x in found if x.index == at] for at in range(len(numbers))]


class Caller(threading.Thread):
    """Makes requests until `stop` is set, or none of those numbered are left.

    counts: of what came of them.
    """

    def __init__(
        self,
        llm: LLM,
        requests: Requests,
        seed: int,
        stop: threading.Event,
        left: Iterator[int],
    ) -> None:
        super().__init__(name=f"caller {seed}")
        self._llm, self._requests, self._stop_it, self._left = llm, requests, stop, left
        self._draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_it.is_set() and next(self._left, None) is not None:
                self._request()
        except BaseException as error:
            self.error = error
        self._stop_it.set()

    def _request(self) -> None:
        draw, requests = self._draw, self._requests
        numbers = [draw.randrange(_PROMPTS) for _ in range(draw.choice((1, 1, 2, 5)))]
        chance = draw.random()
        self.counts["requests"] += 1
        if chance < _GIVES_UP:
            stream = self._llm.stream(
                [requests.prompts[i] for i in numbers], [requests.params[i] for i in numbers]
            )
            for _ in range(draw.randrange(2)):
                next(stream, None)
            del stream  # with answers still to come
            self.counts["given up"] += 1
        elif chance < _GIVES_UP + _IMPOSSIBLE:
            (answer,) = self._llm.generate([[10**9]], requests.params[0])
            self.counts["refused"] += 1
            self.counts["wrong answers"] += answer.finish_reason != "error"
        else:
            for i, found in zip(numbers, requests.answers(self._llm, numbers), strict=True):
                self.counts["answers"] += len(found)
                self.counts["tokens"] += sum(map(len, found))
                alone = requests.alone[i]
                if self._llm.plan.share_prefixes and len(requests.prompts[i]) >= BLOCK_TOKENS:
                    self.counts["wrong answers"] += [*map(len, found)] != [*map(len, alone)]
                else:
                    self.counts["compared"] += len(found)
                    self.counts["wrong answers"] += found != alone


def run(
    checkpoint: Path, plan: Plan, threads: int, seconds: float, most: int, seed: int
) -> Counter[str]:
    """What came of requests, `most` at most. Raises what one of the threads ended with."""
    with LLM(checkpoint, plan) as llm:
        requests, stop, left = Requests(llm, seed), threading.Event(), iter(range(most))
        callers = [Caller(llm, requests, seed + 1 + i, stop, left) for i in range(threads)]
        before = llm.rounds[-1].number
        for caller in callers:
            caller.start()
        stop.wait(seconds)
        stop.set()
        for caller in callers:
            caller.join()
        for caller in callers:
            if caller.error is not None:
                raise caller.error
        requests.answers(llm, [0])  # those that gave up are swept away before it
        counts = sum((caller.counts for caller in callers), Counter[str]())
        for store in llm._executor.stores:  # of each group of layers
            assert isinstance(store, TieredBlocks)
            counts["blocks kept"] += sum(store.used(tier) for tier in TIERS)
        counts["rounds"] = llm.rounds[-1].number - before
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments(
        __doc__,
        argv,
        threads=(int, 8, "callers"),
        seconds=(float, 60.0, "of requests"),
        requests=(int, 10_000, "at most"),
        seed=(int, 0, "of prompts and requests"),
        unshared=(bool, False, "prompts share nothing"),
        model=(Path, None, "a qoff checkpoint; default: a tiny one of random weights"),
    )
    settings: dict[str, Any] = {
        name: getattr(given, name) for name in ("threads", "seconds", "seed", "unshared")
    }
    plan = Plan(
        batch_size=8,
        batches=2,
        context=200,
        kv=KVQuant(window=16),
        kv_placement=KVPlacement(0.4, 0.3),
        activations="host",
        share_prefixes=not given.unshared,
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given.model
        if checkpoint is None:
            checkpoint = Path(folder, "tiny")
            write_random_checkpoint(checkpoint, TINY)
        start = time.perf_counter()
        counts = run(checkpoint, plan, given.threads, given.seconds, given.requests, given.seed)
        seconds = time.perf_counter() - start
    report = Report(
        "stress",
        settings,
        f"{given.threads} threads on one LLM, {seconds:.0f} s",
        ("what", "count"),
        [(name, f"{count:,}") for name, count in counts.items()],
        {name: float(count) for name, count in counts.items()},
        bars=[Bar("answers as alone", 1, float(counts["wrong answers"] == 0))],
    )
    report.publish(given.out)
    if counts["wrong answers"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
