"""Moves run beside the computation: on a machine of slow links and slow layers, all simulated by
sleeping, a run takes little longer than the slower of the two, and moves the bytes it should."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.kvcache.host.packed import PackedPass
from qoff.kvcache.store.placement import KVPlacement
from qoff.plan import Plan
from tests.links import Link, behind
from tests.memory.checkpoints import file_bytes
from tests.tiny_models import tiny_checkpoint

LAYERS = 6
BATCHES = 4
WIDE = 1.1  # what may be lost at the seams, beside one layer of each round
QUANT = KVQuant(window=16)


class Counted(Link):
    """A link that counts what has passed."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self.bytes = 0
        self._guard = threading.Lock()

    def pass_through(self, nbytes: int) -> None:
        with self._guard:
            self.bytes += nbytes
        super().pass_through(nbytes)

    @property
    def seconds(self) -> float:
        """How long the link has been occupied."""
        return self.bytes / self.bytes_per_s


@dataclass(frozen=True)
class Measured:
    """A run after the first round of another one, which loads and compiles what there is."""

    seconds: float
    rounds: int
    compute: float  # seconds, without those that passes waited for what they compute on
    transfer: float  # seconds that the links were occupied, the longer of the two
    bytes_read: int  # of weights, by the store's count
    answers: tuple[tuple[int, ...], ...]

    @property
    def seams(self) -> float:
        """One layer of each round, computed and moved one after the other."""
        return (self.compute + self.transfer) / LAYERS

    @property
    def overlapped(self) -> bool:
        return self.seconds <= WIDE * max(self.compute, self.transfer) + self.seams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")


