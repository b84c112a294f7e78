"""One row of qoff: a model written, a plan run, what it moved and what the GPU waited for."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.bandwidth import RawRead, copy_rate
from bench.gpu_models.flexgen import plan_of
from bench.gpu_models.rows import Config, Row
from bench.random_model import write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.round_stats import RoundStats
from qoff.kvcache import KVQuant
from qoff.memory.instrumentation import Instrumentation
from qoff.plan import Plan
from qoff.units import parse_size

_HOST_SHARE = 0.75  # of the machine's memory, for weights and KV
_WRITERS = 16  # layers that are drawn and written at once; each is up to 0.8 GB
_WARM_PROMPT, _WARM_NEW = 32, 3  # the second of a kind of steps is recorded, the third replayed
_WARM_TOKENS = 4096  # as long as the prompts are no more, they are read whole
_COPIED = 256 << 20


@dataclass(frozen=True)
class Place:
    """Where rows run. folder: of the models. flexgen: a wheel or folder with the package."""

    folder: Path
    device: torch.device
    models: Mapping[str, Config]
    flexgen: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of the peers' weights: bfloat16 where a GPU has it."""
        old = self.on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if old else torch.bfloat16

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def memory(self) -> dict[str, int]:
        """The most bytes that tensors took on the GPU, and that torch held for them."""
        if not self.on_gpu:
            return {}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }

    def prompts(self, row: Row, tokens: int) -> torch.Tensor:
        """Random token ids [sequences, tokens], the same for every system."""
        numbers = torch.Generator().manual_seed(1)
        vocabulary = self.models[row.model]["vocab_size"]
        return torch.randint(4, vocabulary, (row.sequences, tokens), generator=numbers)


def write(place: Place, model: str) -> dict[str, Any]:
    """Write a random checkpoint; returns its bytes and the seconds it took."""
    start = time.perf_counter()
    path = place.folder / model
    packing = "split32" if place.on_gpu else "rows16"
    threads = min(_WRITERS, os.cpu_count() or 1)
    write_random_checkpoint(path, place.models[model], packing=packing, threads=threads)
    return {"bytes": _weight_bytes(path), "seconds": time.perf_counter() - start}


def measure(place: Place, row: Row) -> dict[str, Any]:
    """Run a plan once warm, and once for the clock. See `report.Measured` for what is returned."""
    path = place.folder / row.model
    plan, notes = plan_for(place, row, path)
    clock = ComputeClock(make=_cuda_event if place.on_gpu else HostEvent)
    with LLM(path, plan, device=place.device, _instrumentation=clock) as llm:
        long = row.sequences * row.prompt > _WARM_TOKENS
        warm = place.prompts(row, _WARM_PROMPT if long else row.prompt)
        llm.generate(warm.tolist(), _params(_WARM_NEW))
        first = llm.rounds[-1].number + 1
        clock.begin(lambda: llm.rounds[-1].number + 1)
        prompts = place.prompts(row, row.prompt).tolist()
        start = time.perf_counter()
        answers = llm.generate(prompts, _params(row.new))
        seconds = time.perf_counter() - start
        _require_complete(answers, row.new)
        place.synchronize()
        rounds = [one for one in llm.rounds if one.number >= first]
        found = place.memory()
        tiers = {t: sum(purposes.values()) for t, purposes in llm.memory_by_tier().items()}
        decode, prefill = _decode_rounds(rounds), [one for one in rounds if one.read]
        idle = clock.idle_share({one.number for one in decode})
    gc.collect()  # what the LLM had on the device
    return {
        **found,
        "tokens_per_s": row.sequences * row.new / seconds,
        "prefill_s": sum(one.seconds for one in prefill),
        **_per_round(decode),
        "idle": idle,
        "budget_bytes": plan.device_memory,
        "tiers": tiers,
        "notes": notes,
        **_alone(place, path),
    }


def _require_complete(answers: Sequence[Completion], tokens: int) -> None:
    """Raise RuntimeError for an answer with fewer tokens: one may end early, with an error."""
    for answer in answers:
        if answer.error or len(answer.token_ids) != tokens:
            why = answer.error or f"{len(answer.token_ids)} tokens, not {tokens}"
            raise RuntimeError(f"answer {answer.index}: {why}")


