"""Trainings of models that are far too large, on paper: `qoff plan --train` for three machines.

Nothing of this was run: bytes are counted, seconds are of the cost model, which takes a GPU to
reach the arithmetic that it is given. ZeRO-Infinity's figure (arXiv 2104.07857): 25 petaflop/s on
512 V100, data parallel; here one V100 has host memory and disks of one of its nodes of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.harness import Report
from bench.random_model import TINYLLAMA
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.quant import QuantConfig
from qoff.train.choice import TrainingPlan, training_plan
from qoff.train.finetune import Lora
from qoff.train.optimizers import AdamW
from qoff.train.planned import planned
from qoff.units import format_size

from .flexgen import OPT_175B

_GB, _GIB = 10**9, 1 << 30
# For each parameter and token: all learn, or adapters; and where a layer is computed again.
_OPERATIONS, _OF_ADAPTERS, _AGAIN = 6, 4, 2
_PUBLISHED = 25e15 / 512  # operations a second of one GPU


@dataclass(frozen=True)
class Paper:
    """A training: all weights in bfloat16, or adapters; sequences of a step, tokens of each."""

    config: Mapping[str, Any]
    machine: MachineProfile
    lora: Lora | None
    sequences: int
    tokens: int

    def plan(self) -> TrainingPlan:
        packed = None
        if self.lora is not None:
            packed = NativeSizes.of(self.config, QuantConfig(packing="split32")).checkpoint
        job = planned(
            self.config,
            AdamW(),
            lora=self.lora,
            packed=packed,
            dtype="auto" if self.lora else "bfloat16",
            tokens=self.tokens,
            micro_batches=self.sequences,
            device="cuda",
        )
        return training_plan(job, self.machine)


def machine(
    name: str,
    gpu: tuple[int, float, float],
    host: tuple[int, float],
    link: float,
    disk: tuple[int, float, float],
) -> MachineProfile:
    """gpu: bytes, bytes/s, flop/s. host: bytes, bytes/s. disk: bytes, bytes/s read and written."""
    over = Link(link, 1e-5)
    processor = Processor.of(host[1], 1e12)
    return MachineProfile(
        name,
        True,
        16,
        Processor.of(gpu[1], gpu[2]),
        processor,
        Link(disk[1], 1e-4, 1e-10),
        Link(disk[2], 1e-4, 1e-10),
        over,
        over,
        {"device": gpu[0], "host": host[0], "disk": disk[0]},
    )


def papers(quick: bool) -> dict[str, Paper]:
    """The three, or the first in small."""
    llama = TINYLLAMA | {"max_position_embeddings": 4096}
    thirteen = llama | {
        "hidden_size": 5120,
        "num_hidden_layers": 4 if quick else 40,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    }
    seventy = llama | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    desk = machine(
        "24 GiB, 1 TB/s, 100 Tflop/s; 64 GiB; disk 6 and 5 GB/s",
        (24 * _GIB, 1e12, 100e12),
        (64 * _GIB, 50e9),
        25e9,
        (2000 * _GB, 6e9, 5e9),
    )
    found = {"13B, all weights": Paper(thirteen, desk, None, 32, 2048)}
    if quick:
        return found
    small = machine(
        "12 GiB, 500 GB/s, 60 Tflop/s; 64 GiB; disk 6 and 5 GB/s",
        (12 * _GIB, 5e11, 60e12),
        (64 * _GIB, 50e9),
        25e9,
        (2000 * _GB, 6e9, 5e9),
    )
    node = machine(
        "a V100 (32 GiB, 900 GB/s, 70 Tflop/s) with 1.5 TB; disks 25 GB/s",
        (32 * _GIB, 9e11, 70e12),
        (1500 * _GB, 100e9),
        12e9,
        (28000 * _GB, 25e9, 25e9),
    )
    return found | {
        "70B, adapters r = 16": Paper(seventy, small, Lora(16, 32), 32, 2048),
        "175B, all weights": Paper(OPT_175B.config, node, None, 32, 1024),
    }


def measure(quick: bool) -> Report:
    """All of them."""
    result = Report(
        "planner-training",
        {"quick": quick},
        "fine-tuning on one GPU, simulated: nothing of it was run",
        ("training", "GPU", "host", "disk", "s a step", "tokens/s", "Tflop/s", "limit"),
    )
    for name, paper in papers(quick).items():
        found = paper.plan()
        used = {tier: sum(rows.values()) for tier, rows in found.bytes_by_tier().items()}
        step, job = found.step, found.job
        there = len(found.kept) + len(found.swapped)
        again = 1 - there / (job.layers * job.sizes.micro_batches)
        operations = (_OPERATIONS if paper.lora is None else _OF_ADAPTERS) + _AGAIN * again
        rate = operations * job.parameters * step.tokens_per_s / 1e12
        result.rows.append(
            (f"{name}, {paper.sequences} x {paper.tokens}",
             *(format_size(used[tier]) for tier in ("device", "host", "disk")),
             f"{step.seconds:.0f}", f"{step.tokens_per_s:.0f}", f"{rate:.0f}", step.limit)
        )  # fmt: skip
        result.notes.append(f"{name}: {paper.machine.name}; {found.activation_line()}")
        result.measured[name] = {**found.values(), "simulated": True, "tflops": rate}
        if name.startswith("175B"):
            ratio = rate / (_PUBLISHED / 1e12)
            result.ratios["175B, simulated, by a GPU of ZeRO-Infinity as published"] = ratio
    return result
