"""Which of a sequence's blocks lie where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from qoff.errors import ArgumentError

Tier: TypeAlias = Literal["device", "host", "disk"]
DEVICE: Final = "device"
HOST: Final = "host"
DISK: Final = "disk"
TIERS: tuple[Tier, ...] = (DISK, HOST, DEVICE)  # of the oldest blocks first
_LOOKED_AT = 10_000  # blocks, 640,000 tokens


@dataclass(frozen=True)
class KVPlacement:
    """The newest blocks on the device, older ones on the host, the oldest on disk.

    Fractions of the blocks that a sequence will have. Raises ArgumentError unless they are at
    least 0 and at most 1 together.
    """

    device_fraction: float = 1.0
    host_fraction: float = 0.0

    def __post_init__(self) -> None:
        device, host = self.device_fraction, self.host_fraction
        if not (device >= 0 and host >= 0 and device + host <= 1 + 1e-9):
            raise ArgumentError(
                f"{device} of the KV cache on the device and {host} on the host: use fractions of "
                "at least 0, at most 1 together; the rest goes to disk"
            )

    def split(self, blocks: int) -> dict[str, int]:
        """How many of so many blocks lie on each tier."""
        device = int(blocks * self.device_fraction + 0.5)
        host = min(blocks - device, int(blocks * self.host_fraction + 0.5))
        if self.device_fraction + self.host_fraction > 1 - 1e-9:
            host = blocks - device
        return {DISK: blocks - device - host, HOST: host, DEVICE: device}

    def capacity(self, blocks: int) -> dict[str, int]:
        """Blocks of each tier that suffice for a sequence of up to so many.

        Those of device and host grow with the sequence; of disk, rounding may leave a shorter one
        with one more. Of sequences too long to look at each, that one is counted.
        """
        found = self.split(blocks)
        if blocks > _LOOKED_AT:
            more = int(blocks * max(0.0, 1 - self.device_fraction - self.host_fraction)) + 1
            return {**found, DISK: min(max(more, found[DISK]), blocks)}
        return {**found, DISK: max(self.split(n)[DISK] for n in range(blocks + 1))}

    def tier(self, index: int, expected: int) -> str:
        """Where the block at a place in its sequence lies, 0 being the oldest of `expected`.

        One that was not expected lies where the newest does, so that newer blocks are never on a
        tier of older ones.
        """
        return self.place(index, expected)[0]

    def place(self, index: int, expected: int) -> tuple[str, int]:
        """The tier of a block, as `tier`, and its number among those of its sequence there."""
        expected = max(expected, 1)
        split, last = self.split(expected), min(index, expected - 1)
        for tier in TIERS:
            if last < split[tier]:
                return tier, index
            index, last = index - split[tier], last - split[tier]
        raise AssertionError("a block that is expected is on a tier")