def plan_for(place: Place, row: Row, path: Path) -> tuple[Plan, list[str]]:
    """The plan of a row, and what of FlexGen's flags it does not express."""
    if row.flags:
        found = plan_of(row.flags, Checkpoint.open(path), place.device)
        if place.on_gpu:
            bounds: dict[str, Any] = {"device_memory": row.budget, "host_memory": _host_memory()}
            return replace(found.plan, **bounds), list(found.inexact)
        return found.plan, list(found.inexact)
    options = dict(row.plan)
    kv = KVQuant(window=options.pop("window", KVQuant().window))
    plan = Plan(
        batch_size=row.batch_size,
        batches=row.batches,
        context=row.prompt + row.new,
        kv=kv,
        **{"prefill_tokens": row.prompt, **options},
    )
    if not row.budget:
        return plan, []
    budget = parse_size(row.budget)
    if not place.on_gpu:  # a rehearsal: a part of its tiny weights beside the rest
        with LLM(path, plan, device=place.device) as llm:
            rest, weights = llm.memory.total("device"), llm.runtime.residency.device_bytes
        budget = rest + weights * 3 // 4
    host = _host_memory() if row.weights == "host" else None
    bounds = {"device_memory": budget, "host_memory": host}
    return replace(plan, **bounds), []


def _host_memory() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _HOST_SHARE)


def _params(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


def _weight_bytes(path: Path) -> int:
    checkpoint = Checkpoint.open(path)
    return sum(file.nbytes for file in checkpoint.files)


def _decode_rounds(rounds: list[RoundStats]) -> list[RoundStats]:
    """Those that read no prompt and give as many tokens as any of them does."""
    decode = [one for one in rounds if not one.read]
    most = max((one.generated for one in decode), default=0)
    return [one for one in decode if one.generated == most]


def _per_round(decode: list[RoundStats]) -> dict[str, Any]:
    """Rates of a decode round: median seconds; bytes are means, as some arrive a round later."""
    if not decode:
        return {}
    seconds = statistics.median(one.seconds for one in decode)
    total = sum(one.seconds for one in decode)

    def mean(name: str) -> float:
        return statistics.mean(getattr(one, name) for one in decode)

    waits = {name: sum(getattr(one, f"{name}_wait_s") for one in decode) for name in _WAITS}
    return {
        "decode_tokens_per_s": decode[0].generated / seconds,
        "round_s": seconds,
        "link_bytes_per_s": mean("host_bytes") / seconds,
        "disk_bytes_per_s": mean("disk_bytes") / seconds,
        "waits": {name: waited / total for name, waited in waits.items()},
    }


_WAITS = ("weights", "kv", "activations")


def _alone(place: Place, path: Path) -> dict[str, float]:
    """Bytes per second of copies to the device alone, and of O_DIRECT reads alone."""
    if place.on_gpu:
        torch.cuda.empty_cache()
    raw = RawRead(Checkpoint.open(path))
    try:
        nbytes = _COPIED if place.on_gpu else 1 << 20
        return {"link_alone": copy_rate(place.device, nbytes), "disk_alone": raw()}
    finally:
        raw.reader.close()


class Event(Protocol):
    """A point in the work of a device, as CUDA events are."""

    def record(self) -> object: ...

    def elapsed_time(self, end: Any) -> float: ...


class HostEvent:
    """The same by the clock of the host."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds to another one."""
        return 1e3 * (end._at - self._at)


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)
    return event


@dataclass(frozen=True)
class ComputeClock(Instrumentation):
    """Notes when the GPU begins and ends each step of a pass: not at all until `begin`.

    A step begins when its weights have arrived. What lies between steps is idle time; waits inside
    of a step, for offloaded KV blocks or for launches, are not seen.
    """

    make: Callable[[], Event] = HostEvent
    steps: list[tuple[int, Event, Event]] = field(default_factory=list)  # with the round's number
    rounds: list[Callable[[], int]] = field(default_factory=list)

    def begin(self, round_number: Callable[[], int]) -> None:
        """From now on; the argument says which round is computed."""
        self.rounds.append(round_number)

    def span(self, lane: str, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        return self._step() if self.rounds and lane == "compute" else nullcontext()

    @contextmanager
    def _step(self) -> Iterator[None]:
        first, last = self.make(), self.make()
        first.record()
        yield
        last.record()
        self.steps.append((self.rounds[0](), first, last))

    def idle_share(self, rounds: set[int]) -> float | None:
        """The part of these neighbouring rounds in which no step was computed; None without any."""
        steps = [(first, last) for number, first, last in self.steps if number in rounds]
        if not steps:
            return None
        busy = sum(first.elapsed_time(last) for first, last in steps)
        return 1 - busy / steps[0][0].elapsed_time(steps[-1][1])
