"""What the cost model says that a round moves is what the engine moves, counted by it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qoff.checkpoint import Checkpoint
from qoff.engine.executor import CpuExecutor, Executor
from qoff.engine.simulated import Driver
from qoff.engine.simulated.run import _remember
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.instrumentation import PLAIN
from qoff.plan import Plan
from qoff.plan.certify import Certifier, choices_of
from qoff.plan.cost import CostModel
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.phase import RESOURCES
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.workload import Lengths, Workload
from tests.plan.machines import machine

KIB = 1 << 10
PROMPT, ANSWER, READ = 192, 128, 176  # tokens; of each that is read two blocks are packed
PLAN = Plan(batch_size=3, batches=2, context=320, prefill_tokens=READ, kv=KVQuant(window=16))
STREAMS = 100 * KIB  # of the weights, which the device has no room for
OFF = [
    {},
    {"short": STREAMS},
    {"short": STREAMS, "schedule": "sequential"},
    {"short": STREAMS, "host_memory": 150 * KIB},
    {"short": STREAMS, "host_memory": 1 << 20},
    {"kv_placement": KVPlacement(0, 1), "cpu_attention": "never"},
    {"kv_placement": KVPlacement(0, 1)},
    {"kv_placement": KVPlacement(0, 0)},
    {"kv_placement": KVPlacement(0.5, 0)},
    {"kv_placement": KVPlacement(0.3, 0.3), "cpu_attention": "never"},
    {"activations": "host"},
    {"activations": "disk"},
    {"activations": "disk", "short": STREAMS},
]
NAMES = [
    "all on the device",
    "weights on disk",
    "weights on disk, sequential",
    "weights on both",
    "weights on the host",
    "KV copied",
    "KV attended on the host",
    "KV on disk",
    "half of KV on disk",
    "KV everywhere",
    "hidden states on the host",
    "hidden states on disk",
    "hidden states and weights on disk",
]


def opened(path: Path, plan: Plan, own: ExitStack) -> Executor:
    how: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    checkpoint = Checkpoint.open(path)
    return CpuExecutor(checkpoint, plan, own, packing="rows16", instrumentation=PLAIN, **how)


def counted(executor: Executor) -> np.ndarray:
    """Bytes read, copied and written so far, when all that is on its way has arrived."""
    for load in executor.runtime.store._ring._loads:
        load.read.settle()
    for write in executor.blocks._writes.values():
        write.result()
    if executor.activations is not None:
        executor.activations.copies.call(lambda: None, 0, "", "").result()
    return np.array(executor.counters()[3:])


def unit_rates() -> MachineProfile:
    """A machine whose links move a byte in a second, and have requests for nothing."""
    one, on = Link(1.0), machine()
    device = replace(Processor.of(1.0, 1e11), call_s=0.0)
    return replace(
        on,
        device=device,
        host=device,
        disk_read=one,
        disk_write=one,
        to_device=one,
        from_device=one,
    )


@pytest.mark.parametrize(
    ("options", "decodes"),
    [
        pytest.param(options, decodes, id=f"{name}, {'decoding' if decodes else 'prompts'}")
        for name, options in zip(NAMES, OFF, strict=True)
        for decodes in (True, False)
        if decodes or name != "KV everywhere"  # prompts alone are too short for three tiers
    ],
)
def test_rounds_move_the_bytes_that_the_model_says(
    checkpoint: Path, options: dict[str, Any], decodes: bool, tmp_path: Path
) -> None:
    options = dict(options)
    short = options.pop("short", 0)
    plan = replace(PLAN, spill_folder=tmp_path, **options)
    with ExitStack() as own:
        roomy = opened(checkpoint, replace(plan, device_memory=1 << 30, host_memory=None), own)
        most = roomy.memory.total("device") + roomy.runtime.residency.device_bytes
    plan = replace(plan, device_memory=most - short)
    prompt = PROMPT if decodes else READ
    work = Workload(Lengths.of(prompt), Lengths.of(ANSWER), plan.batch_size * plan.batches)
    cost = CostModel(
        NativeSizes.of_checkpoint(Checkpoint.open(checkpoint)), unit_rates(), work, plan.kv, 4
    )
    with ExitStack() as own:
        executor = opened(checkpoint, plan, own)
        driver = Driver(executor)

        def rounds(tokens: int) -> np.ndarray:
            if decodes:
                for cache in driver._caches:
                    for slot in range(cache.sequences):
                        _remember(cache, slot, PROMPT, plan.context)
                before = counted(executor)
                for _ in range(tokens):
                    driver.decode()
                return (counted(executor) - before) / tokens
            before = counted(executor)
            driver.read(plan.batches, 1, READ, 0)
            return counted(executor) - before

        rounds(2)  # compares files with their checksums
        read, copied, written = rounds(ANSWER)
        certifier = Certifier(cost, plan, torch.device("cpu"), torch.float32)
        placed = certifier.placed(plan, executor.runtime.residency)
    phase = (cost.decode if decodes else cost.prefill)(choices_of(plan))
    said = dict(zip(RESOURCES, phase.busy(placed)[0], strict=True))
    rows = 0.01 * cost.weight_bytes * bool(short)  # of the embedding, read one by one
    exact = 0.04 if "kv_placement" in options and decodes else 1e-6  # blocks are whole
    assert said["disk read"] == pytest.approx(read, rel=exact, abs=rows)
    assert said["to device"] + said["from device"] == pytest.approx(copied, rel=exact)
    if plan.kv_placement.device_fraction in (0, 1) or not decodes:  # else the newest stay
        assert said["disk write"] == pytest.approx(written, rel=exact)
