"""A plan in words and numbers: what lives where, what limits, what else would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from qoff.errors import BudgetError, QoffError
from qoff.kvcache.groups import layer_groups
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.units import format_size

from .certify import Certified, Counted, Forecast
from .finalists import Simulate
from .manual import Plan
from .profile import Link, MachineProfile
from .saved import plan_values
from .search import find_plan, forecast_on
from .sizes import Sizes
from .workload import Workload

_MORE = 32 << 30  # bytes of memory
_DIFFERS = 0.02  # part of the seconds


@dataclass(frozen=True)
class Explained:
    """A plan, the machine it is for, and what it was asked for.

    tokenizer: bytes of main memory that it takes beside the plan, about. beside: whether the
    machine's disk is what the checkpoint leaves of it. counted: by the search that found the plan.
    """

    sizes: Sizes
    machine: MachineProfile
    workload: Workload
    found: Certified
    tokenizer: int = 0
    beside: bool = False
    counted: Counted = field(default_factory=dict, repr=False)

    def line(self) -> str:
        """Why this plan, in one line, with what virtual time expects of it if that was asked."""
        plan, found = self.found.plan, self.found
        timed = found.simulated or found
        where = [f"{format_size(n)} on {tier}" for tier, n in found.weights.items() if n]
        batches = f"{plan.batches} x {plan.batch_size} sequences of {plan.context} tokens"
        busy = share(found.decode)
        if plan.draft_tokens:
            batches += f", up to {plan.draft_tokens} tokens drafted of each"
        return (
            f"{batches}, weights {', '.join(where)}; limit: {found.decode.limit} {busy:.0%}; "
            f"{timed.prefill.tokens_per_s:.1f} prompt tokens/s, "
            f"{timed.decode.tokens_per_s:.1f} new tokens/s expected"
        )

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose. On a CPU what passes through host memory is on the device."""
        found = self.found.bytes_by_tier()
        if not self.machine.on_gpu:
            device, host = found[DEVICE], found[HOST]
            found[DEVICE] = {name: n + host.get(name, 0) for name, n in device.items()}
            found[HOST] = {}
            assert host.keys() <= device.keys()
        return found

    def tiers(self) -> list[tuple[str, ...]]:
        """Rows of bytes: tier, purpose, bytes; with the sum and what there is."""
        rows: list[tuple[str, ...]] = []
        for tier, purposes in self.bytes_by_tier().items():
            rows += [(tier, name, format_size(n)) for name, n in purposes.items() if n]
            if tier == DISK and self.found.weights[DISK]:
                read = format_size(self.found.weights[DISK])
                rows.append((tier, "weights, read each pass", read))
            used, usable = sum(purposes.values()), self.machine.usable[tier]
            if used or usable:
                there = f"{format_size(used)} of {format_size(usable)}"
                rows.append((tier, "in all", there))
        if self.tokenizer:
            main = HOST if self.machine.on_gpu else DEVICE
            rows.append((main, "the tokenizer, beside the plan", format_size(self.tokenizer)))
        return [*rows, (DISK, "the checkpoint, beside the plan", format_size(self.sizes.nbytes))]

    def resources(self) -> list[tuple[str, ...]]:
        """Rows of seconds: resource, busy in a round of prompts, and of decoding."""
        phases = (self.found.prefill, self.found.decode)
        rows: list[tuple[str, ...]] = [
            (name, *(f"{p.busy[name]:.3f} s, {p.busy[name] / p.seconds:.0%}" for p in phases))
            for name in phases[0].busy
            if any(p.busy[name] > 0 for p in phases)
        ]
        return [*rows, ("a round", *(f"{p.seconds:.3f} s" for p in phases))]

    def _passing(self) -> str:
        """For which passes the CPU does not."""
        least, nbytes = self.found.plan.passing_from, self.found.residency.passing_bytes
        if least is None:
            return ""
        most = f" for passes of at most {least - 1:,} tokens" if least > 1 else " for none"
        return f"{most}; longer ones bring them to the GPU, through {format_size(nbytes)} there"

    def warnings(self) -> Iterator[str]:
        """What the user may not expect."""
        yield from self.machine.notes
        yield from self._windows()
        if not self.found.offloads:
            yield "everything fits the device: no offloading is needed, and it would only cost time"
        if self.found.hits is not None:
            told = "as in the routes that were recorded"
            if self.workload.routes is None:
                told = (
                    "by what is published of a mixture with 256 experts; --routes takes this "
                    "model's, which qoff bench MODEL --experts -o json records"
                )
            on_cpu, experts = self.found.residency.cpu_experts, "the experts"
            if on_cpu:
                mixture = self.sizes.experts
                assert mixture is not None
                nbytes = format_size(self.found.residency.cpu_expert_bytes)
                yield (
                    f"{len(on_cpu):,} of {mixture.count * sum(mixture.layers):,} experts "
                    f"({nbytes}) stay in host memory, where the CPU computes them{self._passing()}"
                )
                experts = "the other experts"
            yield (
                f"of {experts} that a round of decoding wants {self.found.hits:.0%} are taken to "
                f"be on the device, {told}"
            )
        simulated = self.found.simulated
        if simulated is not None and abs(simulated.seconds / self.found.seconds - 1) > _DIFFERS:
            yield (
                f"expected is what virtual time says: {simulated.prefill.seconds:.3f} s for a "
                f"round of prompts, {simulated.decode.seconds:.3f} s for one of decoding; the "
                f"model alone, in the tables and the bound, has {self.found.prefill.seconds:.3f} "
                f"and {self.found.decode.seconds:.3f} s, and {self.found.decode.tokens_per_s:.1f} "
                "new tokens/s"
            )
        free = self.machine.usable[DISK]
        spilled = sum(self.found.bytes_by_tier()[DISK].values())
        if self.sizes.nbytes + spilled > free and not self.beside and not self.sizes.stored:
            more = f" and the plan {format_size(spilled)} more" if spilled else ""
            yield (
                f"the checkpoint takes {format_size(self.sizes.nbytes)}{more}, and "
                f"{format_size(free)} of disk are free"
            )

    def bound(self) -> str:
        """How much faster any other plan could be, in one line."""
        gap = self.found.seconds / self.found.bound - 1 if self.found.bound else 0.0
        faster = f"more than {gap:.1%} faster" if gap >= 0.0005 else "faster"
        return f"no plan of this model in this memory is {faster}, by the model alone"

    def _windows(self) -> Iterator[str]:
        """Layers that do not see all tokens, and what they keep."""
        plan, shapes = self.found.plan, self.sizes.shapes
        most = plan.blocks_per_sequence
        kept = {
            layer: group.blocks_at_once(plan.context, plan.kv.window) if group.reach else most
            for group in plan.layer_groups(shapes, self.machine.on_gpu)
            for layer in group.layers
        }
        for group in layer_groups(shapes, tokens=plan.context):
            if group.reach:
                blocks = kept[group.layers[0]]
                seen = f"{'a chunk of' if group.reach < 0 else 'the newest'} {abs(group.reach):,}"
                does = f"{blocks:,} of {most:,} KV blocks of a sequence" if blocks < most else "all"
                yield (
                    f"{len(group.layers)} of {len(shapes)} layers see {seen} tokens and keep {does}"
                )

    def changes(self) -> list[tuple[str, ...]]:
        """Rows: what would be changed, new tokens/s, and how much faster, by the model alone.

        The plan of a better machine is the present one at least.
        """
        rows: list[tuple[str, ...]] = []
        for name, machine, template in self._others():
            try:
                other = find_plan(
                    self.sizes, machine, self.workload, template, counted=self.counted
                )
            except QoffError:
                continue
            if machine is not self.machine:
                same = forecast_on(machine, self.sizes, self.workload, self.found)
                other = min(other, same, key=lambda one: one.seconds)
            times = self.found.seconds / other.seconds
            rows.append((name, f"{other.decode.tokens_per_s:.1f}", f"{times:.2f}x"))
        return rows

    def _others(self) -> Iterator[tuple[str, MachineProfile, Plan]]:
        """Changes; of memory and links where any of them limits."""
        machine, plan, usable = self.machine, self.found.plan, self.machine.usable
        if self.found.offloads:
            tier = HOST if machine.on_gpu else DEVICE
            more = machine.with_memory(**{tier: usable[tier] + _MORE})
            yield f"{format_size(_MORE)} more of {tier} memory", more, plan
            if machine.on_gpu:
                rates = machine.to_device.bytes_per_s, machine.from_device.bytes_per_s
                yield "a link twice as fast", machine.with_link(*(2 * r for r in rates)), plan
            if any(phase.busy["disk read"] for phase in (self.found.prefill, self.found.decode)):
                faster = replace(machine, disk_read=_twice(machine.disk_read))
                yield "a disk twice as fast", faster, plan
        if not self.sizes.shapes:
            return
        bits = 4 if plan.kv.k_bits == 8 else 8
        other = replace(plan.kv, k_bits=bits, v_bits=bits, layers={})
        yield f"{bits}-bit KV cache", machine, replace(plan, kv=other)

    def values(self) -> dict[str, Any]:
        """All of it for JSON: bytes, seconds."""
        found = self.found
        return {
            "plan": plan_values(found.plan),
            "bytes": self.bytes_by_tier(),
            "tokenizer_bytes": self.tokenizer,
            "checkpoint_bytes": self.sizes.nbytes,
            "weights_read_from": dict(found.weights),
            "expert_hits": found.hits,
            "usable": dict(self.machine.usable),
            "seconds": found.seconds,
            "bound_s": found.bound,
            "phases": {
                name: {
                    "rounds": phase.rounds,
                    "seconds": phase.seconds,
                    "busy_s": dict(phase.busy),
                    "limit": phase.limit,
                    "tokens_per_s": phase.tokens_per_s,
                }
                for name, phase in (("prefill", found.prefill), ("decode", found.decode))
            },
            "simulated_s": self._simulated(),
            "warnings": list(self.warnings()),
        }

    def _simulated(self) -> dict[str, float] | None:
        """Seconds of rounds in virtual time."""
        one = self.found.simulated
        if one is None:
            return None
        return {"prefill": one.prefill.seconds, "decode": one.decode.seconds}


def share(phase: Forecast) -> float:
    """The part of a round that its busiest resource is busy."""
    return phase.busy[phase.limit] / phase.seconds


def explain(
    sizes: Sizes,
    machine: MachineProfile,
    workload: Workload,
    template: Plan | None = None,
    simulate: Simulate | None = None,
) -> Explained:
    """Find the best plan, and explain it. Raises as `find_plan` does."""
    counted: Counted = {}
    found = find_plan(sizes, machine, workload, template, simulate=simulate, counted=counted)
    return Explained(sizes, machine, workload, found, counted=counted)


def beside_checkpoint(machine: MachineProfile, sizes: Sizes) -> MachineProfile:
    """The machine with as much disk as a checkpoint leaves that is yet to be made.

    Raises BudgetError where there is not enough for that alone.
    """
    wanted, free = sizes.nbytes, machine.usable[DISK]
    if wanted > free:
        raise BudgetError(
            f"disk: the checkpoint takes {format_size(wanted)}, {format_size(wanted - free)} more "
            f"than the {format_size(free)} there; raise it to that, or use fewer bits"
        )
    return machine.with_memory(disk=free - wanted)


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s)
