"""Throughput of the block schedule under shrinking budgets, beside what its bytes allow.

The demo model, and with `--large` a random one of 1.1B parameters: decode rounds of batches whose
weights, KV cache or hidden states are moved. The bound of a round is the longest of its computation
(the round of the same batches with everything resident), the bytes it reads from disk at the rate
of O_DIRECT reads alone, and its copies at the rate of a copy alone, all in the same turn: plans go
on for a few rounds each, one after another. On a CPU, cores that read memory and a disk that writes
to it take from each other: the second bound is of both at the rates that they have together, as if
the computation did nothing but read memory.
`--device cuda` measures the same on a GPU, whose copies are those from pinned memory.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from bench.bandwidth import RawRead, ReadBandwidth, Shared, copy_rate, shared
from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report, arguments
from bench.plot import draw
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.engine.calls import Call
from qoff.engine.round_stats import RoundStats
from qoff.errors import BudgetError
from qoff.kvcache.store.placement import KVPlacement
from qoff.measure.samples import Samples
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.plan import Plan
from qoff.units import format_size

RESIDENT, KV_ON_DISK = "all resident", "KV on disk"
ROUNDS = 6  # of a plan in each turn


@dataclass(frozen=True)
class Work:
    """What every plan of a model does: batches of sequences, prompt and answer in tokens."""

    batch_size: int
    batches: int
    prompt: int
    new: int

    @property
    def plan(self) -> Plan:
        return Plan(
            batch_size=self.batch_size,
            batches=self.batches,
            context=self.prompt + self.new,
            prefill_tokens=max(512, self.prompt),
            adapt=False,
        )


class Case:
    """One plan, which answers the same prompts over and over."""

    def __init__(
        self, path: Path, work: Work, plan: Plan, device: str, hooks: Instrumentation = PLAIN
    ) -> None:
        self.llm = LLM(path, plan, device=device, _instrumentation=hooks)
        self._work = work
        vocab = self.llm.runtime.spec.vocab_size
        numbers = torch.Generator().manual_seed(1)
        shape = (work.batch_size * work.batches, work.prompt)
        self._prompts = torch.randint(vocab, shape, generator=numbers).tolist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.llm.close()

    def __call__(self) -> RoundStats:
        """A run; its median decode round in which all sequences get a token."""
        first = self._next
        self.llm.generate(self._prompts, self._params)
        return self._median(first)

    def begin(self) -> None:
        """Have the prompts read, and a round computed that only decodes."""
        self.llm.submit(self._prompts, self._params, Call())
        self.llm.work(lambda: any(map(self._decodes, [*self.llm.rounds][-1:])))

    def turn(self, rounds: int) -> RoundStats:
        """Go on for so many rounds; the median but for the first, for which more was read ahead."""
        first = self._next
        self.llm.work(lambda: self._next >= first + rounds)
        return self._median(first + 1)

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self._work.new, ignore_eos=True)

    @property
    def _next(self) -> int:
        """The number of the next round."""
        return self.llm.rounds[-1].number + 1 if self.llm.rounds else 0

    def _decodes(self, one: RoundStats) -> bool:
        return one.generated == len(self._prompts) and not one.read

    def _median(self, first: int) -> RoundStats:
        """The median of the rounds from that number on that only decode, with their mean bytes.

        What is read ahead may arrive in the next round.
        """
        rounds = [r for r in self.llm.rounds if r.number >= first and self._decodes(r)]
        median = sorted(rounds, key=lambda r: r.seconds)[len(rounds) // 2]
        means = {name: statistics.mean(getattr(r, name) for r in rounds) for name in _BYTES}
        return replace(median, **means)


def plans(path: Path, work: Work, device: str) -> dict[str, Plan]:
    """The plans to compare; budgets are parts of what all weights take, beside the rest."""
    base = work.plan
    with LLM(path, base, device=device) as llm:
        rest, weights = llm.memory.total("device"), llm.runtime.residency.device_bytes
    found = {RESIDENT: base}
    for part in (0.75, 0.5, 0.3):
        found[f"{part:.0%} of the weights"] = replace(
            base, device_memory=rest + int(weights * part)
        )
    half = found["50% of the weights"]
    found["50%, sequential"] = replace(half, schedule="sequential")
    found["50%, the rest in host memory"] = replace(half, host_memory=weights + (64 << 20))
    found["KV on the host, moved"] = replace(
        base, kv_placement=KVPlacement(0, 1), cpu_attention="never"
    )
    found[KV_ON_DISK] = replace(base, kv_placement=KVPlacement(0, 0))
    found["50%, half of KV on disk"] = replace(half, kv_placement=KVPlacement(0.5, 0))
    found["50%, hidden states on the host"] = replace(half, activations="host")
    return found


def measure(
    result: Report, name: str, path: Path, work: Work, turns: int, device: str = "cpu"
) -> None:
    """Measure all plans of a model in turn, into the report."""
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for label, plan in plans(path, work, device).items():
            try:
                cases[label] = stack.enter_context(Case(path, work, plan, device))
            except BudgetError as refusal:
                result.notes.append(f"{name}: {label}: refused: {refusal}")
        raw = RawRead(Checkpoint.open(path))
        stack.callback(raw.reader.close)
        for case in cases.values():
            case()  # compiles, and compares each file with its checksum
            case.begin()
        found: dict[str, list[RoundStats]] = {label: [] for label in cases}
        buffer = ReadBandwidth(64 << 20).buffer if device == "cpu" else None
        disk, copies, left = [], [], []
        for _ in range(turns):
            disk.append(raw())
            left.append(None if buffer is None else shared(raw, buffer, disk[-1]))
            copies.append(copy_rate(device))
            for label, case in cases.items():
                found[label].append(case.turn(ROUNDS))
        memory = {
            label: sum(case.llm.memory_by_tier()["device"].values())
            for label, case in cases.items()
        }
    compute = [r.seconds for r in found[RESIDENT]]
    for label, stats in found.items():
        bounds = [
            {
                "compute": seconds,
                "disk": (one.disk_bytes + one.spilled_bytes) / read,
                "host": one.host_bytes / copied,
            }
            for one, seconds, read, copied in zip(stats, compute, disk, copies, strict=True)
        ]
        together = [
            max(turn["host"], max(turn.values()) if one is None else _both(one, turn))
            for one, turn in zip(left, bounds, strict=True)
        ]
        _row(result, name, label, stats, memory[label], bounds, together)
    if buffer is not None:
        parts = zip(*(one for one in left if one is not None), strict=True)
        cores, read = (statistics.median(part) for part in parts)
        result.notes.append(
            f"{name}: beside each other cores that read memory keep {cores:.2f} of their rate, "
            f"the disk {read:.2f} of its"
        )


def _both(left: Shared, turn: dict[str, float]) -> float:
    return left.seconds(turn["compute"], turn["disk"])


def _row(
    result: Report,
    name: str,
    label: str,
    stats: list[RoundStats],
    memory: int,
    bounds: list[dict[str, float]],
    together: list[float],
) -> None:
    """bounds: of each turn, the seconds of a round by what may limit it. together: by all."""
    seconds = Samples(tuple(r.seconds for r in stats))
    one = stats[0]
    needs = {link: statistics.median(turn[link] for turn in bounds) for link in bounds[0]}
    limit = max(needs, key=lambda link: needs[link])
    bound = statistics.median(max(turn.values()) for turn in bounds)
    reached = [max(turn.values()) / r.seconds for turn, r in zip(bounds, stats, strict=True)]
    of_both = [both / r.seconds for both, r in zip(together, stats, strict=True)]
    tokens = one.generated
    waits = [statistics.median(getattr(r, f"{w}_wait_s") for r in stats) for w in _WAITS]
    result.rows.append(
        (
            f"{name}: {label}",
            format_size(memory),
            f"{tokens / seconds.median:.1f}",
            f"{seconds.spread:.0%}",
            f"{one.disk_bytes / tokens / 1e6:.2f}",
            f"{one.host_bytes / tokens / 1e6:.2f}",
            f"{sum(waits) / seconds.median:.0%}",
            f"{tokens / bound:.1f} ({limit})",
            f"{statistics.median(reached):.2f}",
            f"{statistics.median(of_both):.2f}",
        )
    )
    result.measured[f"{name}: {label}"] = {
        "device_bytes": memory,
        "tokens_per_round": tokens,
        "seconds": seconds.summary(),
        "waits_s": dict(zip(_WAITS, waits, strict=True)),
        "disk_bytes": one.disk_bytes,
        "host_bytes": one.host_bytes,
        "spilled_bytes": one.spilled_bytes,
        "bound_s": bound,
        "limit": limit,
        "of_the_bound": reached,
        "of_both_together": of_both,
    }
    result.ratios[f"{name}: {label}, of the bound"] = statistics.median(reached)
    if label == KV_ON_DISK:
        result.bars.append(Bar(f"{name}: {label}, of the bound", 0.75, statistics.median(reached)))
    elif label != RESIDENT:
        result.bars.append(
            Bar(
                f"{name}: {label}, of what disk and cores give together",
                0.85,
                statistics.median(of_both),
            )
        )


_BYTES = ("disk_bytes", "host_bytes", "spilled_bytes")
_WAITS = ("weights", "kv", "activations")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__,
        argv,
        large=(bool, False, "a random model of 1.1B parameters, too"),
        plot=(bool, False, "draw, with matplotlib (the extra `bench`)"),
        folder=(Path, None, "where to write that model; default the temporary folder"),
        device=(str, "cpu", "what computes: cpu or cuda"),
    )
    result = Report(
        "offload",
        {"quick": args.quick, "large": args.large, "device": args.device},
        "decode rounds of the block schedule; of bound: part of what bytes or computation allow",
        ("plan", "device", "tokens/s", "spread", "disk MB/token", "host MB/token", "waiting",
         "bound", "of bound", "together"),
    )  # fmt: skip
    work = Work(2, 2, 128, 10) if args.quick else Work(16, 2, 256, 80)
    turns, on_cpu = 1 if args.quick else 12, args.device == "cpu"
    demo = fetch_checkpoint() if on_cpu else fetch_checkpoint(for_cpu=False)
    measure(result, "135M", demo, work, turns, args.device)
    if args.large:
        config: dict[str, Any] = SMALL if args.quick else TINYLLAMA
        folder = Path(tempfile.mkdtemp(prefix="qoff-offload-", dir=args.folder))
        try:
            packing = "rows16" if on_cpu else "split32"
            write_random_checkpoint(folder / "qoff", config, packing=packing)
            small = Work(2, 2, 64, 10) if args.quick else Work(8, 2, 128, 80)
            measure(result, "1.1B random", folder / "qoff", small, turns, args.device)
        finally:
            shutil.rmtree(folder)
    path = result.publish(args.out)
    if args.plot:
        draw(json.loads(path.read_text()), path.parent, path.stem)


if __name__ == "__main__":
    main()