@pytest.fixture
def slow_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have each pass spend a time of its own in each layer."""

    def slow(seconds: float) -> None:
        real = PackedPass.open

        def open_slowly(this: PackedPass, layer: int) -> Any:
            found = real(this, layer)
            time.sleep(seconds)
            return found

        monkeypatch.setattr(PackedPass, "open", open_slowly)
        monkeypatch.setattr(PackedPass, "replay_key", lambda _: None)  # replays open nothing

    return slow


def plan_of(**options: Any) -> Plan:
    return Plan(batch_size=2, batches=BATCHES, context=200, prefill_tokens=400, kv=QUANT, **options)


def streaming(checkpoint: Path, plan: Plan) -> Plan:
    """The plan with a device that holds about half of the weights."""
    with LLM(checkpoint, plan) as llm:
        memory = llm.memory.total("device") + llm.runtime.residency.device_bytes * 2 // 3
    return Plan(**{**plan.__dict__, "device_memory": memory})


def streamed_bytes(checkpoint: Path, plan: Plan) -> int:
    """Bytes of weights that one way through all layers reads."""
    with LLM(checkpoint, plan) as llm:
        return sum(file_bytes(image) for image in llm.runtime.store._streamed.values())


def measure(
    checkpoint: Path,
    plan: Plan,
    folder: Path,
    *,
    prompt: int,
    tokens: int,
    disk: float = 1e12,
    host: float = 1e12,
) -> Measured:
    """A run over links of so many bytes per second, all batches full from the first round on."""
    links = Counted(disk), Counted(host)
    prompts = [[5 + (7 * i + j) % 100 for j in range(prompt)] for i in range(2 * BATCHES)]
    hooks = behind(*links)
    with LLM(checkpoint, plan, trace=folder / "trace.json", _instrumentation=hooks) as llm:
        assert llm.timeline is not None
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        settle(llm)
        rounds, events = len(llm.rounds), len(llm.timeline.intervals)
        read = llm.runtime.store.stats.bytes_read
        busy = [link.seconds for link in links]
        start = time.perf_counter()
        found = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        )
        seconds = time.perf_counter() - start
        settle(llm)
        spans = [x for x in llm.timeline.intervals[events:] if x.lane == "compute"]
        waits = sum(x.kv_wait_s + x.activations_wait_s for x in llm.rounds[rounds:])
        return Measured(
            seconds,
            len(llm.rounds) - rounds,
            sum(x.stop - x.start for x in spans) - waits,
            max(link.seconds - before for link, before in zip(links, busy, strict=True)),
            llm.runtime.store.stats.bytes_read - read,
            tuple(r.token_ids for r in found),
        )


def settle(llm: LLM) -> None:
    """Wait until what is read ahead is there; nothing more is read then."""
    for load in list(llm.runtime.store._ring._loads):
        load.read.settle()


def undisturbed(measured: Callable[[], Measured]) -> Measured:
    """Up to four times, if other processes or threads took the time."""
    for _ in range(3):
        gc.collect()  # what other tests left takes a second
        found = measured()
        if found.overlapped:
            return found
    print("threads:", threading.enumerate())
    return measured()


def test_weights_that_take_much_longer_than_the_computation(
    checkpoint: Path, tmp_path: Path
) -> None:
    plan = streaming(checkpoint, plan_of())
    rate = streamed_bytes(checkpoint, plan) / 0.3

    found = undisturbed(lambda: measure(checkpoint, plan, tmp_path, prompt=4, tokens=4, disk=rate))
    assert found.rounds == 4
    assert found.transfer >= 4 * 0.3
    assert found.overlapped, found


def test_weights_beside_a_computation_that_takes_as_long(
    checkpoint: Path, tmp_path: Path, slow_layers: Callable[[float], None]
) -> None:
    plan = streaming(checkpoint, plan_of())
    rate = streamed_bytes(checkpoint, plan) / 0.3
    slow_layers(0.3 / LAYERS / BATCHES)

    found = undisturbed(lambda: measure(checkpoint, plan, tmp_path, prompt=4, tokens=4, disk=rate))
    assert min(found.transfer, found.compute) >= 4 * 0.3
    assert found.overlapped, found


def test_columns_read_weights_once_a_round_and_rows_once_a_batch(
    checkpoint: Path, tmp_path: Path
) -> None:
    column = streaming(checkpoint, plan_of())
    row = Plan(**{**column.__dict__, "schedule": "sequential"})
    once = streamed_bytes(checkpoint, column)
    options: dict[str, Any] = {"prompt": 4, "tokens": 2, "disk": once / 0.15}

    by_column = measure(checkpoint, column, tmp_path, **options)
    by_row = measure(checkpoint, row, tmp_path, **options)
    assert by_column.answers == by_row.answers
    rows_of_embedding = by_column.bytes_read - 2 * once
    assert 0 <= rows_of_embedding < once
    assert by_row.bytes_read == 2 * BATCHES * once + rows_of_embedding
    predicted = by_row.transfer / by_column.transfer
    assert predicted > 2
    assert 0.6 * predicted <= by_row.seconds / by_column.seconds <= 1.5 * predicted


def test_row_by_row_weights_come_beside_the_computation_too(
    checkpoint: Path, tmp_path: Path, slow_layers: Callable[[float], None]
) -> None:
    plan = streaming(checkpoint, plan_of(schedule="sequential"))
    rate = streamed_bytes(checkpoint, plan) / 0.15
    slow_layers(0.15 / LAYERS)

    found = undisturbed(lambda: measure(checkpoint, plan, tmp_path, prompt=4, tokens=2, disk=rate))
    assert min(found.transfer, found.compute) >= 2 * BATCHES * 0.15
    assert found.overlapped, found


@pytest.mark.parametrize("schedule", ["block", "sequential"])
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_blocks_come_while_others_are_attended_to(
    checkpoint: Path,
    tmp_path: Path,
    slow_layers: Callable[[float], None],
    tier: str,
    schedule: str,
) -> None:
    """Weights are resident; each pass attends to two blocks a sequence, which are far."""
    plan = plan_of(
        kv_placement=KVPlacement(0, 1.0 if tier == "host" else 0.0),
        cpu_attention="never",
        schedule=schedule,
    )
    each = 0.012
    with LLM(checkpoint, plan) as llm:
        blocks = llm.blocks.plan
        nbytes = blocks.stride if tier == "disk" else blocks.record_bytes[0]
    slow_layers(each)
    rate = {tier: 2 * 2 * nbytes / each}

    found = undisturbed(lambda: measure(checkpoint, plan, tmp_path, prompt=150, tokens=5, **rate))
    assert found.transfer >= 0.95 * 4 * LAYERS * BATCHES * each
    assert found.compute >= 5 * LAYERS * BATCHES * each
    assert found.overlapped, found


def test_weights_and_blocks_share_a_link(
    checkpoint: Path, tmp_path: Path, slow_layers: Callable[[float], None]
) -> None:
    plan = streaming(checkpoint, plan_of(kv_placement=KVPlacement(0, 0)))
    slow_layers(0.012)
    rate = (streamed_bytes(checkpoint, plan) + LAYERS * BATCHES * 4 * 12288) / 0.3

    found = undisturbed(
        lambda: measure(checkpoint, plan, tmp_path, prompt=150, tokens=5, disk=rate)
    )
    assert found.transfer >= 4 * 0.25
    assert found.seconds <= 0.9 * (found.compute + found.transfer), found


def test_hidden_states_come_and_go_beside_the_computation(
    checkpoint: Path, tmp_path: Path, slow_layers: Callable[[float], None]
) -> None:
    """Each pass moves its hidden states out and in again, in each layer."""
    plan = plan_of(activations="host")
    each, nbytes = 0.012, 2 * 64 * 4
    slow_layers(each)

    rate = 2 * nbytes / each
    found = undisturbed(lambda: measure(checkpoint, plan, tmp_path, prompt=1, tokens=5, host=rate))
    assert min(found.transfer, found.compute) >= 5 * LAYERS * BATCHES * each
    assert found.overlapped, found
