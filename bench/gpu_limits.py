"""What a multiprocessor (SM) of each architecture holds, and so how many blocks run on it at once.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; units of
allocation: the CUDA Occupancy Calculator. Stdlib alone is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

WARP = 32  # threads
_REGISTERS = 65536  # of an SM, 32 bits each
_REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
_WARP_UNIT = 4  # as many warps by registers as go evenly over the four schedulers


@dataclass(frozen=True)
class Limits:
    """Of one SM. Shared memory in bytes; `reserved` is what the system takes of it per block."""

    warps: int
    blocks: int
    shared: int
    shared_per_block: int
    reserved: int
    shared_unit: int


def _limits(warps: int, blocks: int, shared_kib: int) -> Limits:
    return Limits(warps, blocks, shared_kib << 10, (shared_kib - 1) << 10, 1 << 10, 128)


LIMITS: Mapping[int, Limits] = MappingProxyType(
    {
        75: Limits(32, 16, 64 << 10, 64 << 10, 0, 256),
        80: _limits(64, 32, 164),
        89: _limits(48, 24, 100),
        90: _limits(64, 32, 228),
        100: _limits(64, 32, 228),
        120: _limits(48, 24, 100),
    }
)
CAPABILITIES = tuple(LIMITS)


def blocks_per_sm(capability: int, warps: int, registers: int, shared: int) -> int:
    """How many blocks of `warps` warps fit an SM at once; 0 if not even one does.

    registers: of a thread. shared: bytes of a block, without what the system reserves.
    """
    limits = LIMITS[capability]
    if shared > limits.shared_per_block:
        return 0
    of_warp = _round_up(max(registers, 1) * WARP, _REGISTER_UNIT)
    by_registers = _REGISTERS // of_warp // _WARP_UNIT * _WARP_UNIT // warps
    of_block = _round_up(shared + limits.reserved, limits.shared_unit)
    by_shared = limits.shared // of_block if of_block else limits.blocks
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
