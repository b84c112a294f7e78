"""What a `qoff.LLM` says of the plan that is open, its memory and its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from qoff.errors import ArgumentError
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import Arena
from qoff.memory.plan import Residency
from qoff.models.runtime import Runtime
from qoff.plan import Memory, Plan

from .executor import Executor
from .rounds import Rounds


class Watched:
    """Any thread may ask."""

    _rounds: Rounds

    @property
    def plan(self) -> Plan:
        """The plan that is open. Another one may take its place (`Plan.adapt`)."""
        return self._rounds.current.plan

    @property
    def memory(self) -> Memory:
        """What the plan takes beside the weights."""
        return self._rounds.current.memory

    @property
    def residency(self) -> Residency:
        """Where the weights are."""
        return self._rounds.current.residency

    @property
    def reopening(self) -> bool:
        """Whether another plan is being opened; those who ask for something wait."""
        return self._rounds.current.closed

    @property
    def runtime(self) -> Runtime:
        """What computes a pass. Raises ArgumentError while `reopening`."""
        return self._executor.runtime

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """Memory of packed KV blocks and parked hidden states, by tier; raises as `runtime`."""
        return self._executor.arenas

    @property
    def blocks(self) -> TieredBlocks | DeviceBlocks:
        """Packed KV blocks of all sequences; raises as `runtime`."""
        return self._executor.blocks

    @property
    def _executor(self) -> Executor:
        return self._rounds.current.opened.executor

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place in a batch."""
        return self._rounds.waiting

    @property
    def round_began(self) -> float | None:
        """When the round that is computed began, by `time.perf_counter`; None: none is."""
        return self._rounds.began

    @property
    def kv_used(self) -> float:
        """Part of the packed KV blocks that is in use, 0 to 1."""
        with suppress(ArgumentError):  # where none is there
            return self._executor.kv_used
        return 0.0

    @property
    def kv_blocks(self) -> dict[str, int]:
        """Packed KV blocks there is room for, by tier; raises as `runtime`."""
        return self._executor.kv_blocks

    def memory_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose, weights included."""
        residency = self.residency
        weights = {DEVICE: residency.device_weight_bytes, HOST: residency.host_bytes}
        return {
            tier: {"weights": weights.get(tier, 0), **purposes}
            for tier, purposes in self.memory.purposes.items()
        }
