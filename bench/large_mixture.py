"""Simulated: a mixture of 750 B parameters whose weights are larger than memory, on one NVMe disk.

Nothing runs: the planner's cost model (docs/cost-model.md) on a machine that is described here, and
a config in the shape of large Qwen3 mixtures. Texts choose experts as is published of others: no
recorded routes are there. `python -m bench.large_mixture` takes a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.experts_stream import QWEN3_MOE
from qoff.cli.output import print_table
from qoff.plan import Plan
from qoff.plan.explain import explain
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from qoff.units import format_size, parse_size

BAR = 40.0  # new tokens per second
MIXTURE: dict[str, Any] = QWEN3_MOE | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 90,
    "num_experts": 192,
    "num_attention_heads": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}


def machine(device: int, host: int) -> MachineProfile:
    """A workstation: a GPU of 1 TB/s and 100 Tflop/s, 32 cores, PCIe 5.0 x16, one Gen5 NVMe."""
    return MachineProfile(
        "a GPU, 32 cores, one Gen5 NVMe",
        on_gpu=True,
        cores=32,
        device=Processor.of(bytes_per_s=1e12, flops_per_s=1e14, call_s=1e-5),
        host=Processor.of(bytes_per_s=2e11, flops_per_s=2e12, call_s=1e-5),
        disk_read=Link(12e9, 1e-4, 1e-10),
        disk_write=Link(8e9, 1e-4, 1e-10),
        to_device=Link(40e9, 1e-5),
        from_device=Link(40e9, 1e-5),
        usable={"device": device, "host": host, "disk": 4 << 40},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan, and whether the bar is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="80GiB", help="memory of the GPU")
    parser.add_argument("--host", default="256GiB", help="main memory")
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--prompt", default="128", help="tokens of a prompt")
    parser.add_argument("--answer", default="256", help="tokens of an answer")
    parser.add_argument(
        "--cpu-expert-tokens", type=int, help="as of qoff.Plan, where the CPU computes experts"
    )
    given = parser.parse_args(argv)
    sizes = NativeSizes.of(MIXTURE, QuantConfig(packing="split32"))
    memory = [parse_size(size) for size in (given.device, given.host)]
    work = Workload(Lengths.of(given.prompt), Lengths.of(given.answer), given.requests)
    most = given.cpu_expert_tokens
    template = Plan(cpu_experts=most is not None, cpu_expert_tokens=most)
    found = explain(sizes, machine(*memory), work, template)
    print(
        f"SIMULATED: {sizes.parameters / 1e9:.0f} B parameters, {format_size(sizes.nbytes)} of "
        f"weights in 4 bits; {given.device} on the GPU, {given.host} of main memory"
    )
    print(found.line())
    print_table("what lives where", found.tiers(), ("tier", "what", "bytes"))
    print_table("busy in a round", found.resources(), ("resource", "prompts", "decoding"))
    rate = found.found.decode.tokens_per_s
    print(f"{'met' if rate >= BAR else 'NOT MET'}: {rate:.1f} new tokens/s, wanted {BAR:g}")


if __name__ == "__main__":
    main()
